"""outer.yaml -> OuterConfig: where the outer optimizer's master and shards are, and with what numbers they work.

Strict, with all that is wrong in one message. The schema is in docs/outer.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from spantrain.config.files.problems import Problems
from spantrain.config.files.text_files import read_text
from spantrain.config.files.yaml_fields import Field, parse_yaml
from spantrain.core.outer.stages import INNER_STEPS
from spantrain.core.quantities import parse_bandwidth, parse_bytes
from spantrain.errors import ConfigError
from spantrain.outer.config.numbers import read_numbers, read_rule, read_switch
from spantrain.outer.config.rows import MasterPlace, ShardPlace, check_apart, read_master, read_shards
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.policy.guard import GuardSettings
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.registry import OuterRule

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


_PAGE = "docs/outer.md"
_REMEDY = f"name a file such as {_PAGE} shows"
_OPTIONAL = ("inner_steps", "rule", "settings", "guard", "data", "encryption", "placement")
_MAX_SAMPLES = 10**12
_MAX_STEPS = 10**9
_MAX_CHUNKS = 10**6
"""The master keeps two numbers for each."""


@dataclass(frozen=True, kw_only=True)
class OuterData:
    """The data set that the master gives out in chunks."""

    samples: int
    chunk_samples: int
    """Of each chunk, about."""
    passes: int | None
    """Over the data; None for no end."""

    @property
    def chunks(self) -> int:
        """How many there are."""
        return max(1, self.samples // self.chunk_samples)


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """One master, its shards, and their numbers."""

    source: str
    """The file's name, as the user gave it."""
    name: str
    master: MasterPlace
    shards: tuple[ShardPlace, ...]
    inner_steps: int
    """Of a cluster between two pushes."""
    rule: OuterRule
    settings: OuterSettings
    data: OuterData | None
    """None where clusters bring their own."""
    encrypted: bool
    """Whether parameters are encrypted and authenticated on their way; the control plane always is."""
    places: OuterPlaces | None
    """Where shards could be, and what is known of clusters."""

    @property
    def for_master(self) -> MasterConfig:
        """What the master is told."""
        data = self.data
        return MasterConfig(
            shards=tuple(shard.name for shard in self.shards),
            settings=self.settings,
            rule=self.rule,
            samples=data.samples if data else 0,
            chunks=data.chunks if data else 0,
            passes=data.passes if data else None,
            encrypted=self.encrypted,
        )

    def shard(self, name: str) -> ShardPlace:
        """Return the shard of that name.

        Raises:
            ConfigError: there is none.
        """
        found = {shard.name: shard for shard in self.shards}
        if name not in found:
            raise ConfigError(f"{self.name} has no shard {name!r}; it has {', '.join(found)}")
        return found[name]


def load_outer(path: Path) -> OuterConfig:
    """Read a file; folders in it are meant from where it lies.

    Raises:
        ConfigError: it is missing, or something in it is wrong; all of it is told at once.
    """
    return parse_outer(read_text(path, remedy=_REMEDY), source=str(path), folder=path.parent)


def parse_outer(text: str, *, source: str, folder: Path) -> OuterConfig:
    """Read the text of a file; `source` is its name in errors, `folder` where its relative paths begin.

    Raises:
        ConfigError: something in it is wrong; all of it is told at once.
    """
    if all(not line.strip() or line.lstrip().startswith("#") for line in text.splitlines()):
        raise ConfigError(f"{source}: is empty; {_REMEDY}")
    problems = Problems(source)
    top = parse_yaml(text, problems).table(required=("name", "master", "shards"), optional=_OPTIONAL)
    name = top["name"].name() if "name" in top else ""
    master = read_master(top.get("master"), folder)
    shards = read_shards(top.get("shards"), folder)
    check_apart(top.get("shards"), master, shards)
    config = OuterConfig(
        source=source,
        name=name,
        master=master,
        shards=shards,
        inner_steps=top["inner_steps"].count(most=_MAX_STEPS) if "inner_steps" in top else INNER_STEPS,
        rule=read_rule(top.get("rule")),
        settings=replace(
            read_numbers(top.get("settings"), OuterSettings), guard=read_numbers(top.get("guard"), GuardSettings)
        ),
        data=_read_data(top.get("data")),
        encrypted=read_switch(top["encryption"]) if "encryption" in top else True,
        places=read_places(top.get("placement")),
    )
    problems.check()
    return config


def _read_data(at: Field | None) -> OuterData | None:
    if at is None:
        return None
    row = at.table(required=("samples", "chunk_samples"), optional=("passes",))
    samples = row["samples"].count(most=_MAX_SAMPLES) if "samples" in row else 1
    chunk = row["chunk_samples"].count(most=_MAX_SAMPLES) if "chunk_samples" in row else 1
    if "samples" in row and "chunk_samples" in row and chunk > samples:
        row["chunk_samples"].problem(f"a chunk of {chunk} samples is more than all {samples}; make chunks smaller")
    if "chunk_samples" in row and samples // chunk > _MAX_CHUNKS:
        row["chunk_samples"].problem(f"{samples // chunk} chunks are more than {_MAX_CHUNKS}; make them larger")
    passes = row["passes"].count(most=10**6) if "passes" in row else None
    return OuterData(samples=samples, chunk_samples=chunk, passes=passes)
