"""The inner optimizer and its learning rate."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from spantrain.core.job import TrainJob


def learning_rate(job: TrainJob, step: int) -> float:
    """Return the rate of a step: linear warm-up, then constant, or down to zero at `decay_steps`."""
    if step < job.warmup_steps:
        return job.learning_rate * (step + 1) / job.warmup_steps
    if job.lr_schedule == "constant":
        return job.learning_rate
    progress = min(1.0, (step - job.warmup_steps) / (job.decay_steps - job.warmup_steps))
    if job.lr_schedule == "linear":
        return job.learning_rate * (1.0 - progress)
    return job.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def build_optimizer(job: TrainJob, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that the job names: one kernel for many tensors on CUDA, lists of tensors elsewhere."""
    listed = list(parameters)
    on_cuda = bool(listed) and listed[0].device.type == "cuda"
    common: dict[str, Any] = {
        "lr": job.learning_rate,
        "weight_decay": job.weight_decay,
        **({"fused": True} if on_cuda else {"foreach": True}),
    }
    if job.optimizer == "adamw":
        return torch.optim.AdamW(listed, betas=(job.adam_beta1, job.adam_beta2), eps=job.adam_epsilon, **common)
    return torch.optim.SGD(listed, momentum=job.momentum, **common)


def clip_factor(grad_norm: float, max_grad_norm: float | None) -> float:
    """Return what all gradients are multiplied by so that their global norm stays under the limit."""
    if max_grad_norm is None:
        return 1.0
    return min(1.0, max_grad_norm / (grad_norm + 1e-6))
