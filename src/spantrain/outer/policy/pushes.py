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

_MIN_PART = 16
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


class PushRounds:
    """Counts a cluster's steps and tokens; says when a round is over, and what its push brings.

    >>> rounds = PushRounds(32)
    >>> for _ in range(5):
    ...     rounds.step(10)
    >>> rounds.is_due(), rounds.end(), rounds.is_due()
    (False, True, True)
    >>> rounds.begin_push(), rounds.ends_round, rounds.is_due(), rounds.end()
    (50, False, False, False)
    >>> rounds.note(skipped=True)
    >>> rounds.is_due(), rounds.begin_push()
    (True, 50)
    >>> last = PushRounds(32, fragment=3, fragments=4)
    >>> pushed = []
    >>> for _ in range(90):
    ...     last.step(1)
    ...     if last.is_due():
    ...         pushed.append((last.steps, last.begin_push(), last.ends_round))
    >>> pushed
    [(24, 24, True), (56, 32, True), (88, 32, True)]
    """

    def __init__(self, inner_steps: int, *, fragment: int = 0, fragments: int = 1) -> None:
        """`inner_steps`: of a whole round; `fragment`: which of how many is pushed."""
        assert inner_steps >= 1
        assert 0 <= fragment < fragments
        self.inner_steps = inner_steps
        self._offset, self._fragments = fragment * inner_steps // fragments, fragments
        self._over_at = self._offset or inner_steps
        self._least = max(1, inner_steps // _MIN_PART)
        self._begun_at = 0
        self._ended = self._again = self._stepped = False
        self.ends_round = False
        """Whether the last push that began ends the round of the other clusters: it came after all steps of a round."""
        self.steps = 0
        self.tokens = 0
        """Trained on here since the last push; other processes may have some where this one has none."""
        self._waiting = self._pushed = 0
        """Tokens of pushes that came to nothing, and of one that has not ended."""

    def part(self, fragment: int, fragments: int) -> "PushRounds":
        """Return the rounds of a fragment, where nothing was pushed yet: what was trained on counts in each."""
        part = PushRounds(self.inner_steps, fragment=fragment, fragments=fragments)
        part.tokens, part._stepped = self.tokens, self._stepped
        return part

    @property
    def has_some(self) -> bool:
        """Whether there is something to push, beside what is under way."""
        return self._stepped or self._waiting > 0

    @property
    def _is_over(self) -> bool:
        return self._ended or self._again or self.steps >= self._over_at

    def is_due(self, *, first: bool = False, everything: bool = False) -> bool:
        """Whether to push; `first`: nobody has brought parameters yet; `everything`: whatever there is."""
        return first or ((self._is_over or everything) and self.has_some)

    def is_ahead(self, ahead: float | None) -> bool:
        """Whether as many steps as may be were taken since the last push began; `ahead`: see `OuterSettings`.

        >>> rounds = PushRounds(8)
        >>> rounds.is_ahead(0.25), rounds.is_ahead(0.0), rounds.is_ahead(None)
        (False, True, False)
        >>> rounds.step(1)
        >>> rounds.step(1)
        >>> rounds.is_ahead(0.25)
        True
        """
        return ahead is not None and self.steps - self._begun_at >= ahead * self.inner_steps

    def step(self, tokens: int) -> None:
        """Count a step."""
        self.steps += 1
        self.tokens += tokens
        self._stepped = True

    def end(self) -> bool:
        """Note that another cluster has ended the round of all; return whether there is enough to push."""
        self._ended = self._ended or self.steps - self._begun_at >= self._least
        return self._ended

    def note(self, *, skipped: bool = False, counted: bool = False) -> None:
        """Note what became of the last push: what came to nothing is given again as soon as may be."""
        if skipped:
            self._again = self._again or self._pushed > 0
            self._waiting, self._pushed = self._waiting + self._pushed, 0
        if counted:
            self._pushed = 0

    def begin_push(self, tokens: int | None = None) -> int:
        """Begin the next round; return the tokens of a push of all that there is.

        `tokens`: of all processes since the last push, where this is not the only one.
        """
        over = self._is_over
        self.ends_round = not (self._ended or self._again) and self.steps >= self._over_at
        self._begun_at, self._over_at = self.steps, self._next(was_over=over)
        self._ended = self._again = self._stepped = False
        self._pushed = self._waiting + (self.tokens if tokens is None else tokens)
        self._waiting = self.tokens = 0
        return self._pushed

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
    """The rounds of a pipeline: what all stages do, and when to ask the master.

    >>> rounds = StageRounds(["w1"], inner_steps=2)
    >>> rounds.pushes.step(10)
    >>> rounds.order(StageOrder(), can_push=True).push
    0
    >>> rounds.pushes.step(10)
    >>> rounds.order(StageOrder(), can_push=True).push
    1
    >>> rounds.to_ask({"w1": StageReport(taken=0)}), rounds.to_ask({"w1": StageReport(taken=1)})
    (None, 20)
    """

    def __init__(self, others: Collection[str], *, inner_steps: int) -> None:
        """Begin a round; `others`: devices that move layers beside the leader."""
        self._others = tuple(others)
        self.pushes = PushRounds(inner_steps)
        self._number = self._tokens = 0
        """Of the last push that was ordered."""
        self._unasked = False
        """Whether that was not asked for yet."""
        self._open = False
        """Whether it is not known what became of it."""

    @property
    def some_left(self) -> bool:
        """Whether anything was learned that is in no version, as far as is known here."""
        return self.pushes.has_some or self._open

    def end_round(self) -> bool:
        """Note that another cluster has ended the round of all; return whether there is a push to come."""
        return self._unasked or self.pushes.end()

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
        self.pushes.note(skipped=known.skipped, counted=known.counted)
        self._open = self._open and not (known.skipped or known.counted)
        due = self.pushes.is_due(first=wants_first, everything=everything)
        push = can_push and due and not (self._unasked or known.over)
        if push:
            self._number += 1
            self._unasked = self._open = True
            self._tokens = self.pushes.begin_push()
        return replace(known, push=self._number if push else 0)

    def to_ask(self, reports: Mapping[str, StageReport]) -> int | None:
        """Return the tokens to ask for a push with, once all stages have copied their parameters for it."""
        if not self._unasked or any(reports[name].taken < self._number for name in self._others):
            return None
        self._unasked = False
        return self._tokens
