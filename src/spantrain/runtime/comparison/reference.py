"""The same steps in one process: the losses that every exact method must have."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from spantrain.core.job import TrainJob
from spantrain.core.span import Span, equal_spans
from spantrain.core.units import ModelSpec
from spantrain.models.build import build_units
from spantrain.models.data.dataset import open_dataset
from spantrain.models.units import UnitModule
from spantrain.runtime.comparison.step_end import StepEnd
from spantrain.runtime.step.feed import SampledFeed

_SAMPLES_AT_ONCE = 8


def reference_losses(model: ModelSpec, job: TrainJob, global_batch: int) -> tuple[float, ...]:
    """Return the mean loss of each step, trained in this process on its own clock, in one thread as workers do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return tuple(_losses(model, job, global_batch))
    finally:
        torch.set_num_threads(threads)


def _losses(model: ModelSpec, job: TrainJob, global_batch: int) -> Iterator[float]:
    units = build_units(model, seed=job.seed)
    feed = SampledFeed(open_dataset(model), global_batch=global_batch, seed=job.seed)
    end = StepEnd(job, {id(p): p for unit in units for p in unit.parameters()}.values())
    for step in range(job.steps):
        loss = 0.0
        for span in equal_spans(global_batch, _SAMPLES_AT_ONCE):
            loss_sum = _loss_sum(units, feed, step, span)
            torch.autograd.backward([loss_sum / global_batch])
            loss += float(loss_sum.detach())
        end.run(step)
        yield loss / global_batch


def _loss_sum(units: Sequence[UnitModule], feed: SampledFeed, step: int, span: Span) -> Tensor:
    tensors = feed.inputs(step, span)
    for unit in units[:-1]:
        tensors = unit(*tensors)
    loss_sum: Tensor = units[-1](*tensors, feed.labels(step, span))
    return loss_sum
