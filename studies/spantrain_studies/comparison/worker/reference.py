"""The same steps in one process: the losses that every exact method must have.

Also what all compared methods have in common: how a step ends, and how the bytes that samples in flight hold are found.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from spantrain.core.job import TrainJob
from spantrain.core.span import equal_spans
from spantrain.core.units import ModelSpec
from spantrain.models.build import build_units
from spantrain.models.data.dataset import open_dataset
from spantrain.models.execution.held import StorageLog, storage_bytes
from spantrain.models.randomness.draws import DrawnSamples
from spantrain.models.units import loss_of, rows_read
from spantrain.runtime.gradients.optimizer import build_optimizer, clip_factor, set_rates
from spantrain.runtime.step.work import SampledFeed


class StepEnd:
    """The optimizer of one device's parameters."""

    def __init__(
        self, job: TrainJob, parameters: Iterable[nn.Parameter], sum_of: Callable[[float], float] = lambda own: own
    ) -> None:
        """Take over the parameters.

        Args:
            job: optimizer, learning rate, clipping.
            parameters: each once.
            sum_of: squares of this device's gradients -> of all gradients; devices that hold all of them have it.
        """
        self._job = job
        self._parameters = list(parameters)
        self._sum_of = sum_of
        self.optimizer = build_optimizer(job, self._parameters)

    def run(self, step: int, *, not_counted: Iterable[Tensor] = ()) -> None:
        """Clip, update, and forget the gradients; squares of `not_counted` are another device's to count."""
        factor = 1.0
        if self._job.max_grad_norm is not None:
            elsewhere = {id(parameter) for parameter in not_counted}
            own = sum(_square(parameter) for parameter in self._parameters if id(parameter) not in elsewhere)
            factor = clip_factor(self._sum_of(own) ** 0.5, self._job.max_grad_norm)
        for parameter in self._parameters:
            if factor < 1.0 and parameter.grad is not None:
                parameter.grad.mul_(factor)
        set_rates(self.optimizer, self._job, step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def _square(parameter: nn.Parameter) -> float:
    if parameter.grad is None:
        return 0.0
    return float(parameter.grad.detach().double().square().sum())


def sum_over_all(own: float) -> float:
    """Return the sum of a number over all devices of torch's default group."""
    total = torch.tensor([own], dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return float(total)


_SAMPLES_AT_ONCE, _CUT_OTHERWISE = 8, 5


def reference_losses(
    model: ModelSpec, job: TrainJob, global_batch: int, samples_at_once: int = _SAMPLES_AT_ONCE
) -> tuple[float, ...]:
    """Return the mean loss of each step, trained in this process on its own clock, in one thread as workers do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return tuple(_losses(model, job, global_batch, samples_at_once))
    finally:
        torch.set_num_threads(threads)


def rounding_error(model: ModelSpec, job: TrainJob, global_batch: int, reference: Sequence[float]) -> float:
    """Return the most by which one process's own losses differ where it cuts the batch otherwise.

    Sums in another order are rounded otherwise, and training enlarges that: without bounds, where it has many steps.
    """
    again = reference_losses(model, job, global_batch, min(_CUT_OTHERWISE, max(1, global_batch // 2)))
    return max(abs(one - other) for one, other in zip(again, reference, strict=True))


def _losses(model: ModelSpec, job: TrainJob, global_batch: int, samples_at_once: int) -> Iterator[float]:
    units = build_units(model, seed=job.seed)
    feed = SampledFeed(open_dataset(model), global_batch=global_batch, seed=job.order_seed)
    end = StepEnd(job, {id(p): p for unit in units for p in unit.parameters()}.values())
    for step in range(job.steps):
        loss = 0.0
        for span in equal_spans(global_batch, samples_at_once):
            samples = DrawnSamples(seed=job.seed, step=step, first=span.lo, count=span.size)
            loss_sum = loss_of(units, feed.rows(step, span, rows_read(units)), samples)
            torch.autograd.backward([loss_sum / global_batch])
            loss += float(loss_sum.detach())
        end.run(step)
        yield loss / global_batch


def forward_bytes(module: nn.Module, forward: Callable[[], tuple[Tensor, ...]]) -> int:
    """Run a forward pass and return what it leaves for the backward pass, outputs included; it is thrown away."""
    log = StorageLog([*module.parameters(), *module.buffers()])
    with torch.enable_grad(), log.watching():
        outputs = forward()
    log.add(*outputs)
    return log.look()


def state_bytes(parameters: Iterable[Tensor], optimizer: Optimizer) -> int:
    """Return the bytes of tensors that stay: parameters, a gradient for each, the optimizer's state."""
    own = list(parameters)
    state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    return storage_bytes([*own, *state]) + sum(parameter.nbytes for parameter in own if parameter.requires_grad)
