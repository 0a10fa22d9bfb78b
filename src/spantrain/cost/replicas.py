"""What the replicas of a stage take together: actions, gradient sums, and the gathers of what they divide.

Sums of gradients run over rings. Where all replicas have tensor-parallel groups of equal degree and shares, the k-th
members hold the same part of the parameters and are a ring of their own, all rings at once. Where groups differ, parts
do not meet; it is reckoned as one ring of the leaders with whole bytes, which stands for leaders that gather their
group's parts and hand them round again, and leaves out the seconds of that.

State sharding (Rajbhandari et al., ZeRO, 2020) divides a stage's state evenly among its replicas:

- `zero2`: each micro-batch's gradients are summed to their holders (reduce-scatter, half of a ring sum), the last one's
  at the end of the step; then the new parameters are gathered (the other half). With one micro-batch that is the ring
  sum itself.
- `zero3`: the parameters are gathered for every F and again for every I or B, unit by unit and one unit ahead, in the
  type that is computed with; gradients as in zero2.

What goes on beside an action is hidden behind it: it takes the longer of its compute and its traffic. Not hidden are
the last gradients' sum and the first unit's first gather of a step, which are counted at its end. Other traffic on the
links is not looked at, and a device that waits for its traffic counts as busy. Kept of the paper: who holds what, and
the bytes that are sent. Not kept: its partitioned activations and offloading.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property

from spantrain.core.action import Op
from spantrain.core.plan import Replica, Stage, StateSharding
from spantrain.core.precision import is_low
from spantrain.core.profile import Profile
from spantrain.core.shares import ALONE, MemberShare, shares_of
from spantrain.cost.collectives import RUNTIME_BUCKET_BYTES, Collectives, SumOptions
from spantrain.cost.recompute import operations_of
from spantrain.cost.tensor import GroupCost, normalised

__all__ = ["ReplicaCost", "Ring", "rings_of"]

_SHARE_DIGITS = 9
"""Digits in which tensor shares must agree to count as the same."""


@dataclass(frozen=True, kw_only=True)
class Ring:
    """Devices of different replicas that hold the same part of a stage's parameters."""

    devices: tuple[str, ...]
    tp_share: MemberShare


def rings_of(stage: Stage) -> tuple[Ring, ...]:
    """Return the rings over which a stage's replicas sum; none if there is one replica only."""
    replicas = stage.replicas
    if len(replicas) < 2:
        return ()
    shares = [tuple(round(share, _SHARE_DIGITS) for share in normalised(replica.tp_shares)) for replica in replicas]
    if len(set(shares)) > 1:
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
        self._unit_traffic_s = cache(self._unit_traffic_of)
        self._buckets_s = cache(self._buckets_of)
        self._traffic_s = cache(self._traffic_of)

    @property
    def _collectives(self) -> Collectives:
        return self.groups.network.collectives

    @cached_property
    def _gathered_ratio(self) -> float:
        """Bytes that are gathered for one byte of float32 parameters."""
        return 0.5 if is_low(self.groups.compute.dtype) else 1.0

    def action_s(self, stage: Stage, replica: Replica, op: Op, samples: int) -> float:
        """Return the seconds of one action of a replica: of its compute, or of what the replicas exchange beside it."""
        compute_s = self._compute_s(stage, replica, op, samples)
        if stage.state_sharding is StateSharding.NONE or len(stage.replicas) < 2:
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

    def _traffic_of(self, stage: Stage, op: Op) -> float:
        """Return the seconds of what a stage's replicas exchange beside one action."""
        one_s = sum(self._unit_traffic_s(stage.units, rings_of(stage)))
        count, traffic_s = len(stage.micro_batches), 0.0
        if op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            # All micro-batches are alike here, but the last one's sum comes at the end of the step.
            traffic_s += one_s * (count - 1) / count
        if stage.state_sharding is StateSharding.ZERO3 and op is not Op.BACKWARD_WEIGHT:
            gathered = self._unit_traffic_s(stage.units, rings_of(stage), self._gathered_ratio)
            traffic_s += sum(gathered)
        return traffic_s

    def _unit_traffic_of(self, units: range, rings: tuple[Ring, ...], ratio: float = 1.0) -> tuple[float, ...]:
        """Return, by unit, the seconds of a gather of parameters; a sum of gradients to their holders is one, too."""
        by_ring = [
            [
                self._gather_s(ring, rings, size * ratio)
                for size in self._graph.held_parameter_bytes(units, ring.tp_share)
            ]
            for ring in rings
        ]
        return tuple(map(max, zip(*by_ring, strict=True)))

    def _gather_s(self, ring: Ring, rings: tuple[Ring, ...], size_bytes: float) -> float:
        return self._collectives.gather_s(ring.devices, size_bytes, _beside(ring, rings)) if size_bytes else 0.0

    def end_of_step_s(self, stage: Stage) -> tuple[float, ...]:
        """Return the seconds of what a stage's replicas exchange when all their work is done, bucket by bucket."""
        rings = rings_of(stage)
        whole = stage.state_sharding is not StateSharding.ZERO3
        by_ring = [self._buckets_s(stage.units, ring, rings, whole) for ring in rings]
        slowest = max(by_ring, key=sum, default=())
        if whole or not rings:
            return slowest
        # What the next step begins with: nothing is computed that could hide it.
        return (*slowest, self._unit_traffic_s(stage.units, rings, self._gathered_ratio)[0])

    def _buckets_of(self, units: range, ring: Ring, rings: tuple[Ring, ...], whole: bool) -> tuple[float, ...]:
        """Return the seconds of each bucket: of a whole sum, or of its first half."""
        beside = _beside(ring, rings)
        seconds = cache(
            lambda size: (
                self._collectives.seconds(ring.devices, size, options=beside)
                if whole
                else self._collectives.gather_s(ring.devices, size, beside)
            )
        )
        size_bytes = sum(self._graph.held_parameter_bytes(units, ring.tp_share))
        return tuple(map(seconds, SumOptions(bucket_bytes=RUNTIME_BUCKET_BYTES).buckets(size_bytes)))

    def sent_bytes(self, stage: Stage) -> Counter[tuple[str, str]]:
        """Return what a stage's devices send each other in a step: gradients, gathers, sums inside replicas."""
        sent: Counter[tuple[str, str]] = Counter()
        for ring in rings_of(stage):
            size_bytes = sum(self._graph.held_parameter_bytes(stage.units, ring.tp_share))
            self._add_around(sent, ring.devices, round(self._halves(stage) * size_bytes))
        for number, replica in enumerate(stage.replicas):
            if len(replica.devices) > 1:
                samples = sum(span.size for span in stage.replica_spans(number))
                summed = 2 * samples * self.groups.sent_bytes_per_sample(stage.units, stage.recompute)
                self._add_around(sent, replica.devices, summed)
        return sent

    def _halves(self, stage: Stage) -> float:
        """Return how often gradients or parameters go round in a step, a ring sum counted as two."""
        count = len(stage.micro_batches)
        match stage.state_sharding:
            case StateSharding.NONE:
                return 2
            case StateSharding.ZERO2:
                return count + 1
            case StateSharding.ZERO3:
                return count + 2 * count * self._gathered_ratio

    def _add_around(self, sent: Counter[tuple[str, str]], devices: tuple[str, ...], size_bytes: int) -> None:
        """Add what each device sends the next one in half a ring's turns."""
        each = (len(devices) - 1) * size_bytes // len(devices)
        for source, target in zip(devices, (*devices[1:], devices[0]), strict=True):
            if each:
                sent[source, target] += each


def _beside(ring: Ring, rings: tuple[Ring, ...]) -> SumOptions:
    return SumOptions(beside=tuple(other.devices for other in rings if other != ring))
