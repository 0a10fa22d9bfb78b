"""What is kept of a simulated run: intervals and flows in the form of a live one, and the bytes that devices hold."""

from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum
from itertools import pairwise

from spantrain.core.action import Action, Direction, Op
from spantrain.core.messages import MessageKey
from spantrain.core.records import Record
from spantrain.core.trace import Flow, Interval, Trace
from spantrain.cost.held_sizes import HeldBytes, HeldSizes
from spantrain.devices.registry import find_backend


class TraceRecorder:
    """Collects what happens; does nothing when it is off."""

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self._intervals: list[Interval] = []
        self._flows: list[Flow] = []

    def computed(
        self, devices: tuple[str, ...], what: Action | str, step: int, start_s: float, end_s: float, *,
        lane: str = "compute",
    ) -> None:  # fmt: skip
        """Note work of all devices of a replica; or of a stage: its sum, from when the first bucket may be summed."""
        for device in devices if self.on else ():
            self._add(device, lane, str(what), step, (start_s, end_s))

    def carried(
        self, route: tuple[str, str], key: MessageKey, size_bytes: int, sent: tuple[float, float], arrived_s: float
    ) -> None:
        """Note a message from one device to another: when it left, from first to last byte, and when it was there."""
        if not self.on:
            return
        source, target = route
        first_s = sent[0] + (arrived_s - sent[1])
        what, detail = f"{Direction(key.lane).value} {key.span}", {"bytes": size_bytes}
        self._add(source, "send", f"{what} to {target}", key.step, sent, detail)
        self._add(target, "receive", f"{what} from {source}", key.step, (first_s, arrived_s), detail)
        flow = Flow(
            name=str(key),
            source=source,
            target=target,
            step=key.step,
            sent_s=sent[0],
            received_s=arrived_s,
            size_bytes=size_bytes,
        )
        self._flows.append(flow)

    def decided(self, device: str, what: str, reason: str, step: int, now_s: float) -> None:
        """Note a decision of an adapter."""
        if self.on:
            self._add(device, "adapter", what, step, (now_s, now_s), {"reason": reason})

    def trace(self) -> Trace:
        """Return what was collected."""
        return Trace(intervals=tuple(self._intervals), flows=tuple(self._flows), clock="virtual")

    def _add(
        self,
        device: str,
        lane: str,
        name: str,
        step: int,
        between: tuple[float, float],
        detail: Mapping[str, str | int | float] | None = None,
    ) -> None:
        start_s, end_s = between
        self._intervals.append(
            Interval(device=device, lane=lane, name=name, step=step, start_s=start_s, end_s=end_s, detail=detail or {})
        )


class _HeldPart(IntEnum):
    """What comes and goes, by the byte; the first six by the sample: members of a group hold different parts."""

    ACTIVATIONS = 0
    """From F to I or B."""
    DEFERRED = 1
    """From I to W."""
    AGAIN = 2
    """What recomputed units hold while B runs."""
    AGAIN_SPLIT = 3
    """What they hold while I runs."""
    WORKING = 4
    """What operations need while an action runs."""
    WORKING_BESIDES = 5
    """The same by the action: however few its samples."""
    RECEIVED = 6
    SENDING = 7


_HELD = (_HeldPart.ACTIVATIONS, _HeldPart.DEFERRED, _HeldPart.AGAIN, _HeldPart.AGAIN_SPLIT)
_WORKING = (_HeldPart.WORKING, _HeldPart.WORKING_BESIDES)


class DeviceMemory(Record):
    """Memory of one device over a simulated run."""

    peak: HeldBytes
    """What it held when it first held the most."""
    held_bytes: int
    """The most that tensors held at once, without what operations need while they run, and the framework."""
    timeline: tuple[tuple[float, int], ...]
    """Times at which the sum changes, and all bytes from then on."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once."""
        return self.peak.total_bytes

    @property
    def allocated_bytes(self) -> int:
        """The same without what the framework itself takes, which is no tensor's."""
        return self.peak.total_bytes - self.peak.framework_bytes

    def counted_bytes(self, backend: str) -> int:
        """Return the most that a device of a backend says it had (`ComputeDevice.peak_bytes`, or what is held)."""
        row = find_backend(backend)
        return self.allocated_bytes if row is not None and row.counts_allocations else self.held_bytes


class MemoryLog:
    """Notes what devices begin and cease to hold.

    What operations need counts from the start to the end of each action.
    Activations count from the start of F to the end of B, or of I, from where on counts what W needs, to its end.
    Units that are run again count from the start to the end of I or B. A message counts at its sender from the start
    of the action that makes it to its last byte sent, at its receiver from its first byte there to the end of the
    action that uses it; where activations hold the very message (`HeldSizes`), to the start of F, and at the sender
    not at all. What is freed at a moment is free for what begins at that moment.
    """

    def __init__(self, sizes: Mapping[str, HeldSizes]) -> None:
        self._sizes = sizes
        self._changes: dict[str, list[tuple[float, int, int, int]]] = {device: [] for device in sizes}
        """By device: when, how much, of what, in which stage."""

    def computed(self, device: str, action: Action, start_s: float, end_s: float) -> None:
        """Note an action from its start to its end."""
        op, stage, changes, samples = action.op, action.stage, self._changes[device], action.span.size
        sizes = self._sizes[device].of(stage)
        for part, amount in zip(_WORKING, (samples, 1), strict=True):
            changes += [(start_s, amount, part, stage), (end_s, -amount, part, stage)]
        if op is Op.FORWARD:
            changes.append((start_s, samples, _HeldPart.ACTIVATIONS, stage))
            taken_s = start_s if sizes.keeps_input else end_s
            changes.append((taken_s, -samples * sizes.input_bytes_per_sample, _HeldPart.RECEIVED, stage))
            return
        if op is Op.BACKWARD_WEIGHT:
            changes.append((end_s, -samples, _HeldPart.DEFERRED, stage))
            return
        again = _HeldPart.AGAIN if op is Op.BACKWARD else _HeldPart.AGAIN_SPLIT
        changes += [(start_s, samples, again, stage), (end_s, -samples, again, stage)]
        changes.append((end_s, -samples, _HeldPart.ACTIVATIONS, stage))
        if op is Op.BACKWARD_INPUT:
            changes.append((end_s, samples, _HeldPart.DEFERRED, stage))
        changes.append((end_s, -samples * sizes.output_gradient_bytes_per_sample, _HeldPart.RECEIVED, stage))

    def sent(
        self, device: str, size_bytes: int, made_s: float, sent_s: float, *, forward: bool = False, stage: int = 0
    ) -> None:
        """Note a message of a stage at its sender: when the action that makes it began, when its last byte had left."""
        if forward and self._sizes[device].of(stage).keeps_output:
            return
        sending = _HeldPart.SENDING
        self._changes[device] += ((made_s, size_bytes, sending, stage), (sent_s, -size_bytes, sending, stage))

    def received(self, device: str, size_bytes: int, first_byte_s: float) -> None:
        """Note a message at its receiver: when its first byte was there."""
        self._changes[device].append((first_byte_s, size_bytes, _HeldPart.RECEIVED, 0))

    def of(self, device: str, leader: str) -> DeviceMemory:
        """Return the memory of a device, which does what the leader of its replica does.

        Raises:
            ValueError: the sizes by the sample do not fit the sizes of messages.
        """
        sizes = self._sizes[device]
        held, most = [0] * len(_HeldPart), [0] * len(_HeldPart)
        per_sample, by_stage = _per_sample(sizes), {stage: _per_sample(own) for stage, own in sizes.stages.items()}
        base = now = highest = sizes.always.total_bytes
        held_bytes = base
        levels: dict[float, int] = {0.0: base}
        # At equal times what is freed comes first.
        for time_s, amount, part, stage in sorted(self._changes[leader]):
            own = by_stage.get(stage, per_sample)
            size_bytes = amount * own[part] if part < len(own) else amount
            held[part] += size_bytes
            now += size_bytes
            if now > highest:
                highest, most = now, held.copy()
            held_bytes = max(held_bytes, now - sum(held[part] for part in _WORKING))
            levels[time_s] = now
        if now != base:
            raise ValueError(
                f"{device} holds {now - base} bytes more after a step: its sizes are not those of messages"
            )
        peak = replace(
            sizes.always,
            activation_bytes=sum(most[part] for part in _HELD),
            received_bytes=most[_HeldPart.RECEIVED],
            sending_bytes=most[_HeldPart.SENDING],
            working_bytes=sum(most[part] for part in _WORKING),
        )
        held_bytes -= sizes.always.framework_bytes
        return DeviceMemory(peak=peak, held_bytes=held_bytes, timeline=_changes(levels))


def _per_sample(sizes: HeldSizes) -> tuple[int, ...]:
    """Return the bytes of one sample of each part that goes by the sample."""
    held, again = sizes.activation_bytes_per_sample, sizes.again_bytes_per_sample
    deferred, split = sizes.deferred_bytes_per_sample, sizes.again_split_bytes_per_sample
    working = sizes.working_bytes_per_sample, sizes.working_bytes
    return held, held if deferred is None else deferred, again, again if split is None else split, *working


def _changes(levels: Mapping[float, int]) -> tuple[tuple[float, int], ...]:
    """Return the levels without those that are like the one before."""
    points = list(levels.items())
    return (points[0], *(point for before, point in pairwise(points) if point[1] != before[1]))
