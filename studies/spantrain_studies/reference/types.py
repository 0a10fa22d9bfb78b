"""Measured runs of others and what was measured around them: layers, links, machines."""

from collections.abc import Mapping
from dataclasses import dataclass

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
class ReferencePlan:
    """What is trained where, in the form that such frameworks run: 1F1B, one micro-batch size, one width."""

    model: str
    global_batch: int
    micro_batch: int
    stages: tuple[ReferenceStage, ...]
    hosts: tuple[tuple[int, ...], ...]
    """Number of the host of every stage's replicas."""

    def __post_init__(self) -> None:
        widths = [len(stage.replicas) for stage in self.stages]
        if not widths or min(widths) < 1 or len(set(widths)) > 1:
            raise ValueError(f"all stages must have the same number of replicas, at least one; they have {widths}")
        if [len(row) for row in self.hosts] != widths:
            raise ValueError(
                f"hosts: every replica needs one, {widths} by stage; got {[len(row) for row in self.hosts]}"
            )

    @property
    def dp_degree(self) -> int:
        """Replicas of each stage."""
        return len(self.stages[0].replicas)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each replica in a step; what does not divide is filled up."""
        return -(-self.global_batch // (self.micro_batch * self.dp_degree))


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

    @property
    def dp_degree(self) -> int:
        """Replicas of each stage."""
        return len(self.stages[0].replicas)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each replica in a step."""
        return self.plan.micro_batches

    @property
    def plan(self) -> ReferencePlan:
        """What was trained where; replicas fill the hosts in the order of ranks, by stage."""
        width = self.dp_degree
        per_host = -(-len(self.stages) * width // self.nodes)
        return ReferencePlan(
            model=self.model,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
            stages=self.stages,
            hosts=tuple(
                tuple((stage * width + number) // per_host for number in range(width))
                for stage in range(len(self.stages))
            ),
        )


@dataclass(frozen=True, kw_only=True)
class ReferencePrices:
    """What devices and traffic between zones cost, and what that framework's own planner counts as memory."""

    usd_per_hour: Mapping[str, float]
    """Of one device, by kind; the same in all zones."""
    usd_per_byte: Mapping[tuple[str, str], float]
    """From zone to zone; nothing is asked for pairs that are not listed."""
    bytes_per_parameter: float
    base_bytes: float
    """Of a device that is no part of a tensor-parallel group."""
    base_bytes_of_group: float
    """Of a device that is."""


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
    prices: ReferencePrices | None = None
    """None: the folder does not have them; it is enough to validate, not to plan."""
