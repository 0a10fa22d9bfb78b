"""Train one step at a time, on batches that a user's own loop gives."""

import contextlib
import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Self, TypeVar

import torch

from spantrain.app.reporter import Reporter
from spantrain.app.session import Session
from spantrain.app.training.metrics import EvaluationMetrics, StepMetrics
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.errors import UsageError
from spantrain.runtime.coordinator.barrier import StepOutcome
from spantrain.runtime.coordinator.batches import EXTERNAL, BatchQueue

_Told = StepOutcome | EvaluationMetrics | str
_Update = TypeVar("_Update", StepOutcome, EvaluationMetrics, str)
_ENDED = "this session has ended: its steps are made inside its `with` block"
_LOOK_S = 0.2


class StepLoop:
    """A run that waits for a batch before each step; a context, which ends it.

    The run itself is another thread's, as `app.training.train` does it; each call here waits until the devices have
    done what it asks. Calls come from one thread.
    """

    def __init__(self, session: Session, request: TrainRequest, reporter: Reporter) -> None:
        """Prepare a run of `request`, whose plan's model is put on given batches."""
        plan = request.plan
        self._plan = replace(plan, model=replace(plan.model, dataset=EXTERNAL))
        self._batches = BatchQueue(plan.global_batch)
        # Checkpoints are written when the loop asks for them.
        job = replace(request.job, checkpoint_every=0, evaluate_every=0)
        self._evaluated: Callable[[EvaluationMetrics], None]
        self._request = replace(
            request, plan=self._plan, job=job, batches=self._batches, take_evaluations=self._take_evaluations
        )
        self._session = session
        self._updates: queue.SimpleQueue[_Told] = queue.SimpleQueue()
        self._reporter = _StepListener(reporter, self._updates)
        self._stop = StopRequest()
        self._outcome: TrainOutcome | None = None
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="training", daemon=True)
        self._saved = ""
        self._first_step = self._next_step = request.resume.content.step if request.resume else 0

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self._plan.global_batch

    @property
    def left_out(self) -> tuple[str, ...]:
        """What of the model as it was given is not done, a line each."""
        return self._request.left_out

    @property
    def steps_done(self) -> int:
        """In all, those before a resume included."""
        return self._next_step

    def step(self, inputs: Sequence[torch.Tensor], labels: torch.Tensor) -> StepOutcome:
        """Train one step on this batch; returns when all devices have reported it, before they update.

        Raises:
            UsageError: the run has ended, or all its steps are done.
            ValueError: a tensor does not have one row for each sample of the global batch.
            WorkerError, PeerLostError: a device failed or was lost.
        """
        total = self._request.job.steps
        if self._error is None and self._next_step >= total:
            raise UsageError(
                f"all {total} steps (max_steps) of this session are done: end the loop there, or give more"
            )
        self._check_running()
        self._batches.give(self._next_step, inputs, labels)
        outcome = self._wait_for(StepOutcome)
        self._next_step += 1
        return outcome

    def evaluated(self, metrics: EvaluationMetrics) -> None:
        """Tell of an evaluation of the loop's own, after a step and before the next; returns when all have heard.

        Raises:
            UsageError: the run has ended.
            ConfigError: it lacks what the best checkpoint is chosen by.
            WorkerError, PeerLostError: a device failed or was lost.
        """
        self._check_running()
        self._session.coordinator.later(lambda: self._evaluated(metrics))
        self._wait_for(EvaluationMetrics)

    def save(self) -> str:
        """Write a checkpoint of what is trained so far; return its folder.

        Raises:
            UsageError: the run has ended before, or keeps no checkpoints, or has done no step.
            WorkerError, PeerLostError: a device failed or was lost.
        """
        name = f"step-{self._next_step}"
        if Path(self._saved).name != name:
            if self._error is not None:
                raise self._error
            if not self._request.checkpoints or self._next_step == self._first_step:
                raise UsageError("nothing to save: this run keeps no checkpoints, or has done no step yet")
            self._batches.save_before(self._next_step)  # behind the last step one has been written, and told of
            self._saved = self._wait_for(str)
        return self._saved

    def close(self) -> TrainOutcome | None:
        """End the run; return what it gave, or None of one that did no step.

        Raises:
            WorkerError, PeerLostError: a device failed or was lost.
        """
        if self._next_step == self._first_step:
            self._abandon()
            return None
        self._batches.stop()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._outcome

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self._abandon()
        elif self._thread.is_alive():
            self.close()

    def _take_evaluations(self, evaluated: Callable[[EvaluationMetrics], None]) -> None:
        self._evaluated = evaluated

    def _abandon(self) -> None:
        """End at once, whatever the devices are at."""
        self._stop.ask()
        self._stop.ask()
        self._batches.stop()  # lets those go that wait for a batch
        self._thread.join()

    def _run(self) -> None:
        try:
            self._outcome = train(self._session, self._request, self._stop, self._reporter)
        except KeyboardInterrupt:
            self._error = UsageError(_ENDED)  # the loop has asked for it
        except Exception as error:  # noqa: BLE001 - this thread's outermost loop: the user's own thread raises it
            self._error = error

    def _check_running(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._thread.is_alive():
            raise UsageError(_ENDED)

    def _wait_for(self, wanted: type[_Update]) -> _Update:
        while True:
            with contextlib.suppress(queue.Empty):
                update = self._updates.get(timeout=_LOOK_S)
                if isinstance(update, wanted):
                    return update
                continue
            self._check_running()


class _StepListener(Reporter):
    """Passes on what the use case reports, and tells the loop of steps, evaluations and checkpoints."""

    def __init__(self, reporter: Reporter, updates: "queue.SimpleQueue[_Told]") -> None:
        self._reporter, self._updates = reporter, updates
        for name in ("phase", "progress", "note", "run_begins", "logged"):
            setattr(self, name, getattr(reporter, name))

    def step(self, outcome: StepOutcome, metrics: StepMetrics, total_steps: int) -> None:
        self._reporter.step(outcome, metrics, total_steps)
        self._updates.put(outcome)

    def evaluated(self, metrics: EvaluationMetrics) -> None:
        self._reporter.evaluated(metrics)
        self._updates.put(metrics)

    def saved(self, folder: str) -> None:
        self._reporter.saved(folder)
        self._updates.put(folder)
