"""`spantrain simulate`: every schedule with its figures, limits in bytes, bad input."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from spantrain.app.predict import predict
from spantrain.app.simulate import SimulateRequest, run_simulation
from spantrain.config.artefacts import reference_to_profile, write_plan
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.spans import equal_spans
from spantrain.cost.memory import MemoryCost
from spantrain.errors import InfeasiblePlanError
from spantrain.schedule.perfetto import read_trace
from spantrain.schedule.registry import SCHEDULE_NAMES

PLACES = ((3, ("office-nx",)), (6, ("office-tx2",)), (10, ("lab-0", "lab-1")), (0, ("home-tx2", "home-nano")))


@pytest.fixture(scope="module")
def plan(laptop_profile) -> Plan:
    """Four stages over all three places; the last one ends with the model."""
    stages, first = [], 0
    for end, devices in PLACES:
        end = end or len(laptop_profile.graph.units)
        shares = (3.0, 1.0) if "home-nano" in devices else (1.0, 1.0)
        replicas = tuple(
            Replica(devices=(name,), sample_share=share, in_flight_limit=64)
            for name, share in zip(devices, shares, strict=False)
        )
        stages.append(Stage(first_unit=first, end_unit=end, replicas=replicas, micro_batches=equal_spans(64, 8)))
        first = end
    return Plan(
        cluster=laptop_profile.cluster,
        model=laptop_profile.model,
        global_batch=64,
        dtype="float32",
        stages=tuple(stages),
        schedule="critical-path",
    )


@pytest.fixture
def plan_path(plan, profile_path, tmp_path) -> Path:
    return written(plan, profile_path, tmp_path / "plan.json")


def written(plan: Plan, profile_path: Path, path: Path) -> Path:
    write_plan(replace(plan, profile=reference_to_profile(profile_path, path)), path)
    return path


def test_all_schedules_with_their_figures(spantrain, plan, plan_path, laptop_profile):
    ended = spantrain("simulate", plan_path, "--schedule", "all", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)["schedules"]
    assert tuple(found) == SCHEDULE_NAMES
    ran = {name: entry for name, entry in found.items() if not entry["reason"]}
    assert {"critical-path", "compact", "1f1b"} <= ran.keys()
    for entry in ran.values():
        assert 1 - 1e-9 <= entry["ratio_to_bound"] == entry["step_s"] / entry["lower_bound_s"]
        assert len(entry["bubble_ratio"]) == len(plan.stages)
        assert set(entry["peak_bytes"]) == set(plan.devices)
        assert entry["money_per_step"] > 0
        assert entry["joules_per_step"] > 0
        assert entry["over_limit"] == []
        for device, held in entry["peak_held"].items():
            assert sum(held.values()) == entry["peak_bytes"][device]
    # It is what a planner would predict of it.
    assert ran["critical-path"]["step_s"] == pytest.approx(predict(plan, laptop_profile).step_s)
    assert ran["critical-path"]["step_s"] < ran["1f1b"]["step_s"]


def test_the_table_names_schedules_and_devices(spantrain, plan, plan_path):
    ended = spantrain("simulate", plan_path, "--schedule", "all")
    assert ended.code == 0, ended.err
    for word in (*SCHEDULE_NAMES, *plan.devices, "over the bound", "$", " J"):
        assert word in ended.out


def test_the_plans_own_schedule_and_a_trace_with_memory(spantrain, plan, plan_path, tmp_path):
    path = tmp_path / "traces" / "sim.json"
    ended = spantrain("simulate", plan_path, "--trace", path, "--steps", 2, "--json")
    assert ended.code == 0, ended.err
    assert tuple(json.loads(ended.out)["schedules"]) == ("critical-path",)
    trace = read_trace(path)
    assert {interval.device for interval in trace.intervals} == set(plan.devices)
    assert {interval.step for interval in trace.intervals} == {0, 1}
    counters = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "C"]
    assert len({event["pid"] for event in counters}) == len(plan.devices)
    assert all(event["ts"] >= 0 and event["args"]["bytes"] > 0 for event in counters)


def request(plan, profile, limit: int, *schedules: str) -> SimulateRequest:
    return SimulateRequest(plan=plan, profile=profile, schedules=schedules or SCHEDULE_NAMES, memory_limit_bytes=limit)


def test_bytes_become_in_flight_limits_that_are_kept(plan, laptop_profile):
    least = least_bytes(plan, laptop_profile)
    for limit in (least + 5 * 2**20, least + 20 * 2**20):
        report = run_simulation(request(plan, laptop_profile, limit))
        ran = [entry for entry in report.schedules.values() if not entry.reason]
        assert ran
        for entry in ran:
            own = {r.devices[0]: r.in_flight_limit for stage in plan.stages for r in stage.replicas}
            assert all(entry.in_flight_limits[device] <= own[device] for device in own)
            assert entry.over_limit == ()
            assert max(entry.peak_bytes.values()) <= limit
            for name, samples in report.results[entry.schedule].peak_in_flight.items():
                assert samples <= entry.in_flight_limits[name]
    tight = run_simulation(request(plan, laptop_profile, least + 5 * 2**20, "critical-path"))
    free = run_simulation(request(plan, laptop_profile, 2**40, "critical-path"))
    assert tight.schedules["critical-path"].step_s > free.schedules["critical-path"].step_s


def least_bytes(plan, profile) -> int:
    """What the neediest device holds with one micro-batch in flight."""
    cost = MemoryCost(profile)
    return max(
        cost.need(stage.units, replica.devices[0], span.size, span.size).peak_bytes
        for stage in plan.stages
        for number, replica in enumerate(stage.replicas)
        for span in stage.replica_spans(number)
    )


def test_a_limit_under_one_micro_batch_is_refused_with_numbers(plan, laptop_profile, spantrain, plan_path):
    with pytest.raises(InfeasiblePlanError, match=r"needs .* for \d+ samples \(state .*, activations .*, buffers"):
        run_simulation(request(plan, laptop_profile, least_bytes(plan, laptop_profile) - 1))
    ended = spantrain("simulate", plan_path, "--schedule", "all", "--memory-limit", "4 MiB")
    assert (ended.code, ended.out) == (2, "")
    assert "4 MiB" in ended.err


def test_a_schedule_that_cannot_run_is_listed_with_its_reason(plan, spantrain, profile_path, tmp_path):
    """A limit under what coarser micro-batches of the next stage need: static orders are refused, the others stop."""
    stages = tuple(
        replace(
            stage,
            micro_batches=equal_spans(64, 16 if index == 3 else 8),
            replicas=tuple(replace(replica, in_flight_limit=16 if index != 1 else 8) for replica in stage.replicas),
        )
        for index, stage in enumerate(plan.stages)
    )
    path = written(replace(plan, stages=stages), profile_path, tmp_path / "tight.json")
    ended = spantrain("simulate", path, "--schedule", "all", "--json")
    assert (ended.code, ended.out) == (2, "")
    assert "in-flight" in ended.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--schedule", "critical"), "critical-path"),
        (("--memory-limit", "4"), "4GiB"),
        (("--memory-limit", "0 GiB"), "more than nothing"),
        (("--memory-limit", "-1 GiB"), "negative"),
        (("--steps", "0"), "--steps"),
        (("--optimizer", "adam"), "adamw"),
        (("--schedule", "all", "--trace", "t.json"), "one schedule"),
        (("--trace", "."), "folder"),
    ],
)
def test_wrong_options(words, says, spantrain, plan_path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    ended = spantrain("simulate", plan_path, *words)
    assert (ended.code, ended.out) == (2, "")
    assert says.replace("4GiB", "GiB") in ended.err
    assert "Traceback" not in ended.err


def test_a_plan_for_other_units_is_refused(spantrain, plan, profile_path, tmp_path):
    longer = (*plan.stages[:-1], replace(plan.stages[-1], end_unit=plan.stages[-1].end_unit + 1))
    path = written(replace(plan, stages=longer), profile_path, tmp_path / "other.json")
    ended = spantrain("simulate", path)
    assert (ended.code, ended.out) == (2, "")
    assert "units" in ended.err
    assert spantrain("simulate", profile_path).code == spantrain("simulate", "none.json").code == 2


def test_it_needs_no_torch(plan_path):
    code = (
        "import sys\n"
        "from spantrain.cli.main import main\n"
        f"try:\n    main(['simulate', {str(plan_path)!r}, '--schedule', 'all'])\nexcept SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'sklearn', 'grpc', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
