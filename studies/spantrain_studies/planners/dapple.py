"""`dapple`: the planner of DAPPLE (Fan et al., PPoPP 2021, section 4), for synchronous pipelines with early backwards.

Kept: the latency of a step as warm-up, steady part of the pivot stage, and ending with the gradient sums (equations
1-3 and the choice of the pivot), transfers as stages of their own; the search that splits one more stage off what is
left and keeps the best prefix for each number of layers and machines; replicas that share samples equally; 1F1B.
Machines are taken in the cluster's order, whole (its policies fresh-first and append-first). Times of a stage are its
slowest device's. Its own sums come behind the last backward; here they are torch's DDP, as in Asteroid's comparison,
which is in its favour. Not kept: the policy scatter-first, and recomputing activations. Memory is not looked at while
planning; what does not fit is planned again with smaller micro-batches, and refused if they do not help.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from spantrain.core.action import Op
from spantrain.core.plan import SumModel
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import StageShape
from spantrain.planner.request import PlanRequest, Proposal
from spantrain_studies.planners.assembler import PaperAssembler

_MAX_PLACES = 1000
_SIZES = 2
"""Micro-batch sizes that are planned for: the largest that leave several micro-batches; smaller ones if none fits."""

Place = tuple[int, int]
"""Units and hosts used up to here."""
Ends = tuple[Place, ...]
"""Where each stage ends."""


@dataclass(frozen=True, slots=True)
class _StepPart:
    """A stage, or a transfer between two."""

    forward_s: float
    backward_s: float
    sum_s: float = 0.0


def dapple(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose DAPPLE's stages for some micro-batch sizes.

    Raises:
        InfeasiblePlanError: no partition fits, or there are more hosts than its search can go through.
    """
    assembler = PaperAssembler(request, SumModel.TORCH_DDP)
    hosts = _hosts(request)
    places = len(hosts) * assembler.units
    if places > _MAX_PLACES:
        raise InfeasiblePlanError(
            f"goes through splits of units and hosts, {_MAX_PLACES} places at most, got {len(hosts)} hosts with "
            f"{assembler.units} units"
        )
    sizes = request.job.micro_batch_sizes()
    several = [size for size in sizes if 4 * size <= request.job.global_batch]
    try:
        return assembler.best(_options(assembler, request, hosts, several[-_SIZES:]), "1f1b")
    except InfeasiblePlanError as error:
        first_miss = error
    for size in reversed(several[:-_SIZES]):
        try:
            return assembler.best(_options(assembler, request, hosts, [size]), "1f1b")
        except InfeasiblePlanError:
            continue
    raise first_miss


def _hosts(request: PlanRequest) -> list[tuple[str, ...]]:
    by_host: dict[str, list[str]] = {}
    for name in request.devices_within_quotas:
        by_host.setdefault(request.profile.cluster.device_by_name[name].host, []).append(name)
    return [tuple(members) for members in by_host.values()]


def _options(
    assembler: PaperAssembler, request: PlanRequest, hosts: list[tuple[str, ...]], wanted: Sequence[int]
) -> Iterator[tuple[tuple[StageShape, ...], int, float]]:
    found = 0
    larger = (size for size in request.job.micro_batch_sizes() if 4 * size > request.job.global_batch)
    for size in (*wanted, *larger):
        # Larger ones only if those leave a device without a sample whatever the stages.
        if found and size not in wanted:
            return
        latency_s, shapes = _DappleSearch(assembler, hosts, size).run()
        if latency_s < float("inf"):
            found += 1
            yield shapes, size, latency_s


class _DappleSearch:
    """The search of section 4.3 for one micro-batch size."""

    def __init__(self, assembler: PaperAssembler, hosts: list[tuple[str, ...]], size: int) -> None:
        self._assembler, self._hosts, self._size = assembler, hosts, size
        self._count = -(-assembler.job.global_batch // size)
        self.devices = cache(self._devices)
        self.kinds = cache(self._kinds)
        self.ring = cache(self._ring)
        self.part = cache(self._part)
        self.transfer = cache(self._transfer)

    def run(self) -> tuple[float, tuple[StageShape, ...]]:
        """Return the least latency found, and its stages."""
        units, hosts = self._assembler.units, len(self._hosts)
        best_ends: Ends = ((units, hosts),)
        best_s = self._latency_s(best_ends)
        prefixes: dict[Place, tuple[float, Ends]] = {(0, 0): (best_s, ())}
        for end in range(1, units):
            for used in range(1, hosts):
                found = self._best_prefix(prefixes, end, used, best_s)
                if found is not None:
                    prefixes[end, used] = found
                    if found[0] < best_s:
                        best_s, best_ends = found[0], (*found[1], (units, hosts))
        return best_s, tuple(self._shape(before, here) for before, here in pairwise(((0, 0), *best_ends)))

    def _best_prefix(
        self, prefixes: dict[Place, tuple[float, Ends]], end: int, used: int, best_s: float
    ) -> tuple[float, Ends] | None:
        """Return the best way to this place whose rest is one stage, with the latency of the whole."""
        found = None
        last = (self._assembler.units, len(self._hosts))
        for (first, before), (_, ends) in prefixes.items():
            if first >= end or before >= used or len(self.devices(before, used)) > self._size:
                continue
            part = self.part((first, before), (end, used))
            if (self._count - 1) * (part.forward_s + part.backward_s) >= best_s:
                continue
            tried = (*ends, (end, used))
            latency_s = self._latency_s((*tried, last))
            if found is None or latency_s <= found[0]:
                found = (latency_s, tried)
        return found

    def _latency_s(self, ends: Ends) -> float:
        """Return the latency of a step: equations 1 to 3; infinite if a device would get no sample."""
        stages = pairwise(((0, 0), *ends))
        if any(len(self.devices(before, used)) > self._size for (_, before), (_, used) in stages):
            return float("inf")
        parts: list[_StepPart] = []
        for index, (before, here) in enumerate(pairwise(((0, 0), *ends))):
            if index > 0:
                parts.append(self.transfer(ends[index - 1]))
            parts.append(self.part(before, here))
        pivot = len(parts) - 1
        steady = [(self._count - 1) * (part.forward_s + part.backward_s) for part in parts]
        between = 0.0
        for index in range(len(parts) - 2, -1, -1):
            if steady[index] > steady[pivot] + between:
                pivot, between = index, 0.0
            else:
                between += parts[index].forward_s + parts[index].backward_s
        ending = 0.0
        for index, part in enumerate(parts):
            low, high = sorted((index, pivot))
            way = sum(entry.backward_s for entry in parts[low : high + 1])
            ending = max(ending, part.sum_s + (way if index <= pivot else -way))
        return sum(part.forward_s for part in parts[: pivot + 1]) + steady[pivot] + ending

    def _devices(self, before: int, used: int) -> tuple[str, ...]:
        return tuple(name for members in self._hosts[before:used] for name in members)

    def _kinds(self, before: int, used: int) -> frozenset[str]:
        return frozenset(self._assembler.kinds(self.devices(before, used)))

    def _shape(self, before: Place, here: Place) -> StageShape:
        return StageShape(units=range(before[0], here[0]), devices=self.devices(before[1], here[1]))

    def _part(self, before: Place, here: Place) -> _StepPart:
        devices, units = self.devices(before[1], here[1]), range(before[0], here[0])
        samples = max(1, round(self._size / len(devices)))
        compute = self._assembler.spans.compute
        kinds = self.kinds(before[1], here[1])
        sums = self._assembler.trained_sums
        gradients = float(sums[units.stop] - sums[units.start])
        return _StepPart(
            forward_s=max(compute.kind_seconds(units, kind, Op.FORWARD, samples) for kind in kinds),
            backward_s=max(compute.kind_seconds(units, kind, Op.BACKWARD, samples) for kind in kinds),
            sum_s=self._ring_s(before[1], here[1], gradients),
        )

    def _ring_s(self, before: int, used: int, size_bytes: float) -> float:
        latency_s, per_byte = self.ring(before, used)
        return latency_s + per_byte * size_bytes

    def _ring(self, before: int, used: int) -> tuple[float, float]:
        devices = self.devices(before, used)
        if len(devices) < 2:
            return 0.0, 0.0
        links = [self._assembler.spans.network.link(a, b) for a, b in pairwise((*devices, devices[0]))]
        turns = 2 * (len(devices) - 1)
        slowest = min(link.bandwidth_bytes_per_s for link in links)
        return turns * max(link.latency_s for link in links), turns / len(devices) / slowest

    def _transfer(self, before: Place) -> _StepPart:
        """Return the way from the last host before a place to the first behind it, the narrowest of the cut."""
        source, target = self._hosts[before[1] - 1][-1], self._hosts[before[1]][0]
        link = self._assembler.spans.network.link(source, target)
        cut = self._assembler.profile.graph.units[before[0] - 1]
        return _StepPart(
            forward_s=link.latency_s + self._size * cut.cut_bytes_per_sample / link.bandwidth_bytes_per_s,
            backward_s=link.latency_s + self._size * cut.gradient_bytes_per_sample / link.bandwidth_bytes_per_s,
        )
