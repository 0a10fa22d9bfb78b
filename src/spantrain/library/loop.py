"""One step at a time, on batches that the user's own loop gives."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spantrain.app.session import SessionOptions
from spantrain.app.training.step_loop import StepLoop
from spantrain.app.training.stop import StopRequest
from spantrain.core.cluster import Cluster
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.library.arguments import TrainingArguments
from spantrain.library.callbacks import UserReporter, checked_callbacks
from spantrain.library.setting import ModelFactory, Setting, model_of, saved_model
from spantrain.library.trainer import opened, state_of
from spantrain.models.data.user import batch_of
from spantrain.models.tracing.model import as_given

__all__ = ["StepSession", "session"]

if TYPE_CHECKING:
    import torch

_ENDLESS = 2**31 - 1


class StepSession:
    """Devices that wait for the next batch; made by `session`."""

    def __init__(self, loop: StepLoop, model: ModelSpec, stop: StopRequest) -> None:
        self._loop = loop
        self._stop = stop
        self._model = model

    @property
    def global_batch(self) -> int:
        """How many samples each step takes."""
        return self._loop.global_batch

    @property
    def left_out(self) -> tuple[str, ...]:
        """What of the model as it was given is not done, a line each: dropout, live batch statistics."""
        return self._loop.left_out

    @property
    def steps_done(self) -> int:
        """In all, those before a resume included."""
        return self._loop.steps_done

    @property
    def should_stop(self) -> bool:
        """Whether a callback wants training to end; the loop decides."""
        return self._stop.wanted

    def step(self, batch: Any) -> float:
        """Train one step on a batch; return its loss, the mean over its samples.

        The batch is what the model's example batch is: a dict with the model's inputs by name and `labels`, or a tuple
        whose last tensor is the labels; `global_batch` samples first. It is sent to the devices that read it.

        Raises:
            ConfigError: the batch is something else, or has another number of samples.
            UsageError: all steps of the session are done.
            WorkerError, PeerLostError: a device failed or was lost.
        """
        source = f"step {self._loop.steps_done}"
        found = batch_of(batch, self._model, source=source, trains=True)
        if found.labels is None:
            raise ConfigError(f"{source}: the batch has no labels; add them, under the key `labels`")
        if found.samples != self.global_batch:
            raise ConfigError(
                f"{source}: the batch has {found.samples} samples, and each step takes {self.global_batch}: "
                "DataLoader(..., batch_size=session.global_batch, drop_last=True), or another train_batch_size"
            )
        outcome = self._loop.step(found.inputs, found.labels)
        assert outcome.loss is not None
        if self._stop.take_save():
            self.save()
        return outcome.loss

    def save(self) -> Path:
        """Write a checkpoint of what is trained so far; return its folder.

        Raises:
            UsageError: no step was done yet.
            WorkerError, PeerLostError: a device failed or was lost.
        """
        return Path(self._loop.save())

    def state_dict(self) -> "dict[str, torch.Tensor]":
        """Save, and return parameters and buffers by the names of the unsplit model.

        Raises:
            UsageError: as `save`.
            ConfigError: files of the checkpoint lie on other machines.
        """
        return state_of(self.save(), self._model)


@contextmanager
def session(
    model: ModelFactory,
    loss_fn: ModelFactory | None = None,
    optimizer: object = None,
    plan: str | Path | None = None,
    *,
    args: TrainingArguments | None = None,
    cluster: Cluster | str | Path | None = None,
    callbacks: Sequence[object] = (),
    sequence_length: int | None = None,
    measure: bool = True,
    workers: SessionOptions | None = None,
) -> Iterator[StepSession]:
    """Bring devices up for a loop of the user's own; arguments as of `Trainer`.

    Learning rates follow `args`; where `max_steps` is not given, they stay constant.

    Raises:
        UsageError: plan, profile, checkpoint or model are missing, or do not fit.
        WorkerError, PeerLostError: a device failed or was lost.
    """
    arguments = args or TrainingArguments(lr_scheduler_type="constant")
    if arguments.max_steps < 0 and arguments.rates_need_end:
        raise ConfigError(
            f"lr_scheduler_type {arguments.lr_scheduler_type!r}, or its warm-up, needs max_steps: it is a part of them"
        )
    named, arguments = saved_model(model, arguments)
    spec = as_given(model_of(named, loss_fn, data=None, tokenizer=None, sequence_length=sequence_length), model)
    setting = Setting(spec, arguments, cluster=cluster, plan=plan, optimizer=optimizer, measure=measure)
    steps = arguments.max_steps if arguments.max_steps > 0 else _ENDLESS
    stop = StopRequest()
    reporter = UserReporter(checked_callbacks(callbacks), arguments, stop=stop.ask, save=stop.ask_save)
    reporter.state.max_steps = max(arguments.max_steps, 0)
    with (
        reporter as progress,
        opened(setting, steps, workers or SessionOptions(), progress) as (devices, request),
        StepLoop(devices, request, progress) as loop,
    ):
        yield StepSession(loop, spec, stop)
        outcome = loop.close()
    progress.ended(outcome)
