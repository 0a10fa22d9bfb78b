"""Random places of four devices in a pipeline of five units."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, permutations
from random import Random

from spantrain.core.cluster import Host, Link, Site
from spantrain.core.plan import Plan
from spantrain.core.span import Span

BATCH = 6
THIRDS = (Span(0, 2), Span(2, 4), Span(4, 6))
HALVES = (Span(0, 3), Span(3, 6))
UNEVEN = (Span(0, 1), Span(1, 5), Span(5, 6))


def random_places(random: Random):
    """Cuts of five units, and four devices in any groups."""
    devices = random.sample("abcd", 4)
    count = random.randint(1, 4)
    edges = [0, *sorted(random.sample(range(1, 5), count - 1)), 5]
    borders = [0, *sorted(random.sample(range(1, 4), count - 1)), 4]
    stages = []
    for index in range(count):
        members = devices[borders[index] : borders[index + 1]]
        cuts = [0, *[at for at in range(1, len(members)) if random.random() < 0.5], len(members)]
        stages.append([members[lo:hi] for lo, hi in pairwise(cuts)])
    return edges, stages, random.choice([THIRDS, HALVES, UNEVEN]), random.choice(["gpipe", "critical-path", "zb"])


def in_sites(plan: Plan, site_of: Mapping[str, str]) -> Plan:
    """A plan whose devices are each on a host of their own, in these sites, all of them joined by fast links."""
    names = sorted(set(site_of.values()))
    sites = tuple(
        Site(
            name=site,
            hosts=tuple(name for name in site_of if site_of[name] == site),
            bandwidth_bytes_per_s=1e9,
            latency_s=0.0,
        )
        for site in names
    )
    links = tuple(
        Link(source=a, target=b, bandwidth_bytes_per_s=1e8, latency_s=0.001) for a, b in permutations(names, 2)
    )
    devices = tuple(replace(one, host=one.name, site=site_of[one.name]) for one in plan.cluster.devices)
    hosts = tuple(Host(name=name, site=site, devices=(name,)) for name, site in site_of.items())
    return replace(plan, cluster=replace(plan.cluster, sites=sites, hosts=hosts, devices=devices, links=links))
