"""`spantrain simulate`: every schedule with its figures, limits in bytes, bad input."""

import json
import re
from dataclasses import replace

import pytest

from spantrain.app.planning.plan_files import open_plan
from spantrain.app.simulation.simulate import SimulateRequest, calm_run_s, run_simulation
from spantrain.config.artefacts import write_profile
from spantrain.config.cluster_file import load_preset
from spantrain.config.traces.network_traces import Changes, network_trace, write_changes
from spantrain.config.traces.trace_file import read_trace
from spantrain.core.plan import Replica
from spantrain.core.quantities import parse_bytes
from spantrain.core.shares import StateSharding
from spantrain.core.span import equal_spans
from spantrain.cost.memory import MemoryCost
from spantrain.errors import InfeasiblePlanError
from spantrain.formats.registry import WireFormat
from spantrain.planner.engine.predict import predict
from spantrain.schedule.registry import schedule_names
from testing.plans import stage_and_replica, written
from testing.programs import needs_no_torch, simulate_refuses


def test_all_schedules_with_their_figures(spantrain, plan, plan_path, laptop_profile):
    ended = spantrain("simulate", plan_path, "--schedule", "all", "--json")
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)["schedules"]
    assert tuple(found) == schedule_names()
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
    for word in (*schedule_names(), *plan.devices, "over the bound", "$", " J"):
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
    return SimulateRequest(
        plan=plan, profile=profile, schedules=schedules or schedule_names(), memory_limit_bytes=limit
    )


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
    with pytest.raises(
        InfeasiblePlanError, match=r"needs .* for \d+ samples \(state .*, activations .*, buffers"
    ) as told:
        run_simulation(request(plan, laptop_profile, least_bytes(plan, laptop_profile) - 1))
    total, parts = re.findall(r"needs .*? \((\d+) bytes\) for \d+ samples \((.*?)\)", str(told.value))[0]
    sizes = [parse_bytes(size) for size in re.findall(r"[\d.]+ [KMG]?i?B", parts)]
    assert sum(sizes) == pytest.approx(int(total), abs=2**17)
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
        (("--optimizer", "adamm"), "adamw"),
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


def test_a_plan_for_other_units_is_simulate_refuses(spantrain, plan, profile_path, tmp_path):
    longer = (*plan.stages[:-1], replace(plan.stages[-1], end_unit=plan.stages[-1].end_unit + 1))
    path = written(replace(plan, stages=longer), profile_path, tmp_path / "other.json")
    ended = spantrain("simulate", path)
    assert (ended.code, ended.out) == (2, "")
    assert "units" in ended.err
    assert spantrain("simulate", profile_path).code == spantrain("simulate", "none.json").code == 2


def test_a_plan_for_another_model_or_cluster_is_simulate_refuses(spantrain, plan, profile_path, tmp_path):
    path = tmp_path / "other.json"
    wider = replace(plan.model, config={**plan.model.config, "n_embd": 1024})
    err = simulate_refuses(spantrain, written(replace(plan, model=wider), profile_path, path))
    assert "another gpt2-tiny than the profile: config.n_embd 1024 (profile: " in err
    ended = spantrain("schedule", "show", "1f1b", "--plan", path)
    assert (ended.code, ended.out) == (2, "")
    assert "another gpt2-tiny" in ended.err
    cluster = plan.cluster
    devices = (*(device for device in cluster.devices if device.name != "lab-1"), *strangers(cluster, "lab-1", "lab-9"))
    hosts = tuple(replace(h, devices=tuple("lab-9" if d == "lab-1" else d for d in h.devices)) for h in cluster.hosts)
    stages = tuple(
        replace(
            stage,
            replicas=tuple(
                replace(r, devices=tuple("lab-9" if d == "lab-1" else d for d in r.devices)) for r in stage.replicas
            ),
        )
        for stage in plan.stages
    )
    other = replace(plan, cluster=replace(cluster, devices=devices, hosts=hosts), stages=stages)
    assert "uses lab-9, which the profile's cluster does not have" in simulate_refuses(
        spantrain, written(other, profile_path, path)
    )


def strangers(cluster, old: str, new: str):
    return [replace(device, name=new) for device in cluster.devices if device.name == old]


@pytest.mark.parametrize("bandwidth", ["0.0", "-5.0", "1e999"])
def test_a_link_without_bandwidth_is_named(bandwidth, spantrain, plan, laptop_profile, tmp_path):
    path = tmp_path / "profile.json"
    write_profile(laptop_profile, path)
    document = json.loads(path.read_text())
    link = document["links"][3]
    text = path.read_text().replace(
        f'"bandwidth_bytes_per_s": {link["bandwidth_bytes_per_s"]}', f'"bandwidth_bytes_per_s": {bandwidth}'
    )
    assert text != path.read_text()
    path.write_text(text)
    err = simulate_refuses(spantrain, written(plan, path, tmp_path / "plan.json"))
    assert "bandwidth" in err
    assert "links[3]" in err


def test_a_pair_that_was_not_measured_is_named(spantrain, plan, laptop_profile, tmp_path):
    links = tuple(k for k in laptop_profile.links if (k.source, k.target) != ("office-tx2", "lab-0"))
    path = tmp_path / "profile.json"
    write_profile(replace(laptop_profile, links=links), path)
    err = simulate_refuses(spantrain, written(plan, path, tmp_path / "plan.json"))
    assert "no measurement from office-tx2 to lab-0" in err


def test_links_follow_a_trace(spantrain, plan_path, tmp_path):
    def step_ends(*words: str) -> list[float]:
        ended = spantrain("simulate", plan_path, "--steps", 4, "--json", *words)
        assert ended.code == 0, ended.err
        (found,) = json.loads(ended.out)["schedules"].values()
        return found["step_ends_s"]

    calm = step_ends()
    assert len(calm) == 4
    out = step_ends("--network-trace", "outage-30:from=10%")
    assert out[-1] > calm[-1] + 25
    assert out[0] > calm[0] + 25
    assert step_ends("--network-trace", "drop-50:from=99%,until=100%")[:3] == pytest.approx(calm[:3])
    # A file of the same content does the same; links that the plan does not use do not matter in it.
    path = tmp_path / "trace.yaml"
    run_s = calm_run_s(*open_plan(plan_path), 4)
    speeds = network_trace("outage-30:from=10%").on(load_preset("laptop"), run_s)
    write_changes(Changes(link_speed=speeds), path)
    assert step_ends("--network-trace", str(path)) == pytest.approx(out)
    assert (
        "4 steps under outage-30 take"
        in spantrain("simulate", plan_path, "--steps", 4, "--network-trace", "outage-30").out
    )
    assert "give one of them" in simulate_refuses(spantrain, plan_path, "--network-trace", "burst", "--changes", path)
    assert "drop-50" in simulate_refuses(spantrain, plan_path, "--network-trace", "drp-50")


def test_a_rounded_cut_is_half_on_its_link_and_in_memory(plan, laptop_profile):
    first, *others = plan.stages
    rounded = replace(plan, stages=(replace(first, wire_format=WireFormat.BFLOAT16), *others))
    reports = [
        run_simulation(SimulateRequest(plan=one, profile=laptop_profile, schedules=("1f1b",)))
        for one in (plan, rounded)
    ]
    exact, halved = (report.results["1f1b"].link_bytes for report in reports)
    for (source, target), size in exact.items():
        at_cut = {stage_and_replica(plan, source)[0], stage_and_replica(plan, target)[0]} == {0, 1}
        assert halved[source, target] == (size // 2 if at_cut else size)
    whole, half = (report.schedules["1f1b"] for report in reports)
    assert half.step_s <= whole.step_s
    assert half.joules_per_step < whole.joules_per_step
    assert half.peak_bytes["office-nx"] <= whole.peak_bytes["office-nx"]


def test_plans_whose_replicas_would_wait_for_ever_are_not_trained(spantrain, plan, profile_path, tmp_path):
    both = tuple(replace(plan.stages[0].replicas[0], devices=(name,), tp_shares=(1.0,)) for name in plan.devices[:2])
    shared = replace(
        plan.stages[0],
        end_unit=plan.stages[-1].end_unit,
        replicas=both,
        state_sharding=StateSharding.ZERO3,
        recompute=(),
    )
    path = written(replace(plan, stages=(shared,), schedule="compact"), profile_path, tmp_path / "divided.json")
    ended = spantrain("train", path, "--out", tmp_path / "run")
    assert (ended.code, ended.out) == (2, "")
    said = " ".join(ended.err.split())
    assert "for comparison by simulation only" in said
    assert "divided gradients: schedule compact decides at run time" in said
    assert spantrain("simulate", path).code == 0


def test_members_of_a_tensor_parallel_group_hold_their_parts(plan, laptop_profile):
    pair = Replica(devices=("lab-0", "lab-1"), sample_share=1.0, in_flight_limit=64, tp_shares=(3.0, 1.0))
    stages = tuple(replace(stage, replicas=(pair,)) if "lab-0" in stage.devices else stage for stage in plan.stages)
    report = run_simulation(
        SimulateRequest(plan=replace(plan, stages=stages), profile=laptop_profile, schedules=("1f1b",))
    )
    held = report.schedules["1f1b"].peak_held
    # Blocks' state is divided three to one, but for norms and what is added to sums; so are inputs and messages whole.
    width = plan.model.config["n_embd"]
    (stage,) = (stage for stage in plan.stages if "lab-0" in stage.devices)
    whole_bytes = len(stage.units) * (2 * 2 * width + 2 * width) * 4
    divided = {name: held[name].parameter_bytes - whole_bytes for name in ("lab-0", "lab-1")}
    assert divided["lab-0"] == pytest.approx(3 * divided["lab-1"], abs=10)
    assert held["lab-1"].activation_bytes < held["lab-0"].activation_bytes < 3 * held["lab-1"].activation_bytes
    assert held["lab-0"].received_bytes == held["lab-1"].received_bytes


def test_it_needs_no_torch(plan_path):
    needs_no_torch("simulate", str(plan_path), "--schedule", "all")
