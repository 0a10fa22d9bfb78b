"""The machines and the network: kinds, devices, hosts, sites, links."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import field, replace
from functools import cached_property
from typing import Annotated

from spantrain.core.money.prices import Egress, KindPrice
from spantrain.core.names import check_name
from spantrain.core.records import Bounds, NotNegative, Positive, Record, check_bounds

MAX_DEVICES = 131_072
MAX_SITES = 1_024
LISTED_SITES = 256
"""Sites up to which the link of every pair of them is listed; with more, most of them may be one that is alike."""
INSIDE_BYTES_PER_S = 10e9
"""Between devices of one host of which nobody says what joins them: about what copies through its memory reach."""
INSIDE_LATENCY_S = 10e-6
"""Between devices of one host, whatever joins them. Of seven kinds that Sailor's artifact has measured there, a
megabyte takes 8 to 63 µs longer than its bytes at the highest rate: a low one of these."""
_MAX_KIND = 63
"""Characters of a kind's name."""


class DeviceKind(Record, where="kind {0.name}"):
    """What the data sheet of a kind of accelerator says."""

    name: str
    peak_fp16_flop_per_s: Positive
    peak_fp32_flop_per_s: Positive
    memory_bytes: Annotated[int, Bounds(low=1)]
    memory_bandwidth_bytes_per_s: Positive
    power_w: NotNegative
    source: str
    """Where the figures come from."""
    unified_memory: bool = False
    """Whether its memory is the processor's, too."""

    def __post_init__(self) -> None:
        if not self.name.isprintable() or not 1 <= len(self.name) <= _MAX_KIND:
            raise ValueError(f"a kind's name is 1 to {_MAX_KIND} printable characters, got {self.name[:80]!r}")
        check_bounds(self)


class Device(Record):
    """One accelerator, real or emulated."""

    name: str
    kind: str
    host: str
    site: str
    backend: str
    """What computes (`devices.registry`): `emulated`, `cpu`, or a number of an accelerator."""
    memory_bytes: int

    def __post_init__(self) -> None:
        check_name("device", self.name)

    @property
    def make(self) -> tuple[str, int, str]:
        """Kind, memory and backend without its number: devices of one make stand for each other where they are."""
        return self.kind, self.memory_bytes, self.backend.partition(":")[0]

    @property
    def emulated(self) -> bool:
        """Whether its time is made up (its computation never is)."""
        return self.backend == "emulated"


class Host(Record, where="host {0.name}"):
    """One machine with its devices."""

    name: str
    site: str
    devices: tuple[str, ...]
    address: str | None = None
    """Where its workers can be reached, if that is known before they join."""
    memory_bytes: Annotated[int | None, Bounds(low=1)] = None
    """Of the processor; None: as far as it is not a device's, it is not known."""
    ssh: str | None = None
    """What ssh calls it, [USER@]HOST; None: its address, or its name."""
    python: str | None = None
    """Its interpreter that has SpanTrain, for who reaches it by ssh; None: `python3`."""

    inside_bandwidth_bytes_per_s: Annotated[float | None, Bounds(over=0)] = None
    """Between two of its devices; None: nobody says, and `INSIDE_BYTES_PER_S` is taken."""

    def __post_init__(self) -> None:
        check_name("host", self.name)
        check_bounds(self)


class Site(Record, where="site {0.name}"):
    """A place with a fast network inside."""

    name: str
    hosts: tuple[str, ...]
    bandwidth_bytes_per_s: Positive
    """Rate of each host's port, in each direction, inside the site."""
    latency_s: NotNegative
    """One way between two hosts of the site."""
    uplink_bandwidth_bytes_per_s: Annotated[float | None, Bounds(over=0)] = None
    """What all that leaves the site for other sites shares; None: nothing but the links themselves."""
    downlink_bandwidth_bytes_per_s: Annotated[float | None, Bounds(over=0)] = None
    """The same of what comes from other sites."""
    region: str = ""
    """`provider/region`, for the prices of what leaves it; empty: nobody says."""
    prices: Mapping[str, KindPrice] = field(default_factory=dict)
    """By kind, where this site has prices of its own."""
    egress: Egress | None = None
    """Prices of what leaves it; None: those of a price table."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """By kind: the most of its devices that may be used."""

    def __post_init__(self) -> None:
        check_name("site", self.name)
        check_bounds(self)


class Link(Record, where="link {0.source} -> {0.target}"):
    """A directed path between two sites."""

    source: str
    target: str
    bandwidth_bytes_per_s: Positive
    latency_s: NotNegative
    """One way."""
    jitter_s: NotNegative = 0.0
    loss_ratio: Annotated[float, Bounds(low=0, under=1)] = 0.0


class Cluster(Record, where="{0.name}"):
    """Sites, hosts, devices and the links between sites.

    `emulated_speed` is the fraction of a kind's real speed at which its emulated devices run: a model scaled
    down by some factor keeps its ratio of compute to traffic when the devices are slowed with it (DESIGN 7).
    """

    name: str
    kinds: tuple[DeviceKind, ...]
    sites: tuple[Site, ...]
    hosts: tuple[Host, ...]
    devices: tuple[Device, ...]
    links: tuple[Link, ...]
    default_link: Link | None = None
    """Of all pairs of sites that are not among `links`, with no ends of its own; None: all are among them."""
    emulated_speed: Positive = 1.0
    description: str = ""

    def with_memory(self, memory_bytes: Mapping[str, int]) -> "Cluster":
        """Return the cluster with other sizes of memory, by device."""
        devices = (replace(one, memory_bytes=memory_bytes.get(one.name, one.memory_bytes)) for one in self.devices)
        return replace(self, devices=tuple(devices))

    def __post_init__(self) -> None:
        for what in ("kinds", "sites", "hosts", "devices"):
            names = [entry.name for entry in getattr(self, what)]
            if len(set(names)) != len(names):
                twice = sorted(name for name, count in Counter(names).items() if count > 1)
                raise ValueError(f"{self.name}: {what} share a name: {', '.join(twice[:10])}")
        for what, most in (("sites", MAX_SITES), ("devices", MAX_DEVICES)):
            if len(getattr(self, what)) > most:
                raise ValueError(f"{self.name}: has {len(getattr(self, what))} {what}; at most {most} are planned for")
        check_bounds(self)

    @cached_property
    def device_by_name(self) -> Mapping[str, Device]:
        """Devices by name."""
        return {device.name: device for device in self.devices}

    @cached_property
    def kind_by_name(self) -> Mapping[str, DeviceKind]:
        """Kinds by name."""
        return {kind.name: kind for kind in self.kinds}

    @cached_property
    def site_by_name(self) -> Mapping[str, Site]:
        """Sites by name."""
        return {site.name: site for site in self.sites}

    @cached_property
    def host_by_name(self) -> Mapping[str, Host]:
        """Hosts by name."""
        return {host.name: host for host in self.hosts}

    @cached_property
    def _link_by_pair(self) -> Mapping[tuple[str, str], Link]:
        return {(link.source, link.target): link for link in self.links}

    @cached_property
    def _devices_by_site(self) -> Mapping[str, tuple[Device, ...]]:
        found: dict[str, list[Device]] = {}
        for device in self.devices:
            found.setdefault(device.site, []).append(device)
        return {site: tuple(devices) for site, devices in found.items()}

    def devices_at(self, site: str) -> tuple[Device, ...]:
        """Return the devices of one site, in order."""
        return self._devices_by_site.get(site, ())

    @cached_property
    def fastest_line_by_site(self) -> Mapping[str, float]:
        """The largest bandwidth of a link to or from a site, by site; none for a site without links."""
        found: dict[str, float] = {}
        for link in self.links:
            for site in (link.source, link.target):
                found[site] = max(found.get(site, 0.0), link.bandwidth_bytes_per_s)
        if self.default_link is not None:
            rate = self.default_link.bandwidth_bytes_per_s
            found = {site.name: max(found.get(site.name, 0.0), rate) for site in self.sites}
        return found

    def link_between(self, source: str, target: str) -> Link:
        """Return the path from one site to another as it is described, whatever lines lie before and behind it."""
        found = self._link_by_pair.get((source, target))
        if found is not None:
            return found
        if self.default_link is None:
            raise KeyError(f"{self.name} has no link {source} -> {target}")
        return replace(self.default_link, source=source, target=target)

    def link(self, source: str, target: str) -> Link:
        """Return the path from one device to another, as the description (not a measurement) has it.

        Between sites it has the rate that one transfer gets: of the link, the uplink behind it and the downlink before
        it, the narrowest.
        """
        a, b = self.device_by_name[source], self.device_by_name[target]
        if a.host == b.host:
            rate = self.host_by_name[a.host].inside_bandwidth_bytes_per_s or INSIDE_BYTES_PER_S
            return Link(source=source, target=target, bandwidth_bytes_per_s=rate, latency_s=INSIDE_LATENCY_S)
        if a.site == b.site:
            site = self.site_by_name[a.site]
            rate, latency_s = site.bandwidth_bytes_per_s, site.latency_s
            return Link(source=source, target=target, bandwidth_bytes_per_s=rate, latency_s=latency_s)
        return self._between(self.link_between(a.site, b.site))

    def _between(self, link: Link) -> Link:
        lines = (
            self.site_by_name[link.source].uplink_bandwidth_bytes_per_s,
            self.site_by_name[link.target].downlink_bandwidth_bytes_per_s,
        )
        rate = min([link.bandwidth_bytes_per_s, *(line for line in lines if line is not None)])
        return link if rate == link.bandwidth_bytes_per_s else replace(link, bandwidth_bytes_per_s=rate)

    @property
    def emulated(self) -> bool:
        """Whether any device is emulated."""
        return any(device.emulated for device in self.devices)
