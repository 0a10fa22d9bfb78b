"""What a user sees and what is left behind when a worker, the user or the program itself ends a run early."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from spantrain.core.span import Span
from testing.patience import PATIENCE_S
from testing.programs import Program, nothing_is_left, written

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SPANS = [Span(0, 2), Span(2, 4)]
PATIENCE = "10 s"
"""A crowded machine may keep a worker from telling for seconds."""
FOREVER = ["--steps", "1000000"]


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

    def run_that_loses(number: signal.Signals, *words: str) -> Program:
        out = tmp_path / number.name
        program = start(
            "train",
            plan_path,
            *FOREVER,
            "--no-network",
            "--lost-after",
            PATIENCE,
            "--on-loss",
            "end",
            "--out",
            out,
            *words,
        )
        program.wait_to_hear("step 20/" if words else "step 1/")
        program.worker(lost).send_signal(number)
        return program

    def is_named(program: Program, how: str, log: Path, go_on: str) -> None:
        code, said = program.end()
        assert code == 1
        last = said[said.index("Error:") :]
        assert f"device {lost}" in last
        assert how in last
        assert str(log) in last
        assert re.search(go_on, last)
        assert "Traceback" not in said
        assert not any("Traceback" in one.read_text() for one in log.parent.glob("*.log"))
        nothing_is_left(program)

    stopped, killed = run_that_loses(signal.SIGSTOP), run_that_loses(signal.SIGKILL, "--checkpoint-every", "1")
    folder = re.escape(str(tmp_path / "SIGKILL"))
    go_on = (
        rf"the newest complete checkpoint is {folder}/checkpoint/step-\d+; go on with: "
        rf"spantrain train --resume {folder} --steps 1000000 --lost-after '{PATIENCE}' --on-loss end --no-network"
    )
    is_named(killed, "killed by signal 9", tmp_path / f"SIGKILL/logs/{lost}.log", go_on)
    none = "there is no checkpoint to go on from; --checkpoint-every N writes them"
    is_named(stopped, "no heartbeat", tmp_path / f"SIGSTOP/logs/{lost}.log", none)


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


def test_who_ends_all_processes_of_a_job_ends_it_with_a_checkpoint(start, plan_path, tmp_path):
    program = start("train", plan_path, *FOREVER, "--no-network", "--out", tmp_path)
    program.wait_to_hear("step 1/")
    for process in program.family():
        process.send_signal(signal.SIGTERM)
    code, said = program.end()
    assert code == 130, said
    found = re.search(r"(\d+) steps done; checkpoint: (\S+); go on with: ", said)
    assert found, said
    assert Path(found[2], "manifest.json").is_file()
    assert "lost" not in said
    nothing_is_left(program)


def test_whose_terminal_is_closed_leaves_a_checkpoint(plan_path, tmp_path):
    """As where a connection by ssh breaks: shell and kernel send SIGHUP each, and nothing can be written there."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it, as nohup does
        words = ("train", plan_path, *FOREVER, "--no-network", "--out", tmp_path)
        os.execv(sys.executable, [sys.executable, "-m", "spantrain", *map(str, words)])
    said = b""
    try:
        while b" loss " not in said:
            said = said[-99:] + os.read(terminal, 4096)
        os.close(terminal)
        os.kill(child, signal.SIGHUP)
        status = os.waitpid(child, 0)[1]
    except BaseException:
        os.kill(child, signal.SIGKILL)
        raise
    assert os.waitstatus_to_exitcode(status) == 130
    assert (tmp_path / "checkpoint/latest").is_file()


def test_interrupt_of_a_pipe_leaves_a_checkpoint_though_its_reader_ends_first(plan_path, tmp_path):
    """As in `spantrain train ... 2>&1 | tee log`: Ctrl-C goes to both."""
    words = ("train", plan_path, *FOREVER, "--no-network", "--out", tmp_path)
    with subprocess.Popen(
        [sys.executable, "-m", "spantrain", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        assert any(b" loss " in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 130
    assert (tmp_path / "checkpoint/latest").is_file()


def test_second_interrupt_ends_at_once(start, slow_plan_path, tmp_path):
    program = start("train", slow_plan_path, *FOREVER, "--no-network", "--out", tmp_path)
    program.wait_to_hear("All devices are ready")
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
    assert len(family) == 5, "the program, the fork server, three workers"
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
