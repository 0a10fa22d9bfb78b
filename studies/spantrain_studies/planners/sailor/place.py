"""Devices for the stages that Sailor's programme chose by supply, and what its simulator (section 4.3) says of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spantrain.planner.strategies.score import Weights
from spantrain_studies.planners.sailor.space import SupplySpace
from spantrain_studies.planners.sailor.task import Taken

Group = tuple[str, ...]
Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """Stages with what they take; all have the same width."""

    samples: int
    """Of a replica's micro-batch."""
    width: int
    taken: tuple[Taken, ...]
    degrees: tuple[tuple[int, ...], ...]
    """Tensor-parallel degree by supply and stage."""

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.taken)

    def replicas(self, stage: int) -> Iterator[tuple[int, int]]:
        """Yield the supply and the degree of each replica of a stage."""
        for supply, count in self.taken[stage]:
            yield from ((supply, self.degrees[supply][stage]) for _ in range(count))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a step takes."""

    step_s: float
    value: float
    """Of the objective."""
    usd: float
    """Infinite where a device has no price."""


def named(space: SupplySpace, layout: StageLayout, *, by_pipeline: bool) -> tuple[tuple[Group, ...], ...] | None:
    """Return the groups of each stage; None if hosts cannot be divided like that.

    Hosts are filled one after the other, by the largest groups first; stage by stage, so that gradients are summed
    inside hosts, or pipeline by pipeline, so that neighbours are inside a host.
    """
    wanted = [
        (stage, number, supply, degree)
        for stage in range(layout.stages)
        for number, (supply, degree) in enumerate(layout.replicas(stage))
    ]
    wanted.sort(key=lambda entry: (-entry[3], entry[1], entry[0]) if by_pipeline else (-entry[3], entry[0], entry[1]))
    free = [[list(members) for members in supply.hosts] for supply in space.supplies]
    found: dict[tuple[int, int], Group] = {}
    for stage, number, supply, degree in wanted:
        host = next((members for members in free[supply] if len(members) >= degree), None)
        if host is None:
            return None
        found[stage, number] = tuple(host[:degree])
        del host[:degree]
    return tuple(tuple(found[stage, number] for number in range(layout.width)) for stage in range(layout.stages))


def estimate(space: SupplySpace, layout: StageLayout, groups: Sequence[Sequence[Group]]) -> Estimate:
    """Return the 1F1B step of section 4.3, with what it costs.

    Its first micro-batch passes all stages and cuts there and back, the others follow at the pace of the straggler (a
    stage, or a cut whose link is busier), and the slowest gradient sum comes at the end.
    """
    job, network = space.job, space.spans.network
    size = layout.samples * layout.width
    micro_batches = -(-job.global_batch // size)
    stages = [_slowest_s(space, layout, stage) for stage in range(layout.stages)]
    pass_s, straggler_s, sum_s = sum(stages), max(stages), 0.0
    sent: dict[Pair, float] = {}
    for stage, members in enumerate(groups):
        units = space.stage_units(layout.stages, stage)
        sum_s = max(sum_s, _sum_s(space, members, units))
        for pairs, size_bytes in _messages(space, groups, stage, units):
            busy_s = _busy_s(space, pairs, layout.samples * size_bytes)
            straggler_s = max(straggler_s, busy_s)
            pass_s += busy_s + max(network.latency_s(*pair) for pair in pairs)
            for pair in pairs:
                sent[pair] = sent.get(pair, 0.0) + job.global_batch * size_bytes / layout.width
    step_s = (micro_batches - 1) * straggler_s + pass_s + sum_s
    busy_by_stage = [micro_batches * seconds for seconds in stages]
    value, usd = (_amount(weights, groups, step_s, busy_by_stage, sent) for weights in (space.weights, space.money))
    return Estimate(step_s=step_s, value=value, usd=usd)


def _messages(
    space: SupplySpace, groups: Sequence[Sequence[Group]], stage: int, units: range
) -> Iterator[tuple[list[Pair], int]]:
    """Yield who sends whom behind a stage, and the bytes of a sample: activations, then gradients.

    The k-th replica of a stage talks to the k-th one of the next, since all stages have the same width.
    """
    if stage + 1 < len(groups):
        cut = space.profile.graph.units[units.stop - 1]
        up = [(a[0], b[0]) for a, b in zip(groups[stage], groups[stage + 1], strict=True)]
        yield up, cut.cut_bytes_per_sample
        yield [(b, a) for a, b in up], cut.gradient_bytes_per_sample


def _amount(
    weights: Weights,
    groups: Sequence[Sequence[Group]],
    step_s: float,
    busy_by_stage: Sequence[float],
    sent: Mapping[Pair, float],
) -> float:
    """Return what a step is worth by some weights: C_comp and C_comm of section 4.3 if they are of money."""
    by_stage = [[name for group in members for name in group] for members in groups]
    total = weights.per_second(name for names in by_stage for name in names) * step_s
    for names, busy_s in zip(by_stage, busy_by_stage, strict=True):
        total += busy_s * sum(weights.busy_by_device[name] for name in names)
    return total + sum(weights.per_byte(*pair) * size for pair, size in sent.items())


def _slowest_s(space: SupplySpace, layout: StageLayout, stage: int) -> float:
    return max(
        space.seconds(supply, layout.degrees[supply][stage], layout.samples, layout.stages)[stage]
        for supply, _ in layout.taken[stage]
    )


def _busy_s(space: SupplySpace, pairs: Sequence[Pair], size_bytes: float) -> float:
    """Return for how long the busiest link is busy when each pair sends so many bytes."""
    network = space.spans.network
    load: dict[str, float] = {}
    for pair in pairs:
        for shared in network.route(*pair):
            load[shared.name] = load.get(shared.name, 0.0) + size_bytes / shared.bandwidth_bytes_per_s
    alone_s = max(network.occupancy_seconds(*pair, size_bytes) for pair in pairs)
    return max(alone_s, *load.values())


def _sum_s(space: SupplySpace, members: Sequence[Group], units: range) -> float:
    """Return the seconds of a ring sum, at the pace of its slowest neighbours; parts of a group share their ports."""
    if len(members) < 2:
        return 0.0
    network = space.spans.network
    leaders = [group[0] for group in members]
    pairs = list(zip(leaders, (*leaders[1:], leaders[0]), strict=True))
    turns, slowest_s = 2 * (len(leaders) - 1), 0.0
    size_bytes = sum(space.profile.graph.held_trained_bytes(units)) / len(leaders)
    for pair in pairs:
        slowest_s = max(slowest_s, network.latency_s(*pair) + network.occupancy_seconds(*pair, size_bytes))
    return turns * slowest_s
