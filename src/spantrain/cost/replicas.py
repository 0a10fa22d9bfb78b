"""What the replicas of a stage take together: actions, gradient sums, and the gathers of what they divide.

Sums of gradients run over rings. Where all replicas have tensor-parallel groups of equal degree and shares, the k-th
members hold the same part of the parameters and are a ring of their own, all rings at once. Where groups differ, parts
do not meet; it is reckoned as one ring of the leaders with whole bytes, which stands for leaders that gather their
group's parts and hand them round again, and leaves out the seconds of that.

State sharding (Rajbhandari et al., ZeRO, 2020) divides a stage's state evenly among its replicas:

- `zero1`: the sums at the end of a step bring each holder its part (half of a ring sum), then the new parameters are
  gathered (the other half).
- `zero2`: each micro-batch's gradients are summed to their holders, unit by unit; new parameters as in zero1.
- `zero3`: the parameters are gathered for every F and again for every I, B and W, unit by unit and one unit ahead, in
  the type that the weights have; gradients as in zero2.

`offload` divides nothing: a stage's one device has all of it in its host's memory, from where a unit's parameters come
for every F, I, B and W, as they are with zero3, and where its gradients go; the processor updates them. The rates are
fixed ones, of page-locked memory and of an update that goes through it (`HOST_BYTES_PER_S`, `UPDATE_BYTES_PER_S`).

What goes on beside an action is hidden behind it: it takes the longer of its compute and its traffic. Whole sums, and
those of zero1, are made as the stage's `sums` say: bucket by bucket beside the last backward (`cost.sums`), if parts
meet, or behind it. With zero2 and zero3 gradients are traffic of each backward, unit by unit, as gathers on the same
links are. Not hidden are the last micro-batch's of the first unit, the last to come, the gather of new parameters, and
zero3's of the first unit, which are counted at the end of a step. Other traffic on the links is not looked at, and a
device that waits for its traffic counts as busy. Kept of the paper: who holds what, and the bytes that are sent. Not
kept: its partitioned activations and offloading.

Whole sums of Gloo wait for their receivers, those between sites once, and NCCL's stream (`cost.sums.Words`). Halves
inside a site are taken to stream.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import accumulate

from spantrain.core.action import Op
from spantrain.core.plan import GradientSums, Replica, Stage, SumModel
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.core.shares import ALONE, MemberShare, StateSharding, shares_of
from spantrain.cost.compute import GroupCost, normalised, operations_of
from spantrain.cost.sums import Collectives, SumBucket, SumOptions, Words, around, behind_s, fill_buckets, words_between
from spantrain.formats.precision import gathered_ratio

HOST_BYTES_PER_S = 12e9
"""Between a device and its host's memory, each way: half of what the sheet of PCIe 4 with 16 lanes says (24 GB/s)."""
UPDATE_BYTES_PER_S = 20e9
"""Of what a processor reads and writes while it updates: two channels of DDR4-3200, as STREAM has it."""
_EndsKey = tuple[range, tuple[int, ...], tuple[str, ...], tuple[float, ...], Op, int]
"""Units, those computed again, kinds of a group's devices with their shares, operation, samples."""
_SHARE_DIGITS = 9
"""Digits in which tensor shares must agree to count as the same."""


class Ring(Record):
    """Devices of different replicas that hold the same part of a stage's parameters."""

    devices: tuple[str, ...]
    tp_share: MemberShare


def rings_of(stage: Stage) -> tuple[Ring, ...]:
    """Return the rings over which a stage's replicas sum; none if there is one replica only."""
    replicas = stage.replicas
    if len(replicas) < 2:
        return ()
    shares = {replica.tp_shares for replica in replicas}
    if len({tuple(round(share, _SHARE_DIGITS) for share in normalised(own)) for own in shares}) > 1:
        return (Ring(devices=tuple(replica.devices[0] for replica in replicas), tp_share=ALONE),)
    members = zip(*(replica.devices for replica in replicas), strict=True)
    return tuple(
        Ring(devices=devices, tp_share=share)
        for devices, share in zip(members, shares_of(replicas[0].tp_shares), strict=True)
    )


class ReplicaCost:
    """Seconds and bytes of stages' replicas, from measurements.

    Raises:
        ProfileError: the profile holds no timing of the wanted dtype; later, one of a kind or a link that is needed.
    """

    def __init__(self, profile: Profile, dtype: str | None = None) -> None:
        self.groups = GroupCost(profile, dtype)
        self._graph = profile.graph
        self._device = profile.cluster.device_by_name
        self._unit_traffic_s = cache(self._unit_traffic_of)
        held_bytes = profile.graph.held_trained_bytes
        self._buckets = cache(lambda units, ring, sums: fill_buckets(held_bytes(units, ring.tp_share), sums))
        self._buckets_s = cache(self._seconds_of_buckets)
        self._unit_ends: dict[_EndsKey, tuple[float, ...]] = {}
        self._traffic_s = cache(self._traffic_of)

    @property
    def _collectives(self) -> Collectives:
        return self.groups.network.collectives

    @cached_property
    def _gathered_ratio(self) -> float:
        return gathered_ratio(self.groups.compute.dtype)

    def action_s(self, stage: Stage, replica: Replica, op: Op, samples: int) -> float:
        """Return the seconds of one action of a replica: of its compute, or of what the replicas exchange beside it."""
        compute_s = self._compute_s(stage, replica, op, samples)
        if stage.offloads:
            return max(compute_s, self._host_traffic_s(stage, op))
        if not stage.state_sharding.divides_gradients or len(stage.replicas) < 2:
            return compute_s
        return max(compute_s, self._traffic_s(stage, op))

    def _compute_s(self, stage: Stage, replica: Replica, op: Op, samples: int) -> float:
        """Return the seconds of an action's compute, with that of units that are computed again."""
        if not stage.recompute:
            return self.groups.replica_seconds(stage.units, replica, op, samples)
        held = [unit for unit in stage.units if unit not in stage.recompute]
        again = (
            self.groups.units_seconds(stage.recompute, replica, operation, samples)
            for operation in operations_of(op, recomputed=True)
        )
        return self.groups.units_seconds(held, replica, op, samples) + sum(again)

    def _host_traffic_s(self, stage: Stage, op: Op) -> float:
        """Return the seconds of what comes from the host's memory, or goes there, the longer of the two ways."""
        brought = sum(self._graph.gathered_bytes(stage.units, self._gathered_ratio))
        back = sum(self._graph.held_trained_bytes(stage.units)) if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT) else 0
        return max(brought, back) / HOST_BYTES_PER_S

    def host_update_s(self, stage: Stage) -> float:
        """Return the seconds in which the host updates what a stage offloads, as AdamW does; 0 of other stages.

        It reads parameters, gradients and two copies of them, and writes all but gradients.
        """
        return 7 * sum(self._graph.held_trained_bytes(stage.units)) / UPDATE_BYTES_PER_S if stage.offloads else 0.0

    def _traffic_of(self, stage: Stage, op: Op) -> float:
        """Return the seconds of what a stage's replicas exchange beside one action."""
        traffic_s = 0.0
        if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            # All micro-batches are alike here, but what is behind the last one's work comes at the end of the step.
            by_unit = self._unit_traffic_s(stage.units, rings_of(stage), None, stage.sums.model)
            traffic_s += sum(by_unit) - by_unit[0] / len(stage.micro_batches)
        if stage.state_sharding is StateSharding.ZERO3:
            ratio = self._gathered_ratio
            traffic_s += sum(self._unit_traffic_s(stage.units, rings_of(stage), ratio, stage.sums.model))
        return traffic_s

    def _unit_traffic_of(
        self, units: range, rings: tuple[Ring, ...], ratio: float | None, model: SumModel
    ) -> tuple[float, ...]:
        """Return, by unit, the seconds of a sum of gradients to their holders, or of a gather of parameters.

        A gather has a ratio: so many bytes for each of the parameters' that are trained.
        """
        graph = self._graph
        sizes = graph.held_trained_bytes if ratio is None else partial(graph.gathered_bytes, ratio=ratio)
        by_ring = [
            [self._gather_s(ring, rings, size, model) for size in sizes(units, tp_share=ring.tp_share)]
            for ring in rings
        ]
        return tuple(map(max, zip(*by_ring, strict=True)))

    def _gather_s(self, ring: Ring, rings: tuple[Ring, ...], size_bytes: float, model: SumModel) -> float:
        if not size_bytes:
            return 0.0
        options = replace(
            _beside(ring, rings), words=words_between([self._device[name] for name in ring.devices], model)
        )
        return self._collectives.gather_s(ring.devices, size_bytes, options)

    def end_of_step_s(self, stage: Stage) -> tuple[float, ...]:
        """Return the seconds of what a stage's replicas exchange for the end of a step: each bucket, then any gather.

        Buckets may be summed beside the last backward (`buckets_beside`); a gather comes behind all work.
        """
        rings = rings_of(stage)
        if not rings:
            return ()
        if stage.state_sharding is StateSharding.ZERO3:
            # What this step ends with, and what the next one begins with: nothing is computed that could hide it.
            gather_s = self._unit_traffic_s(stage.units, rings, self._gathered_ratio, stage.sums.model)[0]
            return self._unit_traffic_s(stage.units, rings, None, stage.sums.model)[0], gather_s
        slowest, seconds = self._slowest_ring(stage, rings)
        if stage.state_sharding is StateSharding.NONE:
            return seconds
        if stage.state_sharding is StateSharding.ZERO2:
            seconds = self._unit_traffic_s(stage.units, rings, None, stage.sums.model)[:1]
        # What was updated goes round.
        size_bytes = sum(self._graph.held_trained_bytes(stage.units, slowest.tp_share))
        return (*seconds, self._gather_s(slowest, rings, size_bytes, stage.sums.model))

    def _slowest_ring(self, stage: Stage, rings: tuple[Ring, ...]) -> tuple[Ring, tuple[float, ...]]:
        whole = stage.state_sharding is StateSharding.NONE
        # Leaders that put their groups' parts together sum one by one.
        sums = stage.sums if _meet(stage, rings) else replace(stage.sums, at_once=1)
        by_ring = {ring: self._buckets_s(stage.units, ring, rings, whole, sums) for ring in rings}
        return max(by_ring.items(), key=lambda entry: sum(entry[1]))

    def parts_until_whole(
        self, buckets: Sequence[SumBucket], stage: Stage, replica: Replica, op: Op, samples: int
    ) -> tuple[float, ...]:
        """Return after which part of a backward action on a replica each bucket's gradients are whole."""
        key = (stage.units, stage.recompute, self.groups.kinds(replica), replica.tp_shares, op, samples)
        if key not in self._unit_ends:
            self._unit_ends[key] = self._unit_ends_of(stage, replica, op, samples)
        return tuple(self._unit_ends[key][bucket.last_unit] for bucket in buckets)

    def buckets_beside(self, stage: Stage) -> tuple[SumBucket, ...] | None:
        """Return what `end_of_step_s` has the seconds of, if it may be summed beside the last backward.

        The buckets are the slowest ring's; a gather comes behind all units, as a bucket does that ends with the first.
        """
        rings = rings_of(stage)
        beside = stage.sums.beside_backward and not stage.state_sharding.divides_gradients
        if not rings or not beside or not _meet(stage, rings):
            return None
        buckets = self._buckets(stage.units, self._slowest_ring(stage, rings)[0], stage.sums)
        if stage.state_sharding is StateSharding.NONE:
            return buckets
        return (*buckets, SumBucket(size_bytes=0.0, last_unit=0))

    def behind_s(self, stage: Stage) -> float:
        """Return the least seconds of what replicas exchange that are left behind the stage's last backward action.

        The last action may be the B or the W of any of its micro-batches.
        """
        seconds, buckets = self.end_of_step_s(stage), self.buckets_beside(stage)
        if buckets is None:
            return sum(seconds)
        alike: dict[tuple[object, ...], tuple[Replica, int]] = {}
        for index, replica in enumerate(stage.replicas):
            kinds = self.groups.kinds(replica)
            for size in set(stage.sizes_by_replica[index]):
                alike[kinds, replica.tp_shares, size] = (replica, size)
        left_s = [
            behind_s(
                seconds,
                self.parts_until_whole(buckets, stage, replica, op, size),
                self._compute_s(stage, replica, op, size),
            )
            for replica, size in alike.values()
            for op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)
        ]
        return min(left_s, default=sum(seconds))

    def _unit_ends_of(self, stage: Stage, replica: Replica, op: Op, samples: int) -> tuple[float, ...]:
        """Return by unit after which part of a backward action it is done; the last unit is first."""
        seconds = [
            sum(
                self.groups.units_seconds((unit,), replica, operation, samples)
                for operation in operations_of(op, recomputed=unit in stage.recompute)
            )
            for unit in reversed(stage.units)
        ]
        *_, whole_s = ends = list(accumulate(seconds))
        return tuple(min(1.0, end / whole_s) if whole_s > 0 else 1.0 for end in reversed(ends))

    def summed_bytes(self, stage: Stage) -> float:
        """Return the bytes of gradients that a ring of a stage sums, the largest of them; 0 if there is none."""
        rings = rings_of(stage)
        return max((sum(self._graph.held_trained_bytes(stage.units, ring.tp_share)) for ring in rings), default=0)

    def largest_bucket_bytes(self, stage: Stage, ring: Ring) -> float:
        """Return the bytes of the largest bucket that a ring sums; 0 if there is nothing to sum."""
        return max((bucket.size_bytes for bucket in self._buckets(stage.units, ring, stage.sums)), default=0.0)

    def _seconds_of_buckets(
        self, units: range, ring: Ring, rings: tuple[Ring, ...], whole: bool, sums: GradientSums
    ) -> tuple[float, ...]:
        """Return the seconds of each bucket: of a whole sum, or of its first half; of those at once an equal part."""
        beside, buckets = _beside(ring, rings), self._buckets(units, ring, sums)
        if not whole:
            gather_s = cache(lambda size: self._gather_s(ring, rings, size, sums.model))
            return tuple(gather_s(bucket.size_bytes) for bucket in buckets)
        words = words_between([self._device[name] for one in rings for name in one.devices], sums.model)
        most = 1 if words is Words.NONE else sums.at_once

        @cache
        def sum_s(size: float, at_once: int) -> float:
            options = replace(beside, words=words, at_once=at_once)
            return self._collectives.seconds(ring.devices, size, options=options) / at_once

        return tuple(
            sum_s(bucket.size_bytes, min(most, len(buckets) - number // most * most))
            for number, bucket in enumerate(buckets)
        )

    def sent_bytes(self, stage: Stage) -> Counter[tuple[str, str]]:
        """Return what a stage's devices send each other in a step: gradients, gathers, sums inside replicas."""
        sent: Counter[tuple[str, str]] = Counter()
        for ring in rings_of(stage):
            self._add_around(sent, ring.devices, round(self._around_bytes(stage, ring)))
        for number, replica in enumerate(stage.replicas):
            if len(replica.devices) > 1:
                per_sample = self.groups.sent_bytes_per_sample(stage.units, stage.recompute)
                self._add_around(sent, replica.devices, 2 * stage.samples_of(number) * per_sample)
        return sent

    def _around_bytes(self, stage: Stage, ring: Ring) -> float:
        """Return the bytes that go half round a ring in a step: gradients, and parameters where they are divided."""
        summed = sum(self._graph.held_trained_bytes(stage.units, ring.tp_share))
        count = len(stage.micro_batches)
        match stage.state_sharding:
            case StateSharding.NONE | StateSharding.ZERO1 | StateSharding.OFFLOAD:
                return 2 * summed
            case StateSharding.ZERO2:
                return (count + 1) * summed
            case StateSharding.ZERO3:
                gathered = sum(self._graph.gathered_bytes(stage.units, self._gathered_ratio, ring.tp_share))
                return count * summed + 2 * count * gathered

    def _add_around(self, sent: Counter[tuple[str, str]], devices: tuple[str, ...], size_bytes: int) -> None:
        """Add what each device sends the next one in half a ring's turns."""
        each = (len(devices) - 1) * size_bytes // len(devices)
        for pair in around(devices):
            if each:
                sent[pair] += each


def _meet(stage: Stage, rings: tuple[Ring, ...]) -> bool:
    """Whether the members of its replicas' groups hold the same parts, so that each sums its own."""
    return all(len(replica.devices) == len(rings) for replica in stage.replicas)


def _beside(ring: Ring, rings: tuple[Ring, ...]) -> SumOptions:
    return SumOptions(beside=tuple(other.devices for other in rings if other != ring))
