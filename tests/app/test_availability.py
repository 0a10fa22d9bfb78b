"""Runs whose devices leave and come, simulated: what is lost, what is told, bad traces."""

from dataclasses import replace
from functools import cache

import pytest

from spantrain.app.planning.protection import about_keepers, with_keepers
from spantrain.app.profiling.describe import described_profile
from spantrain.app.simulation import availability
from spantrain.app.simulation.availability import LivePlans, events_of, run_availability
from spantrain.app.simulation.liveput import LossReckoner, preferring
from spantrain.config.cluster_file import load_preset
from spantrain.core.plan import Plan
from spantrain.errors import ConfigError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, Evaluation, JobSpec
from spantrain.sim.availability import PREPARED_S, AvailabilityEvent, GoesAhead, detect_s
from testing.sites import sites_cluster, sites_profile, two_stages

SMALL = sites_cluster()
CLUSTER = replace(SMALL, devices=tuple(replace(one, memory_bytes=2**32) for one in SMALL.devices))
PROFILE = sites_profile(CLUSTER)
PLAN: Plan = two_stages(CLUSTER, "a", "c")
HEAD = "time_s,device,event\n"


@cache
def went(*events: tuple[float, str, bool], until_s: float = 1000.0, every: int | None = None, losses: int | None = 0):
    made = [AvailabilityEvent(at_s=at_s, device=device, comes=comes) for at_s, device, comes in events]
    return run_availability(PLAN, PROFILE, made, until_s, "adamw", every, losses)


def test_a_calm_run_loses_nothing():
    calm = went()
    assert calm.steps > 0
    assert calm.steps_lost == calm.moved_bytes == sum(calm.pause_s.values()) == 0
    assert 0 < calm.share <= 1


def test_the_only_holder_takes_all_steps_behind_the_newest_checkpoint():
    free, kept = went((500.0, "c", False)), went((500.0, "c", False), every=3)
    assert free.steps_lost > kept.steps_lost
    assert "the beginning" in free.lines[0]
    assert "the checkpoint after" in kept.lines[0]
    assert kept.steps > free.steps
    assert kept.pause_s["detect"] == detect_s(alone=False) < 2
    assert detect_s(alone=True) == pytest.approx(6, abs=0.2)


def test_what_is_kept_twice_costs_a_step_and_not_more_than_it_saves():
    calm, free = went(), went((500.0, "c", False))
    kept, kept_calm = went((500.0, "c", False), losses=1), went(losses=1)
    assert kept.steps_lost == 1
    assert "is trained again" in kept.lines[0]
    assert kept.steps > free.steps
    assert kept_calm.steps <= calm.steps
    assert went(losses=None).steps >= 0.97 * calm.steps


def test_the_same_input_gives_the_same_answer_and_share_stays_a_share():
    events = events_of("mtbf:0.1,repair:0.05,seed:3", CLUSTER, 250.0)
    first, again = (run_availability(PLAN, PROFILE, events, 250.0, "adamw", 5) for _ in range(2))
    assert first == again
    assert len(first.lines) == len(events)
    assert 0 <= first.share <= 1
    assert all(0 <= seconds <= 250 for seconds in first.pause_s.values())


def test_all_stand_still_for_what_has_not_gone_ahead_of_a_change(monkeypatch):
    """Where all compute for long, a second replica of a stage is worth having again."""
    slow = {"forward_s": 0.5, "backward_input_s": 0.5, "backward_weight_s": 0.5}
    profile = replace(PROFILE, timings=tuple(replace(one, **slow) for one in PROFILE.timings))
    plan = two_stages(CLUSTER, "ab", "cd")
    events = [AvailabilityEvent(at_s=at_s, device="b", comes=at_s > 200.0) for at_s in (100.0, 300.0)]

    known = LivePlans(profile, "adamw", 0)  # asks for each plan once
    monkeypatch.setattr(availability, "LivePlans", lambda *_: known)

    def pause_s(ahead):
        monkeypatch.setattr(LivePlans, "ahead", lambda *_: ahead)
        run = run_availability(plan, profile, events, 600.0, "adamw")
        assert "joined:" in run.lines[-1]
        return run.pause_s["move"]

    ahead_s = pause_s(GoesAhead(beside_s=50.0, slower_s=0.25, left_s=0.0))
    never_s = pause_s(GoesAhead(beside_s=1e9, slower_s=0.25, left_s=0.0))
    assert ahead_s - never_s == pytest.approx(0.25)


def test_a_run_without_devices_waits_for_one():
    names = list(CLUSTER.device_by_name)
    gone = went(*((100.0, name, False) for name in names), (200.0, names[0], True))
    assert gone.pause_s["none"] >= 100
    assert any("waits for others" in line for line in gone.lines)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("t.csv", "when,device\n", "line 1"),
        ("t.csv", HEAD + "1,a,leaves\nsoon,a,comes\n", "line 3, field time_s"),
        ("t.csv", HEAD + "1,nobody,leaves\n", "line 2, field device"),
        ("t.csv", HEAD + "1,a,explodes\n", "line 2, field event"),
        ("t.csv", HEAD + "1,a\n", "line 2, field event"),
        ("t.json", "[{]", "line 1"),
        ("t.json", '[{"time_s": 1, "device": "a", "event": "leaves", "more": 1}]', "event 1, field more"),
    ],
)
def test_a_bad_trace_is_refused_by_file_line_and_field(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        events_of(str(tmp_path / name), CLUSTER, 1.0)
    assert name in str(error.value)


@pytest.mark.parametrize("text", ["mtbf:0", "mtbf:x", "mtbf:1,colour:2", "mtbf:1,repair:nan"])
def test_a_bad_drawing_is_refused(text):
    with pytest.raises(ConfigError, match="--availability, field"):
        events_of(text, CLUSTER, 1.0)


def test_two_times_of_one_are_refused():
    with pytest.raises(ConfigError, match="--availability mtbf:1,mtbf:2: says two things of one"):
        events_of("mtbf:1,mtbf:2", CLUSTER, 1.0)


def test_a_light_change_is_known_beforehand_unless_losses_come_close_together():
    late, close = went((500.0, "c", False)), went((0.5, "c", False))
    assert late.pause_s["plan"] == PREPARED_S < close.pause_s["plan"]


def test_copies_lie_in_host_memory():
    """Devices have no room besides their own stage."""
    tight = replace(CLUSTER, devices=tuple(replace(one, memory_bytes=1) for one in CLUSTER.devices))
    assert with_keepers(PLAN, replace(PROFILE, cluster=tight), "adamw", 1).stages[0].keepers == ("c",)
    (_, unknown) = about_keepers(with_keepers(PLAN, PROFILE, "adamw", 1), PROFILE, "adamw", 1)
    assert "host memory at most on hc, ha, which is taken to be there" in unknown
    small = replace(PROFILE, cluster=replace(tight, hosts=tuple(replace(one, memory_bytes=1) for one in tight.hosts)))
    assert with_keepers(PLAN, small, "adamw", 1).stages[0].keepers == ()
    kinds = tuple(replace(kind, unified_memory=True) for kind in tight.kinds)
    assert with_keepers(PLAN, replace(PROFILE, cluster=replace(tight, kinds=kinds)), "adamw", 1).stages[0].keepers == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [("soon", "--mtbf, field mtbf"), ("0", "more than nothing"), ("a100=3", "field a100: unknown"),
     ("repair=1", "give HOURS for all devices"), ("lab=3,lab=4", "says two things of one")],
)  # fmt: skip
def test_bad_hours_are_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        preferring(text, PROFILE, "adamw")


def test_the_planner_says_what_it_reckoned_of_losses():
    profile = described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))
    job, asked = JobSpec(global_batch=16), ("spantrain-dp",)
    hours = "home=1,mtbf=100,repair=0.1"
    few = Constraints(leave_out=("office",), keep=("home-tx2",))
    options = PlanOptions(strategies=asked, constraints=few, prefer=preferring(hours, profile, "adamw"))
    found = make_plan(profile, job, options)
    said, costs = (line for line in found.report.reasons if "expected to stay" in line or "A loss costs" in line)
    assert said.startswith("Devices are lost (mean hours between losses: home 1 h, others 100 h) and back after 360 s")
    assert "Train it with --protect" in costs
    reckoner = LossReckoner({"home": 1.0, "mtbf": 100.0, "repair": 0.1}, profile, "adamw")
    rates = {name: reckoner.rate(name) for name in found.plan.devices}
    assert {rate for name, rate in rates.items() if name.startswith("home")} == {1 / 3600}
    assert {rate for name, rate in rates.items() if name.startswith("lab")} == {1 / 360_000}


def test_the_plan_that_is_expected_to_do_most_is_chosen(monkeypatch):
    """The second of two candidates, as soon as the first one's devices are lost often enough."""
    first, second = two_stages(CLUSTER, "a", "c"), two_stages(CLUSTER, "b", "d")
    evaluation = make_evaluation(step_s=1.0), make_evaluation(step_s=1.1)
    monkeypatch.setattr(LossReckoner, "_lost_s", lambda _self, _plan, _plans, _step_s, _name: 600.0)
    monkeypatch.setattr(LivePlans, "step_s", lambda _self, plan: 1.0 if "a" in plan.devices else 1.1)
    rows = list(zip((first, second), evaluation, strict=True))
    for text, chosen in [("1000", 0), ("mtbf=1000,office=1000,lab=1", 0), ("home=1", 0), ("office=1", 1)]:
        index, said = preferring(text, PROFILE, "adamw")(rows)
        assert index == chosen, (text, said)
    assert "the fastest plan does 8 and keeps 6.8" in said[0]


def make_evaluation(*, step_s):
    return Evaluation(
        step_s=step_s, samples_per_s=8 / step_s, usd_per_step=None, joules_per_sample=None, bubble_ratio=0.0,
        peak_bytes={}, over_memory=(),
    )  # fmt: skip


def test_another_plan_than_the_fastest_may_be_preferred():
    job = JobSpec(global_batch=8)
    rows = []

    def last(candidates):
        rows.extend(candidates)
        return len(candidates) - 1, ("It was preferred.",)

    fastest, found = make_plan(PROFILE, job), make_plan(PROFILE, job, PlanOptions(prefer=last))
    assert rows[0][0].stages == fastest.plan.stages
    assert [evaluation.step_s for _, evaluation in rows] == sorted(evaluation.step_s for _, evaluation in rows)
    preferred, evaluation = rows[-1]

    def places(plan: Plan) -> list[tuple[int, tuple[str, ...]]]:
        return [(stage.first_unit, stage.devices) for stage in plan.stages]

    # Micro-batches and the order of work are searched for it, too.
    assert places(found.plan) == places(preferred) != places(fastest.plan)
    assert found.step_s_predicted <= evaluation.step_s
    assert found.report.reasons[-1] == "It was preferred."
