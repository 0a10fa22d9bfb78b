"""Bytes that a device needs for its part of a plan: a hard limit (DESIGN idea 5)."""

from dataclasses import dataclass

from spantrain.core.plan import Plan
from spantrain.core.profile import Profile

__all__ = [
    "BUFFERED_MICRO_BATCHES",
    "FRAMEWORK_BYTES",
    "OPTIMIZER_STATE_RATIO",
    "HeldBytes",
    "HeldSizes",
    "MemoryCost",
    "MemoryNeed",
    "framework_bytes",
]

OPTIMIZER_STATE_RATIO = {"sgd": 0.0, "momentum": 1.0, "adamw": 2.0}
"""Bytes of optimizer state for one byte of float32 parameters."""

BUFFERED_MICRO_BATCHES = 2
"""Messages of each neighbour and direction that are held at once: one at work, one on its way."""

FRAMEWORK_BYTES = {"cuda": 300 * 2**20, "cpu": 0}
"""What the framework takes before the first tensor, by where it computes.

A CUDA context with its libraries takes 250-500 MiB; 300 MiB stands for it and is a constant to calibrate. An
emulated device stands for the accelerator of its kind, so it is charged like one. A `cpu` device's memory is
the host's free memory, counted with the framework already in it.
"""


def framework_bytes(backend: str) -> int:
    """Return the constant for a backend (`emulated`, `cpu`, `cuda:N`)."""
    return FRAMEWORK_BYTES["cpu" if backend == "cpu" else "cuda"]


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Peak bytes of a device, by what they are for."""

    state_bytes: int
    """Parameters, gradients, optimizer state."""
    activation_bytes: int
    """Of the samples in flight, until W."""
    buffer_bytes: int
    """Messages to and from both neighbours."""
    framework_bytes: int

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return self.state_bytes + self.activation_bytes + self.buffer_bytes + self.framework_bytes


@dataclass(frozen=True, kw_only=True)
class HeldSizes:
    """What the things are in size that a device holds: some all the time, some by the sample."""

    parameter_bytes: int
    """Master weights, and under bfloat16 the copy beside them."""
    gradient_bytes: int
    optimizer_bytes: int
    framework_bytes: int
    activation_bytes_per_sample: int
    """From F to W."""
    input_bytes_per_sample: int
    """Of the message from the stage before; 0 on the first stage."""
    output_gradient_bytes_per_sample: int
    """Of the message from the stage after; 0 on the last stage."""

    def held(self, *, activation_bytes: int = 0, received_bytes: int = 0, sending_bytes: int = 0) -> "HeldBytes":
        """Return what is held when there is so much besides that which always is."""
        return HeldBytes(
            parameter_bytes=self.parameter_bytes,
            gradient_bytes=self.gradient_bytes,
            optimizer_bytes=self.optimizer_bytes,
            framework_bytes=self.framework_bytes,
            activation_bytes=activation_bytes,
            received_bytes=received_bytes,
            sending_bytes=sending_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class HeldBytes:
    """What a device holds at one moment, by what it is for."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    framework_bytes: int
    activation_bytes: int
    """Of samples in flight."""
    received_bytes: int
    """Messages that have begun to arrive and that no action has used up."""
    sending_bytes: int
    """Messages that an action makes or has made, up to their last byte sent."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.framework_bytes
            + self.activation_bytes
            + self.received_bytes
            + self.sending_bytes
        )


class MemoryCost:
    """Bytes of parts of the model, for one optimizer and dtype."""

    def __init__(self, profile: Profile, optimizer: str = "adamw", dtype: str | None = None) -> None:
        if optimizer not in OPTIMIZER_STATE_RATIO:
            raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZER_STATE_RATIO)}, got {optimizer!r}")
        self._profile = profile
        # Autocast keeps float32 master weights and gradients, and a bfloat16 copy of the weights beside them.
        copies = 2.5 if (dtype or profile.dtype) == "bfloat16" else 2.0
        self._optimizer_ratio = OPTIMIZER_STATE_RATIO[optimizer]
        self.state_ratio = copies + self._optimizer_ratio

    def state_bytes(self, units: range) -> int:
        """Return the bytes of parameters, gradients and optimizer state; shared parameters of a stage once."""
        return round(self._float32_bytes(units) * self.state_ratio)

    def _float32_bytes(self, units: range) -> int:
        """Return the bytes of the parameters in float32; shared parameters of a stage once."""
        graph = self._profile.graph
        total = sum(graph.units[unit].parameter_bytes for unit in units)
        for name, size in graph.shared_bytes.items():
            members = sum(name in graph.units[unit].shared for unit in units)
            total -= max(members - 1, 0) * size
        return total

    def activation_bytes_per_sample(self, units: range) -> int:
        """Return the bytes held for one sample in flight."""
        return sum(self._profile.graph.units[unit].activation_bytes_per_sample for unit in units)

    def buffer_bytes_per_sample(self, units: range) -> int:
        """Return the bytes of messages for one sample of a micro-batch: both cuts, both directions."""
        graph = self._profile.graph.units
        edges = [graph[units.start - 1]] if units.start > 0 else []
        if units.stop < len(graph):
            edges.append(graph[units.stop - 1])
        per_sample = sum(unit.cut_bytes_per_sample + unit.gradient_bytes_per_sample for unit in edges)
        return BUFFERED_MICRO_BATCHES * per_sample

    def need(self, units: range, device: str, in_flight: int, largest_span: int) -> MemoryNeed:
        """Return what a device needs for a stage's units, with so many samples in flight."""
        return MemoryNeed(
            state_bytes=self.state_bytes(units),
            activation_bytes=in_flight * self.activation_bytes_per_sample(units),
            buffer_bytes=largest_span * self.buffer_bytes_per_sample(units),
            framework_bytes=framework_bytes(self._profile.cluster.device_by_name[device].backend),
        )

    def held_sizes(self, units: range, device: str) -> HeldSizes:
        """Return the sizes of what a device holds for a stage's units, for memory over time."""
        graph = self._profile.graph.units
        gradient_bytes = self._float32_bytes(units)
        optimizer_bytes = round(gradient_bytes * self._optimizer_ratio)
        last = units.stop == len(graph)
        return HeldSizes(
            parameter_bytes=self.state_bytes(units) - gradient_bytes - optimizer_bytes,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=optimizer_bytes,
            framework_bytes=framework_bytes(self._profile.cluster.device_by_name[device].backend),
            activation_bytes_per_sample=self.activation_bytes_per_sample(units),
            input_bytes_per_sample=graph[units.start - 1].cut_bytes_per_sample if units.start > 0 else 0,
            output_gradient_bytes_per_sample=0 if last else graph[units.stop - 1].gradient_bytes_per_sample,
        )

    def plan_held_sizes(self, plan: Plan) -> dict[str, HeldSizes]:
        """Return the sizes of what every device of a plan holds."""
        return {device: self.held_sizes(stage.units, device) for stage in plan.stages for device in stage.devices}

    def in_flight_limit_for(
        self, units: range, device: str, share_samples: int, largest_span: int, *, limit_bytes: int | None = None
    ) -> int:
        """Return how many samples may be in flight: what fits, at most the replica's share of the global batch.

        0 when not even the parameters fit; a limit under `largest_span` means that the plan cannot run. `limit_bytes`
        stands for a device with less memory than it has.
        """
        left = self._profile.cluster.device_by_name[device].memory_bytes
        if limit_bytes is not None:
            left = min(left, limit_bytes)
        left -= self.need(units, device, 0, largest_span).peak_bytes
        per_sample = self.activation_bytes_per_sample(units)
        if left < 0:
            return 0
        return share_samples if per_sample == 0 else min(share_samples, left // per_sample)

    def plan_peak_bytes(self, plan: Plan) -> dict[str, int]:
        """Return the peak bytes of every device of a plan, at its in-flight limits."""
        peaks = {}
        for stage in plan.stages:
            for index, replica in enumerate(stage.replicas):
                spans = stage.replica_spans(index)
                largest = max((span.size for span in spans), default=0)
                in_flight = min(replica.in_flight_limit, sum(span.size for span in spans))
                for device in replica.devices:
                    peaks[device] = self.need(stage.units, device, in_flight, largest).peak_bytes
        return peaks
