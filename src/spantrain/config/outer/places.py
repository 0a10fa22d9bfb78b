"""The `placement` of an outer.yaml: places that could have shards, how fast clusters reach them, how fast they are."""

from collections.abc import Mapping
from dataclasses import dataclass

from spantrain.config.files.yaml_fields import Field
from spantrain.core.quantities import parse_bandwidth, parse_bytes

_MAX_ITEMS = 256
"""Clusters, and places."""


@dataclass(frozen=True, kw_only=True)
class OuterPlaces:
    """What is known of places and clusters."""

    model_bytes: int
    """Of all parameters."""
    throughput: Mapping[str, float]
    """By cluster: tokens per second."""
    line_bytes_per_s: Mapping[str, float]
    """By cluster that has a limit of its own, whatever place it talks to."""
    bandwidth_bytes_per_s: Mapping[str, Mapping[str, float]]
    """By place, then by cluster."""
    memory_bytes: Mapping[str, int]
    """By place that has a limit."""


def read_places(at: Field | None) -> OuterPlaces | None:
    """Read the section, if there is one; what is wrong becomes problems."""
    if at is None:
        return None
    row = at.table(required=("model", "clusters", "places"))
    throughput: dict[str, float] = {}
    lines: dict[str, float] = {}
    for item in _items(row.get("clusters"), "cluster"):
        _read_cluster(item, throughput, lines)
    bandwidth: dict[str, Mapping[str, float]] = {}
    memory: dict[str, int] = {}
    for item in _items(row.get("places"), "place"):
        _read_place(item, tuple(throughput), bandwidth, memory)
    return OuterPlaces(
        model_bytes=round(row["model"].quantity(parse_bytes)) if "model" in row else 1,
        throughput=throughput,
        line_bytes_per_s=lines,
        bandwidth_bytes_per_s=bandwidth,
        memory_bytes=memory,
    )


def _items(at: Field | None, what: str) -> list[Field]:
    items = at.items() if at else []
    if at and not items and at.is_list_or_empty:
        at.problem(f"placement needs at least one {what}")
    if at and len(items) > _MAX_ITEMS:
        at.problem(f"{len(items)} entries are more than {_MAX_ITEMS}; leave some out")
    return items[:_MAX_ITEMS]


def _read_cluster(item: Field, throughput: dict[str, float], lines: dict[str, float]) -> None:
    row = item.table(required=("name", "tokens_per_s"), optional=("line",))
    name = _name(row, item, "cluster", throughput)
    value = row["tokens_per_s"].number() if "tokens_per_s" in row else None
    if value is not None and value <= 0:
        row["tokens_per_s"].problem(f"{value:g} must be more than 0")
    throughput[name] = value or 1.0
    if "line" in row:
        lines[name] = row["line"].quantity(parse_bandwidth)


def _read_place(
    item: Field, clusters: tuple[str, ...], bandwidth: dict[str, Mapping[str, float]], memory: dict[str, int]
) -> None:
    row = item.table(required=("name", "bandwidth"), optional=("memory",))
    name = _name(row, item, "place", bandwidth)
    rates = row["bandwidth"].entries() if "bandwidth" in row else {}
    for cluster, at in rates.items():
        if cluster not in clusters:
            at.problem(at.problems.unknown("cluster", cluster, clusters))
    missing = [cluster for cluster in clusters if cluster not in rates]
    if missing and "bandwidth" in row and row["bandwidth"].is_table:
        row["bandwidth"].problem(f"needs a bandwidth to each cluster; {', '.join(missing)} is missing")
    bandwidth[name] = {cluster: at.quantity(parse_bandwidth) for cluster, at in rates.items()}
    if "memory" in row:
        memory[name] = round(row["memory"].quantity(parse_bytes))


def _name(row: Mapping[str, Field], item: Field, what: str, taken: Mapping[str, object]) -> str:
    name = row["name"].name() if "name" in row else ""
    if name and name in taken:
        item.problem(f"two {what}s are named {name!r}; rename one")
    return name
