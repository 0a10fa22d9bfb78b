"""A folder of measured figures as the costs that the search over pools asks for (`planner.strategies.pools.costs`)."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from spantrain.cost.span_tables import Array
from spantrain.errors import PlanError, ProfileError
from spantrain.planner.strategies.pools.costs import DevicePool, HopSeconds, PoolPlan, PoolReplica, PoolStage
from spantrain_studies.reference.layers import LayerCosts
from spantrain_studies.reference.network import ReferenceNetwork
from spantrain_studies.reference.platform import Platform
from spantrain_studies.reference.types import FLOAT_BYTES, Reference, ReferencePlan, ReferenceReplica, ReferenceStage

_MEBIBYTE = 2.0**20
_MESSAGES_HELD = 2
"""Of each neighbour at once: one at work, one that came early."""


def pools_of(reference: Reference, available: Mapping[tuple[str, str], int]) -> tuple[DevicePool, ...]:
    """Return the pools of so many devices by kind and zone.

    Raises:
        PlanError: a kind is not in the folder's list of hosts, or a count is negative.
    """
    for (kind, zone), count in available.items():
        if kind not in reference.devices_per_host:
            known = ", ".join(sorted(reference.devices_per_host))
            raise PlanError(f"{kind} in {zone}: prices.json knows {known}; use one of them")
        if count < 0:
            raise PlanError(f"{kind} in {zone}: the number of devices must not be negative, got {count}")
    return tuple(
        DevicePool(kind=kind, site=zone, count=count, host_size=reference.devices_per_host[kind])
        for (kind, zone), count in available.items()
        if count
    )


def reference_plan(model: str, global_batch: int, plan: PoolPlan, pools: tuple[DevicePool, ...]) -> ReferencePlan:
    """Return a plan by pools in the form that `spantrain_studies.reference.costs` takes."""
    return ReferencePlan(
        model=model,
        global_batch=global_batch,
        micro_batch=plan.micro_batch,
        stages=tuple(
            ReferenceStage(layers=stage.units, replicas=tuple(_replica(pools, member) for member in stage.members))
            for stage in plan.stages
        ),
        hosts=hosts_of(plan, pools),
    )


def hosts_of(plan: PoolPlan, pools: tuple[DevicePool, ...]) -> tuple[tuple[int, ...], ...]:
    """Return a host for every replica of every stage, no two pools in one.

    The widest groups of a pool come first, then stages in order, so that no group spans two hosts as long as
    widths divide each other and the size of a host.
    """
    order = sorted(
        (member.pool, -member.tp_degree, stage_index, number)
        for stage_index, stage in enumerate(plan.stages)
        for number, member in enumerate(stage.members)
    )
    rows = [[0] * plan.width for _ in plan.stages]
    taken: Counter[int] = Counter()
    names: dict[tuple[int, int], int] = {}
    for pool, negative, stage_index, number in order:
        key = (pool, taken[pool] // pools[pool].host_size)
        taken[pool] -= negative
        rows[stage_index][number] = names.setdefault(key, len(names))
    return tuple(map(tuple, rows))


def _replica(pools: tuple[DevicePool, ...], member: PoolReplica) -> ReferenceReplica:
    pool = pools[member.pool]
    return ReferenceReplica(kind=pool.kind, zone=pool.site, tp_degree=member.tp_degree)


class ReferencePools:
    """Costs of one model of a folder on so many devices of each kind and zone, on a platform."""

    inside_hosts = False
    width_matters = False
    """Links were measured with all devices of a host sending at once."""

    def __init__(
        self, reference: Reference, model: str, global_batch: int, pools: tuple[DevicePool, ...], platform: Platform
    ) -> None:
        """Keep them.

        Raises:
            PlanError: the folder has no such model, or no prices.
        """
        if model not in reference.models:
            raise PlanError(f"the folder has no model {model!r}; it has {', '.join(sorted(reference.models))}")
        if reference.prices is None:
            raise PlanError(
                "prices.json has no 'gpu_usd_per_hour_simulator'; planning needs prices and memory constants"
            )
        self._reference, self._prices, self._platform = reference, reference.prices, platform
        self._model = reference.models[model]
        self._layers = LayerCosts(reference, model, platform)
        self._network = ReferenceNetwork(reference)
        self.pools, self.global_batch, self.units = pools, global_batch, self._model.num_layers
        self._parameters = cache(self._parameter_sums)
        self._activations = cache(self._activation_bytes)
        self._sums = cache(self._gradient_sums)
        self._cut_bytes = cache(self._bytes_of_cuts)

    def sizes(self) -> tuple[int, ...]:
        """Return the micro-batch sizes that were timed on any of the kinds."""
        kinds = {pool.kind for pool in self.pools}
        found = {samples for kind, samples, _ in self._model.times if kind in kinds}
        return tuple(sorted(size for size in found if size <= self.global_batch))

    def degrees(self, pool: int, size: int) -> tuple[int, ...]:
        """Return the degrees that were timed with such micro-batches and fill hosts without a rest."""
        kind, host = self.pools[pool].kind, self.pools[pool].host_size
        timed = {tp for k, samples, tp in self._model.times if k == kind and samples == size}
        return tuple(sorted(tp for tp in timed if host % tp == 0 and tp in self._model.sizes_by_tp))

    def fits_a_host(self, pool: int, devices: int) -> bool:  # noqa: ARG002 - ranks fill hosts by stage
        """Return that pipelines may span hosts."""
        return True

    def forward_s(self, member: PoolReplica, size: int) -> Array:
        """Return running sums over layers."""
        return self._running(lambda layer: self._layers.forward_s(layer, self._of(member), size))

    def backward_s(self, member: PoolReplica, size: int) -> Array:
        """Return running sums over layers."""
        return self._running(lambda layer: self._layers.backward_s(layer, self._of(member), size))

    def need_bytes(self, member: PoolReplica, size: int, left: int, micro_batches: int) -> Array:
        """Return the more of what our model says and of what that framework's own planner counts."""
        tp, kind = member.tp_degree, self.pools[member.pool].kind
        parameters = _between(self._parameters(tp))
        kept, largest = self._activations(tp)
        cuts = self._cut_bytes(tp) * size
        ours = parameters * self._platform.bytes_per_parameter + self._platform.base_bytes_of(kind)
        ours = ours + min(left, micro_batches) * size * kept
        ours = ours + self._platform.workspace_ratio * size * largest
        ours = ours + _MESSAGES_HELD * (cuts[:, None] + cuts[None, :])
        return np.maximum(ours, self.counted_bytes(member, size, left))

    def counted_bytes(self, member: PoolReplica, size: int, left: int) -> Array:
        """Return what that framework's own planner counts for layers i to j-1, as [i, j] (Sailor, section 4.3).

        Parameters, as many micro-batches of activations as stages are left, and a constant.
        """
        tp = member.tp_degree
        sizes = self._model.sizes_by_tp[tp]
        counted = _between(_sums(sizes.parameters)) * self._prices.bytes_per_parameter
        counted = counted + left * size * FLOAT_BYTES * _between(_sums(sizes.activation_floats))
        counted = counted + (self._prices.base_bytes if tp == 1 else self._prices.base_bytes_of_group)
        return np.asarray(counted)

    def memory_bytes(self, pool: int) -> int:
        """Return what a device has."""
        return self._reference.memory_bytes[self.pools[pool].kind]

    def hop(self, lower: PoolReplica, upper: PoolReplica, size: int, width: int) -> HopSeconds:  # noqa: ARG002 - measured so
        """Return what messages take: receivers are kept for all of it, senders for what the transport does not take."""
        a, b = self._of(lower), self._of(upper)
        cuts = self._cut_bytes(lower.tp_degree) * size
        try:
            up = self._by_size(cuts, lambda size_bytes: self._network.transfer_s((a, 0), (b, 1), size_bytes))
            down = self._by_size(cuts, lambda size_bytes: self._network.transfer_s((b, 1), (a, 0), size_bytes))
        except ProfileError:
            # Nobody measured that way, so nothing is sent on it.
            return HopSeconds(*[np.full_like(cuts, np.inf)] * len(HopSeconds._fields))
        nothing = np.zeros_like(cuts)

        def taken(member: ReferenceReplica) -> Array:
            launch_s = self._platform.relaunched_layers * self._layers.launch_s(member.kind)
            return launch_s + self._by_size(cuts, lambda size_bytes: self._network.gather_s(member, size_bytes))

        def held(seconds: Array, tp_degree: int) -> Array:
            pairs = zip(seconds.tolist(), (cuts / tp_degree).tolist(), strict=True)
            return np.array([self._platform.send_hold_s(*pair) for pair in pairs])

        return HopSeconds(
            lower_forward_s=held(up, a.tp_degree),
            upper_forward_s=up + taken(b),
            upper_backward_s=held(down, b.tp_degree),
            lower_backward_s=down + taken(a),
            delay_forward_s=nothing,
            delay_backward_s=nothing,
            link_s=nothing,
            through_s=nothing,
        )

    def site_distance_s(self, a: int, b: int) -> float:
        """Return the seconds of a message of a mebibyte between whole hosts."""
        pair = (self.pools[a], self.pools[b])
        one, other = (ReferenceReplica(kind=p.kind, zone=p.site, tp_degree=p.host_size) for p in pair)
        try:
            return self._network.transfer_s((one, 0), (other, 1), _MEBIBYTE * one.tp_degree)
        except ProfileError:
            return float("inf")

    def least_step_s(self, sites: Sequence[str]) -> float:  # noqa: ARG002 - nothing is known beforehand
        """Return nothing: every set of sites is worth a search."""
        return 0.0

    def gradient_sums_s(self, plan: PoolPlan) -> list[float]:
        """Return the seconds of the ring sums over all replicas, in their order on hosts."""
        return list(map(self._ring_sum_s, plan.stages, hosts_of(plan, self.pools)))

    def _ring_sum_s(self, stage: PoolStage, hosts: tuple[int, ...]) -> float:
        ring = [(self._of(member), host) for member, host in zip(stage.members, hosts, strict=True)]
        degrees = {member.tp_degree for member in stage.members}
        sums = {tp: self._parameters(tp) for tp in degrees}
        i, j = stage.units.start, stage.units.stop
        size_bytes = max(FLOAT_BYTES * tp * float(s[j] - s[i]) for tp, s in sums.items())
        try:
            return self._network.ring_sum_s(ring, size_bytes)
        except ProfileError:
            return float("inf")

    def tied_s(self, plan: PoolPlan) -> float:  # noqa: ARG002 - as measured, they are part of the update
        """Return nothing."""
        return 0.0

    def sums_across_s(self, a: int, b: int, width: int, stages: Array) -> Array:  # noqa: ARG002 - as inside
        """Return nothing: what comes of it shows when plans are reckoned."""
        return np.zeros_like(stages)

    def update_s(self, stage: PoolStage, size: int) -> float:
        """Return the seconds of the slowest update."""
        return max(self._layers.update_s(stage.units, self._of(member), size) for member, _ in stage.runs)

    def sums_s(self, member: PoolReplica, width: int) -> Array:
        """Return what summing takes over hosts of one pool, by the bytes of the layers."""
        return self._sums(member, width)

    def usd_per_s(self, pool: int) -> float:
        """Return what a device costs; infinite if its price is not known."""
        return self._prices.usd_per_hour.get(self.pools[pool].kind, float("inf")) / 3600

    def usd_of_traffic(self, plan: PoolPlan) -> float:
        """Return what crosses zones: activations and gradients of every pipeline, and every such hop of a ring sum."""
        if len({self.pools[pool].site for pool in plan.devices_by_pool}) == 1:
            return 0.0
        total = 0.0
        for stage in plan.stages:
            i, j = stage.units.start, stage.units.stop
            width, degree = stage.width, min(member.tp_degree for member, _ in stage.runs)
            sums = self._parameters(degree)
            hop_bytes = 2 * (width - 1) / width * FLOAT_BYTES * degree * float(sums[j] - sums[i])
            total += hop_bytes * sum(count * self._usd_per_byte(a, b) for (a, b), count in stage.hops.items())
        for pipeline, count in plan.pipelines().items():
            for stage, (a, b) in zip(plan.stages, pairwise(pipeline), strict=False):
                cut = plan.micro_batches * plan.micro_batch * self._layers.cut_bytes(stage.units.stop - 1, 1)
                total += count * cut * (self._usd_per_byte(a, b) + self._usd_per_byte(b, a))
        return total

    def _usd_per_byte(self, a: PoolReplica, b: PoolReplica) -> float:
        return self._prices.usd_per_byte.get((self.pools[a.pool].site, self.pools[b.pool].site), 0.0)

    def _of(self, member: PoolReplica) -> ReferenceReplica:
        return _replica(self.pools, member)

    def _running(self, of_layer: Callable[[range], float]) -> Array:
        return _sums([of_layer(range(layer, layer + 1)) for layer in range(self.units)])

    def _parameter_sums(self, tp_degree: int) -> Array:
        return self._running(lambda layer: self._layers.parameters(layer, tp_degree))

    def _activation_bytes(self, tp_degree: int) -> tuple[Array, Array]:
        """Return what units i to j-1 keep of one sample, and what the one that keeps most does, as [i, j]."""
        values = [self._layers.activation_bytes(layer, tp_degree) for layer in range(self.units)]
        return _between(_sums(values)), _largest_between(np.array(values))

    def _gradient_sums(self, member: PoolReplica, width: int) -> Array:
        sums = self._parameters(member.tp_degree)
        whole = FLOAT_BYTES * member.tp_degree * float(sums[-1])
        per_host = self.pools[member.pool].host_size // member.tp_degree
        ring = [(self._of(member), number // per_host) for number in range(min(width, per_host + 1))]
        try:
            some_s = self._network.ring_sum_s(ring, whole * len(ring) / width)
        except ProfileError:
            return np.where(sums > 0, np.inf, 0.0)
        share = (width - 1) / width / ((len(ring) - 1) / len(ring)) * width / len(ring)
        return np.asarray(sums / sums[-1] * some_s * share)

    def _bytes_of_cuts(self, tp_degree: int) -> Array:
        """Return the bytes of one sample over the cut in front of every layer; 0 at both ends."""
        inner = [round(self._layers.cut_bytes(layer, tp_degree)) for layer in range(self.units - 1)]
        return np.array([0.0, *inner, 0.0])

    def _by_size(self, sizes: Array, seconds: Callable[[float], float]) -> Array:
        known = {size: seconds(size) for size in set(sizes.tolist())}
        return np.array([known[size] for size in sizes.tolist()])


def _sums(values: "tuple[float, ...] | list[float]") -> Array:
    return np.cumsum([0.0, *values])


def _between(sums: Array) -> Array:
    found: Array = sums[None, :] - sums[:, None]
    return found


def _largest_between(values: Array) -> Array:
    """Return the largest of values i to j-1 as [i, j]; 0 where there are none.

    >>> _largest_between(np.array([3.0, 1.0, 2.0]))[1]
    array([0., 0., 1., 2.])
    """
    found = np.zeros((len(values) + 1, len(values) + 1))
    for first in range(len(values)):
        found[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return found
