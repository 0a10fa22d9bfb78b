"""Traces as one file that opens in Perfetto (Chrome trace JSON); `config.traces.trace_file` reads it back.

A process per device; a track per lane. Slices never overlap on a track: what does overlap (two messages on their way at
once) goes to further tracks of the lane, numbered. What an adapter decided is an instant. An arrow leads from each send
to its receive. Perfetto keeps times as microseconds; the exact seconds are kept in the arguments, so that reading gives
back what was written.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spantrain.core.trace import LANES, TRACE_FORMAT, TRACE_VERSION, Flow, Interval, Trace

_TRACKS_PER_LANE = 1000
_MOMENTS = "adapter"
"""The lane whose intervals are moments: instants there, which take no time."""
_ADDRESS = re.compile(r"g\d+/s\d+/(.+)/cut-?\d+(\[\d+:\d+\])")
"""A message's key as text."""
_FLOW_FIELDS = ("source", "target", "step", "sent_s", "received_s", "size_bytes")

Event = dict[str, Any]


def perfetto_json(trace: Trace) -> dict[str, Any]:
    """Return the trace in Chrome's JSON form; its times count from the first start."""
    devices = dict.fromkeys([*(i.device for i in trace.intervals), *(f.source for f in trace.flows)])
    devices.update(dict.fromkeys(flow.target for flow in trace.flows))
    page = _PerfettoFile({device: number for number, device in enumerate(devices, start=1)}, trace)
    return {
        "traceEvents": page.events(),
        "displayTimeUnit": "ms",
        "otherData": {"format": TRACE_FORMAT, "version": TRACE_VERSION, "clock": trace.clock},
    }


class _PerfettoFile:
    """One trace on its way to a file."""

    def __init__(self, process: Mapping[str, int], trace: Trace) -> None:
        self._process = process
        self._flows = trace.flows
        starts = [*(i.start_s for i in trace.intervals), *(f.sent_s for f in trace.flows)]
        self._origin_s = min(starts, default=0.0)
        self._tracks = _tracks(trace.intervals)
        self._slices: dict[tuple[str, str, int], list[tuple[Interval, int]]] = {}
        for interval, track in self._tracks:
            self._slices.setdefault((interval.device, interval.lane, interval.step), []).append((interval, track))

    def events(self) -> list[Event]:
        """Return names, slices and arrows."""
        arrows = [event for number, flow in enumerate(self._flows) for event in self._arrow(flow, number)]
        return [*self._names(), *(self._slice(interval, track) for interval, track in self._tracks), *arrows]

    def _names(self) -> Iterable[Event]:
        used: dict[str, set[int]] = {device: set() for device in self._process}
        for interval, track in self._tracks:
            used[interval.device].add(track)
        for device, pid in self._process.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": device}}
            for track in sorted(used[device]):
                lane, number = LANES[track // _TRACKS_PER_LANE], track % _TRACKS_PER_LANE
                name = f"{lane} {number + 1}" if number else lane
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": {"name": name}}
                yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": track, "args": {"sort_index": track}}

    def _slice(self, interval: Interval, track: int) -> Event:
        start_us = self._us(interval.start_s)
        moment = interval.lane == _MOMENTS
        return {
            **({"ph": "i", "s": "t"} if moment else {"ph": "X", "dur": round(self._us(interval.end_s) - start_us, 3)}),
            "name": interval.name,
            "cat": interval.lane,
            "pid": self._process[interval.device],
            "tid": track,
            "ts": start_us,
            "args": {
                "step": interval.step,
                "start_s": interval.start_s,
                "end_s": interval.end_s,
                "detail": dict(interval.detail),
            },
        }

    def _arrow(self, flow: Flow, number: int) -> tuple[Event, Event]:
        """Return both ends of a message's arrow, inside its send and receive slices where those were recorded."""
        what = {"id": number, "bind_id": number, "name": flow.name, "cat": "message"}
        sent = self._bound((flow.source, "send", flow.step), f"to {flow.target}", flow, flow.sent_s)
        received = self._bound((flow.target, "receive", flow.step), f"from {flow.source}", flow, flow.received_s)
        args = {name: getattr(flow, name) for name in _FLOW_FIELDS}
        return (
            {"ph": "s", **what, "pid": self._process[flow.source], **sent, "args": args},
            {"ph": "f", "bp": "e", **what, "pid": self._process[flow.target], **received},
        )

    def _bound(self, key: tuple[str, str, int], peer: str, flow: Flow, at_s: float) -> Event:
        """Return track and time inside the slice of a message: the one of its name, else the nearest in time."""
        slices = self._slices.get(key, [])
        if not slices:
            return {"tid": LANES.index(key[1]) * _TRACKS_PER_LANE, "ts": self._us(at_s)}
        address = _ADDRESS.fullmatch(flow.name)
        name = f"{address[1]} {address[2]} {peer}" if address else ""
        interval, track = min(
            slices, key=lambda entry: (entry[0].name != name, abs(_clamped(at_s, entry[0]) - at_s), entry[0].start_s)
        )
        return {"tid": track, "ts": self._us(_clamped(at_s, interval))}

    def _us(self, time_s: float) -> float:
        return round((time_s - self._origin_s) * 1e6, 3)


def _clamped(at_s: float, interval: Interval) -> float:
    return min(max(at_s, interval.start_s), interval.end_s)


def _tracks(intervals: Sequence[Interval]) -> list[tuple[Interval, int]]:
    """Give each interval a track of its lane on which nothing overlaps it: the first that is free."""
    ends: dict[tuple[str, str], list[float]] = {}
    found: list[tuple[Interval, int]] = []
    for interval in sorted(intervals, key=lambda i: (i.start_s, i.end_s)):
        lane_ends = ends.setdefault((interval.device, interval.lane), [])
        free = next((n for n, end_s in enumerate(lane_ends) if end_s <= interval.start_s), len(lane_ends))
        lane_ends[free : free + 1] = [interval.end_s]
        found.append((interval, LANES.index(interval.lane) * _TRACKS_PER_LANE + free))
    return found
