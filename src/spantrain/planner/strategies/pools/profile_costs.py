"""A profile of ours as the costs that the search over pools asks for.

Devices of one kind, memory and backend, in hosts of which as many may be used, are a pool of their site; the first ones
stand for all. What is left out, against the simulator: replicas of one host that talk inside it, sums of several stages
that share a link, and that a link is not always asked by all pipelines at the same time.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby, pairwise

import numpy as np

from spantrain.core.action import Op
from spantrain.core.plan import Plan
from spantrain.core.shares import even_share
from spantrain.core.span import equal_spans
from spantrain.cost.held_sizes import Division
from spantrain.cost.span_tables import Array, SpanTables
from spantrain.cost.sums import Words, words_between
from spantrain.planner.assembly.assemble import draft_stage
from spantrain.planner.request import Objective, PlanRequest, Restriction
from spantrain.planner.strategies.pools.costs import DevicePool, HopSeconds, PoolPlan, PoolReplica, PoolStage, Runs
from spantrain.planner.strategies.relaxation import Relaxation
from spantrain.planner.strategies.score import weights_of
from spantrain.schedule.registry import splits_backward

_MEBIBYTE = 2**20
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def find_pools(request: PlanRequest) -> Iterator[tuple[DevicePool, tuple[str, ...]]]:
    """Yield the pools of the devices that may be used, with these."""
    cluster = request.profile.cluster
    by_host: dict[tuple[str, str, str, int, str], list[str]] = {}
    for name in request.devices_within_quotas:
        device = cluster.device_by_name[name]
        by_host.setdefault((device.site, device.host, *device.make), []).append(name)
    rows = sorted(
        ((site, kind, memory, backend, len(names), names[0] in request.dividing), host, names)
        for (site, host, kind, memory, backend), names in by_host.items()
    )
    for (site, kind, _, _, size, _), hosts in groupby(rows, key=lambda row: row[0]):
        members = tuple(name for _, _, names in hosts for name in names)
        yield DevicePool(kind=kind, site=site, count=len(members), host_size=size), members


class ProfilePools:
    """Costs of a request's profile on the devices that may be used.

    Raises:
        ProfileError: the profile lacks a timing or a link (when it is asked for).
    """

    width_matters = True
    """Pipelines share ports of hosts and lines between sites."""

    def __init__(self, request: PlanRequest, *, most_degree: int, inside_hosts: bool = False) -> None:
        """Keep the request; tensor-parallel groups have at most so many devices.

        `inside_hosts`: what a pipeline has of a pool is in one host, so that only sums leave it; else replicas of a
        stage lie side by side.
        """
        self.inside_hosts = inside_hosts
        self.schedule = "1f1b" if request.restriction is Restriction.MEGATRON else request.job.schedule
        """The plans' order of work."""
        self._profile, self._job, self._most_degree = request.profile, request.job, most_degree
        self._graph = request.profile.graph.units
        self._divides_anywhere, self._dividing = request.restriction is Restriction.MEGATRON, request.dividing
        self.global_batch, self.units = request.job.global_batch, len(self._graph)
        splits = splits_backward(self.schedule)
        self._spans = SpanTables(request.profile, request.job.optimizer, request.job.dtype, splits=splits)
        self._network, self._memory = self._spans.network, self._spans.memory
        self._objective = Objective.COST if request.objective is Objective.THROUGHPUT else request.objective
        self._weights = weights_of(request.profile.cluster, self._objective, self.global_batch)
        self._relaxation = Relaxation(request)
        found = list(find_pools(request))
        self.pools, self._devices = tuple(pool for pool, _ in found), [names for _, names in found]
        self._sums = cache(self._gradient_sums)
        self._hop_s, self._words = cache(self._hop_of), cache(self._words_of)
        self._passed_on = cache(self._passed_on_s)
        runtime = request.profile.runtime
        self._message_s = runtime.message_s if runtime else 0.0

    def sizes(self) -> tuple[int, ...]:
        """Return micro-batch sizes of one replica."""
        return tuple(size for size in _SIZES if size <= self.global_batch)

    def degrees(self, pool: int, size: int) -> tuple[int, ...]:  # noqa: ARG002 - the same for all sizes
        """Return powers of two that fill hosts without a rest."""
        divides = self._divides_anywhere or self._devices[pool][0] in self._dividing
        if not divides or not any(unit.tensor_sums for unit in self._graph):
            return (1,)
        most = min(self._most_degree, self.pools[pool].host_size)
        powers = (2**k for k in range(most.bit_length()))
        return tuple(degree for degree in powers if degree <= most and self.pools[pool].host_size % degree == 0)

    def fits_a_host(self, pool: int, devices: int) -> bool:
        """Whether a pipeline may have so many devices of a pool: a part of a host that leaves no rest."""
        return not self.inside_hosts or self.pools[pool].host_size % devices == 0

    def forward_s(self, member: PoolReplica, size: int) -> Array:
        """Return running sums over units."""
        return self._running(member, Op.FORWARD, size)

    def backward_s(self, member: PoolReplica, size: int) -> Array:
        """Return running sums over units of I and W."""
        return self._running(member, Op.BACKWARD_INPUT, size) + self._running(member, Op.BACKWARD_WEIGHT, size)

    def need_bytes(self, member: PoolReplica, size: int, left: int, micro_batches: int) -> Array:
        """Return what `cost.memory` says of 1F1B's samples in flight."""
        first, share = self._devices[member.pool][0], even_share(member.tp_degree)
        return self._spans.need(first, min(left, micro_batches) * size, size, share)

    def memory_bytes(self, pool: int) -> int:
        """Return what a device has."""
        return self._profile.cluster.device_by_name[self._devices[pool][0]].memory_bytes

    def hop(self, lower: PoolReplica, upper: PoolReplica, size: int, width: int) -> HopSeconds:
        """Return what messages take: they pass beside the computation, and share links with other pipelines'."""
        up_s, up_link_s, up_wait_s, up_port_s = self._way(lower, upper, size, width, forward=True)
        down_s, down_link_s, down_wait_s, down_port_s = self._way(upper, lower, size, width, forward=False)
        nothing = np.zeros(self.units + 1)
        return HopSeconds(
            lower_forward_s=nothing,
            upper_forward_s=nothing,
            upper_backward_s=nothing,
            lower_backward_s=nothing,
            delay_forward_s=up_wait_s + np.maximum(up_s, up_link_s),
            delay_backward_s=down_wait_s + np.maximum(down_s, down_link_s),
            link_s=np.maximum(up_link_s, down_link_s),
            through_s=up_port_s + down_port_s,
        )

    def site_distance_s(self, a: int, b: int) -> float:
        """Return the seconds of a message of a mebibyte."""
        return self._network.transfer_seconds(*self._apart(a, b), _MEBIBYTE)

    def least_step_s(self, sites: Sequence[str]) -> float:
        """Return what compute, memory and links let one expect at best."""
        return self._relaxation.joined_s(sites) if len(sites) > 1 else self._relaxation.alone_s(sites[0])

    def gradient_sums_s(self, plan: PoolPlan) -> list[float]:
        """Return about what rings take: the slowest hop decides.

        Those of several stages that cross sites share it; so do two where a stage begins in the host in which another
        ends.
        """
        crossing = [len({self.pools[member.pool].site for member, _ in stage.runs}) > 1 for stage in plan.stages]
        found = []
        for stage, crosses in zip(plan.stages, crossing, strict=True):
            meets = len(plan.stages) > 1 and self._ends_inside_hosts(stage.runs)
            found.append(self._ring_s(stage, beside=sum(crossing) if crosses else 1 + meets))
        return found

    def _ends_inside_hosts(self, runs: Runs) -> bool:
        """Whether the devices of a stage, all of one pool, do not fill hosts, nor a host several times."""
        pools = {member.pool for member, _ in runs}
        if self.inside_hosts or len(pools) > 1:
            return False
        devices, size = sum(member.tp_degree * count for member, count in runs), self.pools[pools.pop()].host_size
        return devices % size != 0 and size % devices != 0

    def tied_s(self, plan: PoolPlan) -> float:
        """Return what the first and the last holder of each shared parameter take to exchange it, and to pass it on."""
        total = 0.0
        for name, size_bytes in self._profile.graph.trained_shared_bytes.items():
            holders = [stage for stage in plan.stages if any(name in self._graph[unit].shared for unit in stage.units)]
            if len(holders) > 1:
                first, last = holders[0].runs[0][0].pool, holders[-1].runs[0][0].pool
                exchange_s = self._network.transfer_seconds(*self._apart(first, last), size_bytes)
                rounds = (self._passed_on(stage.runs, size_bytes) for stage in holders)
                total += exchange_s + max(rounds)
        return total

    def _passed_on_s(self, runs: Runs, size_bytes: int) -> float:
        """Return what a stage's replicas take to pass so many bytes on to each other, along a tree."""
        rows = ((self._group(member, number * member.tp_degree)[0]) for member, n in runs for number in range(n))
        return self._network.collectives.broadcast_s(tuple(rows), size_bytes)

    def sums_across_s(self, a: int, b: int, width: int, stages: Array) -> Array:
        """Return about what sums take beside each other of so many stages, whose rings go through two sites."""
        latency_s, s_per_byte = self._hop_s(PoolReplica(a, 1), PoolReplica(b, 1))
        size_bytes = self._trained_bytes(range(self.units))
        turns = 4 if self._words((a, b)) is Words.NONE else 5  # and the first word
        return np.full(stages.shape, turns * latency_s + 2 * (width - 1) / width * size_bytes * s_per_byte)

    def update_s(self, stage: PoolStage, size: int) -> float:  # noqa: ARG002 - nobody measured it by stage
        """Return nothing: updates are part of the runtime's own seconds."""
        return 0.0

    def sums_s(self, member: PoolReplica, width: int) -> Array:
        """Return what summing over hosts of one pool takes, by the bytes of the units."""
        return self._sums(member, width)

    def usd_per_s(self, pool: int) -> float:
        """Return what a device in use costs, computing all the time; joules per sample where energy is what counts."""
        name = self._devices[pool][0]
        return self._weights.second_by_device[name] + self._weights.busy_by_device[name]

    def usd_of_traffic(self, plan: PoolPlan) -> float:
        """Return what crosses sites, of activations, gradients and sums, in the objective's own unit."""
        if len({self.pools[pool].site for pool in plan.devices_by_pool}) == 1:
            return 0.0
        total = 0.0
        for stage in plan.stages:
            ring_bytes = 2 * (plan.width - 1) / plan.width * self._trained_bytes(stage.units)
            total += ring_bytes * sum(count * self._per_byte(*pair) for pair, count in stage.hops.items())
        for pipeline, count in plan.pipelines().items():
            samples = count * plan.micro_batch * plan.micro_batches
            for stage, (a, b) in zip(plan.stages, pairwise(pipeline), strict=False):
                unit = self._graph[stage.units.stop - 1]
                total += samples * unit.cut_bytes_per_sample * self._per_byte(a, b)
                total += samples * unit.gradient_bytes_per_sample * self._per_byte(b, a)
        return total

    def plan(self, plan: PoolPlan) -> Plan:
        """Return a plan with devices: groups inside hosts, in-flight limits as 1F1B needs them or as memory allows."""
        rows = self._placed(plan)
        spans = equal_spans(self.global_batch, plan.micro_batch * plan.width)
        stages = []
        for index, (stage, groups) in enumerate(zip(plan.stages, rows, strict=True)):
            draft = draft_stage(stage.units, spans, ((group, 1.0, (1.0,) * len(group)) for group in groups))
            limits = ((self._limit(plan, index, member), count) for member, count in stage.runs)
            stages.append(draft.with_limits(limit for limit, count in limits for _ in range(count)))
        return self._job.plan_of(self._profile, stages, schedule=self.schedule)

    def _group(self, member: PoolReplica, number: int = 0) -> tuple[str, ...]:
        return self._devices[member.pool][number : number + member.tp_degree]

    def _running(self, member: PoolReplica, op: Op, size: int) -> Array:
        return self._spans.seconds(self._group(member), (1.0,) * member.tp_degree, op, size)

    def _way(
        self, source: PoolReplica, target: PoolReplica, size: int, width: int, *, forward: bool
    ) -> tuple[Array, Array, float, Array]:
        """Return by cut the seconds of a message alone and of all on the busiest link; the latency; those of a port."""
        inside = self.inside_hosts and source.pool == target.pool and self.pools[source.pool].host_size > 1
        pair = self._beside(source.pool) if inside else self._apart(source.pool, target.pool)
        if pair[0] == pair[1]:
            # The only one of its pool sends itself nothing.
            nothing = np.zeros(self.units + 1)
            return nothing, nothing, 0.0, nothing
        here = 1 if inside else min(width, self.pools[source.pool].host_size // source.tp_degree)
        route = self._network.route(*pair)
        port = max((here / one.bandwidth_bytes_per_s for one in route if not one.between_sites), default=0.0)
        slowest = max(port, *(width / one.bandwidth_bytes_per_s for one in route if one.between_sites), 0.0)
        sizes = size * self._spans.cut_bytes()[not forward]
        known = {size_bytes: self._network.occupancy_seconds(*pair, size_bytes) for size_bytes in set(sizes.tolist())}
        alone = np.array([known[size_bytes] for size_bytes in sizes.tolist()])
        return alone, sizes * slowest, self._network.latency_s(*pair) + self._message_s, sizes * port

    def _beside(self, pool: int) -> tuple[str, str]:
        """Return two devices of one host."""
        first, second = self._devices[pool][:2]
        return first, second

    def _apart(self, a: int, b: int) -> tuple[str, str]:
        """Return a device of each pool, on different hosts if there are any."""
        one, rest = self._devices[a][0], self._devices[b]
        host = self._profile.cluster.device_by_name
        others = (name for name in (rest[0], rest[-1]) if host[name].host != host[one].host)
        return one, next(others, rest[-1])

    def _trained_bytes(self, units: range, tp_degree: int = 1) -> float:
        """Return the bytes that a group's member trains, of what units share all at the first of the model."""
        sums = self._trained_sums(tp_degree)
        return float(sums[units.stop] - sums[units.start])

    def _trained_sums(self, tp_degree: int) -> Array:
        """Return running sums of the bytes of parameters that one member of a group trains."""
        return np.asarray(self._spans.trained(even_share(tp_degree))[0])

    def _ring_s(self, stage: PoolStage, beside: int = 1) -> float:
        width, hops, first = stage.width, stage.hops, stage.runs[0][0].pool
        if width < 2:
            return 0.0
        degree = min(member.tp_degree for member, _ in stage.runs)
        size_bytes = self._trained_bytes(stage.units, degree)
        at_home = len(hops) == 1 and not self.inside_hosts and beside == 1
        if at_home and width * degree <= self.pools[first].host_size:
            return 2 * (width - 1) / width * self._network.collectives.seconds(self._beside(first), size_bytes)
        latency_s, s_per_byte = map(max, zip(*(self._hop_s(a, b) for a, b in hops), strict=True))
        words = self._words(tuple(dict.fromkeys(member.pool for member, _ in stage.runs)))
        if len(hops) > 1 and words is Words.EACH:
            return float(_waiting_s(np.array(size_bytes), width, latency_s, s_per_byte, np.array(float(beside))))
        around_s = sum(count * self._hop_s(a, b)[0] for (a, b), count in hops.items()) if len(hops) > 1 else 0.0
        turn_s = beside * size_bytes / width * s_per_byte + (latency_s if len(hops) == 1 else around_s / width)
        return 2.0 * (width - 1) * float(turn_s) + (latency_s if words is Words.FIRST else 0.0)

    def _words_of(self, pools: tuple[int, ...]) -> Words:
        """Return which words of their receivers sums over devices of these pools wait for."""
        device = self._profile.cluster.device_by_name
        return words_between([device[self._devices[pool][0]] for pool in pools])

    def _hop_of(self, a: PoolReplica, b: PoolReplica) -> tuple[float, float]:
        """Return the latency of a hop of the rings of all members of two groups, and the seconds of a byte of each."""
        pair = self._apart(a.pool, b.pool)
        if pair[0] == pair[1]:
            return 0.0, 0.0
        rings = self.pools[a.pool].host_size if self.inside_hosts else max(a.tp_degree, b.tp_degree)
        slowest = max(rings / shared.bandwidth_bytes_per_s for shared in self._network.route(*pair))
        own = self._network.link(*pair)
        return own.latency_s, max(slowest, 1 / own.bandwidth_bytes_per_s)

    def _gradient_sums(self, member: PoolReplica, width: int) -> Array:
        sums = self._trained_sums(member.tp_degree)
        whole_s = self._ring_s(PoolStage(units=range(self.units), runs=((member, width),)))
        return np.asarray(sums * (whole_s / max(float(sums[-1]), 1.0)))

    def _per_byte(self, a: PoolReplica, b: PoolReplica) -> float:
        return self._weights.per_byte(self._devices[a.pool][0], self._devices[b.pool][0])

    def _placed(self, plan: PoolPlan) -> list[list[tuple[str, ...]]]:
        """Return the devices of every replica: the widest groups of a pool first, so that none spans two hosts.

        Where pipelines stay inside hosts they come one after the other, each a part of a host that leaves no rest.
        """
        rows: list[list[tuple[str, ...]]] = [[()] * plan.width for _ in plan.stages]
        taken = [0] * len(self.pools)
        order = sorted(
            ((number if self.inside_hosts else 0, -member.tp_degree, stage_index, number), member)
            for stage_index, stage in enumerate(plan.stages)
            for number, member in enumerate(stage.members)
        )
        for (_, _, stage_index, number), member in order:
            rows[stage_index][number] = self._group(member, taken[member.pool])
            taken[member.pool] += member.tp_degree
        return rows

    def _limit(self, plan: PoolPlan, index: int, member: PoolReplica) -> int:
        held = min(len(plan.stages) - index, plan.micro_batches) * plan.micro_batch
        if self.schedule == "1f1b":
            return held
        units = plan.stages[index].units
        # Large buckets of sums, which links of much latency need, are to have room, unless that holds up the pipeline.
        copies = self._trained_bytes(units, member.tp_degree) if plan.width > 1 else 0.0
        limits = [
            self._memory.in_flight_limit_for(
                units,
                self._devices[member.pool][0],
                plan.micro_batches * plan.micro_batch,
                plan.micro_batch,
                limit_bytes=self.memory_bytes(member.pool) - int(spared),
                division=Division(tp_share=even_share(member.tp_degree), splits=self._spans.splits),
            )
            for spared in (copies, 0.0)
        ]
        return limits[0] if limits[0] >= min(2 * held, limits[1]) else limits[1]


def _waiting_s(size_bytes: Array, width: int, latency_s: float, s_per_byte: float, beside: Array) -> Array:
    """Return about what sums by Gloo take, of which so many share the slowest hop: two buckets beside each other.

    Of each, two segments are under way at once; the word that lets the next ones go comes back over that hop.
    """
    turn_s = size_bytes / 2 / width * s_per_byte
    segments = 2 * np.maximum(2.0, np.ceil(size_bytes / 2 / width / _MEBIBYTE))
    busy_s = 2 * turn_s / segments
    alone_s = segments * (width - 1) * (busy_s + np.maximum(busy_s, latency_s))
    return np.asarray(alone_s * (latency_s + beside * turn_s) / (latency_s + turn_s))
