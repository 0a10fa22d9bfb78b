"""What a worker is to run of another framework, and what comes of it."""

from dataclasses import dataclass
from enum import StrEnum

from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.units import UnitGraph
from spantrain.runtime.control.orders import AddedOrder


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
    INTERLEAVED = "torch-interleaved"
    """`ScheduleInterleaved1F1B`."""
    ZERO_BUBBLE = "torch-zb"
    """`ScheduleInterleavedZeroBubble`."""
    ZERO_BUBBLE_V = "torch-zbv"
    """`ScheduleZBVZeroBubble`."""

    @property
    def in_stages(self) -> bool:
        """Whether the model is divided into stages, and not the samples."""
        return self not in (Framework.DDP, Framework.FSDP)

    @property
    def many_stages(self) -> bool:
        """Whether a device may have several stages."""
        return self in (Framework.INTERLEAVED, Framework.ZERO_BUBBLE, Framework.ZERO_BUBBLE_V)


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
    real_s: float | None
    """Seconds of real computation in all steps of an emulated device; None on a real one."""
    overruns: int
    """Pieces of work whose real computation took longer than the emulated device would have."""
    peak_bytes: int
    """Parameters, gradients, optimizer state and the most that samples in flight held."""


class FrameworkOrder(AddedOrder[FrameworkResult], name="framework"):
    """Train with another framework for some steps."""

    framework: Framework
    cluster: Cluster
    graph: UnitGraph
    job: TrainJob
    global_batch: int
    cuts: tuple[tuple[int, int], ...]
    """First unit and one past the last of each stage."""
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
        if self.framework is Framework.ZERO_BUBBLE_V and len(self.cuts) != 2 * ranks:
            raise ValueError(f"{self.framework}: two stages for each of {ranks} devices, got {len(self.cuts)}")

    def rank_of(self, stage: int) -> int:
        """Return who has a stage: everyone in turn, over and over; in a V, the second time from the last to the first.

        Torch's `generate_stage_to_rank_mapping`, its styles `loop` and `v`.
        """
        turn, rank = divmod(stage, len(self.devices))
        back = self.framework is Framework.ZERO_BUBBLE_V and turn % 2
        return len(self.devices) - 1 - rank if back else rank

    def local_stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank."""
        return tuple(stage for stage in range(len(self.cuts)) if self.rank_of(stage) == rank)
