"""Where a model is cut whose units run its own forward: before its blocks, where all that later ones need can cross."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from spantrain.models.tracing.cut import Carried, SamplesLayout, carried_or_why_not
from spantrain.models.tracing.stubs.calls import Calls, Inside, Row, Source
from spantrain.models.tracing.tape import NamedWeight, Value
from spantrain.models.units import LABELS

_SAMPLES_COMPARED = 4
"""Sizes of cuts are compared for so many samples."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StubPart:
    """What one unit runs for itself of a forward: the calls from `first` up to `end`."""

    first: int
    end: int
    modules: tuple[str, ...]
    """Paths of the modules that it calls, in order."""
    weights: tuple[str, ...]
    """Names of weights outside of those that it uses."""
    takes: tuple[Carried, ...]
    gives: tuple[Carried, ...]
    """None: it is the last unit."""
    reads: tuple[int, ...]
    """What it reads of the samples; see `models.units.Rows`."""

    def __deepcopy__(self, memo: object) -> "StubPart":
        """Return the part itself: it does not change."""
        return self


class CallCutter:
    """Cuts a row of calls."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._made_at = {
            sign: number
            for number, call in enumerate(calls.calls)
            for sign in call.template.leaves()
            if isinstance(sign, Value)
        }
        self._last_use: dict[Source, int] = {}
        for number, call in enumerate(calls.calls):
            self._last_use |= dict.fromkeys(call.needs, number)
        self._last_use |= dict.fromkeys(calls.result_needs, len(calls.calls))

    def cut(self, is_block: Callable[[str], bool]) -> tuple[tuple[StubPart, ...], tuple[str, ...]]:
        """Cut before each block, where the fewest bytes cross; return the parts, and what could not be cut.

        Calls before the first block, and those behind the last, are a part of their own.
        """
        count = len(self._calls.calls)
        blocks = [number for number, call in enumerate(self._calls.calls) if is_block(call.path)]
        gaps = [range(before + 1, after + 1) for before, after in pairwise(blocks)]
        if blocks and blocks[0] > 0:
            gaps.insert(0, range(blocks[0], blocks[0] + 1))
        if blocks and blocks[-1] + 1 < count:
            gaps.append(range(blocks[-1] + 1, blocks[-1] + 2))
        cuts, notices = [], []
        for gap in gaps:
            possible = [place for place in gap if not isinstance(self._crossing(place), str)]
            if possible:
                cuts.append(min(possible, key=lambda place: (self._bytes(place), place)))
            else:
                notices.append(f"{self._crossing(gap[0])} (behind {self._calls.calls[gap[0] - 1].path})")
        return tuple(self._part(lo, hi) for lo, hi in pairwise([0, *cuts, count])), tuple(notices)

    def crossing_counts(self, inside: str) -> tuple[int, int]:
        """Return how many tensors cross at most between the calls in a module, and before or behind them all."""
        places = [n for n, call in enumerate(self._calls.calls) if call.path.startswith(f"{inside}.")]
        if not places:
            return 0, 0
        between = [len(self._values(place)) for place in range(places[0] + 1, places[-1] + 1)]
        return max(between, default=0), max(len(self._values(places[0])), len(self._values(places[-1] + 1)))

    def _part(self, lo: int, hi: int) -> StubPart:
        calls, last = self._calls.calls[lo:hi], hi == len(self._calls.calls)
        needs = {*self._calls.looked_at, *(source for call in calls for source in call.needs)}
        needs |= self._calls.result_needs if last else set()
        reads = {source.number for source in needs if isinstance(source, Row)} | ({LABELS} if last else set())
        if lo == 0 and not reads:
            reads = {0}  # which tells how many samples there are
        return StubPart(
            first=lo,
            end=hi,
            modules=tuple(dict.fromkeys(call.path for call in calls)),
            weights=tuple(sorted(source.name for source in needs if isinstance(source, NamedWeight))),
            takes=self._carried(lo) if lo else (),
            gives=() if last else self._carried(hi),
            reads=tuple(sorted(reads)),
        )

    def _carried(self, place: int) -> tuple[Carried, ...]:
        found = self._crossing(place)
        assert not isinstance(found, str), found
        return found

    def _crossing(self, place: int) -> tuple[Carried, ...] | str:
        """Return what crosses there, or why that cannot be."""
        for source, used in self._last_use.items():
            if isinstance(source, Inside) and source.call < place <= used:
                return "a tensor goes on that is neither given nor returned"
        found = []
        for value in self._values(place):
            carried = carried_or_why_not(value, self._calls.facts[value.index])
            if isinstance(carried, str):
                return carried
            found.append(carried)
        return tuple(found) if found else "no tensor crosses"

    def _values(self, place: int) -> list[Value]:
        return [value for value, made in self._made_at.items() if made < place <= self._last_use.get(value, -1)]

    def _bytes(self, place: int) -> int:
        sizes = (
            self._calls.facts[carried.value.index].bytes_of(_SAMPLES_COMPARED)
            * (_SAMPLES_COMPARED if carried.layout is SamplesLayout.NONE else 1)
            for carried in self._carried(place)
        )
        return sum(sizes)


def paths_of(parts: Iterable[StubPart]) -> tuple[str, ...]:
    """Return the paths of all modules that are called, each once."""
    return tuple(dict.fromkeys(path for part in parts for path in part.modules))
