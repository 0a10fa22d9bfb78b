"""How large the loss is made under float16, so that small gradients do not vanish: one number for all stages.

The rules are those of mixed precision training with a dynamic scale (Micikevicius et al., "Mixed Precision Training",
ICLR 2018, section 3.2), with the constants of torch's GradScaler: halve it when any gradient of a step is infinite or
no number, and skip that step's update; double it after so many good steps in a row. GradScaler decides for one
process; here the coordinator decides, from what all devices report at the end of a step, so that all stages skip the
same updates.
"""

from dataclasses import dataclass, replace

from spantrain.errors import WorkerError

_GROWTH = 2.0
_BACKOFF = 0.5
_LEAST = 2.0**-24
"""Under this, float16 would hold nothing that float32 does not overflow with: training has diverged."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
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
            if self.scale <= _LEAST:
                raise WorkerError(
                    f"float16: gradients are not finite even at a loss scale of {self.scale:g}; training has diverged: "
                    "lower --learning-rate, or train in bfloat16 or float32"
                )
            return replace(self, scale=self.scale * _BACKOFF, good_steps=0)
        if self.good_steps + 1 < self.growth_interval:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=self.scale * _GROWTH, good_steps=0)
