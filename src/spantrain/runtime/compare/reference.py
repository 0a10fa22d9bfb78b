"""The same steps in one process: the losses that every exact method must have; and how long computing really takes."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from spantrain.core.job import TrainJob
from spantrain.core.spans import Span, equal_spans
from spantrain.core.units import ModelSpec
from spantrain.models.build import build_units
from spantrain.models.data import open_dataset
from spantrain.models.units import UnitModule
from spantrain.runtime.compare.step_end import StepEnd
from spantrain.runtime.feed import SampledFeed

__all__ = ["real_seconds_per_sample", "reference_losses"]

_SAMPLES_AT_ONCE = 8
_MEASURED_SAMPLES, _MEASURED_TIMES = 2, 8


def reference_losses(model: ModelSpec, job: TrainJob, global_batch: int) -> tuple[float, ...]:
    """Return the mean loss of each step, trained in this process on its own clock."""
    units = build_units(model, seed=job.seed)
    feed = SampledFeed(open_dataset(model), global_batch=global_batch, seed=job.seed)
    end = StepEnd(job, {id(p): p for unit in units for p in unit.parameters()}.values())
    losses = []
    for step in range(job.steps):
        loss = 0.0
        for span in equal_spans(global_batch, _SAMPLES_AT_ONCE):
            loss_sum = _loss_sum(units, feed, step, span)
            torch.autograd.backward([loss_sum / global_batch])
            loss += float(loss_sum.detach())
        end.run(step)
        losses.append(loss / global_batch)
    return tuple(losses)


def real_seconds_per_sample(model: ModelSpec) -> float:
    """Return what forward and backward of one sample of a small micro-batch take one thread of this machine."""
    units = build_units(model, seed=0)
    feed = SampledFeed(open_dataset(model), global_batch=_MEASURED_SAMPLES, seed=0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = []
        for _ in range(_MEASURED_TIMES):
            start_s = time.perf_counter()
            torch.autograd.backward([_loss_sum(units, feed, 0, Span(0, _MEASURED_SAMPLES))])
            seconds.append(time.perf_counter() - start_s)
    finally:
        torch.set_num_threads(threads)
    return min(seconds) / _MEASURED_SAMPLES


def _loss_sum(units: Sequence[UnitModule], feed: SampledFeed, step: int, span: Span) -> Tensor:
    tensors = feed.inputs(step, span)
    for unit in units[:-1]:
        tensors = unit(*tensors)
    loss_sum: Tensor = units[-1](*tensors, feed.labels(step, span))
    return loss_sum
