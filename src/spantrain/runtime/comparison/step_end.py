"""After the backward pass, as our own runtime does it: the global norm, clipping, the update."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from spantrain.core.job import TrainJob
from spantrain.runtime.gradients.optimizer import build_optimizer, clip_factor, learning_rate


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
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self._job, step)
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
