"""Seconds of transfers between devices, and what transfers share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from spantrain.core.cluster import Device
from spantrain.core.profile import LinkMeasurement, Profile
from spantrain.cost.collectives import Collectives
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
    parts = [0.0] * len(demands)
    is_whole = min(capacity.values(), default=1.0) == max(capacity.values(), default=1.0) == 1.0
    most = [1.0] * len(demands) if is_whole else [part_alone(uses, capacity) for _, uses in demands]
    left = dict(capacity)
    rising = list(range(len(demands)))
    while rising:
        weight: dict[str, float] = {}
        for flow in rising:
            bandwidth, uses = demands[flow]
            for link, part in uses:
                weight[link] = weight.get(link, 0.0) + part / bandwidth
        level, narrowest = min((max(0.0, left[link]) / wanted, link) for link, wanted in weight.items())
        full = [flow for flow in rising if most[flow] * demands[flow][0] <= level]
        stay = full or [flow for flow in rising if any(link == narrowest for link, _ in demands[flow][1])]
        for flow in stay:
            bandwidth, uses = demands[flow]
            parts[flow] = most[flow] if full else level / bandwidth
            for link, part in uses:
                left[link] -= part * parts[flow]
        rising = [flow for flow in rising if flow not in stay]
    return parts


def part_alone(uses: Uses, capacity: Mapping[str, float]) -> float:
    """Return the part of its full speed that a flow has alone: what its narrowest link has of its capacity."""
    return max(part for _, part in uses) * min(capacity[link] / part for link, part in uses)


SAME_RATIO = 0.95
"""A pair that was measured at more than this part of a link fills it: two measurements of one link differ as much."""

_ROUNDING = 1e-9
"""What sums of parts of a link may be wrong by."""

Place = tuple[str, ...]
DeviceShares = tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Path:
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


@dataclass(frozen=True, kw_only=True)
class SharedLink:
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
        self._path_of, self._route_of = cache(self._path), cache(self._route)
        self._line, self._described_port = cache(self._find_line), cache(self._find_port)
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

    def route(self, source: str, target: str) -> tuple[SharedLink, ...]:
        """Return all that a transfer shares with others: `shared_link`, ports between hosts, lines between sites.

        A host's port (`lab/a out`, `lab/a in`) is one network card for all its devices; it carries what was measured
        to other hosts of its site, the fastest pair. Where there are none, it carries what the cluster says of its
        site. A link between places carries as much as the fastest pair of devices that it joins. A site's uplink
        (`lab up`) and downlink (`lab down`), where the cluster has them, carry what it says of them, or what was
        measured through them if that is more.
        """
        return self._route_of(source, target)

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
        lines = (link.bandwidth_bytes_per_s for link in self._cluster.links if site in (link.source, link.target))
        return max(self._cluster.site_by_name[site].bandwidth_bytes_per_s, *lines, 0.0)

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
        return max(
            link.bandwidth_bytes_per_s for link in self._cluster.links if (link.source, link.target) == (source, target)
        )

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

    def parts_together(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the part of its own bandwidth that each pair gets when all of them send at once, max-min fair."""
        demands = [
            (own, tuple((shared.name, own / shared.bandwidth_bytes_per_s) for shared in self.route(*pair)))
            for pair in pairs
            for own in (self.link(*pair).bandwidth_bytes_per_s,)
        ]
        return _parts(demands)

    def busy_together_s(
        self, pairs: Sequence[tuple[str, str]], size_bytes: float, beside: Sequence[tuple[str, str]] = ()
    ) -> list[float]:
        """Return for how long each pair is busy with a message of so many bytes when all pairs send at once.

        `beside` are pairs that send at the same time. What pairs share is divided among them max-min fair.
        """
        parts = self.parts_together((*pairs, *beside))
        return [self.link(*pair).busy_seconds(size_bytes) / part for pair, part in zip(pairs, parts, strict=False)]

    def all_reduce_seconds(self, devices: Sequence[str], size_bytes: float) -> float:
        """Return the seconds of a ring sum over devices in this order, in one bucket (`cost.collectives`)."""
        return self.collectives.seconds(devices, size_bytes)

    def path(self, senders: DeviceShares, receivers: DeviceShares) -> Path:
        """Return the way between two stages, given each replica's leader and sample share.

        Every replica takes one piece of each micro-batch, in order, so replica pairs talk where their
        intervals of shares overlap.
        """
        return self._path_of(senders, receivers)

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


def _parts(demands: Sequence[Demand]) -> list[float]:
    """Return the part of its full speed that each flow gets when all are under way."""
    load: dict[str, float] = {}
    for _, uses in demands:
        for name, part in uses:
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
