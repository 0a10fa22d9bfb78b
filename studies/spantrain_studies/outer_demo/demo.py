"""The demonstration of the outer optimizer: four unequal places train one model and never wait for each other.

The picture of the outer optimizer's demonstration: held-out loss of each cluster by time, and by all tokens.
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Protocol
from xml.sax.saxutils import escape

from spantrain.config.files.text_files import write_atomically
from spantrain.errors import ConfigError, TestbedError, WorkerError
from spantrain.testbed.testbed import Testbed, why_unavailable
from spantrain_studies.outer_demo.orders import (
    HUB,
    MASTER,
    OuterDemoOptions,
    cluster_order,
    demo_network,
    host_of,
    master_order,
    shard_order,
    what_is_emulated,
)
from spantrain_studies.outer_demo.processes import DemoProcesses, Heard
from spantrain_studies.outer_demo.record import ClusterRow, DemoRecord, LossPoint, OuterDemoSummary

_WIDTH, _HEIGHT, _PANEL, _LEFT, _TOP, _BOTTOM = 960, 340, 400, 60, 52, 48
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


def draw_losses(points: Sequence[LossPoint], title: str) -> str:
    """Return the picture as SVG: two panels with the same losses, a line for each cluster."""
    names = list(dict.fromkeys(point.cluster for point in points))
    panels: tuple[tuple[str, Callable[[LossPoint], float]], ...] = (
        ("seconds", lambda point: point.time_s),
        ("tokens of all clusters, thousands", lambda point: point.tokens / 1e3),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect x="0" y="0" width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="16" y="20">{escape(title)}</text>',
    ]
    for number, (across, where) in enumerate(panels):
        parts += _panel(points, names, _LEFT + number * (_PANEL + 60), across, where)
    for number, name in enumerate(names):
        x = _LEFT + 90 * number
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<line x1="{x}" y1="36" x2="{x + 18}" y2="36" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 24}" y="40">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    points: Sequence[LossPoint], names: Sequence[str], left: float, across: str, where: Callable[[LossPoint], float]
) -> list[str]:
    low, high = min(point.loss for point in points), max(point.loss for point in points)
    most = max((where(point) for point in points), default=0.0) or 1.0
    bottom, height = _HEIGHT - _BOTTOM, _HEIGHT - _BOTTOM - _TOP

    def at(point: LossPoint) -> tuple[float, float]:
        part = (point.loss - low) / (high - low) if high > low else 0.5
        return left + _PANEL * where(point) / most, bottom - height * part

    parts = [_line((left, bottom), (left + _PANEL, bottom)), _line((left, _TOP), (left, bottom))]
    for tick in range(5):
        x, y = left + _PANEL * tick / 4, bottom - height * tick / 4
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{most * tick / 4:.4g}</text>')
        loss = low + (high - low) * tick / 4
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
    parts.append(f'<text x="{left + _PANEL / 2:.1f}" y="{bottom + 36}" text-anchor="middle">{escape(across)}</text>')
    for number, name in enumerate(names):
        line = [at(point) for point in points if point.cluster == name]
        colour = _COLOURS[number % len(_COLOURS)]
        parts += [_line(start, end, colour) for start, end in pairwise(line)]
    return parts


def _line(start: tuple[float, float], end: tuple[float, float], colour: str = "#000000") -> str:
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke="{colour}" '
        'stroke-width="1"/>'
    )


_START_S = 120.0
_END_S = 60.0
_LOOK_S = 0.25
_RATES_EVERY_S = 1.0


class OuterDemoListener(Protocol):
    """Hears how the demonstration goes."""

    def phase(self, text: str) -> None:
        """Say that a new part begins."""

    def note(self, text: str) -> None:
        """Say something that should stay to be read."""

    def show(self, record: DemoRecord, elapsed_s: float, total_s: float) -> None:
        """Show how far all clusters are."""


def run_outer_demo(options: OuterDemoOptions, out: Path, listener: OuterDemoListener) -> OuterDemoSummary:
    """Run all of it; write the picture into the folder.

    Raises:
        TestbedError: the emulated network is wanted and cannot be had here.
        WorkerError: a process failed.
    """
    if options.network and (reason := why_unavailable()) is not None:
        raise TestbedError(f"{reason}; or run with --no-network (loopback, unshaped)")
    out.mkdir(parents=True, exist_ok=True)
    rows = {
        one.name: ClusterRow(name=one.name, speed=one.speed, step_s=options.step_s / one.speed)
        for one in options.clusters
    }
    record = DemoRecord(rows=rows)
    listener.phase(f"Starting a master, {len(options.shards)} shards and {len(rows)} clusters")
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spantrain-outer-")))
        testbed = stack.enter_context(Testbed.up(demo_network(options))) if options.network else None
        processes = stack.enter_context(DemoProcesses(out / "logs", testbed, os.environ))
        demo = _Demo(options, state, processes, testbed, record, listener)
        demo.start()
        demo.train()
        demo.end()
    return _finish(options, out, record, listener)


class _Demo:
    """The running processes, and what they say."""

    def __init__(
        self,
        options: OuterDemoOptions,
        state: Path,
        processes: DemoProcesses,
        testbed: Testbed | None,
        record: DemoRecord,
        listener: OuterDemoListener,
    ) -> None:
        self._options, self._state, self._processes = options, state, processes
        self._testbed, self._record, self._listener = testbed, record, listener
        self._link_bytes: tuple[float, Mapping[str, tuple[int, int]]] | None = None

    def start(self) -> None:
        """Start all: the master first, whose token the others need."""
        options, state = self._options, self._state
        port = {} if self._testbed else {"port": 0}
        self._processes.start(MASTER, master_order(options, state, self._address(MASTER), **port), host=MASTER)
        joining = self._processes.wait_for(MASTER, "token", _START_S)
        for shard in options.shards:
            self._processes.start(shard, shard_order(options, state, self._address(shard), shard, joining), host=shard)
        for cluster in options.clusters:
            self._processes.start(cluster.name, cluster_order(options, cluster, joining), host=host_of(cluster.name))

    def train(self) -> None:
        """Listen until the time is over, which begins with the first inner step."""
        self._listener.phase("Waiting for the first inner step")
        limit_s = time.monotonic() + _START_S
        while self._record.began_s is None:
            if time.monotonic() > limit_s:
                raise WorkerError(f"no cluster began to train in {_START_S:.0f} s; see the logs in the folder's `logs`")
            self._hear()
        self._listener.phase("Training")
        while (elapsed_s := time.monotonic() - self._record.began_s) < self._options.seconds:
            self._hear()
            self._measure_links()
            self._listener.show(self._record, elapsed_s, self._options.seconds)

    def end(self) -> None:
        """Let clusters bring in what they have, and wait for what they say of themselves."""
        self._listener.phase("Bringing in the last rounds")
        for name in self._record.rows:
            self._processes.stop(name)
        limit_s = time.monotonic() + _END_S
        while any(row.state == "trains" for row in self._record.rows.values()) and time.monotonic() < limit_s:
            self._hear()
            self._listener.show(self._record, self._options.seconds, self._options.seconds)
        last_s = time.monotonic() + 2 * _RATES_EVERY_S  # the master says how it stands once a second
        while time.monotonic() < last_s:
            self._hear()
        for name in (*self._options.shards, MASTER):
            self._processes.stop(name)
            self._processes.wait(name, _END_S)

    def _hear(self) -> None:
        heard = self._processes.next(_LOOK_S)
        if heard is not None:
            self._take(heard)

    def _take(self, heard: Heard) -> None:
        now_s, name, message = heard
        if message is not None:
            self._record.hear(now_s, name, message)
        elif name not in self._record.rows or self._record.rows[name].state != "done":
            raise WorkerError(self._processes.how_it_ended(name))

    def _measure_links(self) -> None:
        """Note what each cluster's link carried since the last look."""
        now_s = time.monotonic()
        if self._testbed is None or (self._link_bytes and now_s < self._link_bytes[0] + _RATES_EVERY_S):
            return
        carried = {(link.source, link.target): link.bytes_sent for link in self._testbed.status().links}
        found = {name: (carried[name, HUB], carried[HUB, name]) for name in self._record.rows}
        if self._link_bytes:
            before_s, before = self._link_bytes
            self._record.links(
                {
                    name: ((up - before[name][0]) / (now_s - before_s), (down - before[name][1]) / (now_s - before_s))
                    for name, (up, down) in found.items()
                }
            )
        self._link_bytes = now_s, found

    def _address(self, host: str) -> str:
        return self._testbed.address(host) if self._testbed else "127.0.0.1"


def _finish(options: OuterDemoOptions, out: Path, record: DemoRecord, listener: OuterDemoListener) -> OuterDemoSummary:
    svg = draw_losses(record.points, f"Held-out loss, {len(record.rows)} clusters, {options.inner_steps} inner steps")
    picture = out / "loss.svg"
    write_atomically(picture, svg)
    try:
        from spantrain.app.picture import write_png

        write_png(svg, out / "loss.png")
        picture = out / "loss.png"
    except ConfigError as reason:
        listener.note(f"No PNG: {reason}")
    return record.summary(picture=str(picture), emulated=what_is_emulated(options))
