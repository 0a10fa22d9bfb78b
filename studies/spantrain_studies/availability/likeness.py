"""Devices that could change places without anybody noticing: a question is asked once for all that are alike."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan

Mark = tuple[int, ...]


class HostSymmetry:
    """Renames devices by exchanges of like hosts, and of like devices of a host.

    Hosts are alike if they lie in one site and have the same devices; links must be those of sites, as presets' are.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._hosts: defaultdict[object, list[tuple[str, ...]]] = defaultdict(list)
        self._kind = {one.name: f"{one.kind} {one.memory_bytes}" for one in cluster.devices}
        for host in cluster.hosts:
            names = tuple(sorted(host.devices, key=lambda name: self._kind[name]))
            self._hosts[host.site, tuple(self._kind[name] for name in names)].append(names)

    def renamed(self, marks: Mapping[str, Mark]) -> dict[str, str]:
        """Return the renaming after which the smallest marks come first: the same for all that are alike."""
        found: dict[str, str] = {}
        for hosts in self._hosts.values():
            inside = [sorted(names, key=lambda name: (self._kind[name], marks[name])) for names in hosts]
            inside.sort(key=lambda names: [marks[name] for name in names])
            for names, places in zip(inside, hosts, strict=True):
                found |= zip(names, places, strict=True)
        return found


def with_names(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return a plan in which devices have other names."""
    stages = (
        replace(
            stage,
            replicas=tuple(replace(one, devices=tuple(names[name] for name in one.devices)) for one in stage.replicas),
            keepers=tuple(names[name] for name in stage.keepers),
        )
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))
