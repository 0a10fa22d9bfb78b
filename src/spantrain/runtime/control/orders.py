"""What the coordinator orders a worker to do, and what comes of it (`runtime.control.plane`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from spantrain.core.checkpoint import CheckpointContent
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.messages import DeviceDecisions
from spantrain.core.outer.stages import OuterCluster
from spantrain.core.plan import Plan
from spantrain.core.profile import DeviceScore, LinkMeasurement, UnitTiming
from spantrain.core.trace import Trace
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.runtime.control.plane import Order
from spantrain.runtime.control.requests import Done, StepVerdict
from spantrain.transport.connection.peers import PeerAddress


class Framework(StrEnum):
    """What of torch runs the steps."""

    DDP = "ddp"
    """`torch.nn.parallel.DistributedDataParallel`."""
    FSDP = "fsdp"
    """`torch.distributed.fsdp.fully_shard` (FSDP2)."""
    GPIPE = "torch-gpipe"
    """`torch.distributed.pipelining.ScheduleGPipe`."""
    ONE_F_ONE_B = "torch-1f1b"
    """`Schedule1F1B`."""
    ZERO_BUBBLE = "torch-zb"
    """`ScheduleInterleavedZeroBubble`."""

    @property
    def in_stages(self) -> bool:
        """Whether the model is divided into stages, and not the samples."""
        return self not in (Framework.DDP, Framework.FSDP)


@dataclass(frozen=True, kw_only=True)
class FrameworkResult:
    """What one worker saw of the steps."""

    start_s: float
    """On the machine's clock, when all were ready."""
    step_ends_s: tuple[float, ...]
    loss_sums: tuple[float, ...]
    """Over the samples whose loss it has, by step; empty where it has none."""
    busy_s: tuple[float, ...]
    """Device time of each step."""
    real_s: float
    """Seconds of real computation in all steps."""
    overruns: int
    """Pieces of work whose real computation took longer than the emulated device would have."""
    peak_bytes: int
    """Parameters, gradients, optimizer state and the most that samples in flight held."""


@dataclass(frozen=True, kw_only=True)
class FrameworkOrder(Order[FrameworkResult], name="framework"):
    """Train with another framework for some steps; all devices get the same order."""

    framework: Framework
    cluster: Cluster
    model: ModelSpec
    graph: UnitGraph
    job: TrainJob
    global_batch: int
    devices: tuple[str, ...]
    """In the order of ranks."""
    cuts: tuple[tuple[int, int], ...]
    """First unit and one past the last of each stage; stage s is on device s modulo their number."""
    micro_batches: int = 1
    """Of the global batch, in a pipeline."""
    bucket_bytes: int | None = None
    """Of gradients that are summed together, under `ddp`; None: torch's own 25 MiB."""

    def __post_init__(self) -> None:
        ranks = len(self.devices)
        if not ranks or self.micro_batches < 1:
            raise ValueError(f"it needs devices and micro-batches, got {ranks} and {self.micro_batches}")
        divided = self.micro_batches if self.framework.in_stages else ranks
        if self.global_batch % divided:
            raise ValueError(
                f"{self.framework}: a batch of {self.global_batch} samples does not divide into {divided} equal parts"
            )
        if len(self.cuts) % (ranks if self.framework.in_stages else 1):
            raise ValueError(f"{self.framework}: {len(self.cuts)} stages do not divide evenly among {ranks} devices")

    def local_stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank."""
        return tuple(range(rank, len(self.cuts), len(self.devices)))


@dataclass(frozen=True, kw_only=True)
class PeerEntry:
    """Where a worker's mailbox is, and the key that it proves itself with."""

    name: str
    endpoint: str
    """Empty where it can't be dialled: then it dials."""
    public_key: str

    @property
    def address(self) -> PeerAddress:
        """The same as a mailbox takes it."""
        return PeerAddress(name=self.name, endpoint=self.endpoint, public_key=self.public_key)


@dataclass(frozen=True, kw_only=True)
class ComputeResult:
    """Timings of units (empty without sizes) and the score."""

    timings: tuple[UnitTiming, ...]
    score: DeviceScore
    real_compute_ratio: float
    """Seconds of real computation per second of device time; 1 on real devices."""


@dataclass(frozen=True, kw_only=True)
class ComputeOrder(Order[ComputeResult], name="compute"):
    """Measure a device's score and, where `sizes` are given, the units of a model."""

    cluster: Cluster
    model: ModelSpec
    graph: UnitGraph
    dtype: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ConnectOrder(Order[Done], name="connect"):
    """Connect to all peers at once, so that no measuring waits for it; what is connected stays so."""

    generation: int
    peers: tuple[PeerEntry, ...]


@dataclass(frozen=True, kw_only=True)
class EchoOrder(Order[Done], name="echo"):
    """Answer a peer's probes until it says that it is done."""

    generation: int
    peers: tuple[PeerEntry, ...]


@dataclass(frozen=True, kw_only=True)
class LinkResult:
    """Both directions."""

    links: tuple[LinkMeasurement, ...]


@dataclass(frozen=True, kw_only=True)
class LinkOrder(Order[LinkResult], name="link"):
    """Measure the paths to and from one peer."""

    generation: int
    peers: tuple[PeerEntry, ...]
    target: str
    max_payload_bytes: int
    rounds: int
    expected_bytes_per_s: tuple[float | None, float | None] = (None, None)
    """There and back, where links like these were measured already."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
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


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """Says that an order begins with what its devices still hold of the order before."""

    verdict: StepVerdict | None
    """On the step before the first one: who has missed it does now what it says. None: that order has made no step."""


@dataclass(frozen=True, kw_only=True)
class TrainOrder(Order[TrainResult], name="train"):
    """Train a part of a plan."""

    plan: Plan
    graph: UnitGraph
    """Of the plan's model, from its profile."""
    job: TrainJob
    peers: tuple[PeerEntry, ...]
    output_dir: str
    """Where this worker writes its part of checkpoints; empty: no checkpoints."""
    first_step: int = 0
    samples_before: int = 0
    """Consumed by all steps before the first."""
    resume_from: str = ""
    """Folder of the checkpoint to begin with; files that other machines wrote may be missing in it."""
    checkpoint: CheckpointContent | None = None
    """What is in it; None: begin with new weights."""
    kept: KeptState | None = None
    """Begin with what is held already, and with no checkpoint."""
    outer: OuterCluster | None = None
    """As whom the run takes part in an outer optimizer, if it does."""


ORDERS: Mapping[str, type[Order[Any]]] = {
    order.wire_name: order for order in (ComputeOrder, ConnectOrder, EchoOrder, FrameworkOrder, LinkOrder, TrainOrder)
}
"""All that a worker can be told to do, by name."""
