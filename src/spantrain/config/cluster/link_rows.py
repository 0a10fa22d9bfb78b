"""The `links` between sites in a cluster file: symmetric, directed, and a default for all other pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations

from spantrain.config.consistency import missing_links
from spantrain.config.files.yaml_fields import Field
from spantrain.core.cluster import Link
from spantrain.core.quantities import parse_bandwidth, parse_seconds

_Pair = tuple[str, str]


def read_links(section: Field | None, root: Field, sites: Sequence[str]) -> tuple[Link, ...]:
    """Return a link for each ordered pair of sites, in the sites' order; what is wrong becomes problems."""
    given: dict[_Pair, Link] = {}
    lines: dict[_Pair, int] = {}
    default: Field | None = None
    sound = True
    for item in section.items() if section else []:
        row = item.table(required=("bandwidth", "latency"), optional=("between", "from", "to", "jitter", "loss"))
        link = _read_link(row)
        if "between" in row and not row["between"].is_list and row["between"].text() == "all":
            if default is not None:
                item.problem(f"a second default (the first on line {default.line}); keep one `between: all`")
            else:
                given.update({pair: _between(link, pair) for pair in permutations(sites, 2) if pair not in lines})
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
            given[pair] = _between(link, pair)
    missing = missing_links(sites, given)
    if missing and sound:
        (section or root).problem(missing)
    return tuple(given[pair] for pair in permutations(sites, 2) if pair in given)


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


def _read_link(row: Mapping[str, Field]) -> Link:
    """Return what an entry says of its links, for no sites yet."""
    return Link(
        source="",
        target="",
        bandwidth_bytes_per_s=row["bandwidth"].quantity(parse_bandwidth) if "bandwidth" in row else 1.0,
        latency_s=row["latency"].quantity(parse_seconds, zero_allowed=True) if "latency" in row else 0.0,
        jitter_s=row["jitter"].quantity(parse_seconds, zero_allowed=True) if "jitter" in row else 0.0,
        loss_ratio=row["loss"].ratio() if "loss" in row else 0.0,
    )


def _between(link: Link, pair: _Pair) -> Link:
    return replace(link, source=pair[0], target=pair[1])
