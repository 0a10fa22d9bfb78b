"""Measure the network through the mailbox that training uses: who measures with whom when, latency, bandwidth.

Planning is pure: `pair_rounds` says which pairs measure at the same time, `spread` gives every pair of devices the
figures of its hosts. Measuring has two sides: one runs `echo_probes`, the other `measure_pair` or `measure_both`.
No clock of one machine is compared with a clock of another.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import combinations

import torch

from spantrain.core.cluster import Cluster, Device
from spantrain.core.messages import MessageKey
from spantrain.core.profile import LinkMeasurement
from spantrain.core.spans import Span
from spantrain.errors import PeerLostError, ProtocolError
from spantrain.transport.interface import MailboxLike, Message

__all__ = [
    "DevicePair",
    "RoundTrip",
    "arrival_rate",
    "echo_probes",
    "measure_both",
    "measure_pair",
    "measure_round_trip",
    "pair_rounds",
    "payload_cap_bytes",
    "spread",
]

DevicePair = tuple[str, str]

_LANE = "probe"
_PING_INTS = 5
_PINGS_PER_ROUND, _LEAST_PINGS = 5, 8
_OVERHEAD_BYTES = 280
"""What a small message takes on the wire besides its tensors: header, framing, encryption, TCP and IP."""
_WARM_UP_BYTES = 256 * 1024
_TRANSFER_S, _TRANSFER_ROUND_TRIPS, _MOST_TRANSFER_S = 0.25, 4, 1.5
_PIECES = 48
_LEAST_PIECE_BYTES, _MOST_PIECE_BYTES = 8 * 1024, 124 * 1024
_MOST_PIECES = 4096
_RAMP_PART = 0.35
"""Part of a transfer that is left out at its beginning: TCP may still be finding its speed."""
_MOST_REPEATS, _STEADY_RATIO, _MOST_OVER_WHOLE = 4, 0.1, 1.4
_REPLY_S = 60.0
_POLL_S = 0.25


# Who measures with whom, and when.


def pair_rounds(
    cluster: Cluster, devices: Sequence[str] | None = None, *, most_at_once: int | None = None
) -> tuple[tuple[DevicePair, ...], ...]:
    """Divide the pairs to be measured into rounds; the pairs of a round measure at the same time.

    Devices of one host share its path, so the first device of each host stands for it, and the first two of a host
    stand for its inside. Pairs of a round are of disjoint sites, or, inside one site, of disjoint hosts.

    Args:
        cluster: Where the devices are.
        devices: Which take part; all if None.
        most_at_once: Bound of a round, where many emulated hosts share a few processors.
    """
    taking_part = cluster.devices if devices is None else tuple(cluster.device_by_name[name] for name in devices)
    by_host: dict[str, list[Device]] = {}
    for device in taking_part:
        by_host.setdefault(device.host, []).append(device)
    leaders = [members[0] for members in by_host.values()]
    pairs = list(combinations(leaders, 2))
    pairs += [(members[0], members[1]) for members in by_host.values() if len(members) > 1]
    pairs.sort(key=lambda pair: pair[0].site == pair[1].site)  # between sites first: inside ones fill the gaps
    rounds: list[list[tuple[Device, Device]]] = []
    for pair in pairs:
        for members in rounds:
            if len(members) != most_at_once and all(_may_run_together(pair, other) for other in members):
                members.append(pair)
                break
        else:
            rounds.append([pair])
    return tuple(tuple((a.name, b.name) for a, b in members) for members in rounds)


def _may_run_together(one: tuple[Device, Device], other: tuple[Device, Device]) -> bool:
    sites, other_sites = {device.site for device in one}, {device.site for device in other}
    if not sites & other_sites:
        return True
    inside = len(sites) == len(other_sites) == 1
    return inside and not {device.host for device in one} & {device.host for device in other}


def spread(
    cluster: Cluster, measured: Iterable[LinkMeasurement], devices: Sequence[str] | None = None
) -> tuple[LinkMeasurement, ...]:
    """Give every ordered pair of devices what was measured between their hosts.

    Raises:
        ProtocolError: a pair of hosts was not measured.
    """
    names = [device.name for device in cluster.devices] if devices is None else list(devices)
    host_of = {name: cluster.device_by_name[name].host for name in names}
    by_hosts = {(host_of[link.source], host_of[link.target]): link for link in measured}
    links, missing = [], set()
    for source in names:
        for target in names:
            if source == target:
                continue
            hosts = (host_of[source], host_of[target])
            if hosts in by_hosts:
                links.append(replace(by_hosts[hosts], source=source, target=target))
            else:
                missing.add(hosts)
    if missing:
        raise ProtocolError(f"not measured: {', '.join(f'{a} -> {b}' for a, b in sorted(missing))}")
    return tuple(links)


def payload_cap_bytes(cluster: Cluster, source: str, target: str, most_bytes: int = 64 * 2**20) -> int:
    """Return the largest payload for a pair: a sixteenth of the smaller device's memory, at most `most_bytes`."""
    memory_bytes = min(cluster.device_by_name[name].memory_bytes for name in (source, target))
    return max(_WARM_UP_BYTES, min(most_bytes, memory_bytes // 16))


# What goes over the wire: the kind is in the key's `cut`, the number of the probe in its `step`.


class _Kind(IntEnum):
    PING = 0
    PONG = 1
    LOAD = 2
    """[pieces] and a piece; the receiver answers the last one with a report."""
    REPORT = 3
    """Arrival times of the pieces, on the receiver's clock."""
    REQUEST = 4
    """[pieces, bytes of one]: send me such a load."""


def _key(mailbox: MailboxLike, kind: _Kind, number: int) -> MessageKey:
    return MessageKey(generation=mailbox.generation, step=number, lane=_LANE, cut=int(kind), span=Span(0, 1))


def _send_load(mailbox: MailboxLike, peer: str, number: int, pieces: int, piece_bytes: int) -> None:
    control = torch.tensor([pieces])
    piece = torch.zeros(piece_bytes, dtype=torch.uint8)
    for _ in range(pieces):
        mailbox.send(peer, _key(mailbox, _Kind.LOAD, number), [control, piece])


class _Echo:
    """The answering side, one message at a time."""

    def __init__(self, mailbox: MailboxLike) -> None:
        self._mailbox = mailbox
        self._arrivals: dict[tuple[str, int], list[float]] = {}

    def take(self, message: Message) -> None:
        """Answer a message; whatever is not a well-formed question is left out."""
        if message.key.lane != _LANE:
            return
        number = message.key.step
        if message.key.cut == _Kind.PING:
            held = torch.tensor([message.received_s], dtype=torch.float64)
            self._mailbox.send(message.source, _key(self._mailbox, _Kind.PONG, number), [held, *message.tensors])
        elif message.key.cut == _Kind.LOAD:
            arrivals = self.load(message)
            if arrivals is not None:
                times = torch.tensor(arrivals, dtype=torch.float64)
                self._mailbox.send(message.source, _key(self._mailbox, _Kind.REPORT, number), [times])
        elif message.key.cut == _Kind.REQUEST:
            self._serve(message)

    def _serve(self, message: Message) -> None:
        numbers = _integers(message, 2)
        if numbers is not None and 1 <= numbers[0] <= _MOST_PIECES and 1 <= numbers[1] <= _MOST_PIECE_BYTES:
            _send_load(self._mailbox, message.source, message.key.step, numbers[0], numbers[1])

    def load(self, message: Message) -> list[float] | None:
        """Note a piece of a load; return all arrival times when the last one is here."""
        numbers = _integers(message, 1)
        if numbers is None:
            return None
        address = (message.source, message.key.step)
        if address not in self._arrivals:
            # A new load of this peer: what is left of an older one was given up.
            self._arrivals = {key: times for key, times in self._arrivals.items() if key[0] != message.source}
        arrivals = self._arrivals.setdefault(address, [])
        arrivals.append(message.received_s)
        if len(arrivals) < min(numbers[0], _MOST_PIECES):
            return None
        return sorted(self._arrivals.pop(address))


def _integers(message: Message, count: int) -> list[int] | None:
    if not message.tensors or message.tensors[0].dtype != torch.int64 or message.tensors[0].shape != (count,):
        return None
    return [int(value) for value in message.tensors[0]]


def echo_probes(mailbox: MailboxLike, *, should_stop: Callable[[], bool]) -> None:
    """Answer probes until told to stop; `mailbox.wake()` makes it ask at once."""
    echo = _Echo(mailbox)
    while not should_stop():
        for message in mailbox.receive(_POLL_S):
            echo.take(message)


# The asking side.


@dataclass(frozen=True, kw_only=True)
class RoundTrip:
    """Five int32 there and back, many times."""

    latency_s: float
    """One way: half of the fastest round trip, without the time that the other side held the message."""
    median_s: float
    """One way, of the median round trip: with the jitter of the network and of both machines' software."""
    held_s: float
    """Median time between the other side's receiving and its answering: its software, not the network."""


class _Prober:
    """Asks one peer, and answers whatever others ask meanwhile."""

    def __init__(self, mailbox: MailboxLike, peer: str) -> None:
        self.mailbox = mailbox
        self.peer = peer
        self._echo = _Echo(mailbox)
        self._number = time.monotonic_ns()

    def next_number(self) -> int:
        """Number a probe so that no late answer to an earlier one is taken for its own."""
        self._number += 1
        return self._number

    def replies(self, kind: _Kind, number: int, count: int) -> list[Message]:
        """Wait for messages of a kind.

        Raises:
            PeerLostError: they do not come.
        """
        found: list[Message] = []
        deadline_s = time.monotonic() + _REPLY_S
        while len(found) < count:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise PeerLostError(
                    f"{self.mailbox.name} measures with {self.peer}: {len(found)} of {count} answers after {_REPLY_S} s"
                )
            for message in self.mailbox.receive(left_s):
                if (message.source, message.key.step, message.key.cut) == (self.peer, number, kind):
                    found.append(message)
                elif message.key.cut in (_Kind.PING, _Kind.LOAD, _Kind.REQUEST):
                    self._echo.take(message)
        return found

    def push(self, pieces: int, piece_bytes: int) -> list[float]:
        """Send a load; return the other side's arrival times."""
        number = self.next_number()
        _send_load(self.mailbox, self.peer, number, pieces, piece_bytes)
        (report,) = self.replies(_Kind.REPORT, number, 1)
        if len(report.tensors) != 1 or report.tensors[0].dtype != torch.float64 or report.tensors[0].numel() != pieces:
            raise ProtocolError(f"{self.peer} answered a load of {pieces} pieces with {report.tensors!r:.80}")
        return [float(value) for value in report.tensors[0].reshape(-1)]

    def pull(self, pieces: int, piece_bytes: int) -> list[float]:
        """Have a load sent; return its arrival times."""
        number = self.next_number()
        request = torch.tensor([pieces, piece_bytes])
        self.mailbox.send(self.peer, _key(self.mailbox, _Kind.REQUEST, number), [request])
        return sorted(message.received_s for message in self.replies(_Kind.LOAD, number, pieces))


def measure_round_trip(mailbox: MailboxLike, peer: str, *, rounds: int) -> RoundTrip:
    """Measure latency with five int32, five times a round."""
    prober = _Prober(mailbox, peer)
    round_trips_s, held_s = [], []
    for index in range(2 + max(rounds * _PINGS_PER_ROUND, _LEAST_PINGS)):
        number = prober.next_number()
        sent_s = time.monotonic()
        mailbox.send(peer, _key(mailbox, _Kind.PING, number), [torch.zeros(_PING_INTS, dtype=torch.int32)])
        (pong,) = prober.replies(_Kind.PONG, number, 1)
        if index < 2:
            continue  # the first ones open connections and wake the other side
        held = max(0.0, pong.sent_s - float(pong.tensors[0].reshape(-1)[0]))
        held_s.append(held)
        round_trips_s.append(pong.received_s - sent_s - held)
    return RoundTrip(
        latency_s=min(round_trips_s) / 2,
        median_s=statistics.median(round_trips_s) / 2,
        held_s=statistics.median(held_s),
    )


def arrival_rate(arrivals_s: Sequence[float], piece_bytes: int) -> float:
    """Return bytes per second of the later part of a load: the slope of the line through its arrivals.

    The first third is left out, for TCP may still be finding its speed, and the last pieces, for then connections run
    empty one after the other. Latency has no part in it, so nothing is to be taken off.

    >>> round(arrival_rate([0.01 * n for n in range(50)], 1000))
    100000
    """
    count = len(arrivals_s)
    times = arrivals_s[int(count * _RAMP_PART) : max(count - 3, int(count * _RAMP_PART) + 2)]
    middle_s, middle = statistics.fmean(times), (len(times) - 1) / 2
    spread_s = sum((index - middle) * (time_s - middle_s) for index, time_s in enumerate(times))
    steps = sum((index - middle) ** 2 for index in range(len(times)))
    if spread_s <= 0:
        return 1e12  # faster than the clock tells
    return piece_bytes * steps / spread_s


def _pieces(total_bytes: float) -> tuple[int, int]:
    """Divide a load into pieces small enough to see its course."""
    piece_bytes = int(min(max(total_bytes / _PIECES, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES))
    return min(max(8, round(total_bytes / piece_bytes)), _MOST_PIECES), piece_bytes


def _bandwidth(
    load: Callable[[int, int], list[float]], max_payload_bytes: int, rounds: int, latency_s: float
) -> tuple[float, int]:
    """Send more and more until a transfer takes long enough to be judged; return bytes per second and payload.

    The smaller transfers before are the warm-up. Long enough is long against a round trip: TCP finds its speed in
    round trips, not in seconds.
    """
    wanted_s = min(_TRANSFER_S + _TRANSFER_ROUND_TRIPS * 2 * latency_s, _MOST_TRANSFER_S)
    total_bytes = float(min(_WARM_UP_BYTES, max_payload_bytes))
    while True:
        pieces, piece_bytes = _pieces(total_bytes)
        arrivals_s = load(pieces, piece_bytes)
        took_s = max(arrivals_s[-1] - arrivals_s[0], 1e-6)
        if took_s >= 0.8 * wanted_s or total_bytes >= max_payload_bytes:
            break
        enough_bytes = 1.2 * total_bytes * wanted_s / took_s
        total_bytes = min(max_payload_bytes, max(2 * total_bytes, min(6 * total_bytes, enough_bytes)))
    transfers = [arrivals_s]
    while len(transfers) < rounds or (not _steady(transfers[-1]) and len(transfers) < rounds + _MOST_REPEATS):
        transfers.append(load(pieces, piece_bytes))
    judged = [arrivals_s for arrivals_s in transfers if _steady(arrivals_s)] or transfers
    rates = [arrival_rate(arrivals_s, piece_bytes + _OVERHEAD_BYTES) for arrivals_s in judged]
    return statistics.median(rates), pieces * piece_bytes


def _steady(arrivals_s: Sequence[float]) -> bool:
    """Whether a load came as fast early in what is judged as late, and hardly faster than the whole.

    If not, TCP was still finding its speed, or a machine was too busy to read and then read what had piled up.
    """
    begin, end = int(len(arrivals_s) * _RAMP_PART), len(arrivals_s) - 3
    middle = (begin + end) // 2
    early_s, late_s = arrivals_s[middle] - arrivals_s[begin], arrivals_s[end] - arrivals_s[middle]
    if middle == begin or early_s <= 0 or late_s <= 0:
        return True
    ratio = (late_s / (end - middle)) / (early_s / (middle - begin))
    whole_rate = (len(arrivals_s) - 1) / (arrivals_s[-1] - arrivals_s[0])
    return 1 - _STEADY_RATIO < ratio < 1 + _STEADY_RATIO and arrival_rate(arrivals_s, 1) < _MOST_OVER_WHOLE * whole_rate


def measure_pair(
    mailbox: MailboxLike, *, source: str, target: str, max_payload_bytes: int, rounds: int
) -> LinkMeasurement:
    """Measure the path from `source` to `target`, of which this mailbox is one; the other must run `echo_probes`.

    The payload is what takes about 0.25 s and four round trips at the speed seen in the warm-up, at most
    `max_payload_bytes`. The rate is that of arrivals at the receiver (`arrival_rate`), the median of the rounds. The
    latency is that of the fastest round trip, less the time that its bytes take at that rate; some tenths of a
    millisecond of both machines' software remain in it, as they do for every message of training.

    Raises:
        PeerLostError: the other side does not answer.
    """
    forward = mailbox.name == source
    assert forward or mailbox.name == target, f"{mailbox.name} takes no part in {source} -> {target}"
    peer = target if forward else source
    latency_s = measure_round_trip(mailbox, peer, rounds=rounds).latency_s
    return _measure_one_way(_Prober(mailbox, peer), forward, latency_s, max_payload_bytes, rounds)


def measure_both(
    mailbox: MailboxLike, peer: str, *, max_payload_bytes: int, rounds: int
) -> tuple[LinkMeasurement, LinkMeasurement]:
    """Measure both directions, this side's sending first; round trips are made once for both."""
    latency_s = measure_round_trip(mailbox, peer, rounds=rounds).latency_s
    prober = _Prober(mailbox, peer)
    there = _measure_one_way(prober, True, latency_s, max_payload_bytes, rounds)
    return there, _measure_one_way(prober, False, latency_s, max_payload_bytes, rounds)


def _measure_one_way(
    prober: _Prober, forward: bool, latency_s: float, max_payload_bytes: int, rounds: int
) -> LinkMeasurement:
    load = prober.push if forward else prober.pull
    bandwidth_bytes_per_s, payload_bytes = _bandwidth(load, max_payload_bytes, rounds, latency_s)
    ends = (prober.mailbox.name, prober.peer)
    source, target = ends if forward else ends[::-1]
    return LinkMeasurement(
        source=source,
        target=target,
        latency_s=max(0.0, latency_s - _OVERHEAD_BYTES / bandwidth_bytes_per_s),
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        payload_bytes=payload_bytes,
        rounds=rounds,
    )
