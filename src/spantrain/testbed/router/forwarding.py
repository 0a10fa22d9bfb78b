"""Carry packets between the sites' TUN devices, each through the shaped way between its sites."""

import os
import time
from collections.abc import Collection, Mapping

from spantrain.core.speed import SpeedTrace
from spantrain.testbed.layout import Layout
from spantrain.testbed.namespaces import set_segmentation
from spantrain.testbed.router.lines import Line, Pair, ShapedNetwork
from spantrain.testbed.router.packets import parse_packet
from spantrain.testbed.router.shaper import Shape

_LARGEST_READ_BYTES = 65536 + 64
_READS_PER_TURN = 32
_EARLY_S = 20e-6
"""Packets due within this time leave together: fewer wake-ups, and far below what is claimed for delays."""
_IDLE_S = 1.0


class Forwarder:
    """All sites of a testbed, joined."""

    def __init__(self, layout: Layout, tun_fds: tuple[int, ...]) -> None:
        self.network = ShapedNetwork(layout.sites, layout.links)
        self._tun_of = {site.name: tun_fd for site, tun_fd in zip(layout.sites, tun_fds, strict=True)}
        self._site_of = {tun_fd: site for site, tun_fd in self._tun_of.items()}
        self.packets_refused = 0
        """Addressed to no site, not IPv4, or not taken by the kernel at the other end."""
        for source in self._tun_of:
            self._choose_segmentation(source)

    @property
    def fds(self) -> Collection[int]:
        """TUN devices to wait on for reading."""
        return self._site_of

    def due_s(self) -> float:
        """Return until when nothing is to be done, unless a packet comes, on the monotonic clock."""
        event_s = self.network.next_event_s
        idle_s = time.monotonic() + _IDLE_S
        return idle_s if event_s is None else min(event_s, idle_s)

    def read(self, tun_fd: int) -> None:
        """Take the packets that a site sends."""
        source = self._site_of[tun_fd]
        for _ in range(_READS_PER_TURN):
            try:
                data = os.read(tun_fd, _LARGEST_READ_BYTES)
            except BlockingIOError:
                return
            packet = parse_packet(data)
            # The time after the read: however busy the machine is, no packet seems to have come before it did.
            if packet is None or not self.network.push(time.monotonic(), source, packet):
                self.packets_refused += 1

    def deliver(self) -> None:
        """Hand over the packets that have arrived by now."""
        for target, packet in self.network.take(time.monotonic() + _EARLY_S):
            self._write(self._tun_of[target], packet.data)

    def reshape(self, pair: Pair, shape: Shape) -> None:
        """Change a link at once."""
        self.network.reshape(time.monotonic(), pair, shape)
        self._choose_segmentation(pair[0])

    def reshape_line(self, line: Line, bandwidth_bytes_per_s: float) -> None:
        """Change the uplink or downlink of a site at once."""
        self.network.reshape_line(time.monotonic(), line, bandwidth_bytes_per_s)

    def follow(self, traces: Mapping[str, SpeedTrace], start_s: float | None) -> float:
        """Let links follow traces that begin at a time of the monotonic clock, or now; return that time."""
        now_s = time.monotonic()
        start_s = now_s if start_s is None else start_s
        self.network.follow(now_s, traces, start_s)
        return start_s

    def _write(self, tun_fd: int, data: bytes) -> None:
        try:
            os.write(tun_fd, data)
        except OSError:
            self.packets_refused += 1

    def _choose_segmentation(self, source: str) -> None:
        # Loss is drawn packet by packet, so they must come one by one where there is any.
        lossy = any(link.shape.loss_ratio for pair, link in self.network.links.items() if pair[0] == source)
        set_segmentation(self._tun_of[source], joined=not lossy)
