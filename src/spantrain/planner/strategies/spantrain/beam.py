"""Algorithm 1 of SpanTrain (English paper, section 3.3.3): a beam over orders of first-level groups and their cuts."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

Arrangement = tuple[tuple[int, int], ...]
"""First-level groups in the pipeline's order, by number, each with how many units it has; with none it is left out."""

_WIDTH = 8
"""The paper's l."""
_MOST_ROUNDS = 40
"""The paper's max_iter."""
_ALL_SWAPS_UP_TO = 5
_STEPS = (1, 4)
"""Units that are moved over a cut at once; besides, all that there are."""


@dataclass(frozen=True, kw_only=True)
class Beam:
    """Keeps the best arrangements, and changes them until none of the changes is kept.

    Kept of the paper: random orders with cuts by capacity to start from, reordering and moving units between neighbours
    as changes, and a store of all results. A group may lose all its units to a neighbour, and get some again.
    """

    units: int
    capacities: Sequence[float]
    """Of the first-level groups, in steps per second if each held the whole model."""
    work: Sequence[float]
    """Of each unit; any scale."""
    seed: int = 0

    def run(self, value_s: Callable[[Arrangement], float]) -> list[tuple[float, Arrangement]]:
        """Return the best arrangements, by rising seconds; what cannot be done is over by a lot, by how far it is."""
        known: dict[Arrangement, float] = {}
        kept: list[Arrangement] = list(dict.fromkeys(self._starts()))
        for _ in range(_MOST_ROUNDS):
            tried = dict.fromkeys((*kept, *(other for entry in kept for other in self._changed(entry))))
            for entry in tried:
                if entry not in known:
                    known[entry] = value_s(entry)
            best = sorted(tried, key=lambda entry: (known[entry], entry))[:_WIDTH]
            if best == kept:
                break
            kept = best
        return [(known[entry], entry) for entry in kept]

    def _starts(self) -> Iterator[Arrangement]:
        groups = list(range(len(self.capacities)))
        chooser = random.Random(self.seed)
        for _ in range(_WIDTH):
            order = chooser.sample(groups, len(groups))
            yield tuple(zip(order, self._by_capacity(order), strict=True))

    def _by_capacity(self, order: Sequence[int]) -> list[int]:
        """Return how many units each group gets so that its work is in proportion to its capacity."""
        total, scale = sum(self.capacities[group] for group in order), sum(self.work) or 1.0
        counts, reached, unit, done = [], 0.0, 0, 0.0
        for group in order:
            reached += self.capacities[group] / total
            first = unit
            while unit < self.units and (done + self.work[unit] / 2) / scale <= reached:
                done += self.work[unit]
                unit += 1
            counts.append(unit - first)
        counts[-1] += self.units - unit
        return counts

    def _changed(self, entry: Arrangement) -> Iterator[Arrangement]:
        positions = range(len(entry))
        near = pairwise(positions)
        for a, b in combinations(positions, 2) if len(entry) <= _ALL_SWAPS_UP_TO else near:
            swapped = list(entry)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            yield tuple(swapped)
        for a in positions[:-1]:
            for source, target in ((a, a + 1), (a + 1, a)):
                have = entry[source][1]
                for count in {*(step for step in _STEPS if step <= have), have} - {0}:
                    moved = list(entry)
                    moved[source] = (entry[source][0], have - count)
                    moved[target] = (entry[target][0], entry[target][1] + count)
                    yield tuple(moved)
