"""Where a tape is cut: what each unit does, what it takes from the one before and gives to the next.

Samples (inputs and labels) are read wherever they are needed. Steps whose results depend on them, shapes and constants
only (masks, positions, shifted labels, rotary angles) are done again in each unit that needs them. So are those that a
module made of few parameters alone (learned relative positions): units then share the parameters. All other tensors
alive at a cut are carried. A carried tensor's first dimension is the samples: one that has them elsewhere is moved, and
one that has none (a bias made of parameters) is repeated for each sample.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, Generic, Self, TypeVar

from torch import Tensor

from spantrain.core.records import Record
from spantrain.models.tracing.tape import (
    Facts,
    NamedModule,
    NamedWeight,
    Samples,
    StandIn,
    Tape,
    TapeStep,
    Value,
    mapped,
    parts,
)

Step = TypeVar("Step")
Part = TypeVar("Part")

_SAMPLES_COMPARED = 4
"""Sizes of cuts are compared for so many samples."""


class Carried(Record):
    """A value that crosses a cut."""

    value: Value
    dim: int | None = None
    """That has the samples; None: it is the same for all of them."""
    each: int = 1
    """Entries of it for each sample."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitPart:
    """What crosses the cuts around one unit."""

    takes: tuple[Carried, ...]
    gives: tuple[Carried, ...]
    """None: it is the last unit."""

    def __deepcopy__(self, memo: object) -> Self:
        """Return the part itself: it does not change."""
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class TapePart(UnitPart):
    """What one unit does."""

    steps: tuple[TapeStep, ...]
    result: Any = None
    """What the loss is made of; only the last unit has it."""
    reads: Mapping[int, Value]
    """What it reads of the samples, by number; see `models.units.Rows`."""
    known: Mapping[int, Tensor]
    """Values with the same numbers whatever the data."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that run in it, in order, and of those that they are given."""
        given = (sign.path for sign in self.signs if isinstance(sign, NamedModule))
        return tuple(dict.fromkeys((*(step.module for step in self.steps if step.module is not None), *given)))

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of weights and buffers that it uses outside of those."""
        return tuple(dict.fromkeys(sign.name for sign in self.signs if isinstance(sign, NamedWeight)))

    @property
    def signs(self) -> list[Any]:
        """All parts of all arguments, and of what the loss is made of."""
        given = [sign for step in self.steps for sign in parts((step.args, dict(step.kwargs)))]
        return [*given, *parts(self.result)]


def needed_steps(tape: Tape) -> Tape:
    """Leave out steps that the result does not depend on; what was read of samples stays."""
    wanted = {value.index for value in _values(tape.result)}
    kept: list[TapeStep] = []
    for step in reversed(tape.steps):
        if step.compares or any(value.index in wanted for value in step.makes):
            kept.append(step)
            wanted.update(value.index for value in step.uses)
    return replace(tape, steps=tuple(reversed(kept)))


class StepCutter(ABC, Generic[Step, Part]):
    """Cuts a row of steps before each block, where the fewest bytes cross."""

    nothing_crosses = "no tensor crosses behind {}, so nothing tells how many samples there are"
    _where: Callable[[Any], str]
    """Returns where in the model a step is, for people."""
    _inside_of: Callable[[Any], str]
    """Returns the path of the module in whose forward, or whose call, a step is."""
    _made_at: Mapping[int, int]
    """By a value's index: the number of the step that makes it, where it can cross."""
    _last_use: Mapping[int, int]
    """The last step that needs it; of what the result is made of, one more than there are."""

    def __init__(self, steps: Sequence[Step], facts: Mapping[int, Facts]) -> None:
        """Take steps, and facts of values by their index."""
        self._steps = steps
        self._facts = facts

    @abstractmethod
    def _part(self, lo: int, hi: int) -> Part:
        """Return what one unit does: some of the steps."""

    def cut(
        self, starts: Callable[[Step], bool], has_weights: Callable[[Step], bool]
    ) -> tuple[tuple[Part, ...], tuple[str, ...]]:
        """Cut before each block; return the parts, and what could not be cut.

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

    def opened_for_nothing(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Return the modules in which more tensors cross between steps than around them: the innermost of them."""
        worse = []
        for path in paths:
            inside = [n for n, step in enumerate(self._steps) if f"{self._inside_of(step)}.".startswith(f"{path}.")]
            places = range(inside[0], inside[-1] + 2) if inside else [0]
            crossing = [len(self._crossing_values(place)) for place in places]
            if max(crossing[1:-1], default=0) > max(crossing[0], crossing[-1]):
                worse.append(path)
        return tuple(path for path in worse if not any(other.startswith(f"{path}.") for other in worse))

    def _crossing_values(self, place: int) -> list[Value]:
        """Return the values that those before a step make, and it or those behind it need."""
        return [Value(index) for index, made in self._made_at.items() if made < place <= self._last_use.get(index, -1)]

    def _crossing(self, place: int) -> tuple[Carried, ...]:
        found = [_carried_or_why_not(value, self._facts[value.index]) for value in self._crossing_values(place)]
        assert self._why_not(place) is None, found
        return tuple(one for one in found if isinstance(one, Carried))

    def _crossing_bytes(self, place: int) -> int:
        return sum(
            self._repeated_bytes(carried.value)
            if carried.dim is None
            else self._facts[carried.value.index].bytes_of(_SAMPLES_COMPARED)
            for carried in self._crossing(place)
        )

    def _repeated_bytes(self, value: Value) -> int:
        """Return the bytes of a value that is repeated for each sample."""
        return _SAMPLES_COMPARED * self._facts[value.index].bytes_of(_SAMPLES_COMPARED)

    def _why_not(self, place: int) -> str | None:
        """Return why a tensor cannot cross there; None if all can."""
        where, values = self._where(self._steps[place - 1]), self._crossing_values(place)
        if not values:
            return self.nothing_crosses.format(where)
        reasons = (_carried_or_why_not(value, self._facts[value.index]) for value in values)
        return next((f"{reason} (behind {where})" for reason in reasons if isinstance(reason, str)), None)


class TapeCutter(StepCutter[TapeStep, TapePart]):
    """Cuts a tape with nothing in it that is not needed."""

    _where, _inside_of = attrgetter("where"), attrgetter("inside")

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._maker = {value.index: step for step in tape.steps for value in step.makes}
        self._order = {id(step): number for number, step in enumerate(tape.steps)}
        changed = {before.index for step in tape.steps for before, _ in step.changes}
        self._compare = [step for step in tape.steps if step.compares]
        self._again = {
            id(step)
            for step in tape.steps
            if not step.compares and not any(tape.facts[v.index].from_weights for v in step.makes)
        }
        """Steps that parts do again."""
        self._known = {
            value.index: facts.known
            for step in tape.steps
            if id(step) not in self._again
            for value in step.makes
            if (facts := tape.facts[value.index]).known is not None and value.index not in changed
        }
        steps = [step for step in tape.steps if id(step) not in self._again and not step.compares]
        super().__init__(steps, tape.facts)
        self._derived = {
            index: derivation.steps
            for index, derivation in tape.derivations.items()
            if index not in changed and derivation.weight_bytes <= self._repeated_bytes(Value(index))
        }
        made = {value.index: n for n, step in enumerate(steps) for value in step.makes}
        self._made_at = {n: made[n] for n in sorted(made.keys() - self._known.keys() - self._derived.keys())}
        self._last_use = self._last_uses()

    def _part(self, lo: int, hi: int) -> TapePart:
        last = hi == len(self._steps)
        own = [*self._steps[lo:hi], *(self._compare if last else ())]
        again = self._closure(own, last=last)
        ordered = sorted((*own, *again), key=lambda step: self._order[id(step)])
        steps = [self._with_stand_ins(step) if id(step) in self._again else step for step in ordered]
        used = {value.index for step in steps for value in step.uses}
        used |= {value.index for value in _values(self.tape.result)} if last else set()
        made = {value.index for step in own for value in step.makes}
        derived = [step for index in sorted(used & self._derived.keys() - made) for step in self._derived[index]]
        reads = {number: value for number, value in self.tape.inputs.items() if value.index in used}
        if lo == 0 and not reads:
            reads = {0: self.tape.inputs[0]}  # which tells how many samples there are
        return TapePart(
            steps=(*derived, *steps),
            takes=self._crossing(lo) if lo else (),
            gives=() if last else self._crossing(hi),
            result=self.tape.result if last else None,
            reads=reads,
            known={index: self._known[index] for index in sorted((used & self._known.keys()) - made)},
        )

    def _closure(self, own: Sequence[TapeStep], *, last: bool) -> list[TapeStep]:
        """Return the steps that a part does again."""
        found: dict[int, TapeStep] = {}
        waiting = [value for step in own for value in step.uses]
        waiting += list(_values(self.tape.result)) if last else []
        while waiting:
            step = self._maker.get(waiting.pop().index)
            if step is None or id(step) not in self._again or id(step) in found:
                continue
            found[id(step)] = step
            waiting += (value for value in step.uses if self._needs_numbers(step, value))
        return list(found.values())

    def _needs_numbers(self, step: TapeStep, value: Value) -> bool:
        """Whether a step to be done again needs more of a value than the shape and type: what it makes tells."""
        facts = self._facts[value.index]
        return not facts.from_weights and (
            not facts.from_data or any(self._facts[v.index].from_data for v in step.makes)
        )

    def _with_stand_ins(self, step: TapeStep) -> TapeStep:
        """Return a step to be done again, without tensors of which it needs the shape and type only."""

        def stand_in(sign: Any) -> Any:
            if not isinstance(sign, Value) or self._needs_numbers(step, sign):
                return sign
            facts = self._facts[sign.index]
            return StandIn(facts.shape, facts.dtype)

        return replace(step, args=mapped(step.args, stand_in), kwargs=mapped(dict(step.kwargs), stand_in))

    def _last_uses(self) -> dict[int, int]:
        """Return for each value the number of the last step that needs it, or needs what is made of it again."""
        last = {value.index: n for n, step in enumerate(self._steps) for value in step.uses}
        at_the_end = (*_values(self.tape.result), *(value for step in self._compare for value in step.uses))
        last |= {value.index: len(self._steps) for value in at_the_end}
        for step in reversed(self.tape.steps):
            latest = max((last.get(value.index, -1) for value in step.makes), default=-1)
            for value in step.uses if id(step) in self._again and latest >= 0 else ():
                if self._needs_numbers(step, value):
                    last[value.index] = max(latest, last.get(value.index, latest))
        return last


def _carried_or_why_not(value: Value, facts: Facts) -> Carried | str:
    """Return how a value is carried, or why it cannot be."""
    if facts.dtype.is_complex:
        return f"a tensor of shape {_text(facts)} has complex numbers"
    growing = [(dim, size) for dim, size in enumerate(facts.shape) if isinstance(size, Samples)]
    if not growing:
        if facts.from_data:
            return f"a tensor of shape {_text(facts)} is made of all samples together"
        return Carried(value=value)
    if len(growing) > 1 or growing[0][1].fixed or growing[0][1].each < 1:
        return f"a tensor of shape {_text(facts)} is not divided by samples"
    dim, size = growing[0]
    return Carried(value=value, dim=dim, each=size.each)


def _text(facts: Facts) -> str:
    sizes = ("samples" if isinstance(size, Samples) else str(size) for size in facts.shape)
    return f"({', '.join(sizes)})"


def _values(structure: Any) -> Iterable[Value]:
    return (part for part in parts(structure) if isinstance(part, Value))
