"""Carry packets between the sites' TUN devices, each through the shaped link of its direction."""

import os
import time
from collections.abc import Collection
from random import Random

from spantrain.core.cluster import Link
from spantrain.testbed.layout import Layout
from spantrain.testbed.namespaces import set_segmentation
from spantrain.testbed.packets import parse_packet
from spantrain.testbed.shaper import Shape, ShapedLink

__all__ = ["Forwarder", "shape_of"]

_LARGEST_READ_BYTES = 65536 + 64
_READS_PER_TURN = 32
_EARLY_S = 20e-6
"""Packets due within this time leave together: fewer wake-ups, and far below what is claimed for delays."""
_IDLE_S = 1.0
_SEED = 20

Pair = tuple[str, str]


def shape_of(link: Link) -> Shape:
    """Return the shape of a link of a cluster."""
    return Shape(
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        latency_s=link.latency_s,
        jitter_s=link.jitter_s,
        loss_ratio=link.loss_ratio,
    )


class Forwarder:
    """All links of a testbed."""

    def __init__(self, layout: Layout, tun_fds: tuple[int, ...]) -> None:
        number_of = {site.name: site.number for site in layout.sites}
        self._tun_of = {site.name: tun_fd for site, tun_fd in zip(layout.sites, tun_fds, strict=True)}
        self.links: dict[Pair, ShapedLink] = {}
        self._outward: dict[int, dict[int, ShapedLink]] = {tun_fd: {} for tun_fd in tun_fds}
        self._exit_of: dict[ShapedLink, int] = {}
        for rank, link in enumerate(layout.links):
            shaped = ShapedLink(shape_of(link), Random(_SEED + rank))
            self.links[link.source, link.target] = shaped
            self._outward[self._tun_of[link.source]][number_of[link.target]] = shaped
            self._exit_of[shaped] = self._tun_of[link.target]
        self._busy: set[ShapedLink] = set()
        self.packets_refused = 0
        """Addressed to no site, not IPv4, or not taken by the kernel at the other end."""
        for source in self._tun_of:
            self._choose_segmentation(source)

    @property
    def fds(self) -> Collection[int]:
        """TUN devices to wait on for reading."""
        return self._outward

    def due_s(self) -> float:
        """Return until when nothing is to be done, unless a packet comes, on the monotonic clock."""
        events = [event for link in self._busy if (event := link.next_event_s) is not None]
        return min(events, default=time.monotonic() + _IDLE_S)

    def read(self, tun_fd: int) -> None:
        """Take the packets that a site sends."""
        outward = self._outward[tun_fd]
        for _ in range(_READS_PER_TURN):
            try:
                data = os.read(tun_fd, _LARGEST_READ_BYTES)
            except BlockingIOError:
                return
            parsed = parse_packet(data)
            link = outward.get(parsed[0]) if parsed else None
            if link is None or parsed is None:
                self.packets_refused += 1
            else:
                # The time after the read: however busy the machine is, no packet seems to have come before it did.
                link.push(time.monotonic(), parsed[1])
                self._busy.add(link)

    def deliver(self) -> None:
        """Hand over the packets that have arrived by now."""
        now_s = time.monotonic() + _EARLY_S
        for link in list(self._busy):
            for data in link.collect(now_s):
                self._write(self._exit_of[link], data)
            if link.next_event_s is None:
                self._busy.discard(link)

    def reshape(self, source: str, target: str, shape: Shape) -> None:
        """Change a link at once."""
        self.links[source, target].reshape(time.monotonic(), shape)
        self._choose_segmentation(source)

    def _write(self, tun_fd: int, data: bytes) -> None:
        try:
            os.write(tun_fd, data)
        except OSError:
            self.packets_refused += 1

    def _choose_segmentation(self, source: str) -> None:
        # Loss is drawn packet by packet, so they must come one by one where there is any.
        lossy = any(link.shape.loss_ratio for pair, link in self.links.items() if pair[0] == source)
        set_segmentation(self._tun_of[source], joined=not lossy)
