"""Real worker processes whose replicas divide tensors train what one process would have trained."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.run_record import DECISIONS_FILE
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.app.validate_run import validate_run
from spantrain.config.artefacts import reference_to_profile, write_plan, write_profile
from spantrain.config.traces.trace_file import read_decisions, read_trace
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica
from spantrain.core.span import Span
from testing.patience import PATIENCE_S
from testing.plans import stage_and_replica
from testing.runtime.runs import OneProcess

pytestmark = [pytest.mark.slow, pytest.mark.tensor_parallel, pytest.mark.timeout(600)]

JOB = TrainJob(steps=6, seed=5, learning_rate=0.02, warmup_steps=5, max_grad_norm=0.5, evaluate_every=3)
THIRDS = [Span(0, 3), Span(3, 6), Span(6, 9)]
TOLERANCE = 1e-4
GENERATIONS = itertools.count(1)


def divided(plan: Plan, cluster: Cluster, groups: list[list[list[int]]]) -> Plan:
    """The plan on the devices of a cluster in order, so many for each replica as it has tensor shares."""
    names = iter(device.name for device in cluster.devices)

    def with_group(replica: Replica, shares: list[int]) -> Replica:
        devices = tuple(itertools.islice(names, len(shares)))
        return replace(replica, devices=devices, tp_shares=tuple(map(float, shares)))

    stages = tuple(
        replace(stage, replicas=tuple(map(with_group, stage.replicas, row)))
        for stage, row in zip(plan.stages, groups, strict=True)
    )
    return replace(plan, cluster=cluster, stages=stages, generation=next(GENERATIONS))


@pytest.fixture(scope="module")
def session(tmp_path_factory, make_plan, spec_of):
    """Five workers, started once."""
    plan = make_plan(spec_of("gpt2"), [0, 5], [[1] * 5], [THIRDS], "gpipe")
    folder = tmp_path_factory.mktemp("logs")
    with open_session(plan.cluster, plan.devices, SessionOptions(network=False), folder, SilentReporter()) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(spec_of):
    return OneProcess(spec_of("gpt2"), JOB, 9).train(0, JOB.steps)


@pytest.mark.parametrize(
    ("groups", "schedule"),
    [([[[1, 2], [1, 2]], [[1]]], "critical-path"), ([[[1], [2, 1]], [[1, 1]]], "1f1b")],
    ids=["figure-7c", "mixed-degrees"],
)
def test_losses_are_those_of_one_process(groups, schedule, session, alone, make_plan, spec_of, law_profile, tmp_path):
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1, 2], [1]], [THIRDS, THIRDS], schedule)
    plan = divided(plan, session.cluster, groups)
    profile = law_profile(plan.cluster, plan.model)
    write_profile(profile, tmp_path / "profile.json")
    request = TrainRequest(
        plan=plan, profile=profile, profile_path=str(tmp_path / "profile.json"), job=JOB, out=tmp_path
    )
    outcome = train(session, request, StopRequest(), SilentReporter())
    assert outcome.losses == pytest.approx(alone, abs=TOLERANCE)
    assert [entry.steps_done for entry in outcome.heldout_losses] == [0, 3, 6]
    leaders = {replica.devices[0] for stage in plan.stages for replica in stage.replicas}
    for name, figures in outcome.devices.items():
        stage, replica = stage_and_replica(plan, name)
        own = plan.stages[stage].replicas[replica]
        assert figures.tensor_share == pytest.approx(own.tp_shares[own.devices.index(name)] / sum(own.tp_shares))
        assert 0 < figures.utilisation <= 1
        assert 0 < figures.peak_held_samples <= own.in_flight_limit
    check_run(tmp_path, plan, leaders)


def check_run(folder: Path, plan: Plan, leaders: set[str]) -> None:
    """Followers have lanes in the trace; only leaders decide, and only they send to other stages."""
    trace = read_trace(folder / "trace.json")
    actions: dict[str, list[str]] = {device: [] for device in plan.devices}
    for interval in trace.intervals:
        if interval.lane == "compute" and "[" in interval.name:
            actions[interval.device].append(interval.name)
    for stage in plan.stages:
        for replica in stage.replicas:
            assert actions[replica.devices[0]]
            assert all(actions[device] == actions[replica.devices[0]] for device in replica.devices)
    assert {flow.source for flow in trace.flows} | {flow.target for flow in trace.flows} <= leaders
    assert {log.device for log in read_decisions(folder / DECISIONS_FILE) if log.decisions} == leaders
    validation = validate_run(folder)
    assert validation.replays, (validation.differences, validation.order_differences)
    assert set(validation.devices) == set(plan.devices)


def test_the_program_trains_such_a_plan_and_tells_shares(make_plan, spec_of, law_profile, tmp_path):
    plan = make_plan(spec_of("gpt2"), [0, 2, 5], [[1, 1], [1]], [THIRDS, THIRDS], "1f1b")
    first, last = plan.stages
    group = replace(first.replicas[0], devices=("s0r0", "s0r1"), tp_shares=(3.0, 1.0))
    plan = replace(plan, stages=(replace(first, replicas=(group,)), last))
    write_profile(law_profile(plan.cluster, plan.model), tmp_path / "profile.json")
    path = tmp_path / "plan.json"
    write_plan(replace(plan, profile=reference_to_profile(tmp_path / "profile.json", path)), path)
    words = ["train", str(path), "--steps", "2", "--no-network", "--json", "--out", str(tmp_path / "run")]
    program = subprocess.run(
        [sys.executable, "-m", "spantrain", *words],
        capture_output=True,
        timeout=PATIENCE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert program.returncode == 0, program.stderr.decode()
    devices = json.loads(program.stdout)["devices"]
    assert {name: figures["tensor_share"] for name, figures in devices.items()} == {
        "s0r0": 0.75,
        "s0r1": 0.25,
        "s1r0": 1.0,
    }
    assert "tensors" in program.stderr.decode()
