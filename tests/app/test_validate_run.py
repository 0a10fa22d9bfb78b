"""A run's folder compared with its prediction: figures, decisions, and folders that are wrong."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from spantrain.app.training.run_folder import RunContent, measured, write_run
from spantrain.app.training.run_record import RunRecord, read_run_record
from spantrain.app.validate_run import validate_run
from spantrain.cli.commands.explain import run_json, show_run
from spantrain.cli.main import main
from spantrain.config.artefacts import read_plan, read_profile, reference_to_profile, write_plan, write_profile
from spantrain.config.cluster_file import load_preset
from spantrain.config.traces.trace_file import read_decisions, write_decisions
from spantrain.core.action import Action, Direction
from spantrain.core.messages import Arrived, ControlKey, Decision, DeviceDecisions, Finished, StepStarted
from spantrain.core.plan import Plan
from spantrain.core.planned.report import PlanReport
from spantrain.core.span import Span
from spantrain.core.trace import Flow, Trace
from spantrain.cost.memory import MemoryCost
from spantrain.errors import UsageError
from spantrain.planner.engine.predict import costs_of, predict
from spantrain.schedule.registry import make_policy
from testing.plans import laptop_plan, task_of
from testing.programs import needs_no_torch

SCHEDULE = "critical-path"


@pytest.fixture(scope="module")
def profile(law_profile):
    from spantrain.models.catalog.catalog import resolve_model

    return law_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


@pytest.fixture(scope="module")
def plan(profile) -> Plan:
    return laptop_plan(profile, SCHEDULE)


@pytest.fixture(scope="module")
def lived(plan, profile) -> tuple[Trace, tuple[DeviceDecisions, ...]]:
    """What a run leaves that goes just as predicted: its clock began at 500 s."""
    trace = predict(plan, profile).trace
    tied = tuple(
        Flow(
            name=str(ControlKey(0, 2, "tied:wte:0")),
            source=source,
            target=target,
            step=2,
            sent_s=0.0,
            received_s=1.0,
            size_bytes=size,
        )
        for (source, target), size in costs_of(plan, profile).tied_bytes().items()
    )
    assert tied
    logs = tuple(decided(plan, trace, device) for device in plan.devices)
    return Trace(intervals=trace.intervals, flows=(*trace.flows, *tied), clock="wall"), logs


def decided(plan: Plan, trace: Trace, device: str) -> DeviceDecisions:
    """Ask a policy all that the trace of a device asks."""
    task = task_of(plan, device)
    policy = make_policy(SCHEDULE, task)
    decisions = []
    for step in range(3):
        actions = [i for i in trace.of(device, step=step) if i.name != "update"]
        told = [(i.end_s, 1, Finished(Action.parse(i.name))) for i in actions]
        for flow in trace.flows:
            if flow.target == device and flow.step == step:
                lane, span = flow.name.split("/")[2:4]
                arrived = Arrived(Direction(lane), Span.parse(span[span.index("[") :]))
                told.append((flow.received_s, 0, arrived))
        begin_s = min(time_s for time_s, _, _ in told)
        told.append((min(begin_s, actions[0].start_s), -1, StepStarted(step)))
        for time_s, _, event in sorted(told, key=lambda entry: entry[:2]):
            answer = policy.on_event(500.0 + time_s, event)
            decisions.append(Decision.of(step, 500.0 + time_s, event, answer))
        assert policy.step_complete
    return DeviceDecisions(device=device, trace_shift_s=-500.0, decisions=tuple(decisions))


@pytest.fixture
def folder(tmp_path, plan, profile, lived) -> Path:
    leave(tmp_path / "run", plan, profile, lived)
    return tmp_path / "run"


def leave(folder: Path, plan: Plan, profile, lived, durations_s=(2.0, 4.0, 3.0), peak_bytes=None) -> None:
    steps = [
        SimpleNamespace(
            duration_s=duration_s,
            busy_s=dict.fromkeys(plan.devices, duration_s / 2),
            peak_held_samples=dict.fromkeys(plan.devices, 6),
        )
        for duration_s in durations_s
    ]
    figures = measured(steps, overlap=False)
    record = RunRecord(plan="", profile="", optimizer="adamw", peak_bytes=peak_bytes or {}, **figures)
    content = RunContent(
        plan=plan, report=PlanReport(), profile=profile, record=record, trace=lived[0], decisions=lived[1]
    )
    write_run(folder, content)


def test_it_needs_no_torch(folder):
    needs_no_torch("validate", str(folder))


def test_figures_of_a_run(folder, plan, profile):
    found = validate_run(folder)
    predicted = predict(plan, profile)
    assert (found.schedule, found.steps_measured, found.measured_by) == (SCHEDULE, 3, "run.json")
    assert found.step_s_measured == 3.0
    assert found.step_error_ratio == pytest.approx(predicted.step_s / 3.0 - 1)
    assert tuple(found.devices) == plan.devices
    for name, device in found.devices.items():
        assert device.busy_s_measured == 1.5
        assert device.busy_s_predicted == pytest.approx(predicted.utilisation[name] * predicted.step_s, rel=0.01)
        assert (device.peak_held_samples_predicted, device.peak_held_samples_measured) == (
            predicted.peak_in_flight[name],
            6,
        )
    assert all(link.bytes_predicted == link.bytes_measured > 0 for link in found.links.values())
    assert {"lab-0 -> office-nx", "office-tx2 -> lab-0", "home-tx2 -> lab-0"} <= set(found.links)


def test_decisions_are_made_again(folder, lived):
    found = validate_run(folder)
    assert found.differences == found.order_differences == ()
    assert found.decisions == sum(len(log.decisions) for log in lived[1]) > 100
    assert found.replays


def test_a_forged_decision_is_told(folder):
    path = folder / "decisions.jsonl"
    logs = read_decisions(path)
    at = next(i for i, decision in enumerate(logs[1].decisions) if decision.run)
    other = replace(logs[1].decisions[at], run=(Action.parse("1W[0:4]"),))
    forged = replace(logs[1], decisions=(*logs[1].decisions[:at], other, *logs[1].decisions[at + 1 :]))
    write_decisions((logs[0], forged, *logs[2:]), path)
    found = validate_run(folder)
    assert not found.replays
    assert len(found.differences) == 1
    assert "1W[0:4]" in found.differences[0]


def test_a_folder_of_plan_profile_and_trace_is_enough(folder, plan, profile, lived):
    for name in ("run.json", "decisions.jsonl"):
        (folder / name).unlink()
    found = validate_run(folder)
    assert (found.measured_by, found.steps_measured, found.decisions) == ("trace.json", 2, None)
    assert found.step_error_ratio == pytest.approx(0, abs=1e-3), "the trace is the simulator's own"
    assert all(device.peak_held_samples_measured is None for device in found.devices.values())
    assert not found.replays


def test_tables_and_json(folder, capsys):
    found = validate_run(folder)
    show_run(found)
    shown = capsys.readouterr().out
    assert "office-nx" in shown
    assert "made again just so" in shown
    page = json.loads(json.dumps(run_json(found)))["run"]
    assert page["time_mape"] == pytest.approx(abs(found.step_error_ratio))
    assert page["cases"][0]["measured_s"] == 3.0
    assert page["replays"] is True
    show_run(replace(found, differences=("here",)))
    assert "decide otherwise: here" in capsys.readouterr().out
    show_run(replace(found, decisions=None, links={}))
    assert "left no log" in capsys.readouterr().out


def test_bytes_where_a_device_counts_them(folder, plan, profile, lived, capsys):
    leave(folder, plan, profile, lived, peak_bytes={"lab-0": 10**7})
    found = validate_run(folder)
    held = MemoryCost(profile, "adamw", "float32").plan_held_sizes(plan)["lab-0"].always
    device = found.devices["lab-0"]
    assert device.peak_bytes_measured == 10**7
    assert device.peak_bytes_predicted > held.parameter_bytes + held.gradient_bytes + held.optimizer_bytes
    assert found.devices["office-nx"].peak_bytes_predicted is None
    show_run(found)
    assert "bytes held" in capsys.readouterr().out
    page = run_json(found)["run"]
    assert page["cases"][0]["measured_bytes"] == 10**7
    assert page["memory_mape"] == page["memory_max_ape"] == pytest.approx(abs(device.peak_bytes_predicted / 1e7 - 1))


# What a run leaves in a folder that is not empty.


def test_what_another_run_left_is_replaced(folder, plan, profile, lived):
    other = replace(plan, schedule="compact", generation=7)
    leave(folder, other, profile, lived)
    assert sorted(path.name for path in folder.iterdir()) == [
        "decisions.jsonl",
        "plan.json",
        "profile.json",
        "run.json",
        "trace.json",
    ]
    assert read_plan(folder / "plan.json").generation == 7


def test_a_plan_and_profile_of_the_user_stay(tmp_path, plan, profile, lived):
    theirs = replace(profile, dtype="bfloat16")
    write_profile(theirs, tmp_path / "profile.json")
    write_plan(replace(plan, schedule="zb"), tmp_path / "plan.json")
    leave(tmp_path, plan, profile, lived)
    leave(tmp_path, plan, profile, lived)
    assert read_profile(tmp_path / "profile.json") == theirs
    assert read_plan(tmp_path / "plan.json").schedule == "zb"
    record = read_run_record(tmp_path)
    assert (record.plan, record.profile) == ("plan.trained.json", "profile.trained.json")
    assert validate_run(tmp_path).step_s_measured == 3.0


def test_the_plan_that_was_trained_is_not_written_again(tmp_path, plan, profile, lived):
    write_profile(profile, tmp_path / "profile.json")
    own = replace(plan, profile=reference_to_profile(tmp_path / "profile.json", tmp_path / "plan.json"))
    write_plan(own, tmp_path / "plan.json")
    leave(tmp_path, own, profile, lived)
    assert not list(tmp_path.glob("*.trained.json"))
    assert read_run_record(tmp_path).plan == "plan.json"


def test_figures_are_of_the_last_steps_of_a_long_run(tmp_path, plan, profile, lived):
    leave(tmp_path, plan, profile, lived, durations_s=(100.0,) * 50 + (1.0,) * 200)
    record = read_run_record(tmp_path)
    assert (record.steps_measured, record.step_s, record.slowest_step_s) == (200, 1.0, 1.0)


# Folders that are wrong: one message that names the file, the field, the value and what to do.


def edit(path: Path, change) -> None:
    page = json.loads(path.read_text())
    change(page)
    path.write_text(json.dumps(page))


def slices(page):
    return [event for event in page["traceEvents"] if event["ph"] == "X" and event["cat"] == "compute"]


def backwards(page):
    slices(page)[3]["args"]["end_s"] = -1.0


def negative(page):
    slices(page)[3]["dur"] = -5.0


def out_of_order(page):
    slices(page)[0]["args"]["step"] = 2


def foreign(page):
    next(e for e in page["traceEvents"] if e["name"] == "process_name")["args"]["name"] = "elsewhere-0"


def empty(page):
    page["traceEvents"] = []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (backwards, r"trace\.json: .*runs backwards in time: end_s -1\.0+ is before start_s .*; train again"),
        (negative, r"trace\.json: .* runs backwards in time: dur is -5\.0 microseconds; train again"),
        (
            out_of_order,
            r"trace\.json: steps are out of order: .* of step 0 starts at .* after .* of step 2; train again",
        ),
        (
            foreign,
            r"trace\.json: is of elsewhere-0, the plan has lab-0.*put the trace and the plan of one run together",
        ),
        (empty, r"trace\.json: holds no steps; train again .*--trace-steps"),
    ],
)
def test_a_wrong_trace(folder, change, message):
    edit(folder / "trace.json", change)
    with pytest.raises(UsageError, match=message):
        validate_run(folder)


def other_units(page):
    page["stages"][2]["end_unit"] = 13


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "plan.json",
            other_units,
            r"plan\.json: stages end at unit 13 of gpt2-tiny \(stages\[2\]\.end_unit\).*14 units",
        ),
        ("plan.json", lambda page: page["model"].update(name="bert-base"), r"plan\.json: .*unit 14 of bert-base"),
        (
            "profile.json",
            lambda page: page.update(dtype="x"),
            r"profile\.json: is not the profile that .*plan\.json was",
        ),
        ("plan.json", lambda page: page.update(schedule="best"), r"plan\.json: .*1f1b.*'best'"),
        ("run.json", lambda page: page.update(plan="gone.json"), r"gone\.json: there is no such file"),
    ],
)
def test_files_that_do_not_belong_together(folder, name, change, message):
    edit(folder / name, change)
    with pytest.raises(UsageError, match=message):
        validate_run(folder)


@pytest.mark.parametrize("name", ["plan.json", "profile.json", "trace.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(UsageError, match=name):
        validate_run(folder)


def test_decisions_of_another_run(folder):
    path = folder / "decisions.jsonl"
    path.write_text(path.read_text().replace('"device": "lab-0"', '"device": "lab-9"'))
    with pytest.raises(UsageError, match=r"decisions\.jsonl: is of lab-9, the plan has lab-0"):
        validate_run(folder)


def test_one_traced_step_cannot_be_timed_alone(folder):
    (folder / "run.json").unlink()
    (folder / "decisions.jsonl").unlink()

    def last_only(page):
        page["traceEvents"] = [
            e for e in page["traceEvents"] if e["ph"] == "M" or (e["ph"] == "X" and e["args"]["step"] == 2)
        ]

    edit(folder / "trace.json", last_only)
    with pytest.raises(UsageError, match=r"trace\.json: holds step 2 alone and there is no run\.json"):
        validate_run(folder)


def test_the_command(folder, capfd):
    with pytest.raises(SystemExit) as ended:
        main(["validate", str(folder), "--json"])
    assert ended.value.code in (0, None)
    assert json.loads(capfd.readouterr().out)["run"]["schedule"] == SCHEDULE
    edit(folder / "trace.json", backwards)
    with pytest.raises(SystemExit) as ended:
        main(["validate", str(folder)])
    assert ended.value.code == 2
    assert "runs backwards in time" in capfd.readouterr().err
