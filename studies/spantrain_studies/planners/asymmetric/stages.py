"""Stages of replicas that are unlike: what they cost and hold, and the cuts that make the slowest one fastest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from spantrain.core.shares import StateSharding, even_share
from spantrain.core.span import apportion
from spantrain.cost.held_sizes import Division
from spantrain.cost.span_tables import Array, over_spans
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import StageShape, least_largest
from spantrain.planner.request import PlanRequest
from spantrain_studies.planners.assembler import PaperAssembler
from spantrain_studies.planners.asymmetric.graph import DeviceGraph, Devices

MAX_DEVICES, MAX_STAGES = 128, 24
"""A graph of more devices is refused; a pipeline has no more stages."""


def graph_within(request: PlanRequest, assembler: PaperAssembler) -> DeviceGraph:
    """Return the graph of the devices that may be used.

    Raises:
        InfeasiblePlanError: they are too many.
    """
    devices = request.devices_within_quotas
    if len(devices) > MAX_DEVICES:
        raise InfeasiblePlanError(f"divides graphs of up to {MAX_DEVICES} devices, got {len(devices)}")
    return DeviceGraph(devices, assembler.spans.network)


@dataclass(frozen=True, kw_only=True)
class Crew:
    """A stage to be, without units: devices of each replica, and what part of a micro-batch each gets."""

    groups: tuple[Devices, ...]
    shares: tuple[float, ...]
    sharding: StateSharding = StateSharding.NONE

    @property
    def devices(self) -> Devices:
        """All devices, by replica."""
        return tuple(name for group in self.groups for name in group)

    def sizes(self, size: int) -> tuple[int, ...]:
        """Divide a micro-batch."""
        return apportion(size, self.shares)


@dataclass(frozen=True, kw_only=True)
class Option:
    """A pipeline with its cuts, and the seconds of a step as the planner itself has them."""

    shapes: tuple[StageShape, ...]
    size: int
    latency_s: float


class CrewCosts:
    """Seconds and room of crews, by units i to j-1 as [i, j]."""

    def __init__(self, assembler: PaperAssembler) -> None:
        self._assembler, self._spans = assembler, assembler.spans
        self._by_name = assembler.profile.cluster.device_by_name
        self._fits = cache(self._fit)

    def speed(self, group: Devices) -> float:
        """Return the samples per second of the whole model on the devices of a replica."""
        return 1 / max(float(self._spans.work(group, (1.0,) * len(group), 1)[-1]), 1e-12)

    def options(self, crews: Sequence[Crew], graph: DeviceGraph, sum_passes: float) -> Iterator[Option]:
        """Yield the pipeline with the best cuts for each size of micro-batch that gives every replica a sample.

        `sum_passes`: how often a stage's gradients cross its slowest link in a step.
        """
        hops = [0.0, *(1 / graph.between(a.devices, b.devices) for a, b in pairwise(crews))]
        trained = self._assembler.trained_sums
        for size in self._assembler.job.micro_batch_sizes():
            count = -(-self._assembler.job.global_batch // size)
            if any(min(crew.sizes(size)) < 1 for crew in crews):
                continue
            arrives = (size * self._assembler.cut_bytes)[:, None]
            costs = [
                self.seconds(crew, size, min(len(crews) - place, count)) + hop * arrives
                for place, (crew, hop) in enumerate(zip(crews, hops, strict=True))
            ]
            slowest_s, begins = least_largest(costs)
            if slowest_s == float("inf"):
                continue
            parts = list(pairwise(begins))
            passed_s = sum(float(cost[part]) for cost, part in zip(costs, parts, strict=True))
            sums_s = max(
                sum_passes * float(trained[end] - trained[first]) / graph.least_inside(crew.devices)
                for crew, (first, end) in zip(crews, parts, strict=True)
            )
            shapes = tuple(
                StageShape(
                    units=range(first, end),
                    devices=crew.devices,
                    shares=crew.sizes(size),
                    degrees=tuple(map(len, crew.groups)),
                    state_sharding=crew.sharding,
                )
                for crew, (first, end) in zip(crews, parts, strict=True)
            )
            yield Option(shapes=shapes, size=size, latency_s=(count - 1) * slowest_s + passed_s + sums_s)

    def seconds(self, crew: Crew, size: int, held: int) -> Array:
        """Return the slowest replica's seconds; infinite where one has no room for so many micro-batches."""
        seconds, fits = np.zeros(self._spans.above.shape), self._spans.above
        for group, samples in zip(crew.groups, crew.sizes(size), strict=True):
            seconds = np.maximum(seconds, over_spans(self._spans.work(group, (1.0,) * len(group), samples)))
            division = Division(
                tp_share=even_share(len(group)), state_sharding=crew.sharding, replicas=len(crew.groups)
            )
            room = min(self._by_name[name].memory_bytes for name in group)
            fits = fits & self._fits(self._by_name[group[0]].backend, room, samples, held, division)
        return np.where(fits, seconds, np.inf)

    def _fit(self, backend: str, room: int, samples: int, held: int, division: Division) -> np.ndarray:
        """Return where a device has room; with state that is divided, span by span until one has none."""
        name = next(one.name for one in self._by_name.values() if one.backend == backend)
        if division.state_sharding is StateSharding.NONE:
            return self._spans.need(name, samples * held, samples, division.tp_share) <= room
        units, fits = self._spans.units, np.zeros(self._spans.above.shape, dtype=bool)
        for first in range(units):
            for end in range(first + 1, units + 1):
                need = self._spans.memory.need(range(first, end), name, samples * held, samples, division)
                if need.peak_bytes > room:
                    break
                fits[first, end] = True
        return fits
