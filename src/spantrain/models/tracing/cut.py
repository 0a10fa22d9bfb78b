"""Where a tape is cut: what each unit does, what it takes from the one before and gives to the next.

Samples (inputs and labels) are read wherever they are needed. Steps whose results depend on them, shapes and constants
only (masks, positions, shifted labels, rotary angles) are done again in each unit that needs them. So are those that a
module made of few parameters alone (learned relative positions): units then share the parameters. All other tensors
alive at a cut are carried. A carried tensor's first dimension is the samples: one that has them elsewhere is moved, and
one that has none (a bias made of parameters) is repeated for each sample.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import Any

from torch import Tensor

from spantrain.models.tracing.tape import Facts, NamedWeight, Samples, StandIn, Tape, TapeStep, Value, mapped, parts

_SAMPLES_COMPARED = 4
"""Sizes of cuts are compared for so many samples."""


class SamplesLayout(Enum):
    """Where a carried tensor has its samples."""

    ALONG = "along one dimension"
    GROUPED = "along one dimension, several entries each"
    NONE = "nowhere: it is the same for all of them"


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A value that crosses a cut."""

    value: Value
    layout: SamplesLayout
    dim: int = 0
    """That has the samples."""
    each: int = 1
    """Entries of it for each sample."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TapePart:
    """What one unit does."""

    steps: tuple[TapeStep, ...]
    takes: tuple[Carried, ...]
    gives: tuple[Carried, ...]
    """None: it is the last unit."""
    result: Any = None
    """What the loss is made of; only the last unit has it."""
    reads: Mapping[int, Value]
    """What it reads of the samples, by number; see `models.units.Rows`."""
    known: Mapping[int, Tensor]
    """Values with the same numbers whatever the data."""

    def __deepcopy__(self, memo: object) -> "TapePart":
        """Return the part itself: it does not change."""
        return self

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that run in it, in order."""
        return tuple(dict.fromkeys(step.module for step in self.steps if step.module is not None))

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of weights and buffers that it uses outside of those."""
        signs = [sign for step in self.steps for sign in parts((step.args, dict(step.kwargs)))]
        return tuple(dict.fromkeys(sign.name for sign in signs if isinstance(sign, NamedWeight)))


def needed_steps(tape: Tape) -> Tape:
    """Leave out steps that the result does not depend on; what was read of samples stays."""
    wanted = {value.index for value in _values(tape.result)}
    kept: list[TapeStep] = []
    for step in reversed(tape.steps):
        if step.compares or any(value.index in wanted for value in step.makes):
            kept.append(step)
            wanted.update(value.index for value in step.uses)
    return replace(tape, steps=tuple(reversed(kept)))


class TapeCutter:
    """Cuts a tape with nothing in it that is not needed."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._maker = {value.index: step for step in tape.steps for value in step.makes}
        self._order = {id(step): number for number, step in enumerate(tape.steps)}
        changed = {before.index for step in tape.steps for before, _ in step.changes}
        self._compare = [step for step in tape.steps if step.compares]
        self._again = {
            id(step)
            for step in tape.steps
            if not step.compares and not any(self._facts(v).from_weights for v in step.makes)
        }
        """Steps that parts do again."""
        self._known = {
            value.index: facts.known
            for step in tape.steps
            if id(step) not in self._again
            for value in step.makes
            if (facts := self._facts(value)).known is not None and value.index not in changed
        }
        self._derived = {
            index: derivation.steps
            for index, derivation in tape.derivations.items()
            if index not in changed and derivation.weight_bytes <= self._repeated_bytes(Value(index))
        }
        self._steps = [step for step in tape.steps if id(step) not in self._again and not step.compares]
        self._made_at = {value.index: n for n, step in enumerate(self._steps) for value in step.makes}
        self._last_use = self._last_uses()

    def cut(
        self, starts: Callable[[TapeStep], bool], has_weights: Callable[[TapeStep], bool]
    ) -> tuple[tuple[TapePart, ...], tuple[str, ...]]:
        """Cut before each block, where the fewest bytes cross; return the parts, and what could not be cut.

        Steps before the first block, and those behind the last, are a part of their own if they have weights.

        Args:
            starts: whether a step runs a block.
            has_weights: whether a step uses parameters.
        """
        blocks = [number for number, step in enumerate(self._steps) if starts(step)]
        gaps = [range(before + 1, after + 1) for before, after in pairwise(blocks)]
        if blocks and any(has_weights(step) for step in self._steps[: blocks[0]]):
            gaps.insert(0, range(blocks[0], blocks[0] + 1))
        if blocks and any(has_weights(step) for step in self._steps[blocks[-1] + 1 :]):
            gaps.append(range(blocks[-1] + 1, blocks[-1] + 2))
        cuts, notices = [], []
        for gap in gaps:
            possible = [place for place in gap if self._why_not(place) is None]
            if possible:
                cuts.append(min(possible, key=lambda place: (self._crossing_bytes(place), place)))
            else:
                notices.append(self._why_not(gap[0]) or "")
        edges = [0, *cuts, len(self._steps)]
        return tuple(self._part(lo, hi) for lo, hi in pairwise(edges)), tuple(notices)

    def crossing_counts(self, inside: Callable[[TapeStep], bool]) -> tuple[int, int]:
        """Return how many tensors cross at most between the steps that are `inside`, and before or behind them all."""
        places = [number for number, step in enumerate(self._steps) if inside(step)]
        if not places:
            return 0, 0
        between = [len(self._crossing_values(place)) for place in range(places[0] + 1, places[-1] + 1)]
        around = [len(self._crossing_values(place)) for place in (places[0], places[-1] + 1)]
        return max(between, default=0), max(around)

    def _part(self, lo: int, hi: int) -> TapePart:
        last = hi == len(self._steps)
        own = [*self._steps[lo:hi], *(self._compare if last else ())]
        again = self._closure(own, last=last)
        ordered = sorted((*own, *again), key=lambda step: self._order[id(step)])
        steps = [self._with_stand_ins(step) if id(step) in self._again else step for step in ordered]
        used = {value.index for step in steps for value in step.uses}
        used |= {value.index for value in _values(self._tape.result)} if last else set()
        made = {value.index for step in own for value in step.makes}
        derived = [step for index in sorted(used & self._derived.keys() - made) for step in self._derived[index]]
        return TapePart(
            steps=(*derived, *steps),
            takes=self._crossing(lo) if lo else (),
            gives=() if last else self._crossing(hi),
            result=self._tape.result if last else None,
            reads=self._reads(used, alone=lo == 0),
            known={index: self._known[index] for index in sorted((used & self._known.keys()) - made)},
        )

    def _reads(self, used: set[int], *, alone: bool) -> dict[int, Value]:
        """Return what a part reads; one that nothing comes to reads some: that tells how many samples there are."""
        found = {number: value for number, value in self._tape.inputs.items() if value.index in used}
        return found if found or not alone else {0: self._tape.inputs[0]}

    def _closure(self, own: Sequence[TapeStep], *, last: bool) -> list[TapeStep]:
        """Return the steps that a part does again."""
        found: dict[int, TapeStep] = {}
        waiting = [value for step in own for value in step.uses]
        waiting += list(_values(self._tape.result)) if last else []
        while waiting:
            step = self._maker.get(waiting.pop().index)
            if step is None or id(step) not in self._again or id(step) in found:
                continue
            found[id(step)] = step
            waiting += (value for value in step.uses if self._needs_numbers(step, value))
        return list(found.values())

    def _needs_numbers(self, step: TapeStep, value: Value) -> bool:
        """Whether a step to be done again needs more of a value than the shape and type: what it makes tells."""
        facts = self._facts(value)
        return not facts.from_weights and (not facts.from_data or any(self._facts(v).from_data for v in step.makes))

    def _with_stand_ins(self, step: TapeStep) -> TapeStep:
        """Return a step to be done again, without tensors of which it needs the shape and type only."""

        def stand_in(sign: Any) -> Any:
            if not isinstance(sign, Value) or self._needs_numbers(step, sign):
                return sign
            facts = self._facts(sign)
            return StandIn(facts.shape, facts.dtype)

        return replace(step, args=mapped(step.args, stand_in), kwargs=mapped(dict(step.kwargs), stand_in))

    def _last_uses(self) -> dict[int, int]:
        """Return for each value the number of the last step that needs it, or needs what is made of it again."""
        last = {value.index: n for n, step in enumerate(self._steps) for value in step.uses}
        at_the_end = (*_values(self._tape.result), *(value for step in self._compare for value in step.uses))
        last |= {value.index: len(self._steps) for value in at_the_end}
        for step in reversed(self._tape.steps):
            latest = max((last.get(value.index, -1) for value in step.makes), default=-1)
            for value in step.uses if id(step) in self._again and latest >= 0 else ():
                if self._needs_numbers(step, value):
                    last[value.index] = max(latest, last.get(value.index, latest))
        return last

    def _crossing_values(self, place: int) -> list[Value]:
        return [
            Value(index)
            for index, made in sorted(self._made_at.items())
            if made < place <= self._last_use.get(index, -1) and index not in self._known and index not in self._derived
        ]

    def _crossing(self, place: int) -> tuple[Carried, ...]:
        found = []
        for value in self._crossing_values(place):
            carried = carried_or_why_not(value, self._facts(value))
            assert isinstance(carried, Carried), carried
            found.append(carried)
        return tuple(found)

    def _crossing_bytes(self, place: int) -> int:
        size = 0
        for carried in self._crossing(place):
            alike = carried.layout is SamplesLayout.NONE
            size += (
                self._repeated_bytes(carried.value) if alike else self._facts(carried.value).bytes_of(_SAMPLES_COMPARED)
            )
        return size

    def _repeated_bytes(self, value: Value) -> int:
        """Return the bytes of a value that is repeated for each sample."""
        return _SAMPLES_COMPARED * self._facts(value).bytes_of(_SAMPLES_COMPARED)

    def _why_not(self, place: int) -> str | None:
        """Return why a tensor cannot cross there; None if all can."""
        where = self._steps[place - 1].where
        values = self._crossing_values(place)
        if not values:
            return f"no tensor crosses behind {where}, so nothing tells how many samples there are"
        for value in values:
            carried = carried_or_why_not(value, self._facts(value))
            if isinstance(carried, str):
                return f"{carried} (behind {where})"
        return None

    def _facts(self, value: Value) -> Facts:
        return self._tape.facts[value.index]


def carried_or_why_not(value: Value, facts: Facts) -> Carried | str:
    """Return how a value is carried, or why it cannot be."""
    growing = [(dim, size) for dim, size in enumerate(facts.shape) if isinstance(size, Samples)]
    if not growing:
        if facts.from_data:
            return f"a tensor of shape {_text(facts)} is made of all samples together"
        return Carried(value=value, layout=SamplesLayout.NONE)
    if len(growing) > 1 or growing[0][1].fixed or growing[0][1].each < 1:
        return f"a tensor of shape {_text(facts)} is not divided by samples"
    dim, size = growing[0]
    layout = SamplesLayout.ALONG if size.each == 1 else SamplesLayout.GROUPED
    return Carried(value=value, layout=layout, dim=dim, each=size.each)


def _text(facts: Facts) -> str:
    sizes = ("samples" if isinstance(size, Samples) else str(size) for size in facts.shape)
    return f"({', '.join(sizes)})"


def _values(structure: Any) -> Iterable[Value]:
    return (part for part in parts(structure) if isinstance(part, Value))
