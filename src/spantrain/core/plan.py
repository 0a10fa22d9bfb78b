"""What runs where: stages, replicas, spans, limits, sums of gradients, an order of work."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cached_property
from typing import Annotated

from spantrain.core.cluster import Cluster
from spantrain.core.outer.groups import OuterPlan
from spantrain.core.planned.hints import DispatchHints
from spantrain.core.planned.report import ProfileReference
from spantrain.core.records import Bounds, Record
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


class GradientSums(Record):
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


class Replica(Record):
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


class Stage(Record):
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


class Crew(Record):
    """The devices of one stage, or of several: in an interleaved pipeline the same devices come again further up.

    Its stages have the same replicas, so what a device holds, sums and updates is that of all of them together.
    """

    numbers: tuple[int, ...]
    """Of its stages, rising."""
    stages: tuple[Stage, ...]

    @property
    def several(self) -> bool:
        """Whether it has more than one stage."""
        return len(self.numbers) > 1

    @property
    def first(self) -> Stage:
        """Its first stage: all have that one's replicas, and sum gradients as it does."""
        return self.stages[0]

    @property
    def units(self) -> tuple[int, ...]:
        """Indices of the units of all of its stages, rising."""
        return tuple(unit for stage in self.stages for unit in stage.units)

    @property
    def devices(self) -> tuple[str, ...]:
        """As of each of its stages."""
        return self.first.devices

    def replica_index(self, device: str) -> int:
        """Return which replica of its stages a device is in."""
        return next(index for index, one in enumerate(self.first.replicas) if device in one.devices)


class Plan(Record):
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
            hinted, wanted = [len(row) for row in self.hints.orders], [len(crew.first.replicas) for crew in self.crews]
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
        for crew in self.crews:
            _check_crew(crew)
        devices, listed = self.devices, [device for crew in self.crews for device in crew.devices]
        if len(listed) != len(devices):
            twice = sorted({name for name in listed if listed.count(name) > 1})
            raise ValueError(
                f"a device may serve one stage only, in one replica, or several stages that have the same replicas; "
                f"{', '.join(twice)} stands in others, too"
            )
        if self.outer is not None and self.interleaved:
            raise ValueError("stages that share devices cannot be joined by an outer optimizer; leave out outer")
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

    @cached_property
    def crews(self) -> tuple[Crew, ...]:
        """Who holds which stages, by their first stage; of most plans as many as there are stages."""
        numbers: dict[tuple[str, ...], list[int]] = {}
        for number, stage in enumerate(self.stages):
            numbers.setdefault(stage.devices, []).append(number)
        return tuple(
            Crew(numbers=tuple(found), stages=tuple(self.stages[number] for number in found))
            for found in numbers.values()
        )

    @property
    def interleaved(self) -> bool:
        """Whether a device has several stages."""
        return len(self.crews) < len(self.stages)

    @cached_property
    def _crew_by_device(self) -> dict[str, Crew]:
        return {device: crew for crew in self.crews for device in crew.devices}

    def crew_of(self, device: str) -> Crew:
        """Return the devices among which one is, with all of their stages.

        Raises:
            KeyError: it is not in the plan.
        """
        if device not in self._crew_by_device:
            raise KeyError(f"device {device} is not in the plan")
        return self._crew_by_device[device]

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices in use, each once, by their first stage."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    @property
    def leaders(self) -> tuple[str, ...]:
        """The first device of each replica, by its first stage."""
        return tuple(replica.devices[0] for crew in self.crews for replica in crew.first.replicas)

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


def _check_crew(crew: Crew) -> None:
    """Check that devices which have several stages can hold, sum and update what is theirs as one."""
    first, told = crew.first, "+".join(crew.devices)
    for number, stage in zip(crew.numbers[1:], crew.stages[1:], strict=True):
        same = [(one.devices, one.sample_share, one.tp_shares) for one in stage.replicas]
        if same != [(one.devices, one.sample_share, one.tp_shares) for one in first.replicas]:
            raise ValueError(f"stages {crew.numbers[0]} and {number} share {told}: their replicas must be the same")
        if (stage.sums, stage.keepers) != (first.sums, first.keepers):
            raise ValueError(f"stages {crew.numbers[0]} and {number} share {told}: sums and keepers must be the same")
    divides = crew.first.divides_tensors or any(one.state_sharding is not StateSharding.NONE for one in crew.stages)
    if crew.several and divides:
        raise ValueError(
            f"stages {', '.join(map(str, crew.numbers))} share {told}: neither tensors nor state can be divided there"
        )


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
