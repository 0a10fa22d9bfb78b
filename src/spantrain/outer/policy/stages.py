"""When a pipeline that is one cluster pushes and takes versions: its leader's decisions, one at each step's end.

Di-PS, 3.1, has each pipeline rank send and get its own layers, and says nothing of how they agree. Decided here: all
stages copy their parameters behind the same step and take a version behind the same step, since the leader's order
reaches them with the verdict that ends the step. The master is asked for a push only when all stages have their copies,
and a version is ordered only when all of it is there, so no message can find a stage with another round's tensors. Who
fails to send or to get ends the push or pull for all; training never waits.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from spantrain.core.outer.stages import StageOrder, StageReport
from spantrain.outer.policy.round_steps import RoundSteps


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
