"""What the coordinator asks of a worker, and what the worker answers; JSON on the wire, dataclasses inside."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from spantrain.core.checkpoint import CheckpointContent
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.messages import DeviceDecisions
from spantrain.core.outer.stages import OuterCluster, StageMeeting, StageReport
from spantrain.core.plan import Plan
from spantrain.core.profile import DeviceScore, LinkMeasurement, UnitTiming
from spantrain.core.speed import LinkReport
from spantrain.core.trace import Trace
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.runtime.comparison.order import FrameworkOrder
from spantrain.transport.mailbox.interface import PeerAddress


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
class ComputeOrder:
    """Measure a device's score and, where `sizes` are given, the units of a model."""

    cluster: Cluster
    model: ModelSpec
    graph: UnitGraph
    dtype: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ComputeResult:
    """Timings of units (empty without sizes) and the score."""

    timings: tuple[UnitTiming, ...]
    score: DeviceScore
    real_compute_ratio: float
    """Seconds of real computation per second of device time; 1 on real devices."""


@dataclass(frozen=True, kw_only=True)
class ConnectOrder:
    """Connect to all peers at once, so that no measuring waits for it; what is connected stays so."""

    generation: int
    peers: tuple[PeerEntry, ...]


@dataclass(frozen=True, kw_only=True)
class EchoOrder:
    """Answer a peer's probes until it says that it is done."""

    generation: int
    peers: tuple[PeerEntry, ...]


@dataclass(frozen=True, kw_only=True)
class LinkOrder:
    """Measure the paths to and from one peer."""

    generation: int
    peers: tuple[PeerEntry, ...]
    target: str
    max_payload_bytes: int
    rounds: int
    expected_bytes_per_s: tuple[float | None, float | None] = (None, None)
    """There and back, where links like these were measured already."""


@dataclass(frozen=True, kw_only=True)
class LinkResult:
    """Both directions."""

    links: tuple[LinkMeasurement, ...]


@dataclass(frozen=True, kw_only=True)
class TrainOrder:
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
    outer: OuterCluster | None = None
    """As whom the run takes part in an outer optimizer, if it does."""


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
class SwitchReport:
    """What it took a device to go over to a new plan."""

    duration_s: float
    """From the verdict to the first action that it may run."""
    received_bytes: int
    """Of parameters and optimizer state, from other devices."""


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """What a worker brings to the barrier at the end of a step."""

    generation: int
    step: int
    loss_sum: float | None
    """Of the last stage's replicas: the sum over their samples."""
    grad_square: float | None
    """Of each stage's first replica, where each device counts what it alone holds."""
    busy_s: float
    peak_held_samples: int
    duration_s: float = 0.0
    """From the step's first action to the barrier, gradient sums included."""
    overflow: bool = False
    """Under float16: whether a gradient of this device is infinite or no number."""
    evaluation_loss_sum: float | None = None
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    """To each peer, since the run began."""
    data_digest: str | None = None
    """Of the data that it reads, in its first report under each plan that moves units; None where it reads none."""
    switch: SwitchReport | None = None
    """In the first step under a new plan."""
    links: tuple[LinkReport, ...] = ()
    """What it knows of the links to its peers, if it leads a replica."""
    outer: StageReport | None = None
    """Of the first device of a stage, where the run takes part in an outer optimizer."""

    def __post_init__(self) -> None:
        amounts = {
            name: getattr(self, name) or 0 for name in ("grad_square", "busy_s", "peak_held_samples", "duration_s")
        }
        amounts |= {f"sent_bytes to {peer}": size for peer, size in self.sent_bytes.items()}
        wrong = [f"{name} is {value}" for name, value in amounts.items() if not 0 <= value < math.inf]
        losses = {"loss_sum": self.loss_sum, "evaluation_loss_sum": self.evaluation_loss_sum}
        wrong += [f"{name} is {value}" for name, value in losses.items() if not math.isfinite(value or 0.0)]
        if wrong:
            raise ValueError(f"step {self.step}: {'; '.join(wrong)}")


@dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """What all workers do after the barrier, in the same way."""

    grad_norm: float
    checkpoint: bool
    stop: bool
    evaluate: bool
    skip_update: bool = False
    """Under float16: gradients overflowed somewhere, so nobody updates and all lower the loss scale."""
    data_differs: str = ""
    """Who reads other data than whom; empty: all read the same."""
    plan: Plan | None = None
    """What all run from the next step on, in its own schedule; None: what they run now."""
    outer: StageMeeting | None = None
    """What all do for the outer optimizer, where the run takes part in one."""


@dataclass(frozen=True, kw_only=True)
class OuterCall:
    """What a worker brings to a meeting outside of steps, where the run takes part in an outer optimizer."""

    number: int
    """Of the meeting."""
    report: StageReport | None
    """Of the first device of a stage."""


Order = ComputeOrder | ConnectOrder | EchoOrder | FrameworkOrder | LinkOrder | TrainOrder
