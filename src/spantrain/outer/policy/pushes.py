"""When a cluster pushes: at the end of its own round, or of the round that another has ended for all.

Di-PS, 3.2: every cluster pushes after H steps of its own. Kept: the fastest does. Decided here: with rounds in common
(see `outer.policy.settings`) a slower cluster then pushes what it has, so that all pushes of a window begin from about
the same version and none waits for most of a round. Liu et al. 2024 ("Asynchronous local-SGD training for language
modeling") give slower workers fewer steps by their measured speeds; here nobody has to know speeds.

Of a model in F fragments each has rounds of its own, which end at different steps, as in Streaming DiLoCo: those of
fragment f at f H / F, and every H steps from there. A push that comes a little early or late moves the next one back.

A pipeline that is one cluster: Di-PS, 3.1, has each pipeline rank send and get its own layers, and says nothing of how
they agree. Decided here: all stages copy their parameters behind the same step and take a version behind the same step,
since the leader's order reaches them with the verdict that ends the step. The master is asked for a push only when all
stages have their copies, and a version is ordered only when all of it is there, so no message can find a stage with
another round's tensors. Who fails to send or to get ends the push or pull for all; training never waits.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from spantrain.core.outer.events import ChunkProgress, Ticket
from spantrain.core.outer.stages import StageOrder, StageReport

_LEAST_PART = 16
"""A round that has fewer than this part of its steps is not ended by others: a push costs as much after few."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """What a cluster brings."""

    ticket: Ticket
    cluster: str
    base_version: int
    tokens: int
    progress: tuple[ChunkProgress, ...]
    parameters: bool
    """Whether it brings parameters rather than a pseudo-gradient."""


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


class StageRounds:
    """Counts steps and tokens; says what all stages do, and when to ask the master.

    >>> rounds = StageRounds(["w1"], inner_steps=2)
    >>> rounds.step(10)
    >>> rounds.order(StageOrder(), can_push=True).push
    0
    >>> rounds.step(10)
    >>> rounds.order(StageOrder(), can_push=True).push
    1
    >>> rounds.to_ask({"w1": StageReport(taken=0)}), rounds.to_ask({"w1": StageReport(taken=1)})
    (None, 20)
    """

    def __init__(self, others: Collection[str], *, inner_steps: int) -> None:
        """Begin a round; `others`: devices that move layers beside the leader."""
        self._others = tuple(others)
        self._steps = RoundSteps(inner_steps)
        self.ends_round = False
        """Whether the last push that was ordered ends the round of other clusters."""
        self._number = 0
        self._unasked = False
        """Whether the last push was ordered, and not asked for."""
        self._open = False
        """Whether it is not known what became of it."""
        self._own = 0
        """Tokens since the last push."""
        self._begun = False
        """Whether there was a step since."""
        self._waiting = 0
        """Tokens of pushes that came to nothing."""
        self._pushed = 0
        """Tokens of a push that has not ended."""

    @property
    def some_left(self) -> bool:
        """Whether anything was learned that is in no version, as far as is known here."""
        return self._to_push or self._open

    @property
    def _to_push(self) -> bool:
        return self._begun or self._waiting > 0

    def step(self, tokens: int) -> None:
        """Count a step."""
        self._steps.step()
        self._own += tokens
        self._begun = True

    def end_round(self) -> bool:
        """Note that another cluster has ended the round of all; return whether there is a push to come."""
        return self._unasked or self._steps.end()

    def order(
        self, known: StageOrder, *, can_push: bool, wants_first: bool = False, everything: bool = False
    ) -> StageOrder:
        """Return what all do now.

        Args:
            known: what has come of the last push and the last pull; a push is added, if it is time for one
            can_push: connected, and no push under way
            wants_first: nobody has brought parameters
            everything: push whatever there is, however few steps
        """
        if known.skipped:
            self._waiting, self._pushed = self._waiting + self._pushed, 0
            self._steps.come_to_nothing()
        if known.counted:
            self._pushed = 0
        self._open = self._open and not (known.skipped or known.counted)
        due = self._steps.is_over or everything
        push = can_push and not self._unasked and not known.over and (wants_first or (due and self._to_push))
        if push:
            self._begin_push()
        return replace(known, push=self._number if push else 0)

    def _begin_push(self) -> None:
        self._number += 1
        self._unasked = self._open = True
        self._pushed = self._waiting + self._own
        self._waiting = self._own = 0
        self._begun = False
        self.ends_round = self._steps.begin_push()

    def to_ask(self, reports: Mapping[str, StageReport]) -> int | None:
        """Return the tokens to ask for a push with, once all stages have copied their parameters for it."""
        if not self._unasked or any(reports[name].taken < self._number for name in self._others):
            return None
        self._unasked = False
        return self._pushed
