"""What runs where: stages, replicas, spans, limits, sums of gradients, an order of work; and what is said of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated

from spantrain.core.bounds import Bounds, NotNegative, check_bounds
from spantrain.core.cluster import Cluster
from spantrain.core.outer.groups import OuterPlan
from spantrain.core.shares import StateSharding
from spantrain.core.span import Span, divided, divided_sizes
from spantrain.core.units import ModelSpec
from spantrain.formats.precision import check_dtype
from spantrain.formats.registry import WireFormat

DEFAULT_BUCKET_BYTES = 8 * 2**20
"""Size for our own sums, until one is chosen by the link (`planner.assembly.tuning`)."""


class SumModel(StrEnum):
    """Whose way to sum gradients a stage follows; `cost.sums` has their settings and sources."""

    SPANTRAIN = "spantrain"
    TORCH_DDP = "torch-ddp"
    TORCH_FSDP = "torch-fsdp"
    DEEPSPEED_PIPELINE = "deepspeed-pipeline"
    ALPA = "alpa"


@dataclass(frozen=True, kw_only=True)
class GradientSums:
    """How a stage's gradients are summed over its replicas, which runtime and simulator both follow."""

    model: SumModel = SumModel.SPANTRAIN
    bucket_bytes: Annotated[int, Bounds(low=1)] = DEFAULT_BUCKET_BYTES
    """Size of the buckets, which are filled from the last unit on. Where parameters are divided, too (zero3), each
    unit's gradients are a bucket, whatever stands here."""
    first_bucket_bytes: Annotated[int | None, Bounds(low=1)] = None
    """Size of the bucket that is whole first; None: like the others."""
    beside_backward: bool = True
    """Whether a bucket is summed as soon as it is whole, beside the last backward; else all come behind it."""
    at_once: Annotated[int, Bounds(low=1, high=64)] = 2
    """Most buckets under way at once where Gloo carries them: two, as torch's has threads for. NCCL sums one by one."""

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies that our runtime sends, at most; a bucket of one gradient is sent without."""
        return self.at_once * self.bucket_bytes

    def bucket_of(self, begin_bytes: float) -> int:
        """Return the number of the bucket that a gradient lies in, by the bytes that are summed before it.

        >>> [GradientSums(bucket_bytes=4, first_bucket_bytes=1).bucket_of(begin) for begin in (0, 1, 4, 5)]
        [0, 1, 1, 2]
        """
        first = self.bucket_bytes if self.first_bucket_bytes is None else self.first_bucket_bytes
        return 0 if begin_bytes < first else 1 + int((begin_bytes - first) // self.bucket_bytes)

    def bucket_end(self, begin_bytes: float) -> float:
        """Return the bytes that are summed with the bucket that begins there, and before it."""
        if begin_bytes == 0 and self.first_bucket_bytes is not None:
            return self.first_bucket_bytes
        return begin_bytes + self.bucket_bytes


OWN_SUMS = GradientSums()
"""Ours, as long as nothing is chosen."""


@dataclass(frozen=True, kw_only=True)
class PlannedWait:
    """An action worth waiting for, though something else could run."""

    position: Annotated[int, Bounds(low=0)]
    """Which action of the order it is, from 0."""
    seconds: NotNegative
    """For how long the device should be idle before it."""

    def __post_init__(self) -> None:
        check_bounds(self, "a planned wait")


@dataclass(frozen=True, kw_only=True)
class PlannedOrder:
    """What one replica should do, in order."""

    ops: str
    """A letter for each action (F, B, I, W); those of a kind take the replica's micro-batches by rising sample."""
    waits: tuple[PlannedWait, ...] = ()

    def __post_init__(self) -> None:
        wrong = sorted(set(self.ops) - set("FBIW"))
        if wrong:
            raise ValueError(f"a planned order has letters of F, B, I and W, got {''.join(wrong)}")


@dataclass(frozen=True, kw_only=True)
class DispatchHints:
    """The orders of all replicas."""

    orders: tuple[tuple[PlannedOrder, ...], ...]
    """By stage and replica."""
    predicted_s: float
    """Seconds of a step, as simulated."""
    reason: str
    """Why these orders."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One member of a stage's data parallelism."""

    devices: tuple[str, ...]
    """Its tensor-parallel group; the first one leads."""
    sample_share: float
    """Part of every micro-batch, relative to the other replicas of the stage."""
    in_flight_limit: int
    """Samples forwarded whose activations may be held at once (until W)."""
    tp_shares: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not self.devices or len(self.devices) != len(self.tp_shares):
            raise ValueError(f"a replica needs one tensor share for each device, got {self.devices}, {self.tp_shares}")
        if min(self.tp_shares) <= 0:
            raise ValueError(f"replica {self.devices}: tp_shares must be positive, got {self.tp_shares}")
        if self.sample_share <= 0:
            raise ValueError(f"replica {self.devices}: sample_share must be positive, got {self.sample_share}")
        if self.in_flight_limit < 1:
            raise ValueError(f"replica {self.devices}: in_flight_limit must be at least 1, got {self.in_flight_limit}")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Consecutive units run by one set of devices."""

    first_unit: int
    end_unit: int
    """One past the last unit."""
    replicas: tuple[Replica, ...]
    micro_batches: tuple[Span, ...]
    """Spans of the global batch, in the order a static schedule takes them; replicas divide each by their shares."""
    state_sharding: StateSharding = StateSharding.NONE
    wire_format: WireFormat = WireFormat.NATIVE
    """Format of activations and gradients on the cut behind this stage."""
    recompute: tuple[int, ...] = ()
    """Indices, rising, of units whose activations are not held from F on: only what enters them, and they are run again
    in the backward pass (`docs/memory.md`)."""
    sequence_parallel: bool = False
    """Whether members of a tensor-parallel group hold slices of the sequence between divided layers, where they can
    (`docs/tensor-parallel.md`)."""
    sums: GradientSums = OWN_SUMS
    """How its replicas sum gradients."""
    keepers: tuple[str, ...] = ()
    """Devices of other stages that hold a copy of its state, which follows it step by step (`recovery.protection`)."""

    def __post_init__(self) -> None:
        if list(self.recompute) != sorted(set(self.recompute)):
            raise ValueError(f"recompute must name units once and in rising order, got {self.recompute}")
        outside = [unit for unit in self.recompute if unit not in self.units]
        if outside:
            raise ValueError(
                f"recompute names units {outside}; leave them out: the stage has "
                f"{self.first_unit} to {self.end_unit - 1}"
            )
        if self.state_sharding is StateSharding.ZERO1 and self.divides_tensors:
            raise ValueError("state_sharding zero1 needs replicas of one device each; leave it out")
        if self.offloads and len(self.devices) > 1:
            raise ValueError("state_sharding offload needs a stage of one device; leave it out")
        if self.sequence_parallel and not self.divides_tensors:
            raise ValueError("sequence_parallel needs a replica of several devices; leave it out")

    @property
    def units(self) -> range:
        """Indices of its units."""
        return range(self.first_unit, self.end_unit)

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, leaders of replicas first in each group."""
        return tuple(device for replica in self.replicas for device in replica.devices)

    @property
    def divides_tensors(self) -> bool:
        """Whether a replica has several devices, among which tensors are divided."""
        return any(len(replica.devices) > 1 for replica in self.replicas)

    @property
    def divides_state(self) -> bool:
        """Whether no replica has all of its state."""
        return self.state_sharding is not StateSharding.NONE and len(self.replicas) > 1

    @property
    def divides_gradients(self) -> bool:
        """Whether no replica has whole gradients, so that all do every action together (`schedule.joint`)."""
        return self.divides_state and self.state_sharding.divides_gradients

    @property
    def offloads(self) -> bool:
        """Whether its state is in its host's memory."""
        return self.state_sharding is StateSharding.OFFLOAD

    @property
    def keeps_rows(self) -> bool:
        """Whether no device has a whole parameter with it but while it works with that."""
        return self.offloads or (self.divides_state and self.state_sharding is StateSharding.ZERO3)

    def replica_spans(self, index: int) -> tuple[Span, ...]:
        """Return the samples of one replica, a span for each micro-batch in which it takes part."""
        return self._spans_by_replica[index]

    def samples_of(self, index: int) -> int:
        """Return how many samples of a step one replica has."""
        return sum(self.sizes_by_replica[index])

    def largest_of(self, index: int) -> int:
        """Return the samples of its largest micro-batch; 0 if it has none."""
        return max(self.sizes_by_replica[index], default=0)

    def with_limits(self, limits: Iterable[int]) -> "Stage":
        """Return the stage with other in-flight limits, one for each replica."""
        pairs = zip(self.replicas, limits, strict=True)
        return replace(self, replicas=tuple(replace(replica, in_flight_limit=limit) for replica, limit in pairs))

    @cached_property
    def _spans_by_replica(self) -> tuple[tuple[Span, ...], ...]:
        return divided(self.micro_batches, [replica.sample_share for replica in self.replicas])

    @cached_property
    def sizes_by_replica(self) -> tuple[tuple[int, ...], ...]:
        """The samples of each replica, by micro-batch in which it takes part."""
        return divided_sizes(self.micro_batches, [replica.sample_share for replica in self.replicas])


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan should do."""

    step_s: float
    samples_per_s: float
    peak_bytes: Mapping[str, int]
    """By device."""
    method: str
    """How it was predicted."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way that was looked at, for the comparison that every plan is shown with (DESIGN idea 6)."""

    name: str
    devices: tuple[str, ...]
    step_s: float | None
    """None where it cannot run."""
    samples_per_s: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """What is said of a plan to people: nothing runs by it."""

    prediction: Prediction | None = None
    alternatives: tuple[Alternative, ...] = ()
    """The other ways that were looked at."""
    reasons: tuple[str, ...] = ()
    """Why this one was chosen."""


@dataclass(frozen=True, kw_only=True)
class ProfileReference:
    """The profile that a plan was made from."""

    path: str
    """Relative to the plan's own folder."""
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What runs where."""

    cluster: Cluster
    model: ModelSpec
    global_batch: int
    dtype: str
    stages: tuple[Stage, ...]
    schedule: str
    generation: int = 0
    strategy: str = ""
    profile: ProfileReference | None = None
    hints: DispatchHints | None = None
    """The order of work that `critical-path` follows; None: its plain rule."""
    outer: OuterPlan | None = None
    """Where sites train by themselves, joined by an outer optimizer: all of them; all else is the plan of one."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise ValueError("a plan needs at least one stage")
        check_dtype(self.dtype)
        if self.hints is not None:
            hinted, wanted = [len(row) for row in self.hints.orders], [len(stage.replicas) for stage in self.stages]
            if hinted != wanted:
                raise ValueError(f"hints: they have {hinted} replicas by stage, the plan has {wanted}")
        if self.stages[-1].wire_format is not WireFormat.NATIVE:
            raise ValueError("the last stage has no cut behind it: its wire_format must be native")
        self._check_units()
        self._check_devices()
        for index, stage in enumerate(self.stages):
            _check_spans(index, stage, self.global_batch)

    def _check_units(self) -> None:
        expected = 0
        for index, stage in enumerate(self.stages):
            if stage.first_unit != expected or stage.end_unit <= stage.first_unit:
                raise ValueError(
                    f"stage {index}: units must follow the stage before, from {expected}; got first_unit "
                    f"{stage.first_unit} and end_unit {stage.end_unit}; every unit must stand in one stage"
                )
            expected = stage.end_unit

    def _check_devices(self) -> None:
        devices = self.devices
        if len(set(devices)) != len(devices):
            twice = sorted({name for name in devices if devices.count(name) > 1})
            raise ValueError(f"a device may serve one stage only, in one replica; {', '.join(twice)} stands in several")
        known = self.cluster.device_by_name
        unknown = sorted(set(devices) - known.keys())
        if unknown:
            raise ValueError(f"devices that the cluster does not have: {unknown}; it has {sorted(known)}")
        for index, stage in enumerate(self.stages):
            wrong = [n for n in stage.keepers if n not in devices or n in stage.devices or stage.divides_state]
            if wrong or len(set(stage.keepers)) < len(stage.keepers):
                raise ValueError(
                    f"stage {index}: keepers must be devices of the plan's other stages, each once (none of one that "
                    f"divides state); got {', '.join(stage.keepers)}"
                )

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices in use, by stage."""
        return tuple(device for stage in self.stages for device in stage.devices)

    @property
    def leaders(self) -> tuple[str, ...]:
        """The first device of each replica, by stage."""
        return tuple(replica.devices[0] for stage in self.stages for replica in stage.replicas)

    @property
    def divides_tensors(self) -> bool:
        """Whether a stage does."""
        return any(stage.divides_tensors for stage in self.stages)

    @property
    def unprotected(self) -> "Plan":
        """The same without keepers, as those work with it who move devices."""
        return self.with_keepers(((),) * len(self.stages))

    def with_keepers(self, keepers: Sequence[tuple[str, ...]]) -> "Plan":
        """The same with other keepers, by stage."""
        stages = zip(self.stages, keepers, strict=True)
        return replace(self, stages=tuple(replace(stage, keepers=names) for stage, names in stages))

    def with_limits(self, limits: Iterable[Iterable[int]]) -> "Plan":
        """Return the plan with other in-flight limits, by stage and replica."""
        pairs = zip(self.stages, limits, strict=True)
        return replace(self, stages=tuple(stage.with_limits(own) for stage, own in pairs))

    def place(self, device: str) -> tuple[int, int]:
        """Return the stage and replica that a device serves."""
        for stage_index, stage in enumerate(self.stages):
            for replica_index, replica in enumerate(stage.replicas):
                if device in replica.devices:
                    return stage_index, replica_index
        raise KeyError(f"device {device} is not in the plan")


def _check_spans(index: int, stage: Stage, global_batch: int) -> None:
    """Check that micro-batches hold every sample once and that the in-flight limits cannot stop the pipeline."""
    if list(stage.micro_batches) != sorted(stage.micro_batches):
        raise ValueError(f"stage {index}: micro-batches must stand in the order of their samples")
    ends = (0, *(span.hi for span in stage.micro_batches))
    pairs = zip(ends, stage.micro_batches, strict=False)
    wrong = [f"leave out or repeat samples at {end}: {span}" for end, span in pairs if span.lo != end]
    if wrong or ends[-1] != global_batch:
        what = [*wrong, f"hold {ends[-1]} samples, the global batch {global_batch}"][0]
        raise ValueError(f"stage {index}: micro-batches {what}; every sample, 0 to {global_batch}, must stand in one")
    for number, replica in enumerate(stage.replicas):
        if replica.in_flight_limit < (largest := stage.largest_of(number)):
            raise ValueError(
                f"stage {index}, replica {number}: in_flight_limit {replica.in_flight_limit} is under its largest "
                f"micro-batch, {largest} samples"
            )
