"""When a cluster pushes: at the end of its own round, or of the round that another has ended for all.

Di-PS, 3.2: every cluster pushes after H steps of its own. Kept: the fastest does. Decided here: with rounds in common
(see `policy.outer.settings`) a slower cluster then pushes what it has, so that all pushes of a window begin from about
the same version and none waits for most of a round. Liu et al. 2024 ("Asynchronous local-SGD training for language
modeling") give slower workers fewer steps by their measured speeds; here nobody has to know speeds.
"""

__all__ = ["RoundSteps"]

_LEAST_PART = 16
"""A round that has fewer than this part of its steps is not ended by others: a push costs as much after few."""


class RoundSteps:
    """Counts a cluster's steps; says when a round is over.

    >>> steps = RoundSteps(32)
    >>> for _ in range(5):
    ...     steps.step()
    >>> steps.is_over, steps.end(), steps.is_over
    (False, True, True)
    >>> steps.begin_push(), steps.is_over, steps.end()
    (False, False, False)
    """

    def __init__(self, inner_steps: int) -> None:
        """`inner_steps`: of a whole round."""
        assert inner_steps >= 1
        self._inner_steps = self._over_at = inner_steps
        self._least = max(1, inner_steps // _LEAST_PART)
        self._begun_at = 0
        self._ended = self._again = False
        self.steps = 0

    @property
    def is_over(self) -> bool:
        """Whether to push."""
        return self._ended or self._again or self.steps >= self._over_at

    def step(self) -> None:
        """Count one."""
        self.steps += 1

    def end(self) -> bool:
        """Note that another cluster has ended the round of all; return whether there is enough to push."""
        self._ended = self._ended or self.steps - self._begun_at >= self._least
        return self._ended

    def come_to_nothing(self) -> None:
        """Note that the last push has: it is made again as soon as may be."""
        self._again = True

    def begin_push(self) -> bool:
        """Begin the next round; return whether all steps of this one were taken, so that it ends that of the others."""
        whole = not (self._ended or self._again) and self.steps >= self._over_at
        self._begun_at, self._over_at = self.steps, self.steps + self._inner_steps
        self._ended = self._again = False
        return whole
