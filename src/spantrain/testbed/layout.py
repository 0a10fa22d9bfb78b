"""Which site and host gets which address, and what the router must be told. Plain data, to and from JSON."""

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from spantrain.core.cluster import Cluster, Link
from spantrain.errors import TestbedError

HOST_INTERFACE = "eth0"
_HOSTS_PER_BLOCK = 250
_MAX_SITES = 250


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """One host."""

    name: str
    address: str


@dataclass(frozen=True, kw_only=True)
class SiteLayout:
    """One site; its addresses are 10.<number>.0.0/16, its gateway 10.<number>.0.1."""

    name: str
    number: int
    bandwidth_bytes_per_s: float
    uplink_bandwidth_bytes_per_s: float | None
    downlink_bandwidth_bytes_per_s: float | None
    hosts: tuple[HostLayout, ...]

    @property
    def gateway(self) -> str:
        """Address of the site's switch, which is its way out."""
        return f"10.{self.number}.0.1"


@dataclass(frozen=True, kw_only=True)
class NetworkLayout:
    """Everything that the router builds."""

    testbed_id: str
    cluster: str
    sites: tuple[SiteLayout, ...]
    links: tuple[Link, ...]
    parent_pid: int | None
    """End when this process ends; None: stay until asked."""

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "NetworkLayout":
        """Read what `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        sites = tuple(
            SiteLayout(**{**site, "hosts": tuple(HostLayout(**host) for host in site["hosts"])})
            for site in fields.pop("sites")
        )
        links = tuple(Link(**link) for link in fields.pop("links"))
        return cls(sites=sites, links=links, **fields)


def lay_out(cluster: Cluster, *, testbed_id: str, parent_pid: int | None) -> NetworkLayout:
    """Give addresses to all sites and hosts of a cluster.

    Raises:
        TestbedError: More sites than addresses, a host without a site, a link to nowhere or two links for one pair.
    """
    problems = _problems(cluster)
    if problems:
        raise TestbedError(f"cluster {cluster.name} cannot be emulated: {'; '.join(problems)}")
    sites = []
    for number, site in enumerate(cluster.sites, start=1):
        hosts = tuple(
            HostLayout(name=name, address=f"10.{number}.{rank // _HOSTS_PER_BLOCK}.{rank % _HOSTS_PER_BLOCK + 2}")
            for rank, name in enumerate(host.name for host in cluster.hosts if host.site == site.name)
        )
        sites.append(
            SiteLayout(
                name=site.name,
                number=number,
                bandwidth_bytes_per_s=site.bandwidth_bytes_per_s,
                uplink_bandwidth_bytes_per_s=site.uplink_bandwidth_bytes_per_s,
                downlink_bandwidth_bytes_per_s=site.downlink_bandwidth_bytes_per_s,
                hosts=hosts,
            )
        )
    return NetworkLayout(
        testbed_id=testbed_id, cluster=cluster.name, sites=tuple(sites), links=cluster.links, parent_pid=parent_pid
    )


def _problems(cluster: Cluster) -> list[str]:
    known = {site.name for site in cluster.sites}
    problems = [f"host {host.name} is at site {host.site}, which is not there" for host in cluster.hosts
                if host.site not in known]  # fmt: skip
    for link in cluster.links:
        if link.source == link.target:
            problems.append(f"link {link.source} -> {link.target} joins a site with itself")
        problems += [
            f"link {link.source} -> {link.target}: no site {end}" for end in {link.source, link.target} - known
        ]
    pairs = Counter((link.source, link.target) for link in cluster.links)
    problems += [f"{count} links {source} -> {target}" for (source, target), count in pairs.items() if count > 1]
    if len(cluster.sites) > _MAX_SITES:
        problems.append(f"{len(cluster.sites)} sites; at most {_MAX_SITES} have addresses")
    return problems
