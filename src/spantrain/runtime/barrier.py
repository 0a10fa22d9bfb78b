"""The barrier at the end of a step: one place where all reports meet and one verdict is made."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Condition

from spantrain.core.job import TrainJob
from spantrain.errors import Interrupted
from spantrain.runtime.advice import Advice, Advising
from spantrain.runtime.orders import StepReport, Verdict
from spantrain.runtime.outer_meetings import meeting_of

__all__ = ["StepBarrier", "StepOutcome", "SwitchFigures"]


@dataclass(frozen=True, kw_only=True)
class SwitchFigures:
    """What going over to a new plan took."""

    duration_s: float
    """Of the slowest device, from the verdict on."""
    moved_bytes: int
    """Of parameters and optimizer state, between devices."""


@dataclass(frozen=True, kw_only=True)
class StepOutcome:
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
    """By device and peer, since the run began."""
    closed_s: float
    skipped: bool = False
    """Whether gradients overflowed under float16, so that nothing was updated."""
    advice: Advice | None = None
    """The plan that takes over behind this step, and why."""
    switch: SwitchFigures | None = None
    """What it took to go over to this step's plan, where it was its first."""


class StepBarrier:
    """Collects the reports of all devices of a run, step by step."""

    def __init__(
        self,
        *,
        devices: frozenset[str],
        job: TrainJob,
        global_batch: int,
        stop_requested: Callable[[], bool],
        on_step: Callable[[StepOutcome], None],
        can_checkpoint: bool,
        advising: Advising | None = None,
    ) -> None:
        self._devices = devices
        self._job = job
        self._global_batch = global_batch
        self._stop_requested = stop_requested
        self._on_step = on_step
        self._can_checkpoint = can_checkpoint
        self._advising = advising
        self._reports: dict[int, dict[str, StepReport]] = {}
        self._verdicts: dict[int, Verdict] = {}
        self._closed = Condition()
        self._aborted: str | None = None
        self._last_closed_s = time.monotonic()

    def begin(self, now_s: float) -> None:
        """Count the first step's time from now on: all devices are ready for it, and none has begun."""
        self._last_closed_s = now_s

    def report(self, device: str, report: StepReport) -> Verdict:
        """Bring one device's report; wait for the others; return what all do next.

        Raises:
            Interrupted: the run was aborted meanwhile.
        """
        with self._closed:
            assert device in self._devices, f"{device} has no part in this run"
            if report.step in self._verdicts:
                return self._verdicts[report.step]  # asked again: the answer was lost on its way
            reports = self._reports.setdefault(report.step, {})
            reports[device] = report
            if len(reports) == len(self._devices):
                self._close(report.step)
            while report.step not in self._verdicts and self._aborted is None:
                self._closed.wait(1.0)
            if report.step not in self._verdicts:
                raise Interrupted(self._aborted or "the run was aborted")
            return self._verdicts[report.step]

    def abort(self, reason: str) -> None:
        """Let everybody who waits go."""
        with self._closed:
            self._aborted = reason
            self._closed.notify_all()

    def _close(self, step: int) -> None:
        reports = self._reports.pop(step)
        now_s = time.monotonic()
        outcome = self._outcome(step, reports, now_s)
        self._last_closed_s = now_s
        verdict = replace(
            self._verdict(step, outcome, _data_differs(reports)),
            outer=meeting_of({name: report.outer for name, report in reports.items()}),
        )
        advice = self._advice(step, reports) if outcome.loss is not None and not verdict.stop else None
        if advice is not None:
            verdict, outcome = replace(verdict, plan=advice.plan), replace(outcome, advice=advice)
        self._verdicts[step] = verdict
        self._verdicts.pop(step - 2, None)
        self._closed.notify_all()
        self._on_step(outcome)

    def _outcome(self, step: int, reports: Mapping[str, StepReport], now_s: float) -> StepOutcome:
        # Sums run over devices in name order, so that a repeated run gives the same bits.
        ordered = [reports[name] for name in sorted(reports)]
        skipped = any(report.overflow for report in ordered)
        return StepOutcome(
            step=step,
            loss=self._mean([report.loss_sum for report in ordered]),
            evaluation_loss=self._mean([report.evaluation_loss_sum for report in ordered]),
            grad_norm=0.0 if skipped else math.sqrt(sum(report.grad_square or 0.0 for report in ordered)),
            duration_s=now_s - self._last_closed_s,
            busy_s={name: report.busy_s for name, report in reports.items()},
            peak_held_samples={name: report.peak_held_samples for name, report in reports.items()},
            sent_bytes={name: report.sent_bytes for name, report in reports.items()},
            closed_s=now_s,
            skipped=skipped,
            switch=_switch_figures(ordered),
        )

    def _advice(self, step: int, reports: Mapping[str, StepReport]) -> Advice | None:
        """Take what was advised on earlier steps, or hand over this one's reports and take what is said at once."""
        if self._advising is None:
            return None
        advice = self._advising.take()
        if advice is None:  # or these reports are of a plan that runs no longer
            advice = self._advising.ask(step, reports)
        return advice

    def _mean(self, sums: list[float | None]) -> float | None:
        known = [value for value in sums if value is not None]
        return sum(known) / self._global_batch if known else None

    def _verdict(self, step: int, outcome: StepOutcome, data_differs: str) -> Verdict:
        done = step + 1
        stop = done >= self._job.steps or self._stop_requested()
        regular = self._job.checkpoint_every > 0 and done % self._job.checkpoint_every == 0
        evaluate = self._job.evaluate_every > 0 and done % self._job.evaluate_every == 0
        return Verdict(
            grad_norm=outcome.grad_norm,
            checkpoint=self._can_checkpoint and (stop or regular),
            stop=stop,
            evaluate=evaluate,
            skip_update=outcome.skipped,
            data_differs=data_differs,
        )


def _switch_figures(reports: Sequence[StepReport]) -> SwitchFigures | None:
    switches = [report.switch for report in reports if report.switch is not None]
    if not switches:
        return None
    return SwitchFigures(
        duration_s=max(switch.duration_s for switch in switches),
        moved_bytes=sum(switch.received_bytes for switch in switches),
    )


def _data_differs(reports: Mapping[str, StepReport]) -> str:
    """Say which devices read which data, if not all read the same: labels would not belong to their inputs."""
    readers: dict[str, list[str]] = {}
    for name, report in sorted(reports.items()):
        if report.data_digest is not None:
            readers.setdefault(report.data_digest, []).append(name)
    if len(readers) < 2:
        return ""
    return " and ".join(f"{', '.join(names)} (SHA-256 {digest[:12]})" for digest, names in readers.items())
