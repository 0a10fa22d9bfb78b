"""The loss scale on one device: scaled backward passes, unscaled gradients, and whether they are finite.

Every device keeps the same scale, since all hear the same verdicts (`runtime.gradients.loss_scale`). Gradients are
summed over replicas and stages while they are scaled, and unscaled before their norm is taken and they are clipped.
"""

import math
from collections.abc import Iterable, Mapping

import torch

from spantrain.core.job import TrainJob
from spantrain.models.execution.stage import StageExecutor
from spantrain.runtime.gradients.loss_scale import LossScale

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

    def begin(self, executor: StageExecutor) -> None:
        """Scale the backward passes of a step."""
        if self._scale is not None:
            executor.loss_scale = self._scale.scale

    def unscale(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Divide all gradients by the scale, in place; return whether one is infinite or no number."""
        if self._scale is None:
            return False
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if not gradients:
            return False
        torch._foreach_mul_(gradients, 1.0 / self._scale.scale)
        largest = torch.stack([gradient.abs().max() for gradient in gradients if gradient.numel()]).max()
        return not math.isfinite(float(largest))

    def settle(self, *, skipped: bool) -> None:
        """Note the verdict on a step.

        Raises:
            WorkerError: gradients overflow at any scale.
        """
        if self._scale is not None:
            self._scale = self._scale.after(overflow=skipped)
