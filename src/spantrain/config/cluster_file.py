"""cluster.yaml -> Cluster, or a preset by name: strict, all that is wrong in one message (docs/cluster.md).

`links` between sites are symmetric or directed, with a default for all other pairs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import permutations
from pathlib import Path
from typing import TypeVar

from spantrain.config.artefacts import missing_links
from spantrain.config.files.problems import Problems, did_you_mean
from spantrain.config.files.text_files import read_text
from spantrain.config.files.yaml_fields import Field, parse_yaml
from spantrain.config.kinds import DeviceRow, load_kinds, read_devices
from spantrain.config.prices import inside_rate, read_egress, read_inside, read_kind_price, read_own_kinds
from spantrain.core.cluster import LISTED_SITES, MAX_DEVICES, MAX_SITES, Cluster, Device, DeviceKind, Host, Link, Site
from spantrain.core.names import is_name
from spantrain.core.quantities import parse_bandwidth, parse_bytes, parse_seconds
from spantrain.errors import ConfigError

T = TypeVar("T")
_Pair = tuple[str, str]


def read_links(section: Field | None, root: Field, sites: Sequence[str]) -> tuple[tuple[Link, ...], Link | None]:
    """Return a link for each ordered pair of sites, in the sites' order; what is wrong becomes problems.

    Of very many sites those that are named, and the default.
    """
    given: dict[_Pair, Link] = {}
    lines: dict[_Pair, int] = {}
    default: Field | None = None
    common: Link | None = None
    sound = True
    for item in section.items() if section else []:
        row = item.table(required=("bandwidth", "latency"), optional=("between", "from", "to", "jitter", "loss"))
        link = Link(  # for no sites yet
            source="",
            target="",
            bandwidth_bytes_per_s=row["bandwidth"].quantity(parse_bandwidth) if "bandwidth" in row else 1.0,
            latency_s=row["latency"].quantity(parse_seconds, zero_allowed=True) if "latency" in row else 0.0,
            jitter_s=row["jitter"].quantity(parse_seconds, zero_allowed=True) if "jitter" in row else 0.0,
            loss_ratio=row["loss"].ratio() if "loss" in row else 0.0,
        )
        if "between" in row and not row["between"].is_list and row["between"].text() == "all":
            if default is not None:
                item.problem(f"a second default (the first on line {default.line}); keep one `between: all`")
            elif len(sites) > LISTED_SITES:
                common = link
            else:
                pairs = [pair for pair in permutations(sites, 2) if pair not in lines]
                given.update({(a, b): replace(link, source=a, target=b) for a, b in pairs})
            default = item
            _refuse(row, ("from", "to"))
            continue
        pairs = _pairs(row, item, sites)
        sound = sound and bool(pairs)
        twice = next((pair for pair in pairs if pair in lines), None)
        if twice is not None:
            item.problem(f"a second link {twice[0]} -> {twice[1]} (the first on line {lines[twice]}); keep one")
            continue
        for pair in pairs:
            lines.setdefault(pair, item.line)
            given[pair] = replace(link, source=pair[0], target=pair[1])
    missing = "" if common else missing_links(sites, given)
    if missing and sound:
        (section or root).problem(missing)
    return tuple(given[pair] for pair in permutations(sites, 2) if pair in given), common


def _pairs(row: Mapping[str, Field], item: Field, sites: Sequence[str]) -> list[_Pair]:
    """Return the ordered pairs that one entry describes; none, and a problem, if that is not clear."""
    if "between" in row:
        _refuse(row, ("from", "to"))
        ends = [_site(end, sites) for end in row["between"].items()]
        if not row["between"].is_list or len(ends) < 2:
            row["between"].problem("name the sites it joins, e.g. [cloud, edge], or write all")
            return []
        if "" not in ends and len(set(ends)) < len(ends):
            row["between"].problem("a link joins different sites; inside a site, its `network` holds")
            return []
        return list(permutations(ends, 2)) if "" not in ends else []
    if "from" not in row or "to" not in row:
        if item.is_table:
            item.problem("needs `between: [a, b]` for both directions, or `from: a` and `to: b` for one")
        return []
    source, target = _site(row["from"], sites), _site(row["to"], sites)
    if source and source == target:
        item.problem("a link joins different sites; inside a site, its `network` holds")
    return [(source, target)] if source and target and source != target else []


def _site(at: Field, sites: Sequence[str]) -> str:
    name = at.text()
    if name is not None and name not in sites:
        at.problem(at.problems.unknown("site", name, [site for site in sites if site]))
        return ""
    return name or ""


def _refuse(row: Mapping[str, Field], keys: Sequence[str]) -> None:
    for key in keys:
        if key in row:
            row[key].problem("cannot stand beside `between`; write one or the other")


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
    emulated_speed = top["emulated_speed"].number() if "emulated_speed" in top else 1.0
    if emulated_speed is not None and emulated_speed <= 0:
        top["emulated_speed"].problem(f"{emulated_speed:g} must be more than zero; 1 is the kind's own speed")
    kinds = {**load_kinds(), **(read_own_kinds(top["kinds"]) if "kinds" in top else {})}
    if "sites" in top:
        _read_sites(top["sites"], kinds, draft)
    links, default_link = read_links(top.get("links"), root, draft.site_names)
    problems.check()
    used = {device.kind for device in draft.devices}
    return Cluster(
        name=name,
        kinds=tuple(kind for kind in kinds.values() if kind.name in used),
        sites=tuple(draft.sites),
        hosts=tuple(draft.hosts),
        devices=tuple(draft.devices),
        links=links,
        default_link=default_link,
        emulated_speed=emulated_speed or 1.0,
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


def _read_sites(section: Field, kinds: Mapping[str, DeviceKind], draft: _Draft) -> None:
    items = section.items()
    if not items and section.is_list_or_empty:
        section.problem("a cluster needs at least one site")
    if len(items) > MAX_SITES:
        section.problem(f"{len(items)} sites are more than {MAX_SITES}; put what is close together into one")
    for item in items[:MAX_SITES]:
        row = item.table(
            required=("name", "network", "hosts"),
            optional=("uplink", "downlink", "region", "prices", "egress", "quotas"),
        )
        name = row["name"].name() if "name" in row else ""
        draft.claim("site", name, item)
        network = row["network"].table(required=("bandwidth", "latency")) if "network" in row else {}
        bandwidth, latency = network.get("bandwidth"), network.get("latency")
        rate = bandwidth.quantity(parse_bandwidth) if bandwidth else 1.0
        hosts = _read_hosts(row["hosts"], name, kinds, rate, draft) if "hosts" in row else ()
        lines = {key: _read_line(row.get(key), key, alone=len(items) == 1) for key in ("uplink", "downlink")}
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
                    region=(row["region"].text() or "") if "region" in row else "",
                    prices=_of_kinds(row.get("prices"), kinds, read_kind_price),
                    egress=read_egress(row["egress"]) if "egress" in row else None,
                    quotas=_read_quotas(row.get("quotas"), name, kinds, draft),
                )
            )


def _of_kinds(at: Field | None, kinds: Mapping[str, DeviceKind], read: Callable[[Field], T]) -> dict[str, T]:
    """Return what a table says of kinds."""
    found = {}
    for kind, value in (at.entries() if at else {}).items():
        if kind not in kinds:
            value.problem(value.problems.unknown("device kind", kind, kinds))
        found[kind] = read(value)
    return found


def _read_quotas(at: Field | None, site: str, kinds: Mapping[str, DeviceKind], draft: _Draft) -> dict[str, int]:
    found = _of_kinds(at, kinds, lambda value: value.count(most=MAX_DEVICES))
    have = Counter(device.kind for device in draft.devices if device.site == site)
    for kind, count in found.items():
        if at is not None and kind in kinds and count > have[kind]:
            at.problem(
                f"{count} {kind} are more than the site has ({have[kind]}); give a smaller number, or leave it out"
            )
    return found


def _read_line(at: Field | None, key: str, *, alone: bool) -> float | None:
    """Return the rate of a site's line to all other sites; None where nothing is said of it."""
    if at is None:
        return None
    if alone:
        at.problem(f"the cluster has one site, so nothing would use its {key}; remove it, or add the other sites")
        return None
    return at.quantity(parse_bandwidth)


def _read_hosts(
    section: Field, site: str, kinds: Mapping[str, DeviceKind], port_bytes_per_s: float, draft: _Draft
) -> tuple[str, ...]:
    """Read the hosts of a site into the draft; return their names."""
    items = section.items()
    if not items and section.is_list_or_empty:
        section.problem("a site needs at least one host")
    names: list[str] = []
    for item in items:
        row = item.table(
            required=("name", "devices"), optional=("count", "address", "ssh", "python", "backend", "memory", "inside")
        )
        base = row["name"].name() if "name" in row else ""
        count = row["count"].count(most=MAX_DEVICES) if "count" in row else None
        reached = {key: row[key].text() for key in ("address", "ssh") if key in row}
        if count is not None and count > 1:
            for key in reached:
                row[key].problem(f"{count} hosts cannot share one address; list the hosts one by one")
        memory_bytes = int(row["memory"].quantity(parse_bytes)) if "memory" in row else None
        devices = read_devices(row, kinds)
        inside = inside_rate(read_inside(row["inside"]), port_bytes_per_s) if "inside" in row else None
        for name in [base] if count is None or not base else [f"{base}-{index}" for index in range(count)]:
            if name and not is_name(name):
                item.problem(f"its hosts would be named {name!r}, which is too long; give it a shorter name")
                break
            draft.claim("host", name, item)
            names.append(name)
            if name:
                host = Host(
                    name=name, site=site, devices=(), memory_bytes=memory_bytes, inside_bandwidth_bytes_per_s=inside,
                    python=row["python"].text() if "python" in row else None, **reached,
                )  # fmt: skip
                if not _place(host, devices, item, draft):
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
            name=name, kind=row.kind, host=host.name, site=host.site, backend=row.backend, memory_bytes=row.memory_bytes
        )
        draft.devices.append(device)
    draft.hosts.append(replace(host, devices=tuple(names)))
    if len(draft.devices) <= MAX_DEVICES:
        return True
    at.problem(f"with this the cluster has more than {MAX_DEVICES} devices; leave some out")
    return False


PRESET_NAMES: tuple[str, ...] = (
    "laptop",
    "spantrain-setting-1",
    "spantrain-setting-2",
    "spantrain-table-1",
    "spantrain-cn",
    *(f"asteroid-{letter}-{mbit}" for letter in "abcd" for mbit in (100, 1000)),
)


_SHORT = {f"asteroid-{letter}": f"asteroid-{letter}-100" for letter in "abcd"}
"""Asteroid's clusters at 100 Mbit/s, its narrower network, when none is named."""


def load_preset(name: str) -> Cluster:
    """Return the cluster of a preset; hyphens may be left out.

    Raises:
        ConfigError: no preset has this name.
    """
    name = _SHORT.get(name, name)
    name = {known.replace("-", ""): known for known in PRESET_NAMES}.get(name.replace("-", ""), name)
    if name not in PRESET_NAMES:
        raise ConfigError(f"unknown preset {name!r}; {did_you_mean(name, PRESET_NAMES)}")
    file = resources.files("spantrain.config") / "presets" / f"{name}.yaml"
    return parse_cluster(file.read_text(encoding="utf-8"), source=f"preset {name}")
