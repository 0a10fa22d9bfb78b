"""The barrier at the end of a step."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from spantrain.app.training.recovery.carry_on import Leg
from spantrain.app.training.recovery.joining import Membership
from spantrain.app.training.stop import StopRequest
from spantrain.core.job import TrainJob
from spantrain.core.outer.stages import StageOrder, StageReport
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.core.speed import LinkReport, LinkVerdict
from spantrain.core.trace import DeviceStep
from spantrain.errors import Interrupted
from spantrain.runtime.control.requests import AheadChange, AheadCopy, AheadState, DeviceReport
from spantrain.runtime.coordinator.advice import Advice
from spantrain.runtime.coordinator.barrier import StepBarrier, StepOutcome
from spantrain.runtime.coordinator.records import RecordedStep, StepRecords
from spantrain.transport.control.protocol import RemoteRefusal
from testing.patience import PATIENCE_S


@pytest.fixture(scope="module")
def plan(make_plan, spec_of) -> Plan:
    """Two devices, a and b, under generation 1."""
    return make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [[Span(0, 4)]] * 2, "gpipe")


A, B = "s0r0", "s1r0"


@pytest.fixture
def barrier_of(plan):
    def make(job: TrainJob, outcomes: list[StepOutcome] | None = None, *, stop: bool = False, **more) -> StepBarrier:
        return StepBarrier(
            plan=plan,
            job=job,
            stop_requested=lambda: stop,
            on_step=[].append if outcomes is None else outcomes.append,
            can_checkpoint=True,
            **{"hold_s": PATIENCE_S, **more},
        )

    return make


def report(step: int, loss_sum: float | None, square: float, generation: int = 1) -> DeviceReport:
    return DeviceReport(
        generation=generation, step=step, loss_sum=loss_sum, grad_square=square, busy_s=0.1, peak_held_samples=2
    )


def both(barrier: StepBarrier, step: int, generation: int = 1, ahead: AheadState | None = None):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(barrier.report, A, replace(report(step, None, 9.0, generation), ahead=ahead))
        second = barrier.report(B, report(step, 8.0, 16.0, generation))
        return first.result(PATIENCE_S), second


def test_all_get_the_same_verdict_with_the_global_loss_and_norm(barrier_of):
    outcomes: list[StepOutcome] = []
    a, b = both(barrier_of(TrainJob(steps=5), outcomes), 0)
    assert a == b
    assert (a.grad_norm, a.stop, a.checkpoint) == (5.0, False, False)
    assert outcomes[0].loss == 2.0
    assert outcomes[0].busy_s == {A: 0.1, B: 0.1}


def test_checkpoints_come_regularly_and_at_the_end(barrier_of):
    barrier = barrier_of(TrainJob(steps=4, checkpoint_every=2))
    verdicts = [both(barrier, step)[0] for step in range(4)]
    assert [v.checkpoint for v in verdicts] == [False, True, False, True]
    assert [v.stop for v in verdicts] == [False, False, False, True]
    assert [done for done in range(9) if barrier.wants_checkpoint(done)] == [2, 4]


AHEAD = AheadChange(number=1, generation=1, copies=(AheadCopy(A, B, (0,)),))


def test_all_pause_when_what_goes_ahead_is_there(barrier_of):
    barrier = barrier_of(TrainJob(steps=9))
    both(barrier, 0)
    assert barrier.take_ahead(AHEAD)
    told, _ = both(barrier, 1)
    assert (told.ahead, told.pause) == (AHEAD, False)
    copying, _ = both(barrier, 2, ahead=AheadState.COPYING)
    assert (copying.ahead, copying.pause, barrier.goes_ahead) == (None, False, True)
    assert both(barrier, 3, ahead=AheadState.LEVEL)[0].pause
    assert not barrier.take_ahead(AheadChange(number=2, generation=1)), "all go over already"


def test_all_pause_where_too_much_waits_to_go_ahead(barrier_of):
    barrier = barrier_of(TrainJob(steps=9))
    barrier.take_ahead(AHEAD)
    both(barrier, 0)
    assert both(barrier, 1, ahead=AheadState.FULL)[0].pause


def test_nobody_pauses_for_what_is_not_to_go_ahead(barrier_of):
    """Whatever a device says; nor when it was given up."""
    barrier = barrier_of(TrainJob(steps=9))
    assert not both(barrier, 0, ahead=AheadState.LEVEL)[0].pause
    barrier.take_ahead(AHEAD)
    both(barrier, 1)
    given_up = AheadChange(number=2, generation=1)
    assert barrier.take_ahead(given_up)
    verdict, _ = both(barrier, 2, ahead=AheadState.COPYING)
    assert verdict.ahead == given_up
    assert not both(barrier, 3, ahead=AheadState.FULL)[0].pause


def test_nothing_goes_ahead_under_another_plan_than_it_was_thought_of(barrier_of):
    assert not barrier_of(TrainJob(steps=9)).take_ahead(replace(AHEAD, generation=0))


def test_nothing_goes_ahead_of_the_end(barrier_of):
    barrier = barrier_of(TrainJob(steps=1))
    barrier.take_ahead(AHEAD)
    assert both(barrier, 0)[0].ahead is None
    assert (barrier.goes_ahead, barrier.take_ahead(AHEAD)) == (False, False)


def test_a_request_to_stop_ends_with_a_checkpoint(barrier_of):
    verdict, _ = both(barrier_of(TrainJob(steps=100), stop=True), 0)
    assert verdict.stop
    assert verdict.checkpoint


def test_an_abort_lets_everybody_go(barrier_of):
    barrier = barrier_of(TrainJob(steps=2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(barrier.report, A, report(0, None, 1.0))
        barrier.abort("device b was lost")
        with pytest.raises(Interrupted, match="device b was lost"):
            waiting.result(PATIENCE_S)


def test_who_asks_again_gets_the_same_verdict_and_the_next_step_waits_for_nobody_twice(barrier_of):
    """Its answer was lost with the network: the report came, so it does not count anew."""
    outcomes: list[StepOutcome] = []
    barrier = barrier_of(TrainJob(steps=5), outcomes)
    first, _ = both(barrier, 0)
    assert barrier.report(A, report(0, None, 9.0)) == first
    both(barrier, 1)
    assert [outcome.step for outcome in outcomes] == [0, 1]


def test_who_waits_for_long_is_told_to_ask_again_and_its_first_report_counts(barrier_of):
    outcomes: list[StepOutcome] = []
    barrier = barrier_of(TrainJob(steps=5), outcomes, hold_s=0.0)
    assert barrier.report(B, report(0, 8.0, 16.0)) is None
    assert barrier.report(B, report(0, 99.0, 16.0)) is None
    assert barrier.report(A, report(0, None, 9.0)) == barrier.report(B, report(0, 8.0, 16.0))
    assert outcomes[0].loss == 2.0


def test_the_first_step_takes_its_time_from_its_begin(barrier_of):
    outcomes: list[StepOutcome] = []
    barrier = barrier_of(TrainJob(steps=5), outcomes)
    barrier.begin(time.monotonic() + 100.0)
    both(barrier, 0)
    assert outcomes[0].duration_s < -90.0


@pytest.mark.parametrize(("digest", "differs"), [("f" * 64, False), ("0" * 64, True)])
def test_data_that_differs_between_machines_is_said_to_all(digest: str, differs: bool, barrier_of):
    barrier = barrier_of(TrainJob(steps=2))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(barrier.report, A, replace(report(0, None, 1.0), data_digest="f" * 64))
        second = pool.submit(barrier.report, B, replace(report(0, 8.0, 1.0), data_digest=digest))
        said = {first.result(PATIENCE_S).data_differs, second.result(PATIENCE_S).data_differs}
    assert said == ({f"{A} (SHA-256 ffffffffffff) and {B} (SHA-256 000000000000)"} if differs else {""})


LINK = LinkReport(
    peer="elsewhere", verdict=LinkVerdict.IDLE, bytes_per_s=None, latency_s=None, queued_s=0.0, busy_s=0.0, messages=0,
    confidence=0.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("device", "invented", "says"),
    [
        ("elsewhere", report(2, None, 1.0), "no part in this run"),
        (A, report(10**15, None, 1.0), "under way is step 2"),
        (A, report(3, None, 1.0), "under way is step 2"),
        (A, report(0, None, 1.0), "under way is step 2"),
        (A, report(2, None, 1.0, generation=0), "under way is step 2 under generation 1"),
        (A, report(2, None, 1.0, generation=2), "under way is step 2 under generation 1"),
    ],
)
def test_only_reports_of_what_is_under_way_count(device: str, invented: DeviceReport, says: str, barrier_of):
    outcomes: list[StepOutcome] = []
    barrier = barrier_of(TrainJob(steps=5), outcomes)
    both(barrier, 0)
    both(barrier, 1)
    with pytest.raises(RemoteRefusal, match=says):
        barrier.report(device, invented)
    both(barrier, 2)
    assert [outcome.step for outcome in outcomes] == [0, 1, 2]


def test_links_to_others_are_left_out(barrier_of):
    heard = {}

    class Advised:
        def take(self):
            return None

        def ask(self, _step, reports):
            heard.update(reports)

    barrier = barrier_of(TrainJob(steps=5), advising=Advised(), hold_s=0.0)
    barrier.report(A, replace(report(0, None, 1.0), links=(LINK, replace(LINK, peer=B))))
    barrier.report(B, report(0, 8.0, 1.0))
    assert [link.peer for link in heard[A].links] == [B]


def test_behind_the_last_step_only_an_evaluation_comes_and_nothing_is_to_be_saved(barrier_of):
    barrier = barrier_of(TrainJob(steps=1), hold_s=0.0)
    both(barrier, 0)
    with pytest.raises(RemoteRefusal, match="ended with step 0"):
        barrier.report(B, report(1, 8.0, 1.0))
    evaluated = replace(report(1, None, 0.0), evaluation_loss_sum=4.0)
    assert barrier.report(A, report(1, None, 0.0)) is None
    assert not barrier.report(B, evaluated).checkpoint
    assert not barrier.wants_checkpoint(2)


def test_where_steps_overlap_the_one_that_has_begun_still_ends(barrier_of):
    barrier = barrier_of(TrainJob(steps=9, staleness=1, adapter="off"), stop=True)
    assert both(barrier, 0)[0].stop
    assert both(barrier, 1)[0].stop
    with pytest.raises(RemoteRefusal, match="ended with step 1"):
        barrier.report(B, report(2, 8.0, 1.0))


def test_a_run_that_goes_on_begins_with_its_first_step(barrier_of):
    barrier = barrier_of(TrainJob(steps=9), first_step=4)
    with pytest.raises(RemoteRefusal, match="under way is step 4"):
        barrier.report(A, report(0, None, 1.0))
    assert both(barrier, 4)[0].grad_norm == 5.0


def test_a_plan_that_takes_over_is_what_is_reported_under(barrier_of, plan):
    class Advised:
        def take(self):
            return None

        def ask(self, step, _reports):
            return Advice(plan=replace(plan, generation=2), reason="why not") if step == 0 else None

    barrier = barrier_of(TrainJob(steps=5), advising=Advised())
    assert both(barrier, 0)[0].plan == barrier.plan == replace(plan, generation=2)
    with pytest.raises(RemoteRefusal, match="under generation 2"):
        barrier.report(A, report(1, None, 1.0))
    assert both(barrier, 1, generation=2)[0].grad_norm == 5.0


def test_one_device_leads_the_stages(barrier_of):
    barrier = barrier_of(TrainJob(steps=5), hold_s=0.0)
    leads = StageReport(order=StageOrder())
    assert barrier.report(A, replace(report(0, None, 1.0), outer=leads)) is None
    with pytest.raises(RemoteRefusal, match=f"as {A} has done"):
        barrier.report(B, replace(report(0, 8.0, 1.0), outer=leads))
    assert barrier.report(B, replace(report(0, 8.0, 1.0), outer=StageReport())).outer.order == StageOrder()


@pytest.mark.parametrize(
    "fields", [{"grad_square": -1.0}, {"busy_s": float("nan")}, {"loss_sum": float("inf")}, {"sent_bytes": {"b": -1}}]
)
def test_figures_that_cannot_be_are_no_report(fields):
    with pytest.raises(ValueError, match="step 0"):
        replace(report(0, 8.0, 1.0), **fields)


def test_what_devices_did_is_asked_about_with_a_verdict_and_taken_from_members_alone(barrier_of):
    heard: list[RecordedStep] = []
    barrier = barrier_of(TrainJob(steps=9), records=StepRecords(heard.append, every_s=3600.0))
    assert [both(barrier, step)[0].record for step in range(3)] == [True, False, False]
    told = DeviceStep(step=0, work=(("0F[0:4]", 1.0, 2.0),), sums=(), messages=())
    with pytest.raises(RemoteRefusal, match="no part"):
        barrier.recorded("stranger", told)
    barrier.recorded(A, replace(told, step=2))
    barrier.recorded(A, told)
    assert not heard
    barrier.recorded(B, told)
    assert heard[0].outcome.step == 0
    assert {one.device for one in heard[0].trace.intervals} == {A, B}
    overlapping = barrier_of(TrainJob(steps=9, staleness=1, adapter="off"), records=StepRecords(heard.append))
    assert not both(overlapping, 0)[0].record


@pytest.mark.parametrize(("device", "over", "said"), [("new", False, 1), ("new", True, 0), (A, False, 0)])
def test_who_was_to_join_is_told_of_while_the_others_go_on(barrier_of, plan, device, over, said):
    """A thread that looked for a better plan may end behind the loss that has ended the part of the run."""
    told: list[str] = []
    coordinator = SimpleNamespace(later=lambda call: call(), follow=lambda *_: None)
    session = SimpleNamespace(devices=plan.devices, coordinator=coordinator)
    members = Membership(Leg(plan=plan, first_step=0), session, None, SimpleNamespace(note=told.append), StopRequest())
    barrier = barrier_of(TrainJob(steps=9))
    if over:
        barrier.abort(f"{device} was lost")
    members._follower_gone(barrier, device, "its worker has gone")
    assert len(told) == said


def test_who_stood_by_is_told_of_once_when_it_goes(plan, tmp_path):
    told: list[str] = []
    here, leaving = [*plan.devices, "lost", "leaves"], {}
    coordinator = SimpleNamespace(
        later=lambda call: call(), here=lambda: here, leaving=lambda: leaving, dismiss=lambda _names: None
    )
    session = SimpleNamespace(devices=tuple(here), coordinator=coordinator)
    request, reporter = SimpleNamespace(out=tmp_path), SimpleNamespace(note=told.append)
    members = Membership(Leg(plan=plan, first_step=0), session, request, reporter, StopRequest())
    members.look(SimpleNamespace(plan=plan))
    assert told == []
    here[2:], leaving["leaves"] = [], "asked to"
    members.look(SimpleNamespace(plan=plan))
    leaving.clear()
    members.look(SimpleNamespace(plan=plan))
    assert told == [
        "leaves left (asked to): it had no part in the run",
        "lost is gone: it stood by, and had no part in the run",
    ]
