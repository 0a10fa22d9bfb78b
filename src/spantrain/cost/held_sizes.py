"""What a device's memory is for, in bytes: what it holds all the time, and what goes by the sample."""

from collections.abc import Mapping
from dataclasses import astuple, field, replace
from typing import Annotated

from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.records import Bounds, Record
from spantrain.core.shares import ALONE, MemberShare, StateSharding, shares_of
from spantrain.formats.registry import WireFormat
from spantrain.schedule.registry import splits_backward


class Division(Record):
    """Which part of a stage a device has, and how its messages are sent."""

    tp_share: MemberShare = ALONE
    """Its place in its tensor-parallel group."""
    state_sharding: StateSharding = StateSharding.NONE
    replicas: Annotated[int, Bounds(low=1)] = 1
    """Replicas of the stage, among which sharded state is divided."""
    wire_before: WireFormat = WireFormat.NATIVE
    """Format on the cut in front of the stage."""
    wire_behind: WireFormat = WireFormat.NATIVE
    recompute: tuple[int, ...] = ()
    """Indices of units that are run again in the backward pass."""
    splits: bool = False
    """Whether the schedule may put W off (`schedule.registry.splits_backward`)."""


WHOLE = Division()
"""A device that has all of its stage."""


class MemoryNeed(Record):
    """Peak bytes of a device, by what they are for."""

    state_bytes: int
    """Parameters, gradients, optimizer state."""
    activation_bytes: int
    """Bytes of the samples in flight, until W, and of a recomputed unit at work."""
    buffer_bytes: int
    """Messages to and from both neighbours."""
    working_bytes: int
    """What operations need while they run."""
    framework_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return sum(vars(self).values())


class HeldBytes(Record):
    """What a device holds at one moment, by what it is for."""

    parameter_bytes: int
    """Master weights, and under bfloat16 the copy beside them."""
    gradient_bytes: int
    optimizer_bytes: int
    framework_bytes: int
    activation_bytes: int = 0
    """Bytes of samples in flight."""
    received_bytes: int = 0
    """Messages that have begun to arrive and that no action has used up."""
    sending_bytes: int = 0
    """Messages that an action makes or has made, up to their last byte sent."""
    working_bytes: int = 0
    """What the operations of an action need while it runs."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(astuple(self))


class HeldSizes(Record):
    """What the things are in size that a device holds: some all the time, some by the sample."""

    always: HeldBytes
    """What is held all the time."""
    activation_bytes_per_sample: int
    """From F to I or B."""
    input_bytes_per_sample: int
    """The message from the stage before; 0 on the first stage."""
    output_gradient_bytes_per_sample: int
    """The message from the stage after; 0 on the last stage."""
    deferred_bytes_per_sample: int | None = None
    """From I to W; None: what is held before."""
    again_bytes_per_sample: int = 0
    """Besides, while B runs recomputed units again."""
    again_split_bytes_per_sample: int | None = None
    """The same while I does; None: as many."""
    working_bytes_per_sample: int = 0
    """Besides, while an action runs."""
    working_bytes: int = 0
    """The same, however few the samples."""
    keeps_input: bool = False
    """Whether what is held of an activation is the very message that brought it."""
    keeps_output: bool = False
    """Whether the message forward is part of the activations."""
    stages: Mapping[int, "HeldSizes"] = field(default_factory=dict)
    """By stage, where the device has several: all that goes by the sample is theirs."""

    def of(self, stage: int) -> "HeldSizes":
        """Return the sizes of what goes by the sample in a stage."""
        return self.stages.get(stage, self)


def divisions_of(plan: Plan) -> dict[str, Division]:
    """Return what part of its stage each device of a plan has; of several stages, of the last."""
    return {device: division for (_, device), division in stage_divisions(plan).items()}


def stage_divisions(plan: Plan) -> dict[tuple[int, str], Division]:
    """Return what part of a stage each of its devices has, by the stage's number and the device."""
    return {(index, name): one for index in range(len(plan.stages)) for name, one in divisions_at(plan, index).items()}


def divisions_at(plan: Plan, index: int, recompute: tuple[int, ...] | None = None) -> dict[str, Division]:
    """Return what part each device of a stage has, if other units than it says are to be computed again: these."""
    stage, before = plan.stages[index], plan.stages[index - 1].wire_format if index else WireFormat.NATIVE
    again = stage.recompute if recompute is None else recompute
    found, alike = dict[str, Division](), dict[tuple[float, ...], list[Division]]()
    for replica in stage.replicas:
        if replica.tp_shares not in alike:
            alike[replica.tp_shares] = [
                replace(division, wire_before=before, wire_behind=stage.wire_format, recompute=again)
                for division in divisions_in(stage, replica, splits=splits_backward(plan.schedule)).values()
            ]
        found.update(zip(replica.devices, alike[replica.tp_shares], strict=True))
    return found


def divisions_in(stage: Stage, replica: Replica, *, splits: bool) -> dict[str, Division]:
    """Return what part of a stage each device of a replica has, of messages sent as they are."""
    shares = shares_of(replica.tp_shares, slices_sequence=stage.sequence_parallel)
    return {
        device: Division(
            tp_share=share,
            state_sharding=stage.state_sharding,
            replicas=len(stage.replicas),
            recompute=stage.recompute,
            splits=splits,
        )
        for device, share in zip(replica.devices, shares, strict=True)
    }
