"""References inside a cluster, profile or plan that a type cannot check; each problem is one line."""

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from itertools import combinations, permutations

from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile

_MAX_SAMPLES = 2**24
_MAX_PIECES = 2**20
Note = Callable[[str, str], None]
"""Takes the path of a field and what is wrong with it."""


def missing_links(sites: Sequence[str], linked: Collection[tuple[str, str]]) -> str:
    """Return what to say of ordered pairs of sites that have no link; empty if all have one.

    >>> missing_links(["a", "b"], [("a", "b"), ("b", "a")])
    ''
    >>> missing_links(["a", "b"], [("a", "b")])
    'sites are disconnected: no link b -> a; add it, or a default with `between: all`'
    """
    named = [site for site in sites if site]
    missing = {pair for pair in permutations(named, 2) if pair not in linked}
    both = [pair for pair in combinations(named, 2) if pair in missing and pair[::-1] in missing]
    one = [pair for pair in permutations(named, 2) if pair in missing and pair[::-1] not in missing]
    told = [f"{a} <-> {b}" for a, b in both] + [f"{a} -> {b}" for a, b in one]
    if not told:
        return ""
    added = "it" if len(told) == 1 else "them"
    return f"sites are disconnected: no link {', '.join(told)}; add {added}, or a default with `between: all`"


def check_cluster(cluster: Cluster, note: Note) -> None:
    """Note every reference inside a cluster that leads nowhere."""
    devices_of = {host.name: frozenset(host.devices) for host in cluster.hosts}
    hosts_of = {site.name: frozenset(site.hosts) for site in cluster.sites}
    for device in cluster.devices:
        path = f"cluster.devices.{device.name}"
        if device.kind not in cluster.kind_by_name:
            note(path, f"kind {device.kind!r} is not among the cluster's kinds")
        host = cluster.host_by_name.get(device.host)
        if host is None or device.name not in devices_of[host.name] or host.site != device.site:
            note(
                path, f"does not agree with the cluster's hosts and sites (host {device.host!r}, site {device.site!r})"
            )
        if device.memory_bytes <= 0:
            note(path, f"memory_bytes must be positive, got {device.memory_bytes}")
    for host in cluster.hosts:
        if host.name not in hosts_of.get(host.site, ()):
            note(f"cluster.hosts.{host.name}", f"does not agree with the cluster's sites (site {host.site!r})")
        check_known(host.devices, cluster.device_by_name, f"cluster.hosts.{host.name}.devices", note)
    for place in cluster.sites:
        check_known(place.hosts, cluster.host_by_name, f"cluster.sites.{place.name}.hosts", note)
    linked = {(link.source, link.target) for link in cluster.links}
    missing = "" if cluster.default_link else missing_links([site.name for site in cluster.sites], linked)
    if missing:
        note("cluster.links", missing)


def check_profile(profile: Profile, note: Note) -> None:
    """Note every reference inside a profile that leads nowhere."""
    check_cluster(profile.cluster, note)
    devices, kinds = profile.cluster.device_by_name, profile.cluster.kind_by_name
    for index, link in enumerate(profile.links):
        check_known((link.source, link.target), devices, f"links[{index}]", note)
    check_known([score.device for score in profile.scores], devices, "scores", note)
    check_known([timing.kind for timing in profile.timings], kinds, "timings", note)
    seen: set[tuple[object, ...]] = set()
    for index, timing in enumerate(profile.timings):
        key = (timing.unit_class, timing.kind, timing.dtype, timing.tp_degree, timing.samples)
        if key in seen:
            note(f"timings[{index}]", f"is a second one of {timing.unit_class} on {timing.kind} for as many samples")
        seen.add(key)


def check_plan(plan: Plan, note: Note) -> None:
    """Note every reference inside a plan that leads nowhere; Plan itself has checked its stages."""
    check_cluster(plan.cluster, note)
    if plan.global_batch > _MAX_SAMPLES:
        note("global_batch", f"must be at most {_MAX_SAMPLES} samples, got {plan.global_batch}")
    pieces = sum(len(stage.replicas) * len(stage.micro_batches) for stage in plan.stages)
    if pieces > _MAX_PIECES:
        note("stages", f"have {pieces} micro-batches of replicas; at most {_MAX_PIECES} are simulated and trained")
    for index, stage in enumerate(plan.stages):
        if not stage.replicas:
            note(f"stages[{index}].replicas", "a stage needs at least one replica")


def check_known(names: Iterable[str], known: Container[str], path: str, note: Note) -> None:
    """Note devices, hosts or kinds that a cluster does not have."""
    unknown = sorted({name for name in names if name not in known})
    if unknown:
        note(path, f"the cluster does not have {', '.join(unknown)}")
