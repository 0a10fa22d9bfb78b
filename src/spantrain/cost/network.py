"""Seconds of transfers between devices, and what transfers share.

A route has the way between two places, the ports of two hosts, and the lines that two sites have to all others
(`NetworkCost.route`). Most of them never bind: a fast port carries all that the slow lines behind it can take.
`scarce_links` says which can make pairs of devices wait for each other, and how much each pair takes of them. A link is
dropped where all that can be on it at once is no more than it carries, or where every pair on it is also on a
narrower one that is kept; but the way between two sites and their lines always stay, since their bandwidth may be said
to change. What is left is exact, and a simulator that has one link to think of instead of three is fast.

Gradient sums of several stages slow each other down while they run at once (`sum_slowdowns`). Each stage sums over its
own rings when its own work is done, whatever the others do; where rings cross the same link (a line between sites, a
host's port), they share it. In a ring all neighbours send in every turn, so a ring that runs beside others takes the
turn of its slowest hop with what the others leave of the links.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache, lru_cache

from spantrain.core.cluster import Device
from spantrain.core.profile import LinkMeasurement, Profile
from spantrain.core.records import Record
from spantrain.cost.sums import Collectives
from spantrain.errors import ProfileError

Uses = tuple[tuple[str, float], ...]
"""Links, each with the part of it that a flow takes when it goes at full speed."""
Demand = tuple[float, Uses]
"""Bytes per second at full speed, and what that takes."""


def fair_parts(demands: Sequence[Demand], capacity: Mapping[str, float]) -> list[float]:
    """Return the part of its full speed that each flow gets: max-min fair in bytes per second.

    No flow can get more without one that has less, or as much, getting less (Bertsekas and Gallager, Data Networks,
    1992, section 6.5.2: all flows rise together until a link is full; those on it stay, the others rise on).
    `capacity` is how much of each link is there, usually 1; where there is more, full speed is more.

    >>> fair_parts([(10.0, (("port", 1.0),)), (2.0, (("port", 0.2), ("far", 1.0)))], {"port": 1.0, "far": 1.0})
    [0.8, 1.0]
    """
    # What is alike gets as much.
    counts = Counter(demands)
    asked, demands, times = demands, list(counts), list(counts.values())
    parts = [0.0] * len(demands)
    is_whole = min(capacity.values(), default=1.0) == max(capacity.values(), default=1.0) == 1.0
    most = [1.0] * len(demands) if is_whole else [part_alone(uses, capacity) for _, uses in demands]
    left = dict(capacity)
    rising_on: dict[str, dict[int, float]] = {}
    for flow, (bandwidth, uses) in enumerate(demands):
        for link, part in uses:
            flows = rising_on.setdefault(link, {})
            flows[flow] = flows.get(flow, 0.0) + times[flow] * part / bandwidth
    wanted = {link: sum(flows.values()) for link, flows in rising_on.items()}
    # The level only rises: the first to be at full speed are those that need least for it.
    by_speed = sorted(range(len(demands)), key=lambda flow: -most[flow] * demands[flow][0])
    rising = set(by_speed)
    while rising:
        level, narrowest = min((max(0.0, left[link]) / weight, link) for link, weight in wanted.items())
        full: list[int] = []
        while by_speed and (by_speed[-1] not in rising or most[by_speed[-1]] * demands[by_speed[-1]][0] <= level):
            full += rising & {by_speed.pop()}
        stay = full or list(rising_on[narrowest])
        for flow in stay:
            bandwidth, uses = demands[flow]
            parts[flow] = most[flow] if full else level / bandwidth
            rising.discard(flow)
            for link, part in uses:
                left[link] -= times[flow] * part * parts[flow]
                rising_on[link].pop(flow, None)
        for link in {link for flow in stay for link, _ in demands[flow][1]}:
            wanted[link] = sum(rising_on[link].values())
            if not rising_on[link]:
                del wanted[link]  # what is left of it is nobody's
    found = dict(zip(demands, parts, strict=True))
    return [found[demand] for demand in asked]


def part_alone(uses: Uses, capacity: Mapping[str, float]) -> float:
    """Return the part of its full speed that a flow has alone: what its narrowest link has of its capacity."""
    return max(part for _, part in uses) * min(capacity[link] / part for link, part in uses)


SAME_RATIO = 0.95
"""A pair that was measured at more than this part of a link fills it: two measurements of one link differ as much."""

_KEPT = 64
"""Sets of pairs of which is kept how they share links: a sum is asked for with many sizes."""

_ROUNDING = 1e-9
"""What sums of parts of a link may be wrong by."""

Pair = tuple[str, str]
Place = tuple[str, ...]
DeviceShares = tuple[tuple[str, float], ...]


class Path(Record):
    """The way from the replicas of one stage to those of another, for bytes divided by their sample shares."""

    latency_s: float
    """Latency of the slowest pair that talks."""
    link_s_per_byte: Mapping[str, float]
    """By shared link: seconds that it is busy for one byte of the whole cut (all pairs that cross it together)."""

    @property
    def s_per_byte(self) -> float:
        """Seconds for one byte of the whole cut on the busiest link."""
        return max(self.link_s_per_byte.values(), default=0.0)

    def seconds(self, size_bytes: float) -> float:
        """Return the seconds from the first byte sent to the last byte there."""
        return self.latency_s + size_bytes * self.s_per_byte


class SharedLink(Record):
    """Something that carries the traffic of several pairs of devices, in one direction."""

    name: str
    bandwidth_bytes_per_s: float
    between_sites: bool = False
    """Whether it is a way between two sites, or a site's uplink or downlink: what is said to change over time."""


class NetworkCost:
    """Seconds of transfers, from measurements between devices."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._cluster = profile.cluster
        self.path = cache(self._path)
        """The way between two stages, given each replica's leader and sample share; replica pairs talk where their
        intervals of shares overlap: every replica takes one piece of each micro-batch, in order."""
        self.route = cache(self._route)
        """All that a transfer from a device to another shares with others: `shared_link`, ports between hosts, lines
        between sites.

        A host's port (`lab/a out`, `lab/a in`) is one network card for all its devices; it carries what was measured
        to other hosts of its site, the fastest pair. Where there are none, it carries what the cluster says of its
        site. A link between places carries as much as the fastest pair of devices that it joins. A site's uplink
        (`lab up`) and downlink (`lab down`), where the cluster has them, carry what it says of them, or what was
        measured through them if that is more.
        """
        self._line, self._described_port = cache(self._find_line), cache(self._find_port)
        self._parts = lru_cache(_KEPT)(self._parts_of)
        self.collectives = Collectives(self)
        """Sums over devices, over these links."""

    def link(self, source: str, target: str) -> LinkMeasurement:
        """Return the measurement from one device to another.

        Raises:
            ProfileError: the pair was not measured.
        """
        found = self._profile.link(source, target)
        if found is None:
            raise ProfileError(
                f"the profile has no measurement from {source} to {target}; measure the network of this cluster again"
            )
        return found

    def occupancy_seconds(self, source: str, target: str, size_bytes: float) -> float:
        """Return the seconds that a transfer keeps its link busy: bytes over the bandwidth for that size."""
        return 0.0 if source == target else self.link(source, target).busy_seconds(size_bytes)

    def transfer_seconds(self, source: str, target: str, size_bytes: float) -> float:
        """Return the seconds from sending to having received all: latency and occupancy."""
        if source == target:
            return 0.0
        return self.link(source, target).latency_s + self.occupancy_seconds(source, target, size_bytes)

    def shared_link(self, source: str, target: str) -> str:
        """Return the name of what all transfers between these two places share.

        Between sites it is the directed pair of sites (`lab->office`). Inside a site it is the directed pair of hosts
        (`lab/a->lab/b`), inside a host the directed pair of devices.
        """
        a, b = self._device(source), self._device(target)
        if a.site != b.site:
            return f"{a.site}->{b.site}"
        if a.host != b.host:
            return f"{a.site}/{a.host}->{b.site}/{b.host}"
        return f"{a.site}/{a.host}/{source}->{b.site}/{b.host}/{target}"

    def _route(self, source: str, target: str) -> tuple[SharedLink, ...]:
        a, b = self._device(source), self._device(target)
        way = SharedLink(
            name=self.shared_link(source, target),
            bandwidth_bytes_per_s=self._way_carries(a, b, self.link(source, target)),  # not measured: it is named
            between_sites=a.site != b.site,
        )
        if a.host == b.host:
            return (way,)
        out, into = self._port_carries(a, out=True), self._port_carries(b, out=False)
        ports = (
            SharedLink(name=f"{a.site}/{a.host} out", bandwidth_bytes_per_s=out),
            SharedLink(name=f"{b.site}/{b.host} in", bandwidth_bytes_per_s=into),
        )
        return (way, *ports, *self._lines_between(a.site, b.site))

    def _lines_between(self, source: str, target: str) -> list[SharedLink]:
        """Return the lines that what goes from one site to another passes, besides the link between them."""
        lines = [self._line(source, "up"), self._line(target, "down")] if source != target else []
        return [line for line in lines if line is not None]

    def _find_line(self, site: str, way: str) -> SharedLink | None:
        """Return a site's line to all others (`up`) or from them (`down`); None if the cluster has none."""
        found = self._cluster.site_by_name[site]
        rate = found.uplink_bandwidth_bytes_per_s if way == "up" else found.downlink_bandwidth_bytes_per_s
        if rate is None:
            return None
        for other in self._cluster.sites:
            places = ((site,), (other.name,)) if way == "up" else ((other.name,), (site,))
            rate = max(rate, self._profile.fastest_pairs.get(places, 0.0))
        return SharedLink(name=f"{site} {way}", bandwidth_bytes_per_s=rate, between_sites=True)

    def _find_port(self, site: str) -> float:
        """Return what a host's port carries by the description: its site's rate, or what a line to elsewhere does."""
        fastest = self._cluster.fastest_line_by_site.get(site, 0.0)
        return max(self._cluster.site_by_name[site].bandwidth_bytes_per_s, fastest)

    def _way_carries(self, a: Device, b: Device, way: LinkMeasurement) -> float:
        """Return the bytes per second of the way between the places of two devices."""
        places: tuple[Place, Place] = ((a.site,), (b.site,))
        if a.site == b.site:
            places = ((a.site, a.host), (b.site, b.host))
        fastest = max(way.bandwidth_bytes_per_s, self._profile.fastest_pairs.get(places, 0.0))
        return fastest if a.site == b.site else max(fastest, self._behind_lines(a.site, b.site, fastest))

    def _behind_lines(self, source: str, target: str, fastest: float) -> float:
        """Return what a link between sites carries by the description, if what was measured filled a line before it."""
        lines = self._lines_between(source, target)
        if not any(fastest > SAME_RATIO * line.bandwidth_bytes_per_s for line in lines):
            return 0.0
        return self._cluster.link_between(source, target).bandwidth_bytes_per_s

    def _port_carries(self, device: Device, *, out: bool) -> float:
        """Return the bytes per second of the port of a device's host, in one direction."""
        if self._profile.links_described:
            return self._described_port(device.site)
        host, site = (device.site, device.host), (device.site,)
        fastest = self._profile.fastest_pairs
        inside = fastest.get((host, site) if out else (site, host))
        elsewhere = fastest.get((host, ()) if out else ((), host), 0.0)
        if inside is None:
            inside = self._cluster.site_by_name[device.site].bandwidth_bytes_per_s
        return max(inside, elsewhere)

    def _device(self, name: str) -> Device:
        return self._cluster.device_by_name[name]

    def place(self, device: str) -> tuple[str, str]:
        """Return the site and host of a device."""
        found = self._device(device)
        return found.site, found.host

    def latency_s(self, source: str, target: str) -> float:
        """Return the seconds of the way from a device to another."""
        return self.link(source, target).latency_s

    def round_trip_s(self, devices: Sequence[str]) -> float:
        """Return the longest way between two of some devices there and back: the least that agreeing takes."""
        return 2 * max((self.latency_s(a, b) for a in devices for b in devices if a != b), default=0.0)

    def exchange_s(self, devices: Sequence[str], size_bytes: float) -> float:
        """Return the seconds in which each of some devices sends all others so many bytes, on ways of their own."""
        return max((self.transfer_seconds(a, b, size_bytes) for a in devices for b in devices if a != b), default=0.0)

    def parts_together(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the part of its own bandwidth that each pair gets when all of them send at once, max-min fair."""
        return self._parts(tuple(pairs))

    def _parts_of(self, pairs: tuple[tuple[str, str], ...]) -> list[float]:
        load: dict[str, float] = {}
        demands: list[Demand] = []
        for pair in pairs:
            own = self.link(*pair).bandwidth_bytes_per_s
            demands.append((own, tuple((way.name, own / way.bandwidth_bytes_per_s) for way in self.route(*pair))))
            for name, part in demands[-1][1]:
                load[name] = load.get(name, 0.0) + part
        # What is not asked for more than it has makes nobody slower.
        crowded = {name for name, asked in load.items() if asked > 1.0 + _ROUNDING}
        parts = [1.0] * len(demands)
        if crowded:
            narrowed = [(own, tuple(use for use in uses if use[0] in crowded)) for own, uses in demands]
            slowed = [number for number, (_, uses) in enumerate(narrowed) if uses]
            found = fair_parts([narrowed[number] for number in slowed], dict.fromkeys(crowded, 1.0))
            for number, part in zip(slowed, found, strict=True):
                parts[number] = part
        return parts

    def busy_together_s(
        self, pairs: Sequence[tuple[str, str]], size_bytes: float, beside: Sequence[tuple[str, str]] = ()
    ) -> list[float]:
        """Return for how long each pair is busy with a message of so many bytes when all pairs send at once.

        `beside` are pairs that send at the same time. What pairs share is divided among them max-min fair.
        """
        parts = self.parts_together((*pairs, *beside))
        return [self.link(*pair).busy_seconds(size_bytes) / part for pair, part in zip(pairs, parts, strict=False)]

    def _path(self, senders: DeviceShares, receivers: DeviceShares) -> Path:
        busy: dict[str, float] = {}
        latency_s = 0.0
        for source, target, fraction in overlaps(senders, receivers):
            name, link = self.shared_link(source, target), self.link(source, target)
            # A rate for messages of any size: what large ones get.
            busy[name] = busy.get(name, 0.0) + fraction / link.bandwidth_bytes_per_s
            for line in self._lines_between(self._device(source).site, self._device(target).site):
                busy[line.name] = busy.get(line.name, 0.0) + fraction / line.bandwidth_bytes_per_s
            latency_s = max(latency_s, link.latency_s)
        return Path(latency_s=latency_s, link_s_per_byte=busy)


def overlaps(
    senders: Sequence[tuple[str, float]], receivers: Sequence[tuple[str, float]]
) -> Iterator[tuple[str, str, float]]:
    """Yield who sends whom which part of a micro-batch: every replica takes one piece of it, in order.

    >>> list(overlaps([("a", 2.0), ("b", 2.0)], [("c", 3.0), ("d", 1.0)]))
    [('a', 'c', 0.5), ('b', 'c', 0.25), ('b', 'd', 0.25)]
    """
    total, others = sum(share for _, share in senders), sum(share for _, share in receivers)
    low = 0.0
    for source, share in senders:
        high, other_low = low + share / total, 0.0
        for target, other in receivers:
            other_high = other_low + other / others
            part = min(high, other_high) - max(low, other_low)
            if part > 1e-9 and source != target:
                yield source, target, part
            other_low = other_high
        low = high


def scarce_links(network: NetworkCost, pairs: Collection[Pair]) -> Mapping[Pair, Uses]:
    """Return for each pair the links that it has to share when all of these pairs may send at once.

    A pair that shares nothing scarce has the way between its places.

    Raises:
        ProfileError: a pair was not measured.
    """
    own = {pair: network.link(*pair).bandwidth_bytes_per_s for pair in pairs}
    routes = {pair: network.route(*pair) for pair in own}
    carries = {shared.name: shared.bandwidth_bytes_per_s for route in routes.values() for shared in route}
    members: dict[str, set[Pair]] = {}
    for pair, route in routes.items():
        for shared in route:
            members.setdefault(shared.name, set()).add(pair)

    def most_load(name: str) -> float:
        """Return the most bytes per second that can come to a link, through the ways between places."""
        by_way: dict[str, float] = {}
        for pair in members[name]:
            # What differs by no more than measurements do must not hide that two of them need twice as much.
            by_way[routes[pair][0].name] = by_way.get(routes[pair][0].name, 0.0) + own[pair]
        return sum(load if line == name else min(load, carries[line]) for line, load in by_way.items())

    kept = set[str]()
    for name in sorted(carries, key=lambda link: (-len(members[link]), carries[link])):
        # What all of its pairs are on is on the route of any one.
        others = {shared.name for shared in routes[next(iter(members[name]))]} & kept
        within = (o for o in others if carries[o] <= carries[name] / SAME_RATIO and members[name] <= members[o])
        if most_load(name) > carries[name] and not any(within):
            kept.add(name)
    found = {}
    for pair, route in routes.items():
        way = route[0].name
        names = [shared.name for shared in route if shared.name in kept or shared.between_sites] or [way]
        alone = names == [way] and len(members[way]) == 1
        ratios = ((name, own[pair] / carries[name]) for name in names)
        found[pair] = tuple((name, 1.0 if alone or ratio > SAME_RATIO else ratio) for name, ratio in ratios)
    return found


Hops = Sequence[tuple[Pair, float]]
"""Who sends whom in one turn of all rings of a stage, and how many bytes."""


def sum_slowdowns(network: NetworkCost, own: Mapping[int, Hops]) -> dict[int, float]:
    """Return by stage how many times as long its sum takes while those of all these stages run; 1: undisturbed."""

    def turn_s(hops: Hops, parts: Sequence[float]) -> float:
        """Return the seconds of a turn in which each pair has a part of its full speed."""
        return max(
            network.latency_s(*pair) + network.occupancy_seconds(*pair, size_bytes) / part
            for (pair, size_bytes), part in zip(hops, parts, strict=True)
        )

    together = iter(network.parts_together([pair for hops in own.values() for pair, _ in hops]))
    found = {}
    for stage, hops in own.items():
        alone_s = turn_s(hops, network.parts_together([pair for pair, _ in hops]))
        found[stage] = max(1.0, turn_s(hops, [next(together) for _ in hops]) / alone_s)
    return found
