"""Tells of a run as it goes: its file of metrics, trackers, and who waits."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Self

from spantrain.app.metrics import Counting, EvaluationMetrics, MetricsFile
from spantrain.app.reporter import Reporter
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.trackers import TrackedRun, Trackers, tagged
from spantrain.config.files.json_codec import to_json
from spantrain.core.checkpoint import SampleLedger
from spantrain.runtime.coordinator.barrier import StepOutcome


class RunLog:
    """Hears of a run's steps, evaluations and checkpoints; a context, from the first step to the last."""

    def __init__(self, request: TrainRequest, ledger: SampleLedger, reporter: Reporter) -> None:
        resume, self._request, self._reporter = request.resume, request, reporter
        self._counting = Counting(
            job=request.job, plan=request.plan, ledger=ledger, dataset_size=request.options.dataset_size
        )
        self._file = MetricsFile(
            request.out,
            first_step=resume.content.step if resume else 0,
            before=resume.folder.parent.parent if resume else None,
        )
        self._trackers: Trackers | None = None
        self._unlogged: list[float] = []
        """Losses of steps since scalars were last given."""
        self.evaluations: list[EvaluationMetrics] = []
        """Of this run."""
        self.epoch: float | None = None
        """After the last step."""
        self._steps_done = 0

    def __enter__(self) -> Self:
        request = self._request
        request.best.went_before(request.out, self._file.evaluations)
        run = TrackedRun(
            name=request.options.run_name or request.out.name,
            project=request.options.project,
            folder=request.out / "tensorboard",
            config={
                **to_json(request.job),
                "model": request.plan.model.name,
                "global_batch": request.plan.global_batch,
                "devices": len(request.plan.devices),
                "schedule": request.plan.schedule,
            },
        )
        self._trackers = Trackers(request.options.report_to, run, self._reporter.note)
        try:
            self._file.__enter__()
        except BaseException:
            self._trackers.close()
            raise
        if request.take_evaluations is not None:
            request.take_evaluations(self.evaluated)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        last = self._request.last_evaluation
        if kind is None and last is not None and self._steps_done == self._request.job.steps:
            self.evaluated(last())
        self._file.__exit__(kind, error, trace)
        if self._trackers is not None:
            self._trackers.close()

    def step(self, outcome: StepOutcome, link_rates: Mapping[str, float]) -> None:
        """Tell of what a barrier knows: an evaluation, a step, or one behind the other.

        Args:
            outcome: what is known.
            link_rates: bytes per second of the links that follow a trace.
        """
        if outcome.evaluation_loss is not None:
            self._evaluated(self._counting.evaluation(outcome))
        if outcome.loss is not None:
            self._trained(outcome, link_rates)

    def saved(self, step: int, folder: str) -> None:
        """Tell of a checkpoint that is complete."""
        self._file.checkpoint(step, f"{Path(folder).parent.name}/{Path(folder).name}")
        self._request.best.saved(step, folder)
        self._reporter.saved(folder)

    def samples_between(self, first: int, end: int) -> int:
        """Return how many samples the steps behind the first so many have, up to the end."""
        ledger = self._counting.ledger
        return ledger.samples_before(end) - ledger.samples_before(first)

    def evaluated(self, metrics: EvaluationMetrics) -> None:
        """Tell of an evaluation that was made in this process, where steps wait for batches."""
        self._evaluated(replace(metrics, epoch=self.epoch))

    def _evaluated(self, metrics: EvaluationMetrics) -> None:
        self.evaluations.append(metrics)
        if any(metrics.step == before.step for before in self._file.evaluations):
            return  # a run that goes on begins with the evaluation that the one before it ended with
        self._file.evaluation(metrics)
        self._reporter.evaluated(metrics)
        self._request.best.evaluated(metrics)
        self._log(metrics.scalars(), metrics.step)

    def _trained(self, outcome: StepOutcome, link_rates: Mapping[str, float]) -> None:
        options, total = self._request.options, self._request.job.steps
        batches = self._request.batches
        metrics = self._counting.step(outcome, batches.tokens(outcome.step) if batches else None)
        self.epoch, self._steps_done = metrics.epoch, metrics.step
        self._file.step(metrics)
        self._reporter.step(outcome, metrics, total)
        self._unlogged.append(metrics.loss)
        if options.logging_steps and (metrics.step % options.logging_steps == 0 or metrics.step == total):
            more = {f"link_bytes_per_second/{link}": rate for link, rate in link_rates.items()}
            more |= {
                f"bubble_ratio/{name}": max(0.0, 1.0 - busy_s / outcome.duration_s)
                for name, busy_s in outcome.busy_s.items()
            }
            self._log(metrics.scalars() | {"loss": fmean(self._unlogged)}, metrics.step, more)
            self._unlogged.clear()

    def _log(self, scalars: Mapping[str, float], step: int, more: Mapping[str, float] | None = None) -> None:
        assert self._trackers is not None, "it is open"
        self._trackers.log({**tagged(scalars), **tagged(more or {})}, step)
        self._reporter.logged(scalars, step)
