"""What `spantrain launch --ray` has actors do; without Ray, which `docs/launch.md` says how it was tried with."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from spantrain.app.launch.ray import RayWorkers, WorkerActor, node_resource
from spantrain.app.launch.way import LaunchWay, WantedWorkers
from spantrain.app.reporter import SilentReporter
from spantrain.config.cluster_file import load_preset
from spantrain.core.cluster import Host
from spantrain.errors import ConfigError
from spantrain.reach.code import PackedCode
from testing.patience import PATIENCE_S


def test_a_host_is_the_node_of_its_name_or_address():
    lab = Host(name="lab", site="home", devices=("lab",), address="10.0.0.7")
    assert node_resource(lab, {"CPU": 4.0, "lab": 1.0, "node:10.0.0.7": 1.0}).keys() == {"lab"}
    assert node_resource(lab, {"CPU": 4.0, "node:10.0.0.7": 1.0}).keys() == {"node:10.0.0.7"}
    with pytest.raises(
        ConfigError, match=r"host lab: no node of Ray is that; start it there with `ray start ... --res"
    ):
        node_resource(lab, {"CPU": 4.0})


def test_an_actor_runs_a_worker_in_the_code(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "own.py").write_text("said = 'from the code'\n")
    writes = "import os, own, pathlib; pathlib.Path(os.environ['OUT']).write_text(own.said)"
    told = {"OUT": str(tmp_path / "out")}
    actor = WorkerActor("", ["-c", writes], told, [str(tmp_path)], PackedCode.of(tmp_path / "code"))
    assert actor.run() == "ended with status 0"
    assert (tmp_path / "out").read_text() == "from the code"
    missing = WorkerActor("", ["-c", writes], told, ["/no/such/data"], None).run()
    assert missing == "was not started: data /no/such/data is not there; copy it: code is copied, data are not"


def test_actors_end_by_themselves_before_they_are_killed(tmp_path):
    """Of an actor that is killed at work Ray prints that it will be tried again, at the end of a run."""
    happened = []

    class Ray:
        """What Ray does, of an actor whose worker takes a moment to leave."""

        exceptions = SimpleNamespace(RayError=RuntimeError)

        def wait(self, references, timeout):
            happened.append("waited")
            time.sleep(min(timeout, 0.2))
            return (references, []) if happened == ["waited"] * 3 else ([], references)

        def get(self, reference):
            happened.append(reference)
            return "ended with status 0"

        def kill(self, actor, *, no_restart):
            happened.append("killed" if no_restart else "started again")

        def shutdown(self):
            happened.append("shutdown")

    wanted = WantedWorkers(cluster=load_preset("laptop"), devices=("lab",), log_folder=tmp_path)
    with RayWorkers(wanted, LaunchWay(workers=RayWorkers, restarts=1), SilentReporter()) as workers:
        workers._ray = Ray()
        workers._actors = {"lab": SimpleNamespace(run=SimpleNamespace(remote=lambda: "left"))}
        workers._thread.start()
    assert happened == ["waited"] * 3 + ["left", "killed", "shutdown"]


def test_an_actor_dies_of_a_worker_that_fails(plain_processes):
    """So that Ray starts it again."""
    code = "from spantrain.app.launch.ray import WorkerActor as A\nA('', ['-c', '1/0'], {}, [], None).run()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 1
    assert b"ZeroDivisionError" in ended.stderr
