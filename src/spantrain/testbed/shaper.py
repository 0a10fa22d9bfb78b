"""The shape of one direction between two sites: rate, delay, jitter, loss, queue. No clock, no I/O.

A packet waits in a fair queue, is sent at the link's rate, may be lost, then travels for the delay. Times are computed,
not measured: a caller that wakes late delivers late but never sends at a lower rate.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import NamedTuple

from spantrain.core.cluster import Link

_QUANTUM_BYTES = 16384
"""Credit of a flow per round: a few packets, so that two bulk flows alternate in about a millisecond at 100 Mbit/s."""
_QUEUE_FLOOR_BYTES = 131072
_QUEUE_FLOOR_S = 0.03
_MAX_PATIENCE_S = 0.5e-3


def room_bytes(bandwidth_bytes_per_s: float, latency_s: float) -> int:
    """Return what may wait on a way of such a rate and so long a delay: two round trips' worth and some.

    One round trip's worth keeps the link full for one TCP flow; the second takes in the overshoot with which a
    connection begins. Other flows do not wait for it, since each has its own queue.
    """
    return int(bandwidth_bytes_per_s * (4 * latency_s + _QUEUE_FLOOR_S)) + _QUEUE_FLOOR_BYTES


class Packet(NamedTuple):
    """One packet, or several of one flow that the kernel has joined."""

    data: bytes
    flow: bytes
    """Packets with equal keys share a queue and keep their order."""
    wire_bytes: int
    """IP bytes of all the packets that this stands for."""
    packets: int = 1
    """How many packets it stands for."""
    site: int = 0
    """Number of the site that it is for."""
    is_load: bool = False
    """Whether it belongs to traffic that was made to compete (`load`)."""


@dataclass(eq=False)
class _FlowQueue:
    key: bytes
    packets: deque[Packet] = field(default_factory=deque)
    waiting_bytes: int = 0
    credit_bytes: int = _QUANTUM_BYTES


class FairQueue:
    """Deficit round robin over flows; a flow that was silent goes first once.

    Shreedhar and Varghese, "Efficient fair queuing using deficit round robin", 1995; the list of new flows as in
    RFC 8290 (FlowQueue-CoDel), section 4. So a ping or a heartbeat does not wait behind a bulk transfer.
    """

    def __init__(self) -> None:
        self._flows: dict[bytes, _FlowQueue] = {}
        self._new: deque[_FlowQueue] = deque()
        self._old: deque[_FlowQueue] = deque()
        self.waiting_bytes = 0

    def push(self, packet: Packet) -> None:
        """Add a packet at the end of its flow."""
        flow = self._flows.get(packet.flow)
        if flow is None:
            flow = self._flows[packet.flow] = _FlowQueue(packet.flow)
            self._new.append(flow)
        flow.packets.append(packet)
        flow.waiting_bytes += packet.wire_bytes
        self.waiting_bytes += packet.wire_bytes

    def pop(self) -> Packet | None:
        """Return the packet whose turn it is, or None when nothing waits."""
        while self._new or self._old:
            turn = self._new or self._old
            flow = turn[0]
            if flow.credit_bytes <= 0:
                flow.credit_bytes += _QUANTUM_BYTES
                self._old.append(turn.popleft())
            elif not flow.packets:
                turn.popleft()
                if turn is self._new:
                    self._old.append(flow)  # else a flow of single packets would be new, and so first, each time
                else:
                    del self._flows[flow.key]
            else:
                packet = self._take(flow)
                flow.credit_bytes -= packet.wire_bytes
                return packet
        return None

    def drop(self) -> Packet:
        """Remove and return the oldest packet of the flow with most bytes waiting: the one that fills the queue."""
        assert self._flows, "nothing to drop"
        return self._take(max(self._flows.values(), key=lambda flow: flow.waiting_bytes))

    def _take(self, flow: _FlowQueue) -> Packet:
        packet = flow.packets.popleft()
        flow.waiting_bytes -= packet.wire_bytes
        self.waiting_bytes -= packet.wire_bytes
        return packet


@dataclass
class LinkCounters:
    """What has passed one direction of a link since it was built."""

    bytes_sent: int = 0
    packets_sent: int = 0
    packets_dropped: int = 0
    """For want of room in the queue."""
    packets_lost: int = 0
    """By `loss_ratio`."""
    load_bytes_sent: int = 0
    """Those of `bytes_sent` that were made to compete."""


class ShapedLink:
    """One direction between two sites. Push packets, collect those that have arrived.

    The shape's rate is that of IP packets, headers included; its delay is one way, without the time to send and to
    queue. Each packet's delay is uniform within plus or minus the jitter, and each may be lost, whatever became of the
    others.

    `speed` is the part of the shape's rate that there is at present. At 0 the link stands still: packets wait, as many
    as at its normal speed, and go on when it moves again.
    """

    def __init__(self, shape: Link, random: Random) -> None:
        self.shape = shape
        self.speed = 1.0
        self.counters = LinkCounters()
        self._random = random
        self._queue = FairQueue()
        self._sending: Packet | None = None
        self._sent_at_s = 0.0
        self._stalled_bytes = 0.0
        """What is left of the packet that is being sent, while the link stands still."""
        self._travelling: list[tuple[float, int, Packet]] = []
        self._order = 0
        self._last_arrival_s: dict[bytes, float] = {}
        self._delay_elsewhere_s = 0.0
        self._measure()

    @property
    def waiting_bytes(self) -> int:
        """Bytes in the queue."""
        return self._queue.waiting_bytes

    @property
    def next_event_s(self) -> float | None:
        """When `take` should be called next; None while the link is empty.

        The end of sending a packet has no effect until the packet arrives, so on a link with a delay it may be noticed
        a little late: that halves the number of wake-ups.
        """
        if self._sending is None:
            return self._travelling[0][0] if self._travelling else None
        noticed_s = self._sent_at_s + self._patience_s
        return min(self._travelling[0][0], noticed_s) if self._travelling else noticed_s

    def expect_delay(self, latency_s: float) -> None:
        """Make room for packets whose whole way has so long a delay: here and on what is before or behind this."""
        self._delay_elsewhere_s = latency_s - self.shape.latency_s
        self._measure()
        self._drop_what_is_too_much()

    def push(self, now_s: float, packet: Packet) -> None:
        """Take a packet; when the queue is full, drop from the flow that fills it."""
        self._advance(now_s)
        self._queue.push(packet)
        if self._sending is None:
            self._send_next(now_s)
        self._drop_what_is_too_much()

    def take(self, now_s: float) -> list[tuple[float, Packet]]:
        """Return the packets that have arrived by now and when each did, in order of arrival."""
        self._advance(now_s)
        arrived: list[tuple[float, Packet]] = []
        while self._travelling and self._travelling[0][0] <= now_s:
            at_s, _, packet = heapq.heappop(self._travelling)
            arrived.append((at_s, packet))
        if not self._travelling:
            self._last_arrival_s.clear()
        return arrived

    def reshape(self, now_s: float, shape: Link) -> None:
        """Change the shape; what is being sent goes on at the new rate, what travels arrives as it would have."""
        self._change(now_s, shape, self.speed)

    def change_speed(self, now_s: float, speed: float) -> None:
        """Let the link carry another part of its rate: what is being sent goes on at the new one, 0 stops it."""
        self._change(now_s, self.shape, speed)

    def _change(self, now_s: float, shape: Link, speed: float) -> None:
        self._advance(now_s)
        left_bytes = self._stalled_bytes if self._sent_at_s == inf else (self._sent_at_s - now_s) * self._bytes_per_s
        self.shape, self.speed = shape, speed
        self._measure()
        if self._sending is not None:
            self._plan_end(now_s, left_bytes)
        self._drop_what_is_too_much()

    def _measure(self) -> None:
        """Reckon the present rate, what may wait at it, and how late the end of sending may be noticed."""
        shape = self.shape
        self._patience_s = min(_MAX_PATIENCE_S, max(0.0, (shape.latency_s - shape.jitter_s) / 2))
        self._bytes_per_s = shape.bandwidth_bytes_per_s * self.speed
        # A link that stands still has the buffer that it had.
        rate = self._bytes_per_s or shape.bandwidth_bytes_per_s
        self._room_bytes = room_bytes(rate, shape.latency_s + self._delay_elsewhere_s)

    def _plan_end(self, start_s: float, left_bytes: float) -> None:
        """Reckon when so many bytes of the packet that is being sent will have left."""
        self._stalled_bytes = left_bytes
        self._sent_at_s = start_s + left_bytes / self._bytes_per_s if self._bytes_per_s else inf

    def _drop_what_is_too_much(self) -> None:
        while self._queue.waiting_bytes > self._room_bytes:
            self.counters.packets_dropped += self._queue.drop().packets

    def _advance(self, now_s: float) -> None:
        while self._sending is not None and self._sent_at_s <= now_s:
            self._depart(self._sending, self._sent_at_s)
            self._send_next(self._sent_at_s)

    def _send_next(self, start_s: float) -> None:
        self._sending = self._queue.pop()
        if self._sending is not None:
            # A packet that has left the link before may be handed on when this one has sent others since.
            self._plan_end(max(start_s, self._sent_at_s), self._sending.wire_bytes)

    def _depart(self, packet: Packet, now_s: float) -> None:
        shape = self.shape
        if shape.loss_ratio and self._random.random() < shape.loss_ratio:
            self.counters.packets_lost += packet.packets
            return
        self.counters.bytes_sent += packet.wire_bytes
        self.counters.packets_sent += packet.packets
        if packet.is_load:
            self.counters.load_bytes_sent += packet.wire_bytes
        delay_s = shape.latency_s
        if shape.jitter_s:
            delay_s = max(0.0, delay_s + self._random.uniform(-shape.jitter_s, shape.jitter_s))
        # A flow keeps its order: TCP would take overtaking for loss, and real paths seldom reorder.
        arrival_s = max(now_s + delay_s, self._last_arrival_s.get(packet.flow, 0.0))
        self._last_arrival_s[packet.flow] = arrival_s
        self._order += 1
        heapq.heappush(self._travelling, (arrival_s, self._order, packet))


LOAD_TYPE_OF_SERVICE = 0x20
"""What marks the packets of traffic that was made to compete: "lower effort", class selector 1 (RFC 4594).

The router does not treat them otherwise, it counts them apart.
"""

OFFLOAD_HEADER_BYTES = 10
"""Size of `struct virtio_net_hdr`, which stands before each packet (Linux: Documentation/networking/tuntap.rst)."""
_TCP, _UDP = 6, 17
_CLASS = 0xFC
"""The two bits below are for congestion marks."""


def parse_packet(data: bytes) -> Packet | None:
    """Return the packet; None if not IPv4. The site that it is for is the second byte of the destination's address.

    With segmentation offload the kernel hands over up to 64 kB of one TCP flow as one packet; it is charged for the
    headers of each of the packets that it stands for.
    """
    start = OFFLOAD_HEADER_BYTES
    if len(data) < start + 20 or data[start] >> 4 != 4:
        return None
    header_bytes = (data[start] & 15) * 4
    protocol = data[start + 9]
    flow = data[start + 9 : start + 10] + data[start + 12 : start + 20]
    fragment = (data[start + 6] & 0x3F) | data[start + 7]
    if protocol in (_TCP, _UDP) and not fragment:
        flow += data[start + header_bytes : start + header_bytes + 4]
    wire_bytes, count = len(data) - start, 1
    segment_bytes = int.from_bytes(data[4:6], "little")
    if data[1] and segment_bytes and protocol == _TCP:
        headers = header_bytes + (data[start + header_bytes + 12] >> 4) * 4
        count = max(1, -(-(wire_bytes - headers) // segment_bytes))
        wire_bytes += (count - 1) * headers
    is_load = data[start + 1] & _CLASS == LOAD_TYPE_OF_SERVICE
    return Packet(data, flow, wire_bytes, count, data[start + 17], is_load)
