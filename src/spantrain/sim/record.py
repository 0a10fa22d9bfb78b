"""Intervals and flows of a simulated run, in the form of a live one."""

from collections.abc import Mapping

from spantrain.core.action import Action, Direction
from spantrain.core.messages import MessageKey
from spantrain.core.trace import Flow, Interval, Trace


class TraceRecorder:
    """Collects what happens; does nothing when it is off."""

    def __init__(self, *, on: bool) -> None:
        self.on = on
        self._intervals: list[Interval] = []
        self._flows: list[Flow] = []

    def computed(self, devices: tuple[str, ...], what: Action | str, step: int, start_s: float, end_s: float) -> None:
        """Note work of all devices of a replica."""
        for device in devices if self.on else ():
            self._add(device, "compute", str(what), step, (start_s, end_s))

    def summed(self, devices: tuple[str, ...], step: int, start_s: float, end_s: float) -> None:
        """Note the gradient sum of a stage, from when its first bucket may be summed."""
        for device in devices if self.on else ():
            self._add(device, "sum", "gradient sum", step, (start_s, end_s))

    def carried(
        self, route: tuple[str, str], key: MessageKey, size_bytes: int, sent: tuple[float, float], arrived_s: float
    ) -> None:
        """Note a message from one device to another: when it left, from first to last byte, and when it was there."""
        if not self.on:
            return
        source, target = route
        latency_s = arrived_s - sent[1]
        what = f"{Direction(key.lane).value} {key.span}"
        self._add(source, "send", f"{what} to {target}", key.step, sent, {"bytes": size_bytes})
        self._add(
            target,
            "receive",
            f"{what} from {source}",
            key.step,
            (sent[0] + latency_s, arrived_s),
            {"bytes": size_bytes},
        )
        self._flows.append(
            Flow(
                name=str(key),
                source=source,
                target=target,
                step=key.step,
                sent_s=sent[0],
                received_s=arrived_s,
                size_bytes=size_bytes,
            )
        )

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
