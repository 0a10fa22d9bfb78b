"""When a cluster pushes: at the end of its own round, or of the round that another has ended for all.

Di-PS, 3.2: every cluster pushes after H steps of its own. Kept: the fastest does. Decided here: with rounds in common
(see `outer.policy.settings`) a slower cluster then pushes what it has, so that all pushes of a window begin from about
the same version and none waits for most of a round. Liu et al. 2024 ("Asynchronous local-SGD training for language
modeling") give slower workers fewer steps by their measured speeds; here nobody has to know speeds.

Of a model in F fragments each has rounds of its own, which end at different steps, as in Streaming DiLoCo: those of
fragment f at f H / F, and every H steps from there. A push that comes a little early or late moves the next one back.
"""

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
    >>> last = RoundSteps(32, fragment=3, fragments=4)
    >>> pushed = []
    >>> for _ in range(90):
    ...     last.step()
    ...     if last.is_over:
    ...         pushed.append((last.steps, last.begin_push()))
    >>> pushed
    [(24, True), (56, True), (88, True)]
    """

    def __init__(self, inner_steps: int, *, fragment: int = 0, fragments: int = 1) -> None:
        """`inner_steps`: of a whole round; `fragment`: which of how many is pushed."""
        assert inner_steps >= 1
        assert 0 <= fragment < fragments
        self.inner_steps = inner_steps
        self._offset, self._fragments = fragment * inner_steps // fragments, fragments
        self._over_at = self._offset or inner_steps
        self._least = max(1, inner_steps // _LEAST_PART)
        self._begun_at = 0
        self._ended = self._again = False
        self.steps = 0

    @property
    def is_over(self) -> bool:
        """Whether to push."""
        return self._ended or self._again or self.steps >= self._over_at

    def is_ahead(self, ahead: float | None) -> bool:
        """Whether as many steps as may be were taken since the last push began; `ahead`: see `OuterSettings`.

        >>> steps = RoundSteps(8)
        >>> steps.is_ahead(0.25), steps.is_ahead(0.0), steps.is_ahead(None)
        (False, True, False)
        >>> steps.step()
        >>> steps.step()
        >>> steps.is_ahead(0.25)
        True
        """
        return ahead is not None and self.steps - self._begun_at >= ahead * self.inner_steps

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
        self._begun_at, self._over_at = self.steps, self._next(was_over=self.is_over)
        self._ended = self._again = False
        return whole

    def _next(self, *, was_over: bool) -> int:
        """Return the end of the round that begins; one of several fragments keeps its place among the others.

        Who is far from that place is slower than others, who end its rounds.
        """
        late = (self.steps - self._offset) % self.inner_steps
        early = self.inner_steps - late
        near = self.inner_steps / self._fragments / 2
        if self._fragments == 1 or (was_over and min(late, early) > near):
            return self.steps + self.inner_steps
        return self.steps + early + (self.inner_steps if was_over and early <= near else 0)
