"""Seconds of slots, hops and ways of `spantrain` for every span of units: equation 1 as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from spantrain.core.action import SPLIT_OPS, Op
from spantrain.core.profile import Profile
from spantrain.core.shares import MemberShare, shares_of
from spantrain.core.span import apportion
from spantrain.cost.span_tables import Array, HopRates, RingRate, hop_rates, over_spans, soonest
from spantrain.planner.assembly.assemble import ReplicaDevices
from spantrain.planner.request import JobSpec
from spantrain.planner.strategies.spantrain.ways import Slot, Way


@dataclass(frozen=True, eq=False, slots=True)
class SlotArrays:
    """Seconds of a slot for units i to j-1, as [i, j]; `run` is infinite where j <= i or it does not fit."""

    run: Array
    """B t^c: all work of a step, with its tensor sums."""
    sums: Array
    """AL: the gradient sum."""
    back: Array
    """I of one micro-batch."""
    turn: Array
    """F and I of one micro-batch: the slot's part of the fill, there and back."""
    pace: Array
    """F, or I if that is longer, of all micro-batches but one."""
    refills: Array
    """How often a member's memory is filled with samples and emptied again; 1 where all fit at once."""


@dataclass(frozen=True, eq=False, slots=True)
class HopArrays:
    """Seconds between two slots for a cut in front of unit j, as [j]."""

    back: Array
    """The gradient of one micro-batch."""
    turn: Array
    """One micro-batch there and its gradient back."""
    busy: Array
    """The busier direction in one step; what of it no compute hides is t^l."""


@dataclass(frozen=True, eq=False, slots=True)
class WayArrays:
    """Seconds of a way for units i to j-1, as [i, j], its inner cuts placed so that equation 1 is least."""

    way: Way
    drained: Array
    """Until all work is done and the last gradient is back; infinite where it does not fit."""
    tail: Array
    """Sums that go on behind that."""
    back: Array
    """The gradient of one micro-batch through all slots."""
    turn: Array
    """One micro-batch through all slots and back."""
    pace: Array
    """The longest pace of its slots."""
    refills: Array
    """The most refills of its slots."""
    tied: Array
    """The exchange of parameters that units of its first and last slot share."""
    choices: tuple[NDArray[np.intp], ...]

    def cuts(self, first: int, end: int) -> tuple[int, ...]:
        """Return where each slot begins, then the end."""
        begins = [first]
        for choice in self.choices:
            begins.append(int(choice[begins[-1], end]))
        return (*begins, end)


class WayTables:
    """Arrays of a profile and a job, each computed once."""

    def __init__(self, profile: Profile, job: JobSpec) -> None:
        self.profile, self.job = profile, job
        self.spans = job.span_tables(profile)
        self.groups, self.memory, self.units = self.spans.groups, self.spans.memory, self.spans.units
        self.slot, self.hop, self.way = cache(self._slot), cache(self._hop), cache(self._way)
        self._rates, self._sides, self._twin = cache(self._rates_of), cache(self._sides_of), cache(self._twin_of)
        self._ring_rate = cache(partial(RingRate.of, self.spans.network))
        self._twins: dict[object, ReplicaDevices] = {}
        self._edge_up, self._edge_down = self.spans.cut_bytes()

    def capacity(self, device: str) -> float:
        """Return the inverse of the seconds of one sample on a device that holds the whole model."""
        return 1 / max(self.seconds(ReplicaDevices(devices=(device,), tp_shares=(1.0,)), range(self.units), 1), 1e-12)

    def seconds(self, member: ReplicaDevices, units: range, samples: int) -> float:
        """Return the seconds of F, I and W of so many samples."""
        sums = [self._sums(member, op, samples) for op in SPLIT_OPS]
        return float(sum(entry[units.stop] - entry[units.start] for entry in sums))

    def counts(self, slot: Slot, units: range, size: int) -> tuple[int, ...]:
        """Divide a micro-batch's samples among members; some may get none."""
        members = slot.members
        if slot.even or len(members) == 1:
            return apportion(size, [1.0] * len(members))
        return soonest(size, [partial(self.seconds, member, units) for member in members])

    def refills(self, slot: Slot, counts: Sequence[int], size: int) -> Array:
        """Return how often memory is filled with units i to j-1, as [i, j]; infinite if no micro-batch fits."""
        found = np.where(self.spans.above, 1.0, np.inf)
        micro_batches = self.job.global_batch / size
        devices, alike = self.profile.cluster.device_by_name, dict[object, tuple[str, MemberShare, int]]()
        for member, count in zip(slot.members, counts, strict=True):
            for name, share in zip(member.devices, shares_of(member.tp_shares), strict=True):
                alike.setdefault((devices[name].make, share, count), (name, share, count))
        for name, share, count in alike.values():
            left = devices[name].memory_bytes - self.spans.need(name, 0, count, share)
            at_once = np.floor(left / np.maximum(count * self.spans.in_flight(share), 1.0))
            found = np.maximum(found, np.where(at_once >= 1, micro_batches / np.maximum(at_once, 1.0), np.inf))
        return np.asarray(found)

    def _slot(self, slot: Slot, size: int) -> SlotArrays | None:
        counts = self.counts(slot, range(self.units), size)
        if min(counts) == 0:
            return None
        refills = self.refills(slot, counts, size)
        whole, left = divmod(self.job.global_batch, size)
        rests = apportion(left, counts)
        run, back, turn = (np.zeros(refills.shape) for _ in range(3))
        twins = {(self._twin(m), count, rest) for m, count, rest in zip(slot.members, counts, rests, strict=True)}
        for member, count, rest in twins:
            ops = [(self._sums(member, op, count), self._sums(member, op, rest)) for op in SPLIT_OPS]
            total = sum((whole * full + part for full, part in ops), np.zeros(self.units + 1))
            run = np.maximum(run, over_spans(total))
            back = np.maximum(back, over_spans(ops[1][0]))
            turn = np.maximum(turn, over_spans(ops[0][0] + ops[1][0]))
        pace = max(whole - (rests == (0,) * len(rests)), 0) * np.maximum(back, turn - back)
        run = np.where(np.isfinite(refills), run, np.inf)
        return SlotArrays(run, self._sync(slot), back, turn, pace, np.where(np.isfinite(refills), refills, 1.0))

    def _sync(self, slot: Slot) -> Array:
        """Return AL of the gradient sum, as [i, j]: the k-th devices of all members are a ring, all rings at once."""
        found = np.zeros(self.spans.above.shape)
        if len(slot.members) > 1:
            rings = tuple(zip(*(member.devices for member in slot.members), strict=True))
            for ring, share in zip(rings, shares_of(slot.members[0].tp_shares), strict=True):
                rate = self._ring_rate(ring, tuple(other for other in rings if other != ring))
                found = np.maximum(found, rate.seconds(self.spans.trained(share)))
        return found

    def _hop(self, source: Slot, target: Slot, size: int) -> HopArrays:
        up, down = self._rates(source, target, size), self._rates(target, source, size)
        rate_up, rate_down = up.busiest * self._edge_up, down.busiest * self._edge_down
        return HopArrays(
            back=down.latency_s + size * rate_down,
            turn=up.latency_s + down.latency_s + size * (rate_up + rate_down),
            busy=self.job.global_batch * np.maximum(rate_up, rate_down),
        )

    def _rates_of(self, source: Slot, target: Slot, size: int) -> HopRates:
        return hop_rates(self.spans.network, self._sides(source, size), self._sides(target, size))

    def _sides_of(self, slot: Slot, size: int) -> list[tuple[str, float]]:
        counts = self.counts(slot, range(self.units), size)
        return [(member.devices[0], float(count)) for member, count in zip(slot.members, counts, strict=True)]

    def _way(self, way: Way, size: int) -> WayArrays | None:
        """Place the inner cuts, from the last slot to the first, each where the value of what is behind it is least.

        A slot is drained when its own work is done and the last gradient has come from those behind it; no sooner
        than that is the last of its micro-batches through all slots and back, or, where memory is filled several
        times, so many round trips are over. Then it sums. Slots behind drain as much sooner as a gradient takes from
        them.
        """
        found = [self.slot(slot, size) for slot in way]
        slots = [slot for slot in found if slot is not None]
        if len(slots) < len(way) or len(way) > self.units:
            return None
        last = slots[-1]
        drained = np.maximum(last.run, self._ports(way, len(way) - 1, size))
        tail, back, turn, pace, refills = last.sums, last.back, last.turn, last.pace, last.refills
        ends, choices = np.arange(self.units + 1)[None, :], list[NDArray[np.intp]]()
        for number in range(len(way) - 2, -1, -1):
            slot, hop = slots[number], self.hop(way[number], way[number + 1], size)
            own = np.maximum(slot.run, self._ports(way, number, size))
            own_turn, own_back = slot.turn + hop.turn, slot.back + hop.back
            behind = np.maximum(np.maximum(drained, hop.busy[:, None])[None, :, :], turn + slot.pace[:, :, None])
            held = (slot.run * size / self.job.global_batch + hop.turn)[:, :, None] + turn
            drains = np.maximum(own[:, :, None], own_turn[:, :, None] + behind)
            drains = np.maximum(drains, slot.refills[:, :, None] * held)
            tails = np.maximum(slot.sums[:, :, None], tail - own_back[:, :, None])
            choice = (drains + tails).argmin(axis=1)
            drained, tail = (np.take_along_axis(t, choice[:, None, :], axis=1)[:, 0, :] for t in (drains, tails))
            back = np.take_along_axis(own_back, choice, axis=1) + back[choice, ends]
            turn = np.take_along_axis(own_turn, choice, axis=1) + turn[choice, ends]
            pace = np.maximum(np.take_along_axis(slot.pace, choice, axis=1), pace[choice, ends])
            refills = np.maximum(np.take_along_axis(slot.refills, choice, axis=1), refills[choice, ends])
            choices.append(choice)
        return WayArrays(way, drained, tail, back, turn, pace, refills, self._tied(way), tuple(reversed(choices)))

    def _ports(self, way: Way, number: int, size: int) -> Array | float:
        """Return for how long a slot's ports are busy in a step, as [i, j]: what comes up and down shares them."""
        ins = np.zeros(self.spans.above.shape)
        outs = np.zeros(self.spans.above.shape)
        if number > 0:
            ins += self._rates(way[number - 1], way[number], size).in_port * self._edge_up[:, None]
            outs += self._rates(way[number], way[number - 1], size).out_port * self._edge_down[:, None]
        if number < len(way) - 1:
            ins += self._rates(way[number + 1], way[number], size).in_port * self._edge_down[None, :]
            outs += self._rates(way[number], way[number + 1], size).out_port * self._edge_up[None, :]
        return np.asarray(self.job.global_batch * np.maximum(ins, outs))

    def _tied(self, way: Way) -> Array:
        found = np.zeros(self.spans.above.shape)
        if len(way) > 1:
            leaders = [way[0].devices[0], way[-1].devices[0]]
            for name, size_bytes in self.profile.graph.trained_shared_bytes.items():
                holders = [index for index, unit in enumerate(self.profile.graph.units) if name in unit.shared]
                if len(holders) > 1:
                    seconds = self.spans.network.exchange_s(leaders, size_bytes)
                    counts = np.searchsorted(holders, np.arange(self.units + 1))
                    found += np.where(counts[None, :] - counts[:, None] > 1, seconds, 0.0)
        return found

    def _twin_of(self, member: ReplicaDevices) -> ReplicaDevices:
        """Return the first member met that takes as long: of the same kinds, shares and places of its devices."""
        devices = [self.profile.cluster.device_by_name[name] for name in member.devices]
        hosts = [device.host for device in devices]
        places = tuple((device.kind, device.site, hosts.index(device.host)) for device in devices)
        key = (places[0][0],) if len(places) == 1 else (places, member.tp_shares)
        return self._twins.setdefault(key, member)

    def _sums(self, member: ReplicaDevices, op: Op, samples: int) -> Array:
        twin = self._twin(member)
        return self.spans.seconds(twin.devices, twin.tp_shares, op, samples)
