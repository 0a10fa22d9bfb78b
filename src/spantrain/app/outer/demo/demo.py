"""The demonstration of the outer optimizer: four unequal places train one model and never wait for each other."""

import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from spantrain.app.outer.demo.orders import (
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
from spantrain.app.outer.demo.picture import draw_losses
from spantrain.app.outer.demo.processes import DemoProcesses, Heard
from spantrain.app.outer.demo.record import ClusterRow, DemoRecord, OuterDemoSummary
from spantrain.config.files.text_files import write_atomically
from spantrain.errors import ConfigError, TestbedError, WorkerError
from spantrain.testbed.testbed import Testbed, why_unavailable

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
