"""Carry packets between the sites' TUN devices, each through the shaped way between its sites.

A site's uplink carries all that leaves it, its downlink all that comes; a site without one is joined to its links
directly. A packet waits, is sent and leaves at each of them in turn (store and forward), and on each of them flows
share fairly. All of them may follow a trace of speeds.
"""

import heapq
import os
import time
from collections.abc import Collection, Mapping
from operator import itemgetter
from random import Random

from spantrain.core.cluster import Link, Site
from spantrain.core.speed import SpeedTrace
from spantrain.errors import TestbedError
from spantrain.testbed.build import NetworkLayout, set_segmentation
from spantrain.testbed.shaper import Packet, ShapedLink, parse_packet

Pair = tuple[str, str]
"""Source and target site."""
Line = tuple[str, str]
"""A site, and `up` or `down`."""

_SEED = 20


class ShapedNetwork:
    """The ways between all sites. Push packets at a site, take those that have arrived at another.

    No clock, no I/O: what leaves a line or link enters the next at the time at which it left, and speeds change at
    their times, however late the caller is.
    """

    def __init__(self, sites: tuple[Site, ...], links: tuple[Link, ...]) -> None:
        self.links: dict[Pair, ShapedLink] = {}
        self.lines: dict[Line, ShapedLink] = {}
        self._site_of = {number: site.name for number, site in enumerate(sites, start=1)}
        self._busy: tuple[set[ShapedLink], set[ShapedLink], set[ShapedLink]] = (set(), set(), set())
        """Uplinks, links and downlinks with packets."""
        self.cut: set[Pair] = set()
        """Ways by which nothing passes."""
        self._changes: list[tuple[float, int, ShapedLink, float]] = []
        """Changes of speed to come: when, by number, of what, to what."""
        for rank, link in enumerate(links):
            self.links[link.source, link.target] = ShapedLink(link, Random(_SEED + rank))
        for site in sites:
            for way, rate in (("up", site.uplink_bandwidth_bytes_per_s), ("down", site.downlink_bandwidth_bytes_per_s)):
                if rate is not None:
                    self.reshape_line(0.0, (site.name, way), rate)

    @property
    def next_event_s(self) -> float | None:
        """When `take` should be called next; None while nothing is under way and no speed is to change."""
        times = [time_s for busy in self._busy for link in busy if (time_s := link.next_event_s) is not None]
        if self._changes:
            times.append(self._changes[0][0])
        return min(times, default=None)

    @property
    def by_name(self) -> dict[str, ShapedLink]:
        """All that may follow a trace: ways between sites (`lab->office`), and lines to all others (`lab up`)."""
        ways = {f"{source}->{target}": link for (source, target), link in self.links.items()}
        return ways | {f"{site} {way}": line for (site, way), line in self.lines.items()}

    def follow(self, now_s: float, traces: Mapping[str, SpeedTrace], start_s: float) -> None:
        """Let links have other speeds over time from now on, those that are not named their normal speed.

        Raises:
            TestbedError: there is no link or line of that name.
        """
        known = self.by_name
        unknown = [name for name in traces if name not in known]
        if unknown:
            raise TestbedError(
                f"no link {', '.join(unknown)} to follow a trace; there are {', '.join(known) or 'none'}"
            )
        self._change_speeds(now_s)
        for link in known.values():
            link.change_speed(now_s, 1.0)
        changes = [
            (start_s + at_s, known[name], speed) for name, trace in traces.items() for at_s, speed in trace.changes
        ]
        self._changes = [(at_s, number, link, speed) for number, (at_s, link, speed) in enumerate(changes)]
        heapq.heapify(self._changes)
        self._change_speeds(now_s)

    def push(self, now_s: float, site: str, packet: Packet) -> bool:
        """Take a packet that a site sends; return whether it can go where it is addressed to."""
        self._change_speeds(now_s)
        link = self._link_to(site, packet)
        if link is None:
            return False
        if (site, link.shape.target) in self.cut:
            link.counters.packets_dropped += packet.packets
            return True
        uplink = self.lines.get((site, "up"))
        first = uplink or link
        first.push(now_s, packet)
        self._busy[0 if uplink else 1].add(first)
        return True

    def take(self, now_s: float) -> list[tuple[str, Packet]]:
        """Return the packets that have arrived by now, each with the site that it has come to, by time of arrival."""
        self._change_speeds(now_s)
        for at_s, uplink, packet in self._leave(0, now_s):
            link = self._link_to(uplink.shape.source, packet)
            assert link is not None, "it was pushed"
            link.push(at_s, packet)
            self._busy[1].add(link)
        there: list[tuple[float, str, Packet]] = []
        for at_s, link, packet in self._leave(1, now_s):
            target = link.shape.target
            downlink = self.lines.get((target, "down"))
            if downlink is None:
                there.append((at_s, target, packet))
            else:
                downlink.push(at_s, packet)
                self._busy[2].add(downlink)
        there += [(at_s, line.shape.source, packet) for at_s, line, packet in self._leave(2, now_s)]
        there.sort(key=itemgetter(0))
        return [(target, packet) for _, target, packet in there]

    def reshape(self, now_s: float, pair: Pair, shape: Link) -> None:
        """Change a link at once."""
        self.links[pair].reshape(now_s, shape)
        self._make_room()

    def reshape_line(self, now_s: float, line: Line, bandwidth_bytes_per_s: float) -> None:
        """Change a site's uplink or downlink at once; one that was not there is there from now on."""
        shape = Link(source=line[0], target=line[1], bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=0.0)
        found = self.lines.get(line)
        if found is not None:
            found.reshape(now_s, shape)
            return
        # It loses and delays nothing, so it draws nothing.
        self.lines[line] = ShapedLink(shape, Random(_SEED))
        self._make_room()

    def _change_speeds(self, now_s: float) -> None:
        """Make the changes that are due, each at its own time."""
        while self._changes and self._changes[0][0] <= now_s:
            at_s, _, link, speed = heapq.heappop(self._changes)
            link.change_speed(at_s, speed)

    def _make_room(self) -> None:
        """Let lines hold what the longest way over them needs."""
        for (site, way), line in self.lines.items():
            end = 0 if way == "up" else 1
            delays_s = (link.shape.latency_s for pair, link in self.links.items() if pair[end] == site)
            line.expect_delay(max(delays_s, default=0.0))

    def _link_to(self, site: str, packet: Packet) -> ShapedLink | None:
        target = self._site_of.get(packet.site)
        return None if target is None else self.links.get((site, target))

    def _leave(self, stage: int, now_s: float) -> list[tuple[float, ShapedLink, Packet]]:
        """Take from all uplinks (0), links (1) or downlinks (2) what has left them by now, by time."""
        busy = self._busy[stage]
        left = [(at_s, link, packet) for link in busy for at_s, packet in link.take(now_s)]
        busy.difference_update([link for link in busy if link.next_event_s is None])
        left.sort(key=itemgetter(0))
        return left


_MAX_READ_BYTES = 65536 + 64
_READS_PER_TURN = 32
_EARLY_S = 20e-6
"""Packets due within this time leave together: fewer wake-ups, and far below what is claimed for delays."""
_IDLE_S = 1.0


class Forwarder:
    """All sites of a testbed, joined."""

    def __init__(self, layout: NetworkLayout, tun_fds: tuple[int, ...]) -> None:
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
                data = os.read(tun_fd, _MAX_READ_BYTES)
            except BlockingIOError:
                return
            packet = parse_packet(data)
            # The time after the read: however busy the machine is, no packet seems to have come before it did.
            if packet is None or not self.network.push(time.monotonic(), source, packet):
                self.packets_refused += 1

    def deliver(self) -> None:
        """Hand over the packets that have arrived by now."""
        for target, packet in self.network.take(time.monotonic() + _EARLY_S):
            try:
                os.write(self._tun_of[target], packet.data)
            except OSError:
                self.packets_refused += 1

    def reshape(self, pair: Pair, shape: Link) -> None:
        """Change a link at once."""
        self.network.reshape(time.monotonic(), pair, shape)
        self._choose_segmentation(pair[0])

    def _choose_segmentation(self, source: str) -> None:
        # Loss is drawn packet by packet, so they must come one by one where there is any.
        lossy = any(link.shape.loss_ratio for pair, link in self.network.links.items() if pair[0] == source)
        set_segmentation(self._tun_of[source], joined=not lossy)
