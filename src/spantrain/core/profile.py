"""What was measured: seconds of F, I and W, activations, links, scores; with provenance."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from spantrain.core.cluster import Cluster
from spantrain.core.units import ModelSpec, UnitGraph

__all__ = ["DeviceScore", "LinkMeasurement", "Profile", "Provenance", "UnitTiming"]


@dataclass(frozen=True, kw_only=True)
class UnitTiming:
    """Median seconds of one unit's work on one kind of device, for one number of samples."""

    unit_class: str
    kind: str
    dtype: str
    """`float32` or `bfloat16` (autocast)."""
    samples: int
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    tp_degree: int = 1
    source: str = "measured"
    """`measured` or `analytic`."""

    def __post_init__(self) -> None:
        if self.samples < 1 or min(self.forward_s, self.backward_input_s, self.backward_weight_s) < 0:
            raise ValueError(f"{self.unit_class} on {self.kind}: samples must be positive, seconds not negative")


@dataclass(frozen=True, kw_only=True)
class LinkMeasurement:
    """What one device can send to another."""

    source: str
    target: str
    latency_s: float
    """One way: half of the round trip of five int32."""
    bandwidth_bytes_per_s: float
    """Of a large payload, latency taken off."""
    payload_bytes: int
    rounds: int


@dataclass(frozen=True, kw_only=True)
class DeviceScore:
    """Compute capacity p_c = sum of w_i / t_i over small tasks (SpanTrain 3.2.1)."""

    device: str
    score: float
    task_s: Mapping[str, float]
    """Seconds of each task."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where the numbers come from."""

    created: str
    """UTC, ISO 8601."""
    spantrain_version: str
    torch_version: str
    machine: str
    method: str
    compute_s: float
    """Seconds that measuring compute took."""
    network_s: float
    """Seconds that one round of measuring the network took."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Everything a planner needs."""

    cluster: Cluster
    model: ModelSpec
    graph: UnitGraph
    dtype: str
    timings: tuple[UnitTiming, ...]
    links: tuple[LinkMeasurement, ...]
    scores: tuple[DeviceScore, ...]
    provenance: Provenance

    @cached_property
    def link_by_pair(self) -> Mapping[tuple[str, str], LinkMeasurement]:
        """Links by (source, target) device."""
        return {(link.source, link.target): link for link in self.links}

    @cached_property
    def score_by_device(self) -> Mapping[str, float]:
        """Compute capacity by device name."""
        return {entry.device: entry.score for entry in self.scores}

    @cached_property
    def timings_by_key(self) -> Mapping[tuple[str, str], tuple[UnitTiming, ...]]:
        """Timings by (unit class, device kind), by rising number of samples."""
        table: dict[tuple[str, str], list[UnitTiming]] = {}
        for timing in self.timings:
            table.setdefault((timing.unit_class, timing.kind), []).append(timing)
        return {key: tuple(sorted(entries, key=lambda t: t.samples)) for key, entries in table.items()}
