"""`sailor`: resources and parallelism chosen together (Strati et al., Sailor, SOSP 2025, sections 4.2 and 4.3).

Kept: tensor parallelism inside hosts (H1), of at least the degree that memory asks for (H2); data-parallel widths
falling until the throughput falls (H3), or, where money is to be little, rising until it rises (H4); every stage inside
a region, pipelines over several (H5); the sites of a region count as one (H6), which is what the cluster file calls
`region`, or a site by itself; one width and one micro-batch for all stages, equal shares; the dynamic programme over
stages and what is left (equation 1, listing 1), with an assumed straggler where money is counted (equation 2); the 1F1B
step of section 4.3, and its money; memory by device. Devices are counted by kind and region, and named at the end.

It trains by Megatron-DeepSpeed, whose sums come behind the last backward (`deepspeed-pipeline` in `cost.sums`).

Decided here: one partition for each number of stages (`space`); degrees of a kind are powers of two, with floors
that are tried by kind; of the widths that need equally many micro-batches the smallest is tried; the straggler's first
micro-batch counts once (the paper's formula has it twice); a link that is busier than the slowest stage is the
straggler; joules are counted as money is. Bounds leave shapes unsolved that cannot be better. Not kept: the seconds of
the update, which are the same for all plans here.

The estimate is low where links are slow: as in the paper, a transfer is taken to be hidden behind the straggler, but a
late stage under 1F1B holds too few micro-batches for that; and it has no exchange of parameters that stages share.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import prod

from spantrain.core.plan import SumModel
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import Assembler, StageShape
from spantrain.planner.request import PlanRequest, Proposal
from spantrain_studies.planners.sailor.place import Estimate, Group, StageLayout, estimate, named
from spantrain_studies.planners.sailor.space import SupplySpace
from spantrain_studies.planners.sailor.task import SupplyStages, shape_of, solve

Rank = tuple[float, float]
"""By how much constraints are broken, relative to them, and the value of the objective."""

_PROPOSED = 3
_PROPOSED_OF_MANY = 1
_MANY_DEVICES = 64
_MAX_STAGES = 32
_MAX_FLOORS = 16
"""Combinations of degrees by kind; of more, all kinds have one floor."""
_MAX_STRAGGLERS = 6
"""Solved for one shape and width."""
_WORSE = 2
"""Widths in a row without any gain, after which no more are tried."""


def sailor(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the pipelines that Sailor's model likes best, those that keep the constraints first.

    Raises:
        InfeasiblePlanError: nothing fits; the closest miss is in the message.
    """
    return _SailorSearch(request).run()


@dataclass(frozen=True, kw_only=True)
class _NamedPipeline:
    """A pipeline with named devices."""

    layout: StageLayout
    groups: tuple[tuple[Group, ...], ...]
    estimate: Estimate
    broken: float
    """By how much it breaks constraints, relative to them."""

    @property
    def rank(self) -> tuple[float, float, float]:
        return self.broken, self.estimate.value, self.estimate.step_s


@dataclass(frozen=True, kw_only=True)
class _StageFamily:
    """A number of stages and a micro-batch, for all widths and tensor-parallel degrees."""

    stages: int
    samples: int
    widths: tuple[int, ...]
    """In the order in which they are tried."""
    bound: Rank
    """Of the rank of any of its plans."""


class _SailorSearch:
    def __init__(self, request: PlanRequest) -> None:
        self._request, self._space = request, SupplySpace(request)
        self._job, self._limits = request.job, request.constraints
        self._shape = cache(partial(shape_of, self._space))
        self._devices = sum(supply.count for supply in self._space.supplies)
        self._most_s = self._limits.slowest_step_s(self._job.global_batch)
        self._tried: set[object] = set()
        self._found: list[_NamedPipeline] = []
        self._best = (float("inf"), float("inf"))

    def run(self) -> tuple[Proposal, ...]:
        for family in sorted(self._families(), key=lambda entry: entry.bound):
            if family.bound >= self._best:
                break
            for floors in self._floors():
                self._try_widths(family, floors)
        if not self._found:
            raise InfeasiblePlanError(
                "no pipeline with stages of equal width fits: in the longest one, with one sample in a micro-batch, "
                f"{self._space.closest_miss()}"
            )
        return self._proposals()

    def _families(self) -> Iterator[_StageFamily]:
        most = min(self._space.units, self._devices, _MAX_STAGES)
        for samples, widths in self._micro_batches():
            for stages in range(1, most + 1):
                possible = tuple(width for width in widths if width * stages <= self._devices)
                if possible:
                    bound = min(self._outlined(stages, samples, width) for width in possible)
                    yield _StageFamily(stages=stages, samples=samples, widths=possible, bound=bound)

    def _outlined(self, stages: int, samples: int, width: int) -> Rank:
        """Return what no rank of such a plan is under, memory and numbers of devices aside."""
        slowest_s, all_s, worth = self._space.outline(stages, samples)
        least_s = self._space.least_step_s(stages, samples, width, slowest_s, all_s)
        value = self._space.count(samples, width) * width * worth if self._space.weights.counts_more else least_s
        return max(0.0, least_s / self._most_s - 1), value

    def _floors(self) -> Iterator[tuple[int, ...]]:
        """Yield the least tensor-parallel degrees to try, by kind."""
        degrees = [self._space.degrees(kind) for kind in self._space.kinds]
        if prod(map(len, degrees)) <= _MAX_FLOORS:
            yield from product(*degrees)
        else:
            yield from ((degree,) * len(degrees) for degree in max(degrees, key=len))

    def _micro_batches(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield a replica's samples with the widths to try, falling for throughput (H3), else rising (H4)."""
        sizes, total = self._job.micro_batch_sizes(), self._job.global_batch
        by_samples: dict[int, set[int]] = {}
        if self._job.micro_batches:
            for size, width in product(sizes, range(1, self._devices + 1)):
                if size % width == 0:
                    by_samples.setdefault(size // width, set()).add(width)
        else:
            most = -(-total // sizes[0])
            for samples in (1 << power for power in range(total.bit_length())):
                counts = range(1, min(most, -(-total // samples)) + 1)
                by_samples[samples] = {-(-total // (samples * count)) for count in counts}
        falling = not self._space.weights.counts_more
        for samples, widths in by_samples.items():
            wanted = (width for width in widths if width <= self._space.largest_region and samples * width <= total)
            yield samples, tuple(sorted(wanted, reverse=falling))

    def _try_widths(self, family: _StageFamily, floors: tuple[int, ...]) -> None:
        best, worse = (float("inf"), float("inf")), 0
        for width in family.widths:
            if self._outlined(family.stages, family.samples, width) >= self._best:
                continue
            count = self._space.count(family.samples, width)
            shape = self._shape(family.stages, family.samples, _rounded(count, family.stages), floors)
            if shape is None or width > shape.widest or self._bound(shape, width) >= self._best:
                continue
            key = (family.samples, width, shape.degrees)
            rank = None if key in self._tried else self._try(shape, width)
            self._tried.add(key)
            if rank is not None:
                worse = worse + 1 if rank >= best else 0
                best = min(best, rank)
                if worse == _WORSE:
                    return

    def _bound(self, shape: SupplyStages, width: int) -> Rank:
        return max(0.0, shape.bound_s(width) / self._most_s - 1), shape.bound_value(width)

    def _try(self, shape: SupplyStages, width: int) -> Rank | None:
        """Solve a shape for each straggler that may be better than the best so far; return the best rank."""
        count, ranks = self._space.count(shape.samples, width), list[Rank]()
        rate = shape.least_rate(self._space.weights, width)
        for straggler_s in shape.stragglers():
            least_s = shape.bound_s(width, straggler_s)
            bound = max(0.0, least_s / self._most_s - 1), (rate if self._space.weights.counts_more else 1.0) * least_s
            if bound >= self._best or len(ranks) >= _MAX_STRAGGLERS:
                break
            ranks.extend(self._solved(shape, width, straggler_s, count))
        return min(ranks, default=None)

    def _solved(self, shape: SupplyStages, width: int, straggler_s: float, count: int) -> Iterator[Rank]:
        """Yield the rank of the best with this straggler, and of the cheapest where that is too dear."""
        for weights in (self._space.weights, self._space.money):
            solution = solve(shape.task(width, straggler_s, count, weights))
            if solution is None:
                return
            layout = StageLayout(samples=shape.samples, width=width, taken=solution[1], degrees=shape.degrees)
            if not weights.counts_more:
                # What the named devices add can only take longer.
                hoped_s = solution[0] + shape.bound_s(width, shape.straggler_s(layout.taken)) - sum(shape.least_s)
                if (0.0, hoped_s) >= self._best:
                    yield 0.0, hoped_s
                    return
            found = [entry for entry in map(partial(self._placed, layout), (False, True)) if entry is not None]
            self._found += found
            self._best = min([self._best, *(entry.rank[:2] for entry in found)])
            yield from (entry.rank[:2] for entry in found)
            if not any(self._too_dear(entry.estimate) for entry in found):
                return

    def _placed(self, layout: StageLayout, by_pipeline: bool) -> _NamedPipeline | None:
        groups = named(self._space, layout, by_pipeline=by_pipeline)
        if groups is None:
            return None
        figures = estimate(self._space, layout, groups)
        broken = max(0.0, figures.step_s / self._most_s - 1) + self._too_dear(figures)
        names = tuple(name for members in groups for group in members for name in group)
        broken += len(self._limits.broken_by_devices(self._space.profile.cluster, names))
        return _NamedPipeline(layout=layout, groups=groups, estimate=figures, broken=broken)

    def _too_dear(self, figures: Estimate) -> float:
        """Return by how much limits on money are passed, relative to them."""
        limits, total = self._limits, 0.0
        for most, usd in (
            (limits.max_usd_per_step, figures.usd),
            (limits.max_usd_per_hour, 3600 * figures.usd / figures.step_s),
        ):
            if most is not None:
                total += max(0.0, usd / most - 1)
        return total

    def _proposals(self) -> tuple[Proposal, ...]:
        """Return the best as plans; what memory refuses after all is left out."""
        assembler, proposals, misses = (
            Assembler(self._request, SumModel.DEEPSPEED_PIPELINE),
            list[Proposal](),
            list[str](),
        )
        distinct = {entry.groups: entry for entry in sorted(self._found, key=lambda entry: entry.rank, reverse=True)}
        most = _PROPOSED if self._devices <= _MANY_DEVICES else _PROPOSED_OF_MANY
        for entry in sorted(distinct.values(), key=lambda entry: entry.rank):
            shapes = [
                StageShape(
                    units=self._space.stage_units(entry.layout.stages, stage),
                    devices=tuple(name for group in members for name in group),
                    degrees=tuple(len(group) for group in members),
                )
                for stage, members in enumerate(entry.groups)
            ]
            try:
                plan = assembler.plan(shapes, entry.layout.samples * entry.layout.width, "1f1b")
            except InfeasiblePlanError as error:
                misses.append(str(error))
                continue
            proposals.append(Proposal(plan=plan, own_estimate_s=entry.estimate.step_s))
            if len(proposals) == most:
                break
        if not proposals:
            raise InfeasiblePlanError(misses[0])
        return tuple(proposals)


def _rounded(micro_batches: int, stages: int) -> int:
    """Return how many micro-batches a stage is taken to hold at most, rounded up so that few shapes differ."""
    return min(stages, 1 << (micro_batches - 1).bit_length())
