"""`hexiscale`: pipelines of unlike devices and tensor groups by graph partitioning (Yan et al., arXiv 2409.01143).

Written from the paper (FlashFlex before) and the steps that its published search takes. Kept: first the graph of
devices is divided into pipelines of about the same capacity, for every number of them, so that slow links are inside
and the gradients' sums between them go over fast ones; then each pipeline into stages, which are tensor groups of alike
devices of a host, of the largest degree of 1, 2, 4 or 8 that is allowed and what is left over of smaller ones, for
every degree; stages in the order of the fastest hops; samples by the pipelines' capacity; layers by what stages get
done, within memory; an estimate of pipelines and sums, by which the best is chosen.

Decided here: devices dealt out by capacity and swapped, in the place of METIS; measured times in the place of peak
rates, and pipelines with fast links inside tried, too, in its favour. Not kept: each pipeline's own cuts, which no plan
has: pipelines share them, so of one with more stages than the others the slowest ones are left out; tensor groups of
unlike kinds; recomputation.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product

from spantrain.core.plan import SumModel
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.request import PlanRequest, Proposal
from spantrain_studies.planners.assembler import PaperAssembler
from spantrain_studies.planners.asymmetric.graph import DeviceGraph, Devices
from spantrain_studies.planners.asymmetric.stages import MAX_STAGES, Crew, CrewCosts, Option, graph_within

_BUILT = 12
"""Pipelines, best by the estimate, that plans are made of."""
_DEGREES = (1, 2, 4, 8)
_SUM_PASSES = 2.0
"""Of a ring sum, at most."""


def hexiscale(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the pipelines and tensor groups that HexiScale's estimate likes best.

    Raises:
        InfeasiblePlanError: none fits, or there are too many devices.
    """
    assembler = PaperAssembler(request, SumModel.TORCH_DDP)
    graph = graph_within(request, assembler)
    search = _HexiscaleSearch(assembler, graph)
    options = sorted(search.options(), key=lambda option: option.latency_s)
    if not options:
        raise InfeasiblePlanError(f"no pipelines of {len(graph.devices)} devices have layers that fit")
    return assembler.best(((one.shapes, one.size, one.latency_s) for one in options[:_BUILT]), "1f1b")


class _HexiscaleSearch:
    def __init__(self, assembler: PaperAssembler, graph: DeviceGraph) -> None:
        self._graph, self._costs, self._units = graph, CrewCosts(assembler), assembler.units
        self._device = assembler.profile.cluster.device_by_name
        self._weight = {name: self._costs.speed((name,)) for name in graph.devices}
        divides = any(unit.tensor_sums for unit in assembler.profile.graph.units)
        self._degrees = _DEGREES if divides else _DEGREES[:1]

    def options(self) -> Iterator[Option]:
        """Yield every number of pipelines and stages, and every largest degree, for each size of micro-batch."""
        tried, near = set[object](), self._graph.groupings()
        for number in range(1, len(self._graph.devices) + 1):
            ways = self._graph.dealt(number, self._weight), near[number]
            for pipelines, degree in product(ways, self._degrees):
                rows = [self._stages(pipeline, degree) for pipeline in pipelines]
                fewest = min(min(map(len, rows)), self._units, MAX_STAGES)
                crews = tuple(self._crews([self._ordered(row, fewest) for row in rows]))
                if crews not in tried:
                    tried.add(crews)
                    yield from self._costs.options(crews, self._graph, _SUM_PASSES if number > 1 else 0.0)

    def _stages(self, pipeline: Devices, degree: int) -> list[Devices]:
        """Return tensor groups of a pipeline's devices, of that degree at most."""
        alike = dict[tuple[str, str], list[str]]()
        for name in pipeline:
            alike.setdefault((self._device[name].host, self._device[name].kind), []).append(name)
        found = list[Devices]()
        for members in alike.values():
            while members:
                width = max(one for one in self._degrees if one <= min(degree, len(members)))
                found.append(tuple(members[:width]))
                members = members[width:]
        return found

    def _ordered(self, stages: list[Devices], count: int) -> tuple[Devices, ...]:
        """Return so many stages, those that get most done, in the order of the fastest hops."""
        kept = sorted(stages, key=partial(_speed_of, self._weight), reverse=True)[:count]
        return self._graph.best_chain(kept)

    def _crews(self, rows: list[tuple[Devices, ...]]) -> Iterator[Crew]:
        """Yield the stages of pipelines beside each other; one that is turned fits better is turned."""
        first, shares = rows[0], [sum(map(self._costs.speed, row)) for row in rows]
        turned = [first, *(min((row, row[::-1]), key=partial(self._unlike, first)) for row in rows[1:])]
        for groups in zip(*turned, strict=True):
            yield Crew(groups=groups, shares=tuple(shares))

    def _unlike(self, first: tuple[Devices, ...], row: tuple[Devices, ...]) -> float:
        """Return how unlike the parts are that the stages of two pipelines have in what those get done."""
        parts = [[self._costs.speed(stage) / sum(map(self._costs.speed, one)) for stage in one] for one in (first, row)]
        return sum(abs(mine - yours) for mine, yours in zip(parts[0], parts[1], strict=True))


def _speed_of(weight: Mapping[str, float], group: Devices) -> float:
    return sum(weight[name] for name in group)
