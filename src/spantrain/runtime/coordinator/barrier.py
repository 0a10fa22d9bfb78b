"""Where all devices of a run meet at the end of each step, for one verdict."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, replace
from threading import Condition

from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.core.speed import LinkReport
from spantrain.core.trace import DeviceStep
from spantrain.devices.meters import MeterReading
from spantrain.errors import Interrupted
from spantrain.runtime.control.plane import HOLD_S
from spantrain.runtime.control.requests import AheadChange, AheadState, DeviceReport, StepVerdict, SwitchReport
from spantrain.runtime.coordinator.advice import Advice, Advising
from spantrain.runtime.coordinator.meetings import meeting_of
from spantrain.runtime.coordinator.records import StepRecords
from spantrain.transport.control.protocol import RemoteRefusal


class StepOutcome(Record):
    """What is known of a step when its barrier has closed."""

    step: int
    loss: float | None
    """Mean over the global batch; None when only an evaluation was reported."""
    evaluation_loss: float | None
    """On held-out data, with the parameters as they were before this step."""
    grad_norm: float
    """0 where the update was skipped."""
    duration_s: float
    """Since the barrier before closed (the first: since all devices were ready)."""
    busy_s: Mapping[str, float]
    """Of each device."""
    peak_held_samples: Mapping[str, int]
    sent_bytes: Mapping[str, Mapping[str, int]]
    """By device and peer, in this step."""
    closed_s: float
    skipped: bool = False
    """Whether gradients overflowed under float16, so that nothing was updated."""
    advice: Advice | None = None
    """The plan that takes over behind this step, and why."""
    dataset_size: int | None = None
    """Samples of the data set, if a device said it."""
    switch: SwitchReport | None = None
    """What it took to go over to this step's plan, where it was its first: the slowest device, and all bytes."""
    keepers: tuple[tuple[str, ...], ...] = ()
    """Of each stage, those whose copies are whole."""
    links: Mapping[str, tuple[LinkReport, ...]] = field(default_factory=dict)
    """What each device knows of the links to its peers."""
    meters: Mapping[str, MeterReading] = field(default_factory=dict)
    """What the own meters of those that have some said last."""


class CommitPoint(Record):
    """What of a run has happened for good: steps before `step`, all of them, and nothing of that one."""

    step: int
    verdict: StepVerdict | None
    """On the step before, or the evaluation behind it; None if the run has made none."""
    plan: Plan
    """Under which that step ran, with those keepers alone whose copies were whole."""


@dataclass(kw_only=True, eq=False)
class StepBarrier:
    """Collects the reports of all devices of a run, step by step; of the step that is under way, and of no other."""

    plan: Plan
    """That runs: the last one that a verdict had."""
    job: TrainJob
    stop_requested: Callable[[], bool]
    on_step: Callable[[StepOutcome], None]
    """Hears of each step behind its verdict."""
    can_checkpoint: bool
    first_step: InitVar[int] = 0
    save_requested: Callable[[], bool] = lambda: False
    advising: Advising | None = None
    pause_requested: Callable[[], bool] = lambda: False
    on_commit: Callable[[StepOutcome, StepVerdict], None] = lambda _outcome, _verdict: None
    """Hears of each step before any device hears of its verdict."""
    records: StepRecords | None = None
    """Of what devices did in single steps."""
    hold_s: float = HOLD_S
    is_over: InitVar[bool] = False
    """Whether all steps are done, and devices save what they have."""

    def __post_init__(self, first_step: int, is_over: bool) -> None:
        self.members = frozenset(self.plan.devices)
        """Who reports."""
        self._ran = self.plan
        self._step = first_step
        """That all report next."""
        self._steps_done = first_step
        self._reports: dict[str, DeviceReport] = {}
        """Of that step."""
        self._verdict: StepVerdict | None = None
        """On the step before."""
        self._ahead = AheadChange(number=0, generation=self.plan.generation)
        """What goes ahead of another plan: nothing, until it is told."""
        self._ahead_told = 0
        """The number of the last one that a verdict has told of."""
        self._stops = 0
        """How often all were told to stop: where steps overlap, one that has begun still ends."""
        self._to_save = {first_step} if is_over else set[int]()
        self._closed = Condition()
        self._aborted: str | None = None
        self._last_closed_s = time.monotonic()

    def take_ahead(self, change: AheadChange) -> bool:
        """Have devices copy state ahead of another plan from the next step on; all pause when it is there.

        They pause as well when it gets on too slowly. A later change takes the place of an earlier one. Returns whether
        it is taken: not where all have been told to end, or another plan runs.
        """
        with self._closed:
            ends = self._verdict is not None and (self._verdict.stop or self._verdict.pause)
            if ends or self._aborted is not None or change.generation != self.plan.generation:
                return False
            self._ahead = change
            return True

    def begin(self, now_s: float) -> None:
        """Count the first step's time from now on: all devices are ready for it, and none has begun."""
        self._last_closed_s = now_s

    def wants_checkpoint(self, steps_done: int) -> bool:
        """Whether a verdict has told all devices to save what they have after so many steps."""
        return steps_done in self._to_save

    @property
    def paused(self) -> bool:
        """Whether the last verdict has ended all orders, for others to go on with what devices hold."""
        return self._verdict is not None and self._verdict.pause

    @property
    def goes_ahead(self) -> bool:
        """Whether devices have been told to copy state ahead of another plan."""
        return bool(self._ahead.copies) and self._ahead.number == self._ahead_told

    @property
    def committed(self) -> CommitPoint:
        """What has happened for good; after `abort` it stays so."""
        with self._closed:
            return CommitPoint(step=self._steps_done, verdict=self._verdict, plan=self._ran)

    @property
    def awaited(self) -> frozenset[str]:
        """Who has not reported the step that is under way."""
        with self._closed:
            return self.members - self._reports.keys()

    def report(self, device: str, report: DeviceReport) -> StepVerdict | None:
        """Bring one device's report; wait for the others; return what all do next, or None if it takes longer.

        Who asks again brings its report again: the first one counts.

        Raises:
            RemoteRefusal: it is no report of the step that is under way, or says what cannot be.
            Interrupted: the run was aborted meanwhile.
        """
        with self._closed:
            if report.step == self._step - 1 and self._verdict is not None and device in self.members:
                return self._verdict  # asked again: the answer was lost on its way
            refusal = self._why_not(device, report)
            if refusal:
                raise RemoteRefusal(refusal)
            if self._aborted is not None:
                raise Interrupted(self._aborted)
            # Of links to devices of an earlier run it may still have news.
            links = tuple(link for link in report.links if link.peer in self.members)
            self._reports.setdefault(device, replace(report, links=links))
            if self._reports.keys() == self.members:
                self._close()
            self._closed.wait_for(lambda: self._step > report.step or self._aborted is not None, self.hold_s)
            if self._step > report.step:
                return self._verdict
            if self._aborted is not None:
                raise Interrupted(self._aborted)
            return None

    def recorded(self, device: str, told: DeviceStep) -> None:
        """Take what a device did in a step.

        Raises:
            RemoteRefusal: it has no part in this run.
        """
        if device not in self.members:
            raise RemoteRefusal(f"device {device} has no part in this run")
        if self.records is not None:
            self.records.take(device, told)

    def _why_not(self, device: str, report: DeviceReport) -> str:
        """Return why a report is not taken, or nothing."""
        if device not in self.members:
            return f"device {device} has no part in this run"
        if (report.generation, report.step) != (self.plan.generation, self._step):
            return (
                f"device {device} reports step {report.step} under generation {report.generation}; under way is step "
                f"{self._step} under generation {self.plan.generation}"
            )
        if self._stops > self.job.staleness and report.loss_sum is not None:
            return f"device {device} reports step {report.step}; the run ended with step {self._step - 1}"
        leaders = [name for name, other in self._reports.items() if other.outer and other.outer.order]
        if report.outer and report.outer.order and leaders not in ([], [device]):
            return f"device {device} orders what all do for the outer optimizer, as {leaders[0]} has done"
        return ""

    def abort(self, reason: str) -> None:
        """Let everybody who waits go."""
        with self._closed:
            self._aborted = reason
            self._closed.notify_all()

    def _close(self) -> None:
        step, reports, self._reports = self._step, self._reports, {}
        now_s = time.monotonic()
        outcome = self._outcome(step, reports, now_s)
        self._last_closed_s = now_s
        verdict = replace(
            self._judge(step, outcome, _data_differs(reports), _is_ahead(reports) and self.goes_ahead),
            outer=meeting_of({name: report.outer for name, report in reports.items()}),
        )
        advice = None
        ends = verdict.stop or verdict.pause
        if not ends and self._ahead.number != self._ahead_told:
            verdict, self._ahead_told = replace(verdict, ahead=self._ahead), self._ahead.number
        if self.advising is not None and outcome.loss is not None and not (self._ahead.copies or ends):
            # If there was advice on earlier steps, these reports are of a plan that runs no longer.
            advice = self.advising.take() or self.advising.ask(step, reports)
        self._ran = self.plan.with_keepers(outcome.keepers)
        if advice is not None:
            verdict, outcome = replace(verdict, plan=advice.plan), replace(outcome, advice=advice)
            self.plan = advice.plan
        if verdict.checkpoint:
            self._to_save.add(step + 1)
        self.on_commit(outcome, verdict)
        self._verdict, self._step = verdict, step + 1
        self._steps_done += outcome.loss is not None  # else it was the evaluation behind the last one
        self._stops += verdict.stop
        self._closed.notify_all()
        self.on_step(outcome)

    def _outcome(self, step: int, reports: Mapping[str, DeviceReport], now_s: float) -> StepOutcome:
        # Sums run over devices in name order, so that a repeated run gives the same bits.
        ordered = [reports[name] for name in sorted(reports)]
        skipped = any(report.overflow for report in ordered)
        switches = [report.switch for report in ordered if report.switch is not None]
        switch = None
        if switches:
            received_bytes = sum(one.received_bytes for one in switches)
            switch = SwitchReport(duration_s=max(one.duration_s for one in switches), received_bytes=received_bytes)
        return StepOutcome(
            step=step,
            loss=self._mean([math.nan if report.loss_overflows else report.loss_sum for report in ordered]),
            evaluation_loss=self._mean([report.evaluation_loss_sum for report in ordered]),
            grad_norm=0.0 if skipped else math.sqrt(sum(report.grad_square or 0.0 for report in ordered)),
            duration_s=now_s - self._last_closed_s,
            busy_s={name: report.busy_s for name, report in reports.items()},
            peak_held_samples={name: report.peak_held_samples for name, report in reports.items()},
            sent_bytes={name: report.sent_bytes for name, report in reports.items()},
            closed_s=now_s,
            skipped=skipped,
            dataset_size=max((report.dataset_size for report in ordered if report.dataset_size), default=None),
            switch=switch,
            keepers=tuple(
                tuple(name for name in stage.keepers if stage.devices[0] in reports[name].kept)
                for stage in self.plan.stages
            ),
            links={name: report.links for name, report in reports.items()},
            meters={name: report.meters for name, report in reports.items() if report.meters is not None},
        )

    def _mean(self, sums: list[float | None]) -> float | None:
        known = [value for value in sums if value is not None]
        return sum(known) / self.plan.global_batch if known else None

    def _judge(self, step: int, outcome: StepOutcome, data_differs: str, is_ahead: bool) -> StepVerdict:
        done = step + 1
        stop = done >= self.job.steps or self.stop_requested()
        regular = self.job.checkpoint_every > 0 and done % self.job.checkpoint_every == 0
        # Steps that overlap come to rest where the job says, and nowhere else.
        regular |= not self.job.staleness and self.save_requested()
        evaluate = self.job.evaluate_every > 0 and done % self.job.evaluate_every == 0
        # Where steps overlap, none can be told from the next.
        records = None if stop or self.job.staleness or outcome.loss is None else self.records
        return StepVerdict(
            grad_norm=outcome.grad_norm,
            checkpoint=self.can_checkpoint and outcome.loss is not None and (stop or regular),
            stop=stop,
            evaluate=evaluate,
            skip_update=outcome.skipped,
            pause=not stop and (self.pause_requested() or is_ahead),
            data_differs=data_differs,
            record=records is not None and records.asks_for(outcome),
        )


def _is_ahead(reports: Mapping[str, DeviceReport]) -> bool:
    """Whether all that goes ahead is there, or some of it gets on too slowly."""
    given = [report.ahead for report in reports.values() if report.ahead is not None]
    return AheadState.FULL in given or (bool(given) and all(state is AheadState.LEVEL for state in given))


def _data_differs(reports: Mapping[str, DeviceReport]) -> str:
    """Say which devices read which data, if not all read the same: labels would not belong to their inputs."""
    readers: dict[str, list[str]] = {}
    for name, report in sorted(reports.items()):
        if report.data_digest is not None:
            readers.setdefault(report.data_digest, []).append(name)
    if len(readers) < 2:
        return ""
    return " and ".join(f"{', '.join(names)} (SHA-256 {digest[:12]})" for digest, names in readers.items())
