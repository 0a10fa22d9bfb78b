"""cluster.yaml -> Cluster: strict, with all that is wrong in one message. The schema is in docs/cluster.md."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from spantrain.config.cluster.device_rows import DeviceRow, read_devices
from spantrain.config.cluster.kinds import load_kinds, read_kind
from spantrain.config.cluster.link_rows import read_links
from spantrain.config.files.problems import Problems
from spantrain.config.files.text_files import read_text
from spantrain.config.files.yaml_fields import Field, parse_yaml
from spantrain.core.cluster import MAX_DEVICES, MAX_SITES, Cluster, Device, DeviceKind, Host, Site
from spantrain.core.names import is_name
from spantrain.core.quantities import parse_bandwidth, parse_seconds

_REMEDY = "name a cluster file (docs/cluster.md shows how to write one) or use a preset"


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file.

    Raises:
        ConfigError: it is missing, or something in it is wrong; all of it is told at once.
    """
    return parse_cluster(read_text(path, remedy=_REMEDY), source=str(path))


def parse_cluster(text: str, *, source: str) -> Cluster:
    """Read the text of a cluster file; `source` is its name in errors.

    Raises:
        ConfigError: something in it is wrong; all of it is told at once.
    """
    draft = _Draft()
    problems = Problems(source)
    root = parse_yaml(text, problems)
    top = root.table(required=("name", "sites"), optional=("description", "emulated_speed", "kinds", "links"))
    name = top["name"].name() if "name" in top else ""
    description = (top["description"].text() or "") if "description" in top else ""
    emulated_speed = _read_emulated_speed(top.get("emulated_speed"))
    kinds = _read_kinds(top.get("kinds"))
    if "sites" in top:
        _read_sites(top["sites"], kinds, draft)
    links = read_links(top.get("links"), root, draft.site_names)
    problems.check()
    used = {device.kind for device in draft.devices}
    return Cluster(
        name=name,
        kinds=tuple(kind for kind in kinds.values() if kind.name in used),
        sites=tuple(draft.sites),
        hosts=tuple(draft.hosts),
        devices=tuple(draft.devices),
        links=links,
        emulated_speed=emulated_speed,
        description=" ".join(description.split()),
    )


@dataclass(kw_only=True)
class _Draft:
    """What has been read so far, without what has no name; other wrong values have harmless ones in their place."""

    site_names: list[str] = field(default_factory=list)
    """Empty where a site has none."""
    sites: list[Site] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    lines: dict[tuple[str, str], int] = field(default_factory=dict)
    """The line that first gave each (site|host|device, name)."""

    def claim(self, what: str, name: str, at: Field) -> None:
        """Note that a name is taken; a second time is a problem. An empty name was a problem before."""
        first = self.lines.get((what, name))
        if name and first is not None:
            at.problem(f"two {what}s are named {name!r} (the first on line {first}); rename one")
        self.lines.setdefault((what, name), at.line)


def _read_emulated_speed(at: Field | None) -> float:
    value = at.number() if at else None
    if at and value is not None and value <= 0:
        at.problem(f"{value:g} must be more than zero; 1 is the kind's own speed")
    return 1.0 if value is None else value


def _read_kinds(section: Field | None) -> Mapping[str, DeviceKind]:
    """Return the kinds that ship with the program and those of this file."""
    kinds = dict(load_kinds())
    for name, entry in (section.entries() if section else {}).items():
        if name in load_kinds():
            entry.problem(f"kind {name!r} ships with the program; give yours another name")
        else:
            try:
                kinds[name] = read_kind(name, entry)
            except ValueError as reason:
                entry.problem(str(reason))
    return kinds


def _read_sites(section: Field, kinds: Mapping[str, DeviceKind], draft: _Draft) -> None:
    items = section.items()
    if not items and section.is_list_or_empty:
        section.problem("a cluster needs at least one site")
    if len(items) > MAX_SITES:
        section.problem(f"{len(items)} sites are more than {MAX_SITES}; put what is close together into one")
    for item in items[:MAX_SITES]:
        row = item.table(required=("name", "network", "hosts"), optional=("uplink", "downlink"))
        name = row["name"].name() if "name" in row else ""
        draft.claim("site", name, item)
        network = row["network"].table(required=("bandwidth", "latency")) if "network" in row else {}
        bandwidth, latency = network.get("bandwidth"), network.get("latency")
        hosts = _read_hosts(row["hosts"], name, kinds, draft) if "hosts" in row else ()
        lines = {key: _read_line(row.get(key), key, alone=len(items) == 1) for key in ("uplink", "downlink")}
        rate = bandwidth.quantity(parse_bandwidth) if bandwidth else 1.0
        delay_s = latency.quantity(parse_seconds, zero_allowed=True) if latency else 0.0
        draft.site_names.append(name)
        if name:
            draft.sites.append(
                Site(
                    name=name,
                    hosts=hosts,
                    bandwidth_bytes_per_s=rate,
                    latency_s=delay_s,
                    uplink_bandwidth_bytes_per_s=lines["uplink"],
                    downlink_bandwidth_bytes_per_s=lines["downlink"],
                )
            )


def _read_line(at: Field | None, key: str, *, alone: bool) -> float | None:
    """Return the rate of a site's line to all other sites; None where nothing is said of it."""
    if at is None:
        return None
    if alone:
        at.problem(f"the cluster has one site, so nothing would use its {key}; remove it, or add the other sites")
        return None
    return at.quantity(parse_bandwidth)


def _read_hosts(section: Field, site: str, kinds: Mapping[str, DeviceKind], draft: _Draft) -> tuple[str, ...]:
    """Read the hosts of a site into the draft; return their names."""
    items = section.items()
    if not items and section.is_list_or_empty:
        section.problem("a site needs at least one host")
    names: list[str] = []
    for item in items:
        row = item.table(required=("name", "devices"), optional=("count", "address", "backend"))
        base = row["name"].name() if "name" in row else ""
        count = row["count"].count() if "count" in row else None
        if "address" in row and count is not None and count > 1:
            row["address"].problem(f"{count} hosts cannot share one address; list the hosts one by one")
        address = row["address"].text() if "address" in row else None
        devices = read_devices(row, kinds)
        for name in [base] if count is None or not base else [f"{base}-{index}" for index in range(count)]:
            if name and not is_name(name):
                item.problem(f"its hosts would be named {name!r}, which is too long; give it a shorter name")
                break
            draft.claim("host", name, item)
            names.append(name)
            if name and not _place(Host(name=name, site=site, devices=(), address=address), devices, item, draft):
                return tuple(names)
    return tuple(names)


def _place(host: Host, rows: list[DeviceRow], at: Field, draft: _Draft) -> bool:
    """Put a host and its devices into the draft, unless that has too many; return whether it has room for more.

    A device without a name is named after its host.
    """
    names = []
    for index, row in enumerate(rows):
        stem = "cpu" if row.backend == "cpu" else "gpu"
        name = row.name or (host.name if len(rows) == 1 else f"{host.name}-{stem}{index}")
        if not is_name(name):
            at.problem(f"its device would be named {name!r}, which is too long; give the host a shorter name")
            return True
        draft.claim("device", name, row.at if row.name else at)
        names.append(name)
        device = Device(
            name=name,
            kind=row.kind,
            host=host.name,
            site=host.site,
            backend=row.backend,
            memory_bytes=row.memory_bytes,
        )
        draft.devices.append(device)
    draft.hosts.append(replace(host, devices=tuple(names)))
    if len(draft.devices) <= MAX_DEVICES:
        return True
    at.problem(f"with this the cluster has more than {MAX_DEVICES} devices; leave some out")
    return False
