"""Who waited for whom in a step: a device or a link that is late is named, and since when."""

import contextlib
import json
from dataclasses import replace

import pytest

from spantrain.app.reporter import Reporter
from spantrain.app.training.metrics import EvaluationMetrics
from spantrain.app.watching.chain import StageLayout, StepForecast, StepTrace, reason_of
from spantrain.app.watching.metrics_text import metrics_of_view
from spantrain.app.watching.reason_text import chain_lines, late_line, lateness_text
from spantrain.app.watching.run_watch import Points, RunWatch
from spantrain.app.watching.view import VIEW_FILE, read_view
from spantrain.config.cluster_file import load_preset
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.span import equal_spans
from spantrain.core.trace import DeviceStep, Flow, Interval, Trace
from spantrain.planner.engine.predict import predict
from spantrain.runtime.coordinator.barrier import StepOutcome
from spantrain.runtime.coordinator.records import RecordedStep, StepRecords, recorded
from testing.plans import interleaved, laptop_plan

STAGE_OF = {"lab-0": 0, "office-nx": 1, "office-tx2": 1, "home-tx2": 2}


@pytest.fixture(scope="module")
def profile(law_profile) -> Profile:
    from spantrain.models.catalog.catalog import resolve_model

    return law_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


@pytest.fixture(scope="module")
def plan(profile) -> Plan:
    return laptop_plan(profile)


@pytest.fixture(scope="module")
def forecast(plan, profile) -> StepForecast:
    found = predict(plan, profile)
    return StepForecast(found.trace, found.step_s, StageLayout.of(plan))


def step_of(plan: Plan, profile: Profile) -> tuple[Trace, float]:
    """The last of three simulated steps, and how long one takes."""
    found = predict(plan, profile)
    last = max(one.step for one in found.trace.intervals)
    return found.trace.since(last), found.step_s


def slower_device(profile: Profile, kind: str, times: float) -> Profile:
    timings = tuple(
        replace(one, forward_s=one.forward_s * times, backward_input_s=one.backward_input_s * times,
                backward_weight_s=one.backward_weight_s * times) if one.kind == kind else one
        for one in profile.timings
    )  # fmt: skip
    return replace(profile, timings=timings)


def slower_link(profile: Profile, source: str, target: str, times: float) -> Profile:
    links = tuple(
        replace(one, bandwidth_bytes_per_s=one.bandwidth_bytes_per_s / times, curve=None)
        if (one.source, one.target) == (source, target)
        else one
        for one in profile.links
    )
    return replace(profile, links=links)


def test_a_step_that_goes_as_forecast_has_a_chain_without_gaps_and_nobody_late(plan, profile, forecast):
    trace, step_s = step_of(plan, profile)
    reason = reason_of(2, step_s, trace, forecast, StageLayout.of(plan), {})
    assert reason.chain[0].start_s == 0.0
    assert all(a.end_s == pytest.approx(b.start_s) for a, b in zip(reason.chain, reason.chain[1:], strict=False))
    assert sum(part.duration_s for part in reason.chain) <= step_s + 1e-9
    assert reason.late is None or reason.late.excess_s < 0.05 * step_s
    assert any(" -> " in part.place for part in reason.chain), "a pipeline's step depends on messages"


def test_a_slow_device_is_named_with_what_it_takes_as_a_rule(plan, profile, forecast):
    trace, step_s = step_of(plan, slower_device(profile, plan.cluster.device_by_name["home-tx2"].kind, 3.0))
    history = {"home-tx2": [(step, 0.5) for step in range(8)] + [(8, 1.4), (9, 1.5)]}
    reason = reason_of(2, step_s, trace, forecast, StageLayout.of(plan), history)
    assert reason.late is not None
    kinds = {plan.cluster.device_by_name[name].kind: name for name in STAGE_OF}
    assert plan.cluster.device_by_name[reason.late.place].kind == plan.cluster.device_by_name["home-tx2"].kind, kinds
    assert reason.late.excess_s > 0.5 * (step_s - forecast.step_s)
    named = reason_of(2, step_s, trace, forecast, StageLayout.of(plan), {reason.late.place: history["home-tx2"]})
    assert (named.late.usual_s, named.late.now_s, named.late.since_step) == (0.5, 1.5, 8)
    assert "late since step 9" in lateness_text(named.late)
    assert late_line(named).startswith("Step 3 took ")


def test_a_slow_link_is_named(plan, profile, forecast):
    trace, step_s = step_of(plan, slower_link(profile, "office-nx", "home-tx2", 60.0))
    reason = reason_of(2, step_s, trace, forecast, StageLayout.of(plan), {})
    assert reason.late is not None
    assert reason.late.place == "office-nx -> home-tx2"
    assert any("office-nx -> home-tx2: forward" in line for line in chain_lines(reason))


@pytest.mark.parametrize("there_and_back", [False, True])
def test_a_device_with_several_stages_has_a_chain_without_gaps_and_the_slow_one_is_named(profile, there_and_back):
    stages = tuple(
        Stage(
            first_unit=first, end_unit=end, replicas=(Replica(devices=(name,), sample_share=1.0, in_flight_limit=64),),
            micro_batches=equal_spans(24, 6),
        )
        for first, end, name in ((0, 3, "lab-0"), (3, 7, "home-tx2"), (7, 10, "office-nx"), (10, 14, "office-tx2"))
    )  # fmt: skip
    plan = interleaved(replace(laptop_plan(profile), stages=stages), there_and_back=there_and_back)
    found, stages = predict(plan, profile), StageLayout.of(plan)
    forecast = StepForecast(found.trace, found.step_s, stages)
    trace, step_s = step_of(plan, profile)
    reason = reason_of(2, step_s, trace, forecast, stages, {})
    assert reason.chain[0].start_s == 0.0
    assert reason.chain[0].what.startswith("0F")
    assert all(a.end_s == pytest.approx(b.start_s) for a, b in zip(reason.chain, reason.chain[1:], strict=False))
    assert reason.rest_s < 0.1 * step_s
    assert reason.late is None or reason.late.excess_s < 0.05 * step_s
    trace, step_s = step_of(plan, slower_device(profile, plan.cluster.device_by_name["home-tx2"].kind, 4.0))
    late = reason_of(2, step_s, trace, forecast, stages, {}).late
    assert late is not None
    assert late.place == "home-tx2"
    assert late.excess_s > 0.5 * (step_s - forecast.step_s)


def test_who_comes_last_to_a_sum_is_the_one_that_others_wait_for():
    def work(device: str, name: str, start_s: float, end_s: float) -> Interval:
        return Interval(device=device, lane="compute", name=name, step=0, start_s=start_s, end_s=end_s)

    rows = (
        work("a", "0B[0:4]", 0.0, 1.0), work("a", "gradient sum", 1.0, 5.2),
        work("b", "0B[4:8]", 0.0, 5.0), work("b", "gradient sum", 5.0, 5.2),
    )  # fmt: skip
    chain = StepTrace(
        Trace(intervals=rows, flows=(), clock="wall"), 0, StageLayout(stage_of={"a": 0, "b": 0}, before={})
    ).chain()
    assert [(place, what) for place, what, _, _ in chain] == [("b", "0B[4:8]"), ("b", "gradient sum")]


def test_clocks_that_differ_make_no_chain_without_end():
    rows = tuple(
        Interval(device=device, lane="compute", name=name, step=0, start_s=start_s, end_s=start_s + 1.0)
        for device, name, start_s in (
            ("a", "0F[0:4]", 9.0),
            ("b", "1F[0:4]", 1.0),
            ("b", "1B[0:4]", 2.0),
            ("a", "0B[0:4]", 10.0),
        )
    )
    flows = tuple(
        Flow(
            name=f"g0/s0/{lane}/cut0[0:4]",
            source=source,
            target=target,
            step=0,
            sent_s=sent_s,
            received_s=there_s,
            size_bytes=1,
        )
        for lane, source, target, sent_s, there_s in (
            ("forward", "a", "b", 10.0, 0.5),
            ("backward", "b", "a", 3.0, 9.5),
        )
    )
    chain = StepTrace(
        Trace(intervals=rows, flows=flows, clock="wall"), 0, StageLayout(stage_of={"a": 0, "b": 1}, before={0: 0})
    ).chain()
    assert all(end_s >= start_s for _, _, start_s, end_s in chain)


def test_what_a_device_tells_of_a_step_is_bounded():
    with pytest.raises(ValueError, match="characters"):
        DeviceStep(step=0, work=(("x" * 300, 0.0, 1.0),), sums=(), messages=())
    with pytest.raises(ValueError, match="names"):
        DeviceStep(step=0, work=(("x", 0.0, 1.0),) * 5_000, sums=(), messages=())


def test_what_a_member_makes_up_ends_no_run_and_no_terminal(plan, profile, forecast, tmp_path):
    with pytest.raises(ValueError, match="printable"):
        DeviceStep(step=0, work=(("\x1b[2J", 0.0, 1.0),), sums=(), messages=())
    names = (
        "0F[5:3]",
        "0F[0:0]",
        f"0F[0:{'9' * 150}]",
        "x[4:2]",
        "gradient sum",
        "",
        "\N{ARABIC-INDIC DIGIT ONE}F[0:4]",
    )
    told = DeviceStep(
        step=0,
        work=tuple((name, -1e11, 1e11 - number) for number, name in enumerate(names)),
        sums=(("gradient sum", 3.0, 1.0),),
        messages=tuple(
            (f"g0/s0/forward/{name}", source, 9e10, -9e10, -1) for name in names for source in ("lab-0", "nobody")
        ),
    )
    with RunWatch(Reporter(), tmp_path, profile, TrainJob(steps=9)) as watch:
        watch.run_begins(plan)
        watch.recorded(recorded(outcome_of(0, 1.0, 1.0), dict.fromkeys(STAGE_OF, told)))
    assert read_view(tmp_path).reason is not None


def outcome_of(step: int, duration_s: float, closed_s: float, **more) -> StepOutcome:
    return StepOutcome(
        step=step, loss=1.0, evaluation_loss=None, grad_norm=1.0, duration_s=duration_s,
        busy_s=dict.fromkeys(STAGE_OF, 0.5), peak_held_samples=dict.fromkeys(STAGE_OF, 6),
        sent_bytes={"lab-0": {"office-nx": 1000}}, closed_s=closed_s, **more,
    )  # fmt: skip


def test_a_step_is_asked_for_once_a_second_and_told_of_when_all_have_told():
    heard: list[RecordedStep] = []
    records = StepRecords(heard.append)
    assert [records.asks_for(outcome_of(step, 0.4, 0.4 * step)) for step in range(5)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    told = DeviceStep(step=3, work=(("0F[0:4]", 1.0, 2.0),), sums=(), messages=(), peak_bytes=7)
    records.take("lab-0", replace(told, step=2))
    for name in STAGE_OF:
        assert not heard
        records.take(name, told)
    assert heard[0].peak_bytes == dict.fromkeys(STAGE_OF, 7)
    assert {one.device for one in heard[0].trace.intervals} == set(STAGE_OF)


def metrics_of(step: int):
    from spantrain.app.training.metrics import StepMetrics

    return StepMetrics(step=step, loss=3.0 / step, learning_rate=1e-3, grad_norm=1.0, step_s=0.5, samples_per_s=48.0)


class Noted(Reporter):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_a_run_leaves_what_there_is_to_see_and_tells_of_a_step_over_twice_its_forecast(
    plan, profile, forecast, tmp_path
):
    shown = Noted()
    with contextlib.suppress(RuntimeError), RunWatch(shown, tmp_path, profile, TrainJob(steps=9)) as watch:
        watch.run_begins(plan)
        watch.note("start there: SPANTRAIN_TOKEN=abc spantrain worker")
        for step in range(3):
            outcome = outcome_of(step, 5 * forecast.step_s, 100.0 * step)
            watch.step(outcome, metrics_of(step + 1), 9)
            trace, _ = step_of(plan, slower_link(profile, "office-nx", "home-tx2", 60.0))
            shifted = tuple(replace(one, step=step) for one in trace.intervals)
            flows = tuple(replace(one, step=step) for one in trace.flows)
            watch.recorded(
                RecordedStep(
                    outcome=outcome, trace=replace(trace, intervals=shifted, flows=flows), peak_bytes={"lab-0": 5}
                )
            )
        assert [line for line in shown.lines if "times its forecast" in line and "Step 3 took" in line], shown.lines
        assert read_view(tmp_path).state == "running"
        raise RuntimeError("boom")
    view = read_view(tmp_path)
    assert (view.state, view.ending, view.steps_done) == ("failed", "boom", 3)
    assert view.events[0].text == "start there: SPANTRAIN_TOKEN=... spantrain worker"
    assert view.reason.late.place == "office-nx -> home-tx2"
    assert view.reason.late.now_s < view.reason.chain[-1].end_s, "a link is no longer busy than the step takes"
    assert view.timeline.work.keys() == view.timeline.work_forecast.keys() == STAGE_OF.keys()
    assert {one.name: one.peak_bytes for one in view.devices}["lab-0"] == 5
    assert [one.stage for one in view.devices if one.name == "home-nano"] == [None]
    used = {(one.source, one.target): one.used_bytes_per_s for one in view.links}
    assert used["lab", "office"] == pytest.approx(1000 / (5 * forecast.step_s))
    assert (tmp_path / VIEW_FILE).stat().st_size < 200_000


def test_behind_a_change_of_plan_the_last_recorded_step_is_told_of(plan, profile, forecast, tmp_path):
    with RunWatch(Noted(), tmp_path, profile, TrainJob(steps=9)) as watch:
        watch.run_begins(plan)
        trace, _ = step_of(plan, profile)
        outcome = outcome_of(0, forecast.step_s, 0.0)
        watch.step(outcome, metrics_of(1), 9)
        watch.recorded(RecordedStep(outcome=outcome, trace=trace, peak_bytes={}))
        watch.run_begins(replace(plan, generation=plan.generation + 1), "home-tx2 was lost")
        view = read_view(tmp_path)
        assert (view.reason.step, view.timeline, view.generation) == (0, None, plan.generation + 1)


def test_a_long_curve_stays_short_and_keeps_its_last_point():
    points = Points()
    for step in range(1, 10_001):
        points.add(step, float(step))
    assert len(points.all) <= 502
    assert points.all[-1] == (10_000, 10_000.0)
    points.add(500, 0.5)
    assert points.all[-1] == (500, 0.5), "steps that are done again replace what was not committed"


def test_a_held_out_loss_that_is_no_number_leaves_a_view_that_browsers_read(plan, profile, tmp_path):
    with RunWatch(Noted(), tmp_path, profile, TrainJob(steps=9)) as watch:
        watch.run_begins(plan)
        for step, loss in ((0, 3.0), (2, float("nan"))):
            watch.evaluated(EvaluationMetrics(step=step, eval_loss=loss))
    json.loads((tmp_path / VIEW_FILE).read_text(), parse_constant=pytest.fail)
    assert read_view(tmp_path).evaluations == ((0, 3.0), (2, None))
    assert "spantrain_eval_loss" not in metrics_of_view((tmp_path / VIEW_FILE).read_bytes())
