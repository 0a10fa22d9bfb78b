"""How layers are dealt out to the devices of a pipeline in several rounds, and where the cuts between them lie."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise, product

from spantrain.core.action import SPLIT_OPS
from spantrain.core.plan import Plan, Stage
from spantrain.core.span import Span, equal_spans
from spantrain.core.units import UnitGraph
from spantrain.cost.replicas import ReplicaCost
from spantrain.errors import ProfileError
from spantrain.formats.registry import WireFormat

MOST_ACTIONS = 20_000
"""A step of more actions is not interleaved: its search would take seconds."""
Busy = dict[tuple[int, int], float]
"""Seconds for a micro-batch: of the devices of a place (it, twice), and of the way from one place to another."""
_TURNED = 4
"""Devices up to which a pipeline that goes there and back begins at each of them."""


def dealings(devices: int) -> list[list[int]]:
    """Return ways to deal stages out, each as the devices of all stages, by their numbers in the pipeline.

    With the end on the first device, too, so that no others need sum what beginning and end share; there and back, of
    few devices from each of them on; and in two, three and four rounds.

    >>> dealings(2)[:4]
    [[0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1], [0, 1, 0, 1]]
    """
    there = list(range(devices))
    turned = [there[k:] + there[:k] for k in range(devices if devices <= _TURNED else 1)]
    return [there + there[:1], *(own + own[::-1] for own in turned), *(there * rounds for rounds in (2, 3, 4))]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dealt:
    """A pipeline of the devices of another one, in several rounds."""

    base: Plan
    places: tuple[int, ...]
    """By stage: the stage of the other one whose devices it has."""
    begins: tuple[int, ...]
    """The first units of stages, and the end of the last."""
    spans: tuple[Span, ...]
    loads: "_Loads"

    @cached_property
    def plan(self) -> Plan:
        """With nothing that limits what is in flight."""
        stages = []
        for place, (begin, end) in zip(self.places, pairwise(self.begins), strict=True):
            own = self.base.stages[place]
            stage = replace(own, first_unit=begin, end_unit=end, micro_batches=self.spans)
            stages.append(stage.with_limits([self.base.global_batch] * len(own.replicas)))
        return replace(self.base, stages=tuple(stages), schedule="critical-path", hints=None)

    @property
    def key(self) -> object:
        """What two of the same devices and cuts have in common."""
        return self.spans, self.begins, tuple(self.base.stages[place].devices for place in self.places)

    @property
    def busy_s(self) -> float:
        """The seconds for which the busiest device or way works in a step: it hardly takes less."""
        return len(self.spans) * self.loads.busiest_s(self.begins, self.places)

    @property
    def ways(self) -> list[tuple[range, int]]:
        """How cuts can be moved: each by itself, and two neighbours, with the stage between them as large as before."""
        runs = [range(first, first + number) for number in (1, 2) for first in range(1, len(self.places) + 1 - number)]
        return list(product(runs, (-1, 1)))

    def moved(self, cuts: range, way: int) -> "Dealt | None":
        """Return the same with cuts moved by so many units; None if nothing is left on a side of them."""
        begins = tuple(unit + way * (cut in cuts) for cut, unit in enumerate(self.begins))
        return replace(self, begins=begins) if all(begin < end for begin, end in pairwise(begins)) else None


def dealt(base: Plan, costs: ReplicaCost, graph: UnitGraph, below_s: float) -> Iterator[Dealt]:
    """Yield pipelines in several rounds, with the micro-batches of a pipeline and ones of half and of double the size.

    None in which a device or a way is busy for `below_s` or longer.
    """
    devices, size = len(base.stages), max(span.size for span in base.stages[0].micro_batches)
    sizes = dict.fromkeys((size, max(1, size // 2), min(2 * size, base.global_batch)))
    loads = {other: _Loads(base.stages, other, costs, graph) for other in sizes}
    for places, other in product(dealings(devices), sizes):
        spans = equal_spans(base.global_batch, other)
        replicas = sum(len(base.stages[place].replicas) for place in places)
        if len(places) > base.stages[-1].end_unit or 3 * replicas * len(spans) > MOST_ACTIONS:
            continue
        with suppress(ProfileError):  # a size that was not measured
            for begins in loads[other].evened(places, len(spans)):
                found = Dealt(base=base, places=tuple(places), begins=begins, spans=spans, loads=loads[other])
                if found.busy_s < below_s:
                    yield found


class _Loads:
    """What units and cuts cost the devices of a pipeline, and the ways between them, for a micro-batch of a size."""

    def __init__(self, stages: tuple[Stage, ...], size: int, costs: ReplicaCost, graph: UnitGraph) -> None:
        self._stages, self._size, self._costs, self._units = stages, size, costs, graph.units

    @cached_property
    def _until_s(self) -> list[list[float]]:
        """By place in the pipeline: the seconds of all units before each one, and of all of them."""
        units = range(self._stages[-1].end_unit)
        return [[0.0, *accumulate(self._unit_s(stage, unit) for unit in units)] for stage in self._stages]

    def _unit_s(self, stage: Stage, unit: int) -> float:
        """Return the seconds of a unit's share of a micro-batch on the slowest of a stage's replicas."""
        total = sum(one.sample_share for one in stage.replicas)
        sizes = [(one, max(1, round(self._size * one.sample_share / total))) for one in stage.replicas]
        return max(
            sum(self._costs.groups.units_seconds([unit], one, op, own) for op in SPLIT_OPS) for one, own in sizes
        )

    @cache  # noqa: B019 - it lives as long as its pipeline is dealt out
    def _ways_s(self, source: int, target: int) -> tuple[list[float], list[float]]:
        """Return by unit how long at least outputs keep the ways busy between two places, and gradients the ways back.

        In the mean of the pairs of replicas, all of which send at once.
        """
        network = self._costs.groups.network
        here, there = self._stages[source].replicas, self._stages[target].replicas
        pairs = [(a.devices[0], b.devices[0]) for a, b in product(here, there)]

        def least_s(size_bytes: int, *, back: bool = False) -> float:
            ways = [(b, a) if back else (a, b) for a, b in pairs]
            each_s = [network.occupancy_seconds(*way, self._size * size_bytes) for way in ways]
            return 1 / sum(1 / seconds for seconds in each_s) if all(each_s) else 0.0

        return (
            [least_s(unit.forward_bytes(WireFormat.NATIVE)) for unit in self._units],
            [least_s(unit.backward_bytes(WireFormat.NATIVE), back=True) for unit in self._units],
        )

    def evened(self, places: Sequence[int], micro_batches: int) -> Iterator[tuple[int, ...]]:
        """Yield where stages begin, and the end, with each device about as busy as in the pipeline, and otherwise.

        Cuts move as long as that makes the busiest device less busy; and, for the other ones, as long as that makes the
        busiest device or way so, or a step of so many micro-batches, in which nothing else waits, shorter.
        """
        begins = self._moved(self._begins(places), places, max, most=1, ways=False)
        yield begins
        other = self._moved(begins, places, max, most=len(self._units))
        # A pipeline is filled, runs at the speed of what is busiest, and drains.
        other = self._moved(
            other, places, lambda busy_s: (micro_batches - 1) * max(busy_s) + sum(busy_s), most=len(self._units)
        )
        if other != begins:
            yield other

    def _moved(
        self,
        begins: tuple[int, ...],
        places: Sequence[int],
        value: Callable[[Collection[float]], float],
        *,
        most: int,
        ways: bool = True,
    ) -> tuple[int, ...]:
        """Move single cuts, by so many units at most at a time, while that lowers what busy seconds come to.

        And where they come to as much, while it lowers the busiest, then the next, and so on.
        """
        busy_s, moved = self._busy_s(begins, places, ways=ways), True
        best = value(busy_s.values()), *sorted(busy_s.values(), reverse=True)
        while moved:
            moved = False
            for cut in range(1, len(places)):
                here = begins[cut]
                for unit in range(max(here - most, begins[cut - 1] + 1), min(here + most + 1, begins[cut + 1])):
                    other_s = self._with_cut(busy_s, places[cut - 1 : cut + 1], begins[cut], unit)
                    found = value(other_s.values())
                    if found > best[0]:
                        continue
                    key = found, *sorted(other_s.values(), reverse=True)
                    if key < best:
                        best, busy_s, moved = key, other_s, True
                        begins = (*begins[:cut], unit, *begins[cut + 1 :])
        return begins

    def _with_cut(self, busy_s: Busy, around: Sequence[int], unit: int, other: int) -> Busy:
        """Return for how long all is busy with a cut between two places behind other units."""
        before, behind = around
        changed, (before_s, behind_s) = busy_s.copy(), (self._until_s[before], self._until_s[behind])
        changed[before, before] += before_s[other] - before_s[unit]
        changed[behind, behind] -= behind_s[other] - behind_s[unit]
        if before != behind and (before, behind) in busy_s:
            out_s, back_s = self._ways_s(before, behind)
            changed[before, behind] += out_s[other - 1] - out_s[unit - 1]
            changed[behind, before] += back_s[other - 1] - back_s[unit - 1]
        return changed

    def _begins(self, places: Sequence[int]) -> tuple[int, ...]:
        until_s, units = self._until_s, self._stages[-1].end_unit
        left_s = [own[stage.end_unit] - own[stage.first_unit] for own, stage in zip(until_s, self._stages, strict=True)]
        rounds, begins = [places.count(place) for place in range(len(self._stages))], [0]
        for number, place in enumerate(places):
            own, begin = until_s[place], begins[-1]
            end, most = begin + 1, units - (len(places) - number - 1)
            wanted_s = left_s[place] / rounds[place]
            while end < most and (own[end] + own[end + 1]) / 2 - own[begin] <= wanted_s:
                end += 1
            left_s[place], rounds[place] = max(0.0, left_s[place] - own[end] + own[begin]), rounds[place] - 1
            begins.append(end)
        return (*begins[:-1], units)

    def busiest_s(self, begins: Sequence[int], places: Sequence[int]) -> float:
        """Return the seconds of the busiest device or way for a micro-batch."""
        return max(self._busy_s(begins, places).values())

    def _busy_s(self, begins: Sequence[int], places: Sequence[int], *, ways: bool = True) -> Busy:
        busy_s = dict.fromkeys(((place, place) for place in places), 0.0)
        for place, (begin, end) in zip(places, pairwise(begins), strict=True):
            busy_s[place, place] += self._until_s[place][end] - self._until_s[place][begin]
        for (here, there), cut in zip(pairwise(places), begins[1:], strict=False):
            if ways and here != there:
                out_s, back_s = self._ways_s(here, there)
                busy_s[here, there] = busy_s.get((here, there), 0.0) + out_s[cut - 1]
                busy_s[there, here] = busy_s.get((there, here), 0.0) + back_s[cut - 1]
        return busy_s
