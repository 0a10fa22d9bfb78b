"""What the coordinator orders a worker to do, and what comes of it (`runtime.control.plane`)."""

from collections.abc import Mapping
from typing import Any

from spantrain.core.checkpoint import CheckpointContent
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.messages import DeviceDecisions
from spantrain.core.outer.stages import OuterCluster
from spantrain.core.plan import Plan
from spantrain.core.profile import DeviceScore, LinkMeasurement, UnitTiming
from spantrain.core.records import Record
from spantrain.core.trace import Trace
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.runtime.control.plane import A, Order
from spantrain.runtime.control.requests import AheadChange, Done, StepVerdict
from spantrain.transport.connection.peers import PeerAddress


class AddedOrder(Order[A]):
    """Base of what installed packages have workers do (`runtime.worker.perform`); all get the same order."""

    devices: tuple[str, ...]
    """In the order of ranks; they can meet at a store."""
    model: ModelSpec


class ComputeResult(Record):
    """Timings of units (empty without sizes) and the score."""

    timings: tuple[UnitTiming, ...]
    score: DeviceScore
    real_compute_ratio: float
    """Seconds of real computation per second of device time; 1 on real devices."""


class ComputeOrder(Order[ComputeResult], name="compute"):
    """Measure a device's score and, where `sizes` are given, the units of a model."""

    cluster: Cluster
    model: ModelSpec
    graph: UnitGraph
    dtype: str
    sizes: tuple[int, ...]


class ConnectOrder(Order[Done], name="connect"):
    """Connect to all peers at once, so that no measuring waits for it; what is connected stays so."""

    generation: int
    peers: tuple[PeerAddress, ...]


class EchoOrder(Order[Done], name="echo"):
    """Answer a peer's probes until it says that it is done."""

    generation: int
    peers: tuple[PeerAddress, ...]


class LinkResult(Record):
    """Both directions."""

    links: tuple[LinkMeasurement, ...]


class LinkOrder(Order[LinkResult], name="link"):
    """Measure the paths to and from one peer."""

    generation: int
    peers: tuple[PeerAddress, ...]
    target: str
    max_payload_bytes: int
    rounds: int
    expected_bytes_per_s: tuple[float | None, float | None] = (None, None)
    """There and back, where links like these were measured already."""


class TrainResult(Record):
    """What a worker says at the end of a train order."""

    trace: Trace
    decisions: DeviceDecisions
    """Of the steps in the trace."""
    sent_bytes: Mapping[str, int]
    """By peer, payload and protocol."""
    received_bytes: Mapping[str, int]
    refused: Mapping[str, int]
    """Messages that were turned away, by reason."""
    real_compute_ratio: float
    """Seconds of real computation per second of device time; 1 on real devices."""
    overrun_actions: int
    """Actions whose real computation took longer than the emulated device would have."""
    peak_bytes: int | None
    """The most that the device's allocator had given out at once; None where it cannot tell."""
    overhead_s: tuple[float, ...]
    """Runtime time per action outside computation and waiting."""
    notices: tuple[str, ...] = ()
    """What its tensor-parallel replica could not divide, so that every member computes the whole."""


class KeptState(Record):
    """Says that an order begins with what its devices still hold of the order before."""

    verdict: StepVerdict | None
    """On the step before the first one: who has missed it does now what it says. None: that order has made no step."""


class GiveOrder(Order[Done], name="give"):
    """Give what is held of the order before to devices that go on without this one."""

    plan: Plan
    """That they go on under."""
    peers: tuple[PeerAddress, ...]
    first_step: int
    kept: KeptState


class FollowOrder(Order[Done], name="follow"):
    """Take what a device with no part in the present plan is to have of the next one, until that begins."""

    plan: Plan
    """The present one."""
    graph: UnitGraph
    job: TrainJob
    peers: tuple[PeerAddress, ...]
    change: AheadChange


class BringOrder(Order[Done], name="bring"):
    """Bring files that this device has saved to the coordinator's machine."""

    folder: str
    """Of the checkpoint, on the coordinator's machine."""
    step: int
    """Steps done."""
    names: tuple[str, ...]


class TrainOrder(Order[TrainResult], name="train"):
    """Train a part of a plan."""

    plan: Plan
    graph: UnitGraph
    """Of the plan's model, from its profile."""
    job: TrainJob
    peers: tuple[PeerAddress, ...]
    output_dir: str
    """Where this worker writes its part of checkpoints; empty: no checkpoints."""
    journal_dir: str = ""
    """The run's folder, where this worker keeps a copy of its journal; empty: it keeps none."""
    first_step: int = 0
    samples_before: int = 0
    """Consumed by all steps before the first."""
    resume_from: str = ""
    """Folder of the checkpoint to begin with; files that other machines wrote may be missing in it."""
    checkpoint: CheckpointContent | None = None
    """What is in it; None: begin with new weights."""
    at_coordinator: tuple[str, ...] = ()
    """Those of its files that the coordinator's machine has."""
    kept: KeptState | None = None
    """Begin with what is held already, and with no checkpoint."""
    givers: tuple[str, ...] = ()
    """Devices that are no part of the plan and give what they hold (`GiveOrder`)."""
    outer: OuterCluster | None = None
    """As whom the run takes part in an outer optimizer, if it does."""
    is_over: bool = False
    """Whether all steps are done: what is held is saved and evaluated, and that is all."""


ORDERS: Mapping[str, type[Order[Any]]] = {
    order.wire_name: order
    for order in (ComputeOrder, ConnectOrder, EchoOrder, LinkOrder, GiveOrder, FollowOrder, BringOrder, TrainOrder)
}
"""All of ours that a worker can be told to do, by name."""
