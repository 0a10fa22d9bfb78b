"""The inner optimizer, its learning rate, and the loss scale.

Under float16 the loss is made larger, so that small gradients do not vanish, by one number for all stages: every device
keeps the same, since all hear the same verdicts. Gradients are summed over replicas and stages while they are scaled,
and unscaled before their norm is taken and they are clipped.

The rules are those of mixed precision training with a dynamic scale (Micikevicius et al., "Mixed Precision Training",
ICLR 2018, section 3.2), with the constants of torch's GradScaler: halve it when any gradient of a step is infinite or
no number, and skip that step's update; double it after so many good steps in a row. GradScaler decides for one
process; here the coordinator decides, from what all devices report at the end of a step, so that all stages skip the
same updates.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from spantrain.core.job import TrainJob
from spantrain.core.records import Record
from spantrain.core.update.optimizers import OPTIMIZERS
from spantrain.devices.registry import class_of
from spantrain.errors import WorkerError
from spantrain.models.execution.stage import StageExecutor

_GROWTH = 2.0
_BACKOFF = 0.5
_MIN_SCALE = 2.0**-24
"""Under this, float16 would hold nothing that float32 does not overflow with: training has diverged."""


class LossScale(Record):
    """The present scale, and how long it has served.

    >>> scale = LossScale(scale=1024.0, growth_interval=2)
    >>> scale.after(overflow=True).scale
    512.0
    >>> scale.after(overflow=False).after(overflow=False).scale
    2048.0
    """

    scale: float = 65536.0
    good_steps: int = 0
    """In a row since the scale last changed."""
    growth_interval: int = 2000
    """After so many of them the scale is doubled."""

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale must be positive, got {self.scale}")
        if self.growth_interval < 1 or not 0 <= self.good_steps < self.growth_interval:
            raise ValueError(
                f"good_steps must be under growth_interval, got {self.good_steps} and {self.growth_interval}"
            )

    def after(self, *, overflow: bool) -> "LossScale":
        """Return the scale for the next step.

        Raises:
            WorkerError: gradients overflow at any scale.
        """
        if overflow:
            if self.scale <= _MIN_SCALE:
                raise WorkerError(
                    f"float16: gradients are not finite even at a loss scale of {self.scale:g}; training has diverged: "
                    "lower --learning-rate, or train in bfloat16 or float32"
                )
            return replace(self, scale=self.scale * _BACKOFF, good_steps=0)
        if self.good_steps + 1 < self.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=self.scale * _GROWTH, good_steps=0)


_SCALE = "loss_scale"
_GOOD_STEPS = "loss_scale_good_steps"


class GradientScaling:
    """The loss scale of a run in float16; in other precisions it does nothing."""

    def __init__(self, job: TrainJob, dtype: str, scalars: Mapping[str, float]) -> None:
        """Begin with the job's scale, or with what a checkpoint's `scalars` say."""
        self._scale: LossScale | None = None
        if dtype == "float16":
            self._scale = LossScale(
                scale=scalars.get(_SCALE, job.loss_scale), good_steps=int(scalars.get(_GOOD_STEPS, 0))
            )

    @property
    def scalars(self) -> dict[str, float]:
        """What a checkpoint keeps of it."""
        if self._scale is None:
            return {}
        return {_SCALE: self._scale.scale, _GOOD_STEPS: self._scale.good_steps}

    def begin(self, executors: Iterable[StageExecutor]) -> None:
        """Scale the backward passes of a step."""
        if self._scale is not None:
            for executor in executors:
                executor.loss_scale = self._scale.scale

    def unscale(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Divide all gradients by the scale, in place; return whether one is infinite or no number."""
        gradients = [one.grad for one in parameters if one.grad is not None and one.grad.numel()]
        if self._scale is None or not gradients:
            return False
        torch._foreach_mul_(gradients, 1.0 / self._scale.scale)
        largest = torch.stack([gradient.abs().max() for gradient in gradients]).max()
        return not math.isfinite(float(largest))

    def settle(self, *, skipped: bool) -> None:
        """Note the verdict on a step.

        Raises:
            WorkerError: gradients overflow at any scale.
        """
        if self._scale is not None:
            self._scale = self._scale.after(overflow=skipped)


def learning_rate(job: TrainJob, step: int) -> float:
    """Return the rate of a step."""
    return job.learning_rate * job.rate_factor(step)


def build_optimizer(
    job: TrainJob, parameters: Iterable[torch.nn.Parameter], names: Iterable[str] = ()
) -> torch.optim.Optimizer:
    """Return the optimizer that the job names, of those that are trained (there may be none).

    It is one kernel for many tensors where there is one, else lists.

    Args:
        job: optimizer, rates, groups.
        parameters: each once.
        names: theirs in the unsplit model, in the same order; needed where the job has groups.
    """
    listed = list(parameters)
    named = list(names) or [""] * len(listed)
    assert not job.parameter_groups or all(named), "groups are told by names"
    kind = OPTIMIZERS[job.optimizer]
    rows = [
        {"params": [], "initial_lr": own.learning_rate, **_options_of(own)}
        for own in (job, *map(job.of_group, job.parameter_groups))
    ]
    row_of = {name: row for group, row in zip(job.parameter_groups, rows[1:], strict=True) for name in group.names}
    for name, parameter in zip(named, listed, strict=True):
        if parameter.requires_grad:
            row_of.get(name, rows[0])["params"].append(parameter)
    fuses = bool(listed) and kind.fuses and class_of(listed[0].device).fuses_optimizer
    made: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, kind.torch_class)
    kept = [row for row in rows if row["params"]] or rows[:1]
    return made(kept, **_options_of(job), **({"fused": True} if fuses else {"foreach": True}))


def _options_of(job: TrainJob) -> dict[str, Any]:
    """Return what torch's class takes."""
    options: dict[str, Any] = {"lr": job.learning_rate, "weight_decay": job.weight_decay, **job.optimizer_options}
    if OPTIMIZERS[job.optimizer].uses_adam_options:
        options |= {"betas": (job.adam_beta1, job.adam_beta2), "eps": job.adam_epsilon}
    if job.optimizer == "sgd":
        options["momentum"] = job.momentum
    return options


def set_rates(optimizer: torch.optim.Optimizer, job: TrainJob, step: int) -> None:
    """Give each group of the optimizer its rate of a step."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * job.rate_factor(step)


def clip_factor(grad_norm: float, max_grad_norm: float | None) -> float:
    """Return what all gradients are multiplied by so that their global norm stays under the limit."""
    if max_grad_norm is None:
        return 1.0
    return min(1.0, max_grad_norm / (grad_norm + 1e-6))


def update(optimizer: torch.optim.Optimizer, job: TrainJob, step: int, grad_norm: float | None) -> None:
    """Do what a step's verdict says with the gradients that are summed: clip by their global norm, update, forget them.

    Without a norm they overflowed, and nothing is updated.
    """
    if grad_norm is not None:
        factor = clip_factor(grad_norm, job.max_grad_norm)
        if factor < 1.0:
            for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        set_rates(optimizer, job, step)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
