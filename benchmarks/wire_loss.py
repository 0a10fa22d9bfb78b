"""Training in one process with the wire formats of cuts: what `wire_formats.py` asks for the loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.formats.registry import WireFormat
from spantrain.models.build import build_units
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.dataset import Dataset, open_dataset
from spantrain.models.units import LABELS, loss_of, rows_read
from spantrain.runtime.gradients.optimizer import build_optimizer, clip_factor, learning_rate
from spantrain.runtime.step.rounding import ErrorFeedback, for_wire, from_wire
from spantrain.runtime.step.work import SampledFeed

HELD_OUT_SAMPLES, HELD_OUT_BATCH = 128, 64
LAST_STEPS = 10
OTHER_BITS = 1e-6
"""Of the control: activations at each cut times one and this, as another order of sums would change them."""

Send = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and where it is cut."""

    model: str
    steps: int
    batch: int
    cuts: int
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What came out of one run."""

    training: tuple[float, ...]
    held_out: float

    @property
    def last(self) -> float:
        """Mean of the last steps."""
        return sum(self.training[-LAST_STEPS:]) / LAST_STEPS


class _Cut(torch.autograd.Function):
    """Passes activations one way and gradients the other, each as they arrive at the other side."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Send, backward: Send) -> Tensor:
        """Return activations as the next stage gets them."""
        ctx.send_back = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return gradients as the stage before gets them."""
        return ctx.send_back(gradients[0]), None, None


def there(wire_format: WireFormat) -> Send:
    """Return what a format does to activations."""
    return lambda tensor: from_wire(for_wire((tensor,), wire_format), wire_format)[0]


def back(wire_format: WireFormat) -> Send:
    """Return what a format does to gradients, as `StepDriver` sends them."""

    def send(tensor: Tensor) -> Tensor:
        return from_wire(ErrorFeedback().for_wire((tensor,), wire_format), wire_format)[0]

    return send


def other_bits(tensor: Tensor) -> Tensor:
    """Return activations that differ in their last bits."""
    return tensor * (1.0 + OTHER_BITS)


class Trained:
    """A model that is trained on one device as a pipeline with these cuts would; one thread."""

    def __init__(self, setting: Setting, seed: int) -> None:
        torch.set_num_threads(1)
        spec = resolve_model(setting.model)
        self._batch = setting.batch
        self.units = build_units(spec, seed=seed)
        self._job = TrainJob(
            steps=setting.steps,
            seed=seed,
            learning_rate=setting.learning_rate,
            lr_schedule="linear",
            decay_steps=setting.steps,
        )
        self._feed = SampledFeed(open_dataset(spec), global_batch=setting.batch, seed=seed)
        self._parameters = list({id(own): own for unit in self.units for own in unit.parameters()}.values())
        self._optimizer = build_optimizer(self._job, self._parameters)
        self._behind = {round(len(self.units) * (cut + 1) / (setting.cuts + 1)) - 1 for cut in range(setting.cuts)}
        self._done = 0

    def step(self, forward: Send, backward: Send) -> float:
        """Take a step; return its loss."""
        self._optimizer.param_groups[0]["lr"] = learning_rate(self._job, self._done)
        loss = self._backward(self._done, forward, backward)
        gradients = [own.grad for own in self._parameters if own.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        torch._foreach_mul_(gradients, clip_factor(norm, self._job.max_grad_norm))
        self._optimizer.step()
        self._done += 1
        return loss

    def gradients(self, ahead: int, forward: Send, backward: Send) -> Tensor:
        """Return all gradients of a step to come, as one row, without taking it."""
        self._backward(self._done + ahead, forward, backward)
        return torch.cat([own.grad.flatten() for own in self._parameters if own.grad is not None])

    def _backward(self, step: int, forward: Send, backward: Send) -> float:
        self._optimizer.zero_grad()
        span = Span(0, self._batch)
        rows, tensors = self._feed.rows(step, span, rows_read(self.units)), ()
        for index, unit in enumerate(self.units[:-1]):
            tensors = unit.run(tensors, rows)
            if index in self._behind:
                tensors = tuple(_passed(tensor, forward, backward) for tensor in tensors)
        loss = self.units[-1].run(tensors, rows) / self._batch
        loss.backward()
        return float(loss.detach())


def train(setting: Setting, seed: int, forward: Send, backward: Send) -> Losses:
    """Train with what these do at each cut to activations and to gradients."""
    trained = Trained(setting, seed)
    losses = tuple(trained.step(forward, backward) for _ in range(setting.steps))
    held_out = open_dataset(resolve_model(setting.model), held_out=True)
    return Losses(training=losses, held_out=_held_out(trained.units, held_out))


def _passed(tensor: Tensor, forward: Send, backward: Send) -> Tensor:
    return _Cut.apply(tensor, forward, backward) if tensor.is_floating_point() else tensor


@torch.no_grad()
def _held_out(units: list[Any], data: Dataset) -> float:
    count = min(HELD_OUT_SAMPLES, len(data))
    chosen = [number * len(data) // count for number in range(count)]
    total = 0.0
    for begin in range(0, count, HELD_OUT_BATCH):
        indices = chosen[begin : begin + HELD_OUT_BATCH]
        total += float(loss_of(units, {**dict(enumerate(data.inputs(indices))), LABELS: data.labels(indices)}))
    return total / count
