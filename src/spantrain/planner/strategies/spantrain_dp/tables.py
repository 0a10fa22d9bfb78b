"""Seconds of slots (stages to be) and of the ways between them, and the dynamic programme that places the cuts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from spantrain.core.action import SPLIT_OPS
from spantrain.core.profile import Profile
from spantrain.core.span import apportion
from spantrain.cost.network import Path
from spantrain.cost.span_tables import Array, over_spans
from spantrain.cost.step import StepCost
from spantrain.planner.assembly.assemble import begins_by
from spantrain.planner.request import JobSpec

Slot = tuple[str, ...]
"""Devices that will be the replicas of one stage."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SlotTable:
    """Seconds of a slot for units i to j-1, as [i, j]; infinite where j <= i or it does not fit."""

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


class SlotTables:
    """Tables of slots and hops of a profile and a job, each computed once."""

    def __init__(self, profile: Profile, job: JobSpec) -> None:
        self.profile, self.job = profile, job
        self.step_cost = StepCost(profile, job.dtype)
        self.spans = job.span_tables(profile)
        self.memory, self.units, self.shares = self.spans.memory, self.spans.units, self.spans.shares
        self.slot = cache(self._slot)
        """By (devices, micro-batch size): None if a device would get no sample."""
        self.hop = cache(self._hop)
        """By (slot, next slot, micro-batch size); both have a slot table."""

    def _slot(self, devices: Slot, size: int) -> SlotTable | None:
        samples = self.shares(devices, range(self.units), size)
        if min(samples) == 0:
            return None
        run, turn, fits = np.zeros(self.spans.above.shape), np.zeros(self.spans.above.shape), self.spans.above
        whole, left = divmod(self.job.global_batch, size)
        own = [self.profile.cluster.device_by_name[name] for name in devices]
        rows = zip(own, samples, apportion(left, samples), strict=True)
        alike = {(row[0].kind, row[0].backend, row[0].memory_bytes, *row[1:]): row for row in rows}
        for device, count, rest in alike.values():
            full, part = (
                [np.array(self.step_cost.compute.prefix_seconds(device.kind, op, n)) for op in SPLIT_OPS]
                for n in (count, rest)
            )
            total = sum((whole * f + r for f, r in zip(full, part, strict=True)), np.zeros(self.units + 1))
            run = np.maximum(run, over_spans(total))
            turn = np.maximum(turn, over_spans(full[0] + full[1]))
            fits = fits & (self.spans.need(device.name, count, count) <= device.memory_bytes)
        rate = 1 / max(float(run[0, self.units]), 1e-12)
        return SlotTable(run=np.where(fits, run + self._sync(devices), np.inf), turn=turn, rate=rate)

    def _sync(self, devices: Slot) -> Array | float:
        """Return the seconds of the gradient sum."""
        if len(devices) == 1:
            return 0.0
        seconds = self.step_cost.network.collectives.seconds
        latency_s = seconds(devices, 0)
        per_byte = seconds(devices, 1) - latency_s
        return latency_s + per_byte * self.spans.trained()

    def _hop(self, source: Slot, target: Slot, size: int) -> HopTable:
        up, down = self._path(source, target, size), self._path(target, source, size)
        up_bytes, down_bytes = self.spans.cut_bytes()
        rate_up, rate_down = up.s_per_byte * up_bytes, down.s_per_byte * down_bytes
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


def best_cuts(slots: Sequence[SlotTable], hops: Sequence[HopTable]) -> tuple[float, tuple[int, ...]]:
    """Place the cuts so that the paper's objective is least, exactly (Chinese paper, section 2.2 and figure 6).

    The objective is equation 1 with the critical slot c found by the maximum: everything that a micro-batch passes
    before c, on the way up (equation 2) and down (equation 4), plus the run and weight sync of c (equations 3, 5);
    a link that is busier than any slot rules in the same way. It nests, so that one value per (slot, unit) is
    enough: V_k(i) = min over j of max(run_k(i,j), turn_k(i,j) + hop_k(j) + max(V_k+1(j), busy_k(j))).

    Returns the seconds (infinite if nothing fits) and the unit in front of which each slot begins, then the end.
    """
    units = slots[0].run.shape[0] - 1
    value: Array = slots[-1].run[:, units]
    choices: list[np.ndarray] = []
    for slot, hop in zip(reversed(slots[:-1]), reversed(hops), strict=True):
        beyond = hop.turn + np.maximum(value, hop.busy)
        table = np.maximum(slot.run, slot.turn + beyond[None, :])
        choice = table.argmin(axis=1)
        value = table[np.arange(units + 1), choice]
        choices.append(choice)
    return float(value[0]), begins_by(choices, units)
