"""How far a step goes: the numbers of the outer step, which the master tells and the shards follow.

Di-PS, 4.1. Kept: Nesterov momentum, rate 0.7 and momentum 0.8. Decided here: parts of steps (see `OuterSettings`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OuterRule:
    """How a shard steps along the mean pseudo-gradient."""

    learning_rate: float = 0.7
    momentum: float = 0.8

    def __post_init__(self) -> None:
        if not self.learning_rate > 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                "learning_rate must be positive and momentum at least 0 and under 1, "
                f"got {self.learning_rate} and {self.momentum}"
            )

    def of_part(self, part: float) -> tuple[float, float, float]:
        """Return, for a part of a step: what is kept of the velocity, and how far gradient and new velocity are gone.

        In parts that add up to 1, whichever, a velocity decays as in one step; and a gradient that comes in a part
        takes the parameters, in the end, that part of the way of a gradient in one step. Part 1 is a step as it is.

        >>> OuterRule(momentum=0.81).of_part(0.5)[0], OuterRule(momentum=0.8).of_part(1.0)
        (0.9, (0.8, 1.0, 0.8))
        """
        if not self.momentum:
            return 0.0, 1.0, 0.0
        kept = self.momentum**part
        ahead = self.momentum * ((1 - kept) / (1 - self.momentum)) * (self.momentum / kept)
        return kept, 1 + (self.momentum - ahead), ahead
