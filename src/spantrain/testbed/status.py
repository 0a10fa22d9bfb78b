"""What a running testbed is asked for: its hosts, the present shape of its links, and what they have carried."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HostStatus:
    """One host."""

    host: str
    site: str
    address: str
    interface: str


@dataclass(frozen=True, kw_only=True)
class ShapedLinkStatus:
    """One direction between two sites: its shape now, and what has passed since the testbed came up."""

    source: str
    target: str
    bandwidth_bytes_per_s: float
    latency_s: float
    jitter_s: float
    loss_ratio: float
    speed: float
    """The part of the bandwidth that there is now, by the trace that it follows; 1 without one."""
    bytes_sent: int
    """IP bytes, headers included."""
    packets_sent: int
    packets_dropped: int
    """For want of room in the queue."""
    packets_lost: int
    """By `loss_ratio`."""
    load_bytes_sent: int
    """Of `bytes_sent`, those of `spantrain testbed load`."""
    bytes_waiting: int


@dataclass(frozen=True, kw_only=True)
class LineStatus:
    """What all links of a site share, in one direction: its rate now, and what has passed since it was there."""

    site: str
    way: str
    """`up`: what leaves the site; `down`: what comes."""
    bandwidth_bytes_per_s: float
    speed: float
    """The part of the bandwidth that there is now, by the trace that it follows; 1 without one."""
    bytes_sent: int
    """IP bytes, headers included."""
    load_bytes_sent: int
    """Of `bytes_sent`, those of `spantrain testbed load`."""
    packets_sent: int
    packets_dropped: int
    """For want of room in the queue."""
    bytes_waiting: int


@dataclass(frozen=True, kw_only=True)
class TestbedStatus:
    """A running testbed."""

    __test__ = False

    id: str
    cluster: str
    hosts: tuple[HostStatus, ...]
    links: tuple[ShapedLinkStatus, ...]
    lines: tuple[LineStatus, ...]
    """Of sites that have them."""
    packets_refused: int
    """Addressed to no site, or not IPv4."""
    up_s: float
    router_cpu_s: float
    """Processor time that the router has used since it began."""

    @property
    def router_cpu_share(self) -> float:
        """Part of one processor that the router has used since it began."""
        return self.router_cpu_s / self.up_s

    @property
    def bytes_sent(self) -> int:
        """IP bytes over all links."""
        return sum(link.bytes_sent for link in self.links)
