"""Measured runs of others and what was measured around them: layers, links, machines."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "FLOAT_BYTES",
    "LayerSizes",
    "LayerTimes",
    "LinkCurve",
    "ModelShape",
    "Reference",
    "ReferenceCase",
    "ReferenceModel",
    "ReferenceReplica",
    "ReferenceStage",
]

FLOAT_BYTES = 4
"""All counts of elements in such a folder are of float32."""


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Sizes at one tensor-parallel degree, by layer."""

    parameters: tuple[float, ...]
    """On one device."""
    output_floats: tuple[float, ...]
    """Leaving the layer, for one sample, on all devices of the group together."""
    activation_floats: tuple[float, ...]
    """Kept for the backward of one sample, on one device."""


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Seconds at one kind, micro-batch and tensor-parallel degree, by layer."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a transformer's sizes follow from."""

    hidden: int
    sequence_length: int
    positions: int
    """Rows of the table of positions, which the embedding holds beside the vocabulary."""


@dataclass(frozen=True, kw_only=True)
class ReferenceModel:
    """A model's layers, as measured."""

    name: str
    roles: tuple[str, ...]
    """By layer: embedding, transformer_block, output_head, ..., perhaps with a remark behind."""
    shape: ModelShape | None
    sizes_by_tp: Mapping[int, LayerSizes]
    times: Mapping[tuple[str, int, int], LayerTimes]
    """By kind, micro-batch and tensor-parallel degree."""

    @property
    def num_layers(self) -> int:
        """How many layers it has, embedding and head included."""
        return len(self.roles)


@dataclass(frozen=True, kw_only=True)
class LinkCurve:
    """Bandwidth against message size: a polynomial in log2 of the message's megabytes (1e6 bytes)."""

    coefficients: tuple[float, ...]
    """Highest power first, in 1e9 bytes per second."""
    max_bandwidth_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class ReferenceReplica:
    """One replica of a stage: a tensor-parallel group of equal devices in one host."""

    kind: str
    zone: str
    tp_degree: int


@dataclass(frozen=True, kw_only=True)
class ReferenceStage:
    """Consecutive layers and who runs them."""

    layers: range
    replicas: tuple[ReferenceReplica, ...]


@dataclass(frozen=True, kw_only=True)
class ReferenceCase:
    """A measured run."""

    id: str
    set_name: str
    model: str
    nodes: int
    global_batch: int
    micro_batch: int
    stages: tuple[ReferenceStage, ...]
    step_s: float
    """Measured, sums of gradients and update included."""
    gradient_sum_s: float
    """As one rank saw it, its waiting for slower ranks included."""
    peak_bytes: float
    """Measured, of a whole device, the largest over all."""
    flags: tuple[str, ...]
    calibrate: bool
    """Whether a platform's constants may be fitted on it."""

    @property
    def dp_degree(self) -> int:
        """Replicas of each stage."""
        return len(self.stages[0].replicas)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each replica in a step."""
        return self.global_batch // (self.micro_batch * self.dp_degree)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A folder of measured runs."""

    cases: tuple[ReferenceCase, ...]
    models: Mapping[str, ReferenceModel]
    links: Mapping[tuple[str, str, int, str, str, int], LinkCurve]
    """Between hosts, by zone, kind and number of sending devices, then of receiving ones."""
    inside: Mapping[tuple[str, int], LinkCurve]
    """Inside a host, by kind and number of devices."""
    devices_per_host: Mapping[str, int]
    """By kind."""
    memory_bytes: Mapping[str, int]
    """Of a device, by kind."""
