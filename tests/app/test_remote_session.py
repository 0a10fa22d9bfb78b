"""A coordinator that waits for workers of other machines: what it prints, who may come, how all part."""

import re
import threading
from contextlib import nullcontext
from typing import Any

import pytest

from spantrain.app.launch.ssh import SshWorkers
from spantrain.app.launch.way import LaunchOptions, LaunchWay
from spantrain.app.outer import serve as outer_serve
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.config.cluster_file import load_preset
from spantrain.errors import ConfigError, PeerLostError, WorkerError
from spantrain.outer.outer_file import load_outer
from spantrain.transport.control.client import ControlClient
from spantrain.transport.control.protocol import RemoteRefusal
from testing.patience import PATIENCE_S

DEVICES = ("a", "b")
SHOWN = re.compile(r"  SPANTRAIN_TOKEN=(\S+) spantrain worker --join (\S+) --name DEVICE\n  with DEVICE one of a, b$")
FACTS = {"endpoint": "tcp://10.0.0.2:5000"}


def key_of(name: str) -> str:
    return f"{name:.<40}"


class Arriving(SilentReporter):
    """Starts what it is told to start: workers that join, and serve until they are sent away."""

    def __init__(self, *names: str) -> None:
        self.welcomes: dict[str, dict[str, Any]] = {}
        self.last: dict[str, dict[str, Any]] = {}
        self.refused: dict[str, str] = {}
        self.notes: list[str] = []
        self._names, self._threads = names, list[threading.Thread]()

    def note(self, text: str) -> None:
        self.notes.append(text)
        shown = SHOWN.search(text)
        if shown is None:  # it tells of who comes, too
            return
        self._threads = [threading.Thread(target=self._serve, args=(name, *shown.groups())) for name in self._names]
        for thread in self._threads:
            thread.start()

    def _serve(self, name: str, token: str, address: str) -> None:
        try:
            client = ControlClient.join(address, token, name=name, facts={}, timeout_s=PATIENCE_S)
        except RemoteRefusal as refusal:
            self.refused[name] = str(refusal)
            return
        self.welcomes[name] = client.welcome
        client.call("introduce", {**FACTS, "public_key": key_of(name)}, timeout_s=PATIENCE_S)
        self.last[name] = client.call("next_order", {"after": -1}, timeout_s=PATIENCE_S)
        client.close()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)


def options(**more: Any) -> SessionOptions:
    return SessionOptions(**{"listen": "127.0.0.1:0", "join_timeout_s": PATIENCE_S, **more})


@pytest.mark.parametrize(("given_s", "patience_s"), [(None, 6.0), (60.0, 60.0)])
def test_who_is_waited_for_is_told_how_long_a_silence_may_be_and_let_go_at_the_end(tmp_path, given_s, patience_s):
    workers = Arriving("a", "rank-1")
    with open_session(
        load_preset("laptop"), DEVICES, options(heartbeat_timeout_s=given_s), tmp_path, workers
    ) as session:
        peers = session.coordinator.peers(DEVICES)
        assert [one.public_key for one in peers] == [key_of("a"), key_of("rank-1")]
        assert workers.last == {}
    workers.wait()
    told = {"patience_s": patience_s}
    assert workers.welcomes == {"a": {"device": "a", **told}, "rank-1": {"device": "b", **told}}
    told_to_leave = {name: (answer["order"], answer["standing"]["leave"]) for name, answer in workers.last.items()}
    assert told_to_leave == {"a": (None, True), "rank-1": (None, True)}


def test_ranks_and_names_that_the_run_does_not_have_are_refused_and_who_is_missing_is_named(tmp_path):
    workers = Arriving("rank-2", "c")
    with (
        pytest.raises(PeerLostError, match=r"a, b did not join within 4 s; start there: SPANTRAIN_TOKEN="),
        open_session(load_preset("laptop"), DEVICES, options(join_timeout_s=4.0), tmp_path, workers),
    ):
        pass
    workers.wait()
    assert "this run has 2 devices, ranks 0 to 1" in workers.refused["rank-2"]
    assert "there is no device c here; this run has a, b" in workers.refused["c"]
    here = [note for note in workers.notes if note.startswith("The coordinator refused (join_refused, ")]
    assert len(here) == 2
    assert any("127.0.0.1: there is no device c here" in note for note in here)


def test_what_is_said_of_no_host_or_site_is_refused_before_any_is_reached(tmp_path):
    way = LaunchWay(workers=SshWorkers, options=LaunchOptions(python={"lap": "python"}))
    with (
        pytest.raises(ConfigError, match=r"--python lap=\.\.\.: the host or site must be one of"),
        open_session(load_preset("laptop"), DEVICES, options(launch=way), tmp_path, SilentReporter()),
    ):
        pass


OUTER = """\
name: two-places
master: {address: "127.0.0.1:0", state: state/master}
shards:
  - {name: s0, address: "127.0.0.1:29510", snapshots: state/s0}
inner_steps: 16
"""


class Failed:
    """A master or a shard one of whose threads has ended."""

    failure = "the thread 'layers of s0' has ended: LookupError: a fault"
    address, endpoint = "127.0.0.1:7000", "tcp://127.0.0.1:7000"

    def __init__(self, **_options: Any) -> None: ...

    def __enter__(self) -> "Failed":
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("which", ["master", "shard"])
def test_a_master_and_a_shard_end_with_the_reason_when_a_thread_has_ended(which, tmp_path, monkeypatch):
    for name in ("MasterServer", "ShardServer"):
        monkeypatch.setattr(outer_serve, name, Failed)
    monkeypatch.setattr(outer_serve, "_LOOK_EVERY_S", 0.001)
    (tmp_path / "outer.yaml").write_text(OUTER)
    (tmp_path / "state" / "master").mkdir(parents=True)
    config, told = load_outer(tmp_path / "outer.yaml"), {"end_with_input": False, "metrics": nullcontext}
    serve = {
        "master": lambda: outer_serve.serve_master(config, ready=lambda *_: None, **told),
        "shard": lambda: outer_serve.serve_shard(
            config, config.shard("s0"), master="127.0.0.1:1", token="", ready=print, **told
        ),
    }
    with pytest.raises(WorkerError, match="the thread 'layers of s0' has ended") as caught:
        serve[which]()
    assert caught.value.exit_code == 1
