"""The seconds of one pipeline under 1F1B (Narayanan et al., PipeDream, SOSP 2019), all micro-batches alike."""

from collections.abc import Sequence
from typing import NamedTuple

_SETTLED = 8
"""Micro-batches beyond the pipeline's depth after which each one takes as long as the one before."""


class StageSeconds(NamedTuple):
    """What a stage of one pipeline does with one micro-batch, its part in messages included."""

    forward_s: float
    backward_s: float
    hold_forward_s: float = 0.0
    """For which it is kept after a forward, while the next stage may begin."""
    hold_backward_s: float = 0.0
    delay_up_s: float = 0.0
    """Until the stage after it may begin with what it sent."""
    delay_down_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """For which a micro-batch keeps it."""
        return self.forward_s + self.backward_s + self.hold_forward_s + self.hold_backward_s


def one_f_one_b_ends_s(stages: Sequence[StageSeconds], micro_batches: int, *, deep: bool = False) -> list[float]:
    """Return when each stage is done with a step.

    Stage s of P does P-s forwards, then a backward and a forward in turn; `deep`: 2(P-s)-1 of them, so that messages
    pass behind other work (the in-flight count K_p of Ye et al., Asteroid, MobiCom 2024). When the first micro-batches
    have settled the pipeline, each further one takes as long as the slowest stage; that part is not gone through.

    >>> one_f_one_b_ends_s([StageSeconds(1, 2), StageSeconds(1, 2)], 4)
    [15.0, 13.0]
    """
    gone_through = min(micro_batches, (2 if deep else 1) * len(stages) + _SETTLED)
    rest_s = (micro_batches - gone_through) * max(stage.busy_s for stage in stages)
    return [end + rest_s for end in _gone_through_s(stages, gone_through, deep=deep)]


def _gone_through_s(stages: Sequence[StageSeconds], count: int, *, deep: bool) -> list[float]:
    """Go through the actions of all stages, each in its order, as far as what they need is there."""
    depth = len(stages)
    free, forwards, backwards = [0.0] * depth, [0] * depth, [0] * depth
    activations = [[0.0] * count, *([] for _ in range(depth - 1))]
    gradients: list[list[float]] = [[] for _ in range(depth)]
    waiting = list(range(depth))
    while waiting:
        s = waiting.pop()
        stage, left = stages[s], depth - s
        warm_up = min(2 * left - 1 if deep else left, count)
        while backwards[s] < count:
            f, b = forwards[s], backwards[s]
            if f < count and f - b < warm_up:
                if f >= len(activations[s]):
                    break
                end = max(free[s], activations[s][f]) + stage.forward_s
                forwards[s], free[s] = f + 1, end + stage.hold_forward_s
                if s + 1 < depth:
                    activations[s + 1].append(end + stage.delay_up_s)
                    waiting.append(s + 1)
                else:
                    gradients[s].append(end)
            else:
                if b >= len(gradients[s]):
                    break
                end = max(free[s], gradients[s][b]) + stage.backward_s
                backwards[s], free[s] = b + 1, end + stage.hold_backward_s
                if s:
                    gradients[s - 1].append(end + stage.delay_down_s)
                    waiting.append(s - 1)
    return free
