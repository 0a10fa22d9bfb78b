"""Measure the network through the mailbox that training uses: who measures with whom and when, and what is asked for.

Planning is pure: `pair_rounds` says which pairs measure at the same time, `doubtful` which are to be measured again,
`spread` gives every pair of devices the figures of its hosts. Measuring has two sides: one runs `echo_probes`, the
other `measure_directions`, then `Prober.dismiss`; before, all sides may `warm_up_links` to those that they
will measure with, so that connecting is over. No clock of one machine is compared with a clock of another.

Latency: pings through the mailbox, less the time that the software of both ends takes by itself.

A message of five int32 goes through the threads of two mailboxes and of two ZeroMQ contexts, through encryption and
two kernels; together that takes as long as some networks. Every message of training feels it, but it is the machines',
not the network's. So each side measures a round trip between two mailboxes of its own over the loopback interface,
at the same pace and just before, since a busy machine takes longer for both; the mean of both sides' is taken off: a
round trip uses each side's sending and receiving once, one over loopback uses one side's twice. What is left is the
network and the noise of two minima.
"""

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations

from spantrain.core.cluster import Cluster, Device
from spantrain.core.profile import LinkMeasurement
from spantrain.errors import ProtocolError
from spantrain.profiler.network_probes import Echo, Prober
from spantrain.profiler.network_rates import OVERHEAD_BYTES, WARM_UP_BYTES, measure_bandwidth
from spantrain.transport.mailbox.interface import Limits
from spantrain.transport.mailbox.mailbox import Mailbox, MailboxLike

_MIN_PINGS, _WARM_UP_PINGS = 15, 2
"""Pings of a sample; several samples, some time apart, find a moment in which every processor on the way is free."""
_FRESH_S = 10.0


class Software:
    """What a round trip through a mailbox's own software takes, measured anew when the last figure is 10 s old.

    A device measures with one after another of its peers: in between neither its speed nor its load changes much.
    """

    def __init__(self, mailbox: MailboxLike, now_s: Callable[[], float] = time.monotonic) -> None:
        self._mailbox, self._now_s = mailbox, now_s
        self._found: tuple[float, float] | None = None

    def round_trip_s(self) -> float:
        """Return the seconds of `software_round_trip`."""
        now_s = self._now_s()
        if self._found is None or now_s - self._found[0] > _FRESH_S:
            self._found = (now_s, software_round_trip(self._mailbox))
        return self._found[1]


def software_round_trip(like: MailboxLike) -> float:
    """Return the seconds of the fastest round trip between two new mailboxes of this process, over loopback."""
    near, far = (
        Mailbox(name=name, limits=Limits(bulk_connections=1), encrypted=bool(like.public_key))
        for name in ("near", "far")
    )
    stop = threading.Event()
    answering = threading.Thread(
        target=lambda: echo_probes(far, lambda: 0.0, should_stop=stop.is_set), name="echo of software_round_trip"
    )
    try:
        for mailbox, other in ((near, far), (far, near)):
            mailbox.set_peers(0, [other.address], dial=False)
        for mailbox in (near, far):
            mailbox.dial()
        answering.start()
        prober = Prober(near, "far", lambda: 0.0)
        prober.ping(_WARM_UP_PINGS)
        return min(prober.ping(_MIN_PINGS))
    finally:
        stop.set()
        far.wake()
        answering.join()
        far.close()  # it dialled: a goodbye to one that has gone would take its time
        near.close()


DevicePair = tuple[str, str]

_PINGS_PER_ROUND = 5
_POLL_S = 0.25
_MIN_ALIKE, _DOUBTFUL_PART = 3, 0.8


# Who measures with whom, and when.


def pair_rounds(
    cluster: Cluster, devices: Sequence[str] | None = None, *, max_at_once: int | None = None
) -> tuple[tuple[DevicePair, ...], ...]:
    """Divide the pairs to be measured into rounds; the pairs of a round measure at the same time.

    Devices of one host share its path, so the first device of each host stands for it, and the first two of a host
    stand for its inside. Pairs of a round are of disjoint sites, or, inside one site, of disjoint hosts.

    Args:
        cluster: Where the devices are.
        devices: Which take part; all if None.
        max_at_once: Bound of a round, where many emulated hosts share a few processors.
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
            if len(members) != max_at_once and all(_may_run_together(pair, other) for other in members):
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
    pairs = {pair: (host_of[pair[0]], host_of[pair[1]]) for pair in permutations(names, 2)}
    missing = sorted(set(pairs.values()) - by_hosts.keys())
    if missing:
        raise ProtocolError(f"not measured: {', '.join(f'{a} -> {b}' for a, b in missing)}")
    return tuple(replace(by_hosts[hosts], source=source, target=target) for (source, target), hosts in pairs.items())


def _between_sites(cluster: Cluster, links: Iterable[LinkMeasurement]) -> dict[DevicePair, list[LinkMeasurement]]:
    """Return the measurements between hosts by the sites, from and to."""
    found: dict[DevicePair, list[LinkMeasurement]] = {}
    for link in links:
        one, other = (cluster.device_by_name[name] for name in (link.source, link.target))
        if one.host != other.host:
            found.setdefault((one.site, other.site), []).append(link)
    return found


def doubtful(cluster: Cluster, links: Iterable[LinkMeasurement]) -> frozenset[DevicePair]:
    """Return the directed pairs that came out much slower than most others between the same two places.

    What disturbs a measurement only ever makes a link look slower. With fewer than three pairs there is no telling.
    """
    return frozenset(
        (link.source, link.target)
        for group in _between_sites(cluster, links).values()
        if len(group) >= _MIN_ALIKE
        for link in group
        if link.bandwidth_bytes_per_s
        < _DOUBTFUL_PART * statistics.median(other.bandwidth_bytes_per_s for other in group)
    )


def expected_rates(
    cluster: Cluster, links: Iterable[LinkMeasurement], pair: DevicePair
) -> tuple[float | None, float | None]:
    """Return what to expect of a pair, there and back: the median of the pairs between the same two places, if any."""
    one, other = (cluster.device_by_name[name] for name in pair)
    if one.host == other.host:
        return None, None
    between = _between_sites(cluster, links)
    there, back = (between.get(sites) for sites in ((one.site, other.site), (other.site, one.site)))
    return _median_rate(there), _median_rate(back)


def _median_rate(links: Sequence[LinkMeasurement] | None) -> float | None:
    return statistics.median_high(link.bandwidth_bytes_per_s for link in links) if links else None


def better(first: LinkMeasurement, again: LinkMeasurement) -> LinkMeasurement:
    """Return what two measurements of a link say together: the larger rate, the smaller latency."""
    assert (first.source, first.target) == (again.source, again.target)
    fastest = max(first, again, key=lambda link: link.bandwidth_bytes_per_s)
    return replace(fastest, latency_s=min(first.latency_s, again.latency_s), rounds=first.rounds + again.rounds)


def payload_cap_bytes(cluster: Cluster, source: str, target: str) -> int:
    """Return the largest payload for a pair: a sixteenth of the smaller device's memory, at most 64 MiB."""
    memory_bytes = min(cluster.device_by_name[name].memory_bytes for name in (source, target))
    return max(WARM_UP_BYTES, min(64 * 2**20, memory_bytes // 16))


# Measuring: the answering side, then the asking one.


def echo_probes(
    mailbox: MailboxLike, software_round_trip_s: Callable[[], float], *, should_stop: Callable[[], bool]
) -> None:
    """Answer probes until the other side dismisses it, or until told to; `mailbox.wake()` makes it ask at once."""
    echo = Echo(mailbox, software_round_trip_s)
    while not echo.dismissed and not should_stop():
        for message in mailbox.receive(_POLL_S):
            echo.take(message)


def measure_directions(
    prober: Prober, directions: Mapping[bool, float | None], max_payload_bytes: int, rounds: int
) -> list[LinkMeasurement]:
    """Measure directions (True: there), each with the rate expected of it; the other side must run `echo_probes`.

    Round trips are made for all together. Where links like these were measured already, what is expected spares finding
    out how much has to be sent.

    The payload is what takes about 0.15 s and a round trip at the speed seen in the warm-up, at most
    `max_payload_bytes`. The rate is that of arrivals at the receiver (`arrival_rate`), the median of the rounds. The
    latency is the network's: half of the fastest of thirty round trips or more, before and after the loads, less what
    the software of both ends takes by itself, less the time that a ping's bytes take at that rate.

    Raises:
        PeerLostError: the other side does not answer.
    """
    # Asked first: connections are opened before the other side answers.
    software_s = (prober.ask_software_round_trip() + prober.software_round_trip_s()) / 2
    round_trips_s: list[float] = []

    def latency_so_far_s() -> float:
        """Send pings; return what these and all before say of the network, one way."""
        round_trips_s.extend(prober.ping(max(rounds * _PINGS_PER_ROUND, _MIN_PINGS)))
        return max(0.0, (min(round_trips_s) - software_s) / 2)

    latency_s, found = latency_so_far_s(), []
    for forward, expected in directions.items():
        load = prober.push if forward else prober.pull
        rate = measure_bandwidth(load, max_payload_bytes, rounds, latency_s, expected_bytes_per_s=expected)
        found.append((forward, *rate))
        latency_s = latency_so_far_s()
    links = []
    for forward, bandwidth_bytes_per_s, payload_bytes in found:
        ends = (prober.mailbox.name, prober.peer)
        source, target = ends if forward else ends[::-1]
        links.append(
            LinkMeasurement(
                source=source,
                target=target,
                latency_s=max(0.0, latency_s - OVERHEAD_BYTES / bandwidth_bytes_per_s),
                bandwidth_bytes_per_s=bandwidth_bytes_per_s,
                payload_bytes=payload_bytes,
                rounds=rounds,
            )
        )
    return links
