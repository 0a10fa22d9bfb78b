"""Cost arrays of slots over all spans of units: what the dynamic programme reads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spantrain.core.action import Op
from spantrain.core.profile import Profile
from spantrain.core.span import apportion
from spantrain.cost.memory import BUFFERED_MICRO_BATCHES, MemoryCost, framework_bytes
from spantrain.cost.network import Path
from spantrain.cost.step import StepCost
from spantrain.planner.assembly.in_flight import in_flight_bytes
from spantrain.planner.assembly.layouts import Slot
from spantrain.planner.assembly.shares import SampleShares
from spantrain.planner.job import JobSpec

Array = NDArray[np.float64]
_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


@dataclass(frozen=True, eq=False, kw_only=True)
class SlotTable:
    """Seconds of a slot for units i to j-1, as [i, j]; infinite where j <= i or it does not fit."""

    samples: tuple[int, ...]
    """Of a whole micro-batch, for each device."""
    run: Array
    """All work of the global batch and the gradient sum: T_r + T_s."""
    turn: Array
    """F and I of one micro-batch: the slot's part in filling and draining."""
    rate: float
    """Steps per second if it held the whole model, memory aside."""


@dataclass(frozen=True, eq=False, kw_only=True)
class HopTable:
    """Seconds between two slots for a cut in front of unit j, as [j]."""

    turn: Array
    """One micro-batch there and its gradient back."""
    busy: Array
    """The busier direction of the link in one step."""
    least_busy: float
    latency_s: float
    """There and back."""


class Tables:
    """Cost arrays of a profile and a job, each computed once."""

    def __init__(self, profile: Profile, job: JobSpec) -> None:
        self.profile, self.job = profile, job
        self.step_cost = StepCost(profile, job.dtype)
        self.memory = MemoryCost(profile, job.optimizer, self.step_cost.compute.dtype)
        self.units = len(profile.graph.units)
        self._slots: dict[tuple[Slot, int], SlotTable | None] = {}
        self._hops: dict[tuple[Slot, Slot, int], HopTable] = {}
        self._shares = SampleShares(profile.cluster, self.step_cost.compute)
        self._state, self._activation, self._buffer, self._parameters = self._memory_arrays()
        graph = profile.graph.units
        self._forward_bytes = np.array([0.0, *(float(unit.cut_bytes_per_sample) for unit in graph)])
        self._gradient_bytes = np.array([0.0, *(float(unit.gradient_bytes_per_sample) for unit in graph)])

    def shares(self, devices: Slot, units: range, size: int) -> tuple[int, ...]:
        """Divide a micro-batch's samples among devices so that the slowest ends soonest; some may get none."""
        return self._shares.divide(devices, units, size)

    def slot(self, devices: Slot, size: int) -> SlotTable | None:
        """Return the table of a slot for a micro-batch size; None if a device would get no sample."""
        key = (devices, size)
        if key not in self._slots:
            self._slots[key] = self._slot(devices, size)
        return self._slots[key]

    def hop(self, source: Slot, target: Slot, size: int) -> HopTable:
        """Return the table of the way from one slot to the next (both have a slot table)."""
        key = (source, target, size)
        found = self._hops.get(key)
        if found is None:
            found = self._hops[key] = self._hop(source, target, size)
        return found

    def _slot(self, devices: Slot, size: int) -> SlotTable | None:
        samples = self.shares(devices, range(self.units), size)
        if min(samples) == 0:
            return None
        shape = (self.units + 1, self.units + 1)
        run, turn, fits = np.zeros(shape), np.zeros(shape), np.tril(np.ones(shape)) == 0
        whole, left = divmod(self.job.global_batch, size)
        rests = apportion(left, samples)
        own = [self.profile.cluster.device_by_name[name] for name in devices]
        rows = zip(own, samples, rests, strict=True)
        alike = {(device.kind, device.backend, device.memory_bytes, count, rest) for device, count, rest in rows}
        for kind, backend, memory_bytes, count, rest in alike:
            total, one = self._kind_arrays(kind, count, whole, rest)
            run = np.maximum(run, total[None, :] - total[:, None])
            turn = np.maximum(turn, one[None, :] - one[:, None])
            need = self._state + count * (self._activation + self._buffer) + framework_bytes(backend)
            fits &= need <= memory_bytes
        rate = 1 / max(float(run[0, self.units]), 1e-12)
        run = run + self._sync(devices)
        return SlotTable(samples=samples, run=np.where(fits, run, np.inf), turn=turn, rate=rate)

    def _kind_arrays(self, kind: str, count: int, whole: int, rest: int) -> tuple[Array, Array]:
        """Return running sums over units: all work of a step (whole micro-batches and the rest), and one F + I."""
        compute = self.step_cost.compute
        total, one = np.zeros(self.units + 1), np.zeros(self.units + 1)
        for op in _OPS:
            full = np.array(compute.prefix_seconds(kind, op, count))
            total += whole * full + np.array(compute.prefix_seconds(kind, op, rest))
            if op is not Op.BACKWARD_WEIGHT:
                one += full
        return total, one

    def _sync(self, devices: Slot) -> Array:
        if len(devices) == 1:
            return np.zeros_like(self._parameters)
        latency_s = self.step_cost.network.all_reduce_seconds(devices, 0)
        per_byte = self.step_cost.network.all_reduce_seconds(devices, 1) - latency_s
        return latency_s + per_byte * self._parameters

    def _hop(self, source: Slot, target: Slot, size: int) -> HopTable:
        up, down = self._path(source, target, size), self._path(target, source, size)
        rate_up, rate_down = up.s_per_byte * self._forward_bytes, down.s_per_byte * self._gradient_bytes
        latency_s = up.latency_s + down.latency_s
        busy = self.job.global_batch * np.maximum(rate_up, rate_down)
        return HopTable(
            turn=latency_s + size * (rate_up + rate_down),
            busy=busy,
            least_busy=float(busy[1:-1].min()) if self.units > 1 else 0.0,
            latency_s=latency_s,
        )

    def _path(self, source: Slot, target: Slot, size: int) -> Path:
        def sides(devices: Slot) -> tuple[tuple[str, float], ...]:
            shares = self.shares(devices, range(self.units), size)
            return tuple((name, float(share)) for name, share in zip(devices, shares, strict=True))

        return self.step_cost.network.path(sides(source), sides(target))

    def _memory_arrays(self) -> tuple[Array, Array, Array, Array]:
        """Return state, activations of one sample, buffers of one sample, and summed gradients, as [i, j]."""
        graph = self.profile.graph
        parameters = _between([unit.parameter_bytes for unit in graph.units])
        unique = parameters.copy()
        for name, size in graph.shared_bytes.items():
            members = _between([name in unit.shared for unit in graph.units])
            unique -= size * np.maximum(members - 1, 0)
        edge = [unit.cut_bytes_per_sample + unit.gradient_bytes_per_sample for unit in graph.units]
        edges = np.array([0, *edge[:-1], 0], dtype=np.float64)
        above = np.tril(np.ones_like(unique)) == 0
        buffer = BUFFERED_MICRO_BATCHES * (edges[:, None] + edges[None, :])
        state = np.rint(unique * self.memory.state_ratio)
        activation = in_flight_bytes(graph, splits=self.job.splits_backward)
        arrays = (state, activation, buffer, parameters)
        found = tuple(np.where(above, array, 0.0) for array in arrays)
        return found[0], found[1], found[2], found[3]

    def need(self, device: str, largest: int, in_flight: int) -> Array:
        """Return the bytes that a device needs for units i to j-1, as [i, j]."""
        fixed = framework_bytes(self.profile.cluster.device_by_name[device].backend)
        return self._state + in_flight * self._activation + largest * self._buffer + fixed

    def least_need(self, devices: Sequence[str]) -> list[Array]:
        """Return, for each device, the bytes it needs for units i to j-1 with one sample, as [i, j]."""
        backends = [self.profile.cluster.device_by_name[name].backend for name in devices]
        return [self._state + self._activation + self._buffer + framework_bytes(backend) for backend in backends]


def _between(values: Sequence[float]) -> Array:
    """Return the sums of entries i to j-1, as [i, j]."""
    sums = np.cumsum([0.0, *values])
    return np.asarray(sums[None, :] - sums[:, None], dtype=np.float64)
