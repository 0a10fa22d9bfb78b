"""The inner optimizer and its learning rate."""

import math
from collections.abc import Iterable

import torch

from spantrain.core.job import TrainJob

__all__ = ["build_optimizer", "clip_factor", "learning_rate"]


def learning_rate(job: TrainJob, step: int) -> float:
    """Return the rate of a step: linear warm-up, then constant, or cosine down to zero at `decay_steps`."""
    if step < job.warmup_steps:
        return job.learning_rate * (step + 1) / job.warmup_steps
    if job.lr_schedule == "constant":
        return job.learning_rate
    progress = min(1.0, (step - job.warmup_steps) / (job.decay_steps - job.warmup_steps))
    return job.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def build_optimizer(job: TrainJob, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that the job names."""
    if job.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=job.learning_rate, weight_decay=job.weight_decay)
    return torch.optim.SGD(parameters, lr=job.learning_rate, momentum=job.momentum, weight_decay=job.weight_decay)


def clip_factor(grad_norm: float, max_grad_norm: float | None) -> float:
    """Return what all gradients are multiplied by so that their global norm stays under the limit."""
    if max_grad_norm is None:
        return 1.0
    return min(1.0, max_grad_norm / (grad_norm + 1e-6))
