"""What a user sees and what is left behind when a worker, the user or the program itself ends a run early."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest

from patience import PATIENCE_S
from spantrain.config.artefacts import reference_to_profile, write_plan, write_profile
from spantrain.core.plan import Plan
from spantrain.core.spans import Span

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SPANS = [Span(0, 2), Span(2, 4)]
PATIENCE = "20 s"
"""A crowded machine may keep a worker from telling for seconds."""
FOREVER = ["--steps", "1000000"]


@dataclass
class Program:
    """A running `spantrain`, what it has said, and everything that it has started."""

    process: subprocess.Popen[bytes]
    temporary: Path
    said: list[str] = field(default_factory=list)
    _silent: bool = False
    """Whether it will say nothing more: it has ended."""
    _heard: threading.Condition = field(default_factory=threading.Condition)
    _listener: threading.Thread | None = None

    def listen(self) -> None:
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._heard:
                self.said.append(line.decode())
                self._heard.notify_all()
        with self._heard:
            self._silent = True
            self._heard.notify_all()

    def _said(self, text: str) -> bool:
        return any(text in line for line in self.said)

    def wait_to_hear(self, text: str) -> None:
        with self._heard:
            self._heard.wait_for(lambda: self._said(text) or self._silent, PATIENCE_S)
            found = self._said(text)
        assert found, f"never said {text!r}, but: {''.join(self.said)}"

    def family(self) -> list[psutil.Process]:
        """All processes that live on this program's temporary folder: it and what it started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(self.temporary) and process.status() != "zombie":
                    found.append(process)
        return found

    def worker(self, device: str) -> psutil.Process:
        """The process that writes this device's log."""
        for process in self.family():
            if os.readlink(f"/proc/{process.pid}/fd/1").endswith(f"/{device}.log"):
                return process
        raise AssertionError(f"no worker of {device}")

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its exit code and all that it has said."""
        code = self.process.wait(PATIENCE_S)
        assert self._listener is not None
        self._listener.join(PATIENCE_S)
        return code, "".join(self.said)


@pytest.fixture
def start(tmp_path_factory) -> Iterator[object]:
    programs = []

    def run(*words: object, listening: bool = True) -> Program:
        temporary = tmp_path_factory.mktemp("t")
        process = subprocess.Popen(
            [sys.executable, "-m", "spantrain", *map(str, words)],
            stdout=(temporary.parent / f"{temporary.name}.out").open("wb"),
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        )
        program = Program(process, temporary)
        programs.append(program)
        if listening:
            program.listen()
        return program

    yield run
    for program in programs:
        for process in program.family():
            with contextlib.suppress(psutil.Error):
                process.kill()
        program.process.wait()


def written(plan: Plan, law_profile, folder: Path) -> Path:
    """Write a plan and its profile; return the plan's path."""
    write_profile(law_profile(plan.cluster, plan.model), folder / "profile.json")
    reference = reference_to_profile(folder / "profile.json", folder / "plan.json")
    write_plan(replace(plan, profile=reference), folder / "plan.json")
    return folder / "plan.json"


@pytest.fixture(scope="module")
def plan_path(tmp_path_factory, make_plan, spec_of, law_profile) -> Path:
    """Three workers in two stages; the second stage sums its gradients with Gloo."""
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1, 1]], [SPANS] * 2, "critical-path")
    return written(plan, law_profile, tmp_path_factory.mktemp("plan"))


@pytest.fixture(scope="module")
def divided_plan_path(tmp_path_factory, make_plan, spec_of, law_profile) -> Path:
    """Three workers in two stages; the first stage's two divide tensors, s0r0 leads."""
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1, 1], [1]], [SPANS] * 2, "critical-path")
    first, last = plan.stages
    group = replace(first.replicas[0], devices=("s0r0", "s0r1"), tp_shares=(2.0, 1.0))
    plan = replace(plan, stages=(replace(first, replicas=(group,)), last))
    return written(plan, law_profile, tmp_path_factory.mktemp("divided"))


@pytest.fixture(scope="module")
def slow_plan_path(tmp_path_factory, make_plan, spec_of, law_profile) -> Path:
    """Emulated devices so slow that no step ends while a test waits."""
    plan = make_plan(spec_of("gpt2"), [0, 5], [[1]], [SPANS], "critical-path")
    devices = tuple(replace(device, backend="emulated") for device in plan.cluster.devices)
    plan = replace(plan, cluster=replace(plan.cluster, devices=devices, emulated_speed=1e-9))
    return written(plan, law_profile, tmp_path_factory.mktemp("slow"))


def nothing_is_left(program: Program) -> None:
    assert program.family() == []
    assert list(program.temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("path_of_plan", "lost"),
    [("plan_path", "s1r0"), pytest.param("divided_plan_path", "s0r1", marks=pytest.mark.tensor_parallel)],
    ids=["a stage", "a follower"],
)
def test_lost_worker_is_named_with_its_log(path_of_plan, lost, request, start, tmp_path):
    """While one run is silent for as long as it may be, another one loses its worker at once.

    How soon is for benchmarks/lost_worker.py to show.
    """
    plan_path = request.getfixturevalue(path_of_plan)

    def run_that_loses(number: signal.Signals) -> Program:
        out = tmp_path / number.name
        program = start("train", plan_path, *FOREVER, "--no-network", "--lost-after", PATIENCE, "--out", out)
        program.wait_to_hear("step 1/")
        program.worker(lost).send_signal(number)
        return program

    def is_named(program: Program, how: str, log: Path) -> None:
        code, said = program.end()
        assert code == 1
        last = said[said.index("Error:") :]
        assert f"device {lost}" in last
        assert how in last
        assert str(log) in last
        assert "Traceback" not in said
        nothing_is_left(program)

    stopped, killed = run_that_loses(signal.SIGSTOP), run_that_loses(signal.SIGKILL)
    is_named(killed, "killed by signal 9", tmp_path / f"SIGKILL/logs/{lost}.log")
    is_named(stopped, "no heartbeat", tmp_path / f"SIGSTOP/logs/{lost}.log")


def test_interrupt_leaves_a_checkpoint_to_resume(start, plan_path, tmp_path):
    program = start("train", plan_path, *FOREVER, "--no-network", "--out", tmp_path)
    program.wait_to_hear("step 1/")
    program.process.send_signal(signal.SIGINT)
    code, said = program.end()
    assert code == 130, said
    assert "Stopped:" in said
    assert "Traceback" not in said
    found = re.search(r"(\d+) steps done; checkpoint: (\S+); go on with: (.*--resume \S+)", said)
    assert found, said
    done = int(found[1])
    assert Path(found[2]) == tmp_path / f"checkpoint/step-{done}"
    assert found[3] == f"spantrain train --resume {tmp_path}"
    nothing_is_left(program)

    again = start("train", "--resume", tmp_path, "--steps", done + 2, "--no-network", "--json")
    code, said = again.end()
    assert code == 0, said
    result = json.loads((again.temporary.parent / f"{again.temporary.name}.out").read_text())
    assert len(result["losses"]) == done + 2
    assert result["steps"] == done + 2
    nothing_is_left(again)


def test_second_interrupt_ends_at_once(start, slow_plan_path, tmp_path):
    program = start("train", slow_plan_path, *FOREVER, "--no-network", "--out", tmp_path)
    program.wait_to_hear("Training")
    program.process.send_signal(signal.SIGINT)
    program.wait_to_hear("Stopping after this step")
    program.process.send_signal(signal.SIGINT)
    code, said = program.end()
    assert code == 130, said
    assert "Stopped:" in said
    assert "Traceback" not in said
    nothing_is_left(program)


def test_killed_program_takes_its_workers_along(start, plan_path, tmp_path):
    program = start("train", plan_path, *FOREVER, "--no-network", "--out", tmp_path)
    program.wait_to_hear("step 1/")
    family = program.family()
    assert len(family) == 5, "the program, the nursery, three workers"
    program.process.kill()
    gone, alive = psutil.wait_procs([process for process in family if process.pid != program.process.pid], PATIENCE_S)
    assert len(gone) == 4
    assert alive == []
    assert list(program.temporary.iterdir()) == []


def test_program_whose_listener_has_gone_ends(start, plan_path, tmp_path):
    """As in `spantrain train ... 2>&1 | head`."""
    program = start("train", plan_path, *FOREVER, "--no-network", "--out", tmp_path, listening=False)
    assert program.process.stderr is not None
    assert b"workers" in program.process.stderr.readline()
    program.process.stderr.close()
    program.process.wait(PATIENCE_S)
    nothing_is_left(program)
