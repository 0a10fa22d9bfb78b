"""outer.yaml -> OuterConfig: where master and shards are, with what numbers they work, and where shards could be.

Strict, with all that is wrong in one message. The schema is in docs/outer.md. The numbers' bounds are those of their
fields (`outer.policy.settings`, `outer.policy.guard`, `outer.rules`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from spantrain.config.files.problems import Problems
from spantrain.config.files.text_files import read_text
from spantrain.config.files.yaml_fields import Field, parse_yaml
from spantrain.core.outer.stages import INNER_STEPS
from spantrain.core.quantities import parse_bandwidth, parse_bytes, parse_seconds
from spantrain.core.records import Bounds, Record, bounds_of
from spantrain.errors import ConfigError, UsageError
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.policy.guard import GuardSettings
from spantrain.outer.policy.placement import OuterPlaces
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.rules.registry import OuterRule, rules
from spantrain.transport.control.address import Address

_REMEDY = "name a file such as docs/outer.md shows"
_OPTIONAL = ("inner_steps", "rule", "settings", "guard", "data", "encryption", "placement")
_MAX_SAMPLES = 10**12
_MAX_STEPS = 10**9
_MAX_CHUNKS = 10**6
"""The master keeps two numbers for each."""
_MAX_SHARDS = 100
"""A master has 128 members: clusters need places, too."""
_MAX_LETTERS = 32
"""Of a shard's name."""
_MAX_ITEMS = 256
"""Clusters, and places."""
_EXAMPLE = "192.0.2.7:29500 or [2001:db8::7]:29500"
T = TypeVar("T")
_SWITCH = {"on": True, "off": False}
_BAD = object()
"""In the place of a value that cannot be read; its problem is noted."""


class MemberPlace(Record):
    """Where the master is, or a shard."""

    name: str
    """A shard's; empty of the master."""
    address: Address
    """By which others reach it. At its port members join, or layers come; what members say to a master later goes to
    the next one. 0 for any."""
    listen: Address
    """Of its own machine, that it listens on."""
    folder: Path
    """Of what outlives it: the master's state, or a shard's versions."""


class OuterConfig(Record):
    """One master, its shards, and their numbers."""

    source: str
    """The file's name, as the user gave it."""
    name: str
    master: MemberPlace
    shards: tuple[MemberPlace, ...]
    inner_steps: int
    """Of a cluster between two pushes."""
    for_master: MasterConfig
    """What the master is told."""
    model_bytes: int
    """Of all parameters, where places are given."""
    places: OuterPlaces | None
    """Where shards could be, and what is known of clusters."""

    def shard(self, name: str) -> MemberPlace:
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
    master = _read_master(top.get("master"), folder)
    shards = _read_shards(top.get("shards"), folder)
    _check_apart(top.get("shards"), master, shards)
    inner_steps = top["inner_steps"].count(most=_MAX_STEPS) if "inner_steps" in top else INNER_STEPS
    rule = _read_rule(top.get("rule"))
    settings = _read_numbers(top.get("settings"), OuterSettings)
    settings = replace(settings, guard=_read_numbers(top.get("guard"), GuardSettings))
    samples, chunks, passes = _read_data(top["data"]) if "data" in top else (0, 0, None)
    encrypted = _read_switch(top["encryption"]) if "encryption" in top else True
    model_bytes, places = _read_places(top["placement"]) if "placement" in top else (0, None)
    problems.check()
    return OuterConfig(
        source=source,
        name=name,
        master=master,
        shards=shards,
        inner_steps=inner_steps,
        for_master=MasterConfig(
            shards=tuple(shard.name for shard in shards),
            settings=settings,
            rule=rule,
            samples=samples,
            chunks=chunks,
            passes=passes,
            encrypted=encrypted,
        ),
        model_bytes=model_bytes,
        places=places,
    )


# Numbers: a table is read into the dataclass that has them, by the types and bounds of its fields.


def _read_numbers(at: Field | None, kind: type[T], *, beside: Collection[str] = ()) -> T:
    """Read a table; what it leaves out is as the dataclass has it, and what is wrong becomes problems.

    A field in seconds is written without its `_s`, and with a unit; one that may be None, as `none`. `beside`: further
    keys, which somebody else reads. Fields that are dataclasses have tables of their own.
    """
    types = get_type_hints(kind)
    hints = {one.name.removesuffix("_s"): (one.name, types[one.name]) for one in fields(kind)}  # type: ignore[arg-type]
    known = [key for key, (_, hint) in hints.items() if not hasattr(hint, "__dataclass_fields__")]
    is_empty = at is None or (at.is_list_or_empty and not at.is_list)
    row = at.table(required=(), optional=(*beside, *known)) if at and not is_empty else {}
    values = {}
    for key in row.keys() & set(known):
        name, hint = hints[key]
        value = _read(row[key], hint, in_seconds=name != key, bounds=bounds_of(kind).get(name, Bounds()))
        if value is not _BAD:
            values[name] = value
    return kind(**values)


def _read_rule(at: Field | None) -> OuterRule:
    """Read the rule of the outer step: its `name`, if it is not the default, and its numbers."""
    row = at.entries() if at is not None and at.is_table else {}
    kinds = rules()
    name = _text(row["name"]) if "name" in row else Nesterov.name
    if name not in kinds:
        row["name"].problem(f"{name!r} must be one of {', '.join(sorted(kinds))}")
    return _read_numbers(at, kinds.get(name or "", Nesterov), beside=("name",))


def _read_switch(at: Field) -> bool:
    """Return whether it says `on`; what is neither on nor off becomes a problem."""
    text = _text(at)
    if text not in _SWITCH:
        at.problem("must be on or off" if text is None else f"{text!r} must be on or off")
    return _SWITCH.get(text or "", True)


def _read(at: Field, hint: Any, *, in_seconds: bool, bounds: Bounds) -> Any:
    may_be_none = NoneType in get_args(hint)
    if may_be_none and _text(at) == "none":
        return None
    kind = next((one for one in get_args(hint) if one is not NoneType), hint)
    if kind is bool:
        return _read_switch(at)
    if issubclass(kind, Enum):
        text = _text(at)
        if text in [one.value for one in kind]:
            return kind(text)
        at.problem(f"{'' if text is None else f'{text!r} '}must be one of {', '.join(one.value for one in kind)}")
        return _BAD
    if in_seconds:
        return at.quantity(parse_seconds, zero_allowed=bounds.holds(0))
    value = at.count(most=int(bounds.high)) if kind is int else at.number()
    if value is not None and bounds.holds(value):
        return value
    if value is not None:
        wanted = f"at least {bounds.low}" if kind is int else f"{bounds}, or none" if may_be_none else str(bounds)
        at.problem(f"{value:g} must be {wanted}")
    return _BAD


def _text(at: Field) -> str | None:
    return None if at.is_table or at.is_list else at.text()


# Master and shards.


def _read_master(at: Field | None, folder: Path) -> MemberPlace:
    row = at.table(required=("address", "state"), optional=("listen",)) if at else {}
    place = _read_member("", row, "state", folder)
    if place.address.port == 65535:
        row["address"].problem("the master needs this port and the next one; take a port below 65535")
    return place


def _read_shards(at: Field | None, folder: Path) -> tuple[MemberPlace, ...]:
    """Read the shards, in the order in which they hold layers; what is wrong becomes problems."""
    shards: list[MemberPlace] = []
    for item in _items(at, "shard", _MAX_SHARDS, "give fewer, each with more layers"):
        row = item.table(required=("name", "address", "snapshots"), optional=("listen",))
        name = _name(row, item, "shard", [shard.name for shard in shards])
        if len(name) > _MAX_LETTERS:
            row["name"].problem(f"{name!r} has {len(name)} letters; a shard's name has up to {_MAX_LETTERS}")
        shards.append(_read_member(name, row, "snapshots", folder))
    return tuple(shards)


def _read_member(name: str, row: Mapping[str, Field], kept: str, folder: Path) -> MemberPlace:
    """Read where a member is; `kept`: the key of its folder, which is meant from where the file lies."""
    address = _address(row["address"]) if "address" in row else Address()
    host = row["listen"].text() if "listen" in row else None
    listen = address if host is None else replace(address, host=host)
    try:
        Address.parse(str(listen)) if host is not None else ()
    except UsageError:
        row["listen"].problem(f"{host!r} is no host; write an address of that machine, without a port, e.g. 0.0.0.0")
    text = row[kept].text() if kept in row else None
    return MemberPlace(name=name, address=address, listen=listen, folder=folder / text if text else Path())


def _address(at: Field) -> Address:
    text = at.text()
    if text is None:
        return Address()
    try:
        found = Address.parse(text)
    except UsageError:
        found = Address(path=text)
    if found.path:
        at.problem(f"{text!r} is not an address; write HOST:PORT, e.g. {_EXAMPLE}")
        return Address()
    if found.is_anywhere:
        at.problem(
            f"{found.host} is where to listen, not where others find it; give the machine's name or address, and "
            f"`listen: {found.host}` beside it"
        )
    return found


def _check_apart(at: Field | None, master: MemberPlace, shards: Sequence[MemberPlace]) -> None:
    """Refuse places that two would share: ports and folders."""
    ports = [master.address.at_port(master.address.port + more) for more in (0, 1)]
    taken: dict[Address | Path, str] = dict.fromkeys([*ports, master.folder], "the master")
    for shard in shards:
        for place, is_any in ((shard.address, shard.address.port == 0), (shard.folder, shard.folder == Path())):
            if at and place in taken and not is_any:
                told = f"{shard.name or 'a shard'} and {taken[place] or 'another'} would share {place}"
                at.problem(f"{told}; give each its own")
            taken.setdefault(place, shard.name)


def _name(row: Mapping[str, Field], item: Field, what: str, taken: Collection[str]) -> str:
    name = row["name"].name() if "name" in row else ""
    if name and name in taken:
        item.problem(f"two {what}s are named {name!r}; rename one")
    return name


# Data and places; what is wrong becomes problems.


def _read_data(at: Field) -> tuple[int, int, int | None]:
    """Return the samples of the data set that the master gives out, into how many chunks it is cut, and the passes."""
    row = at.table(required=("samples", "chunk_samples"), optional=("passes",))
    samples = row["samples"].count(most=_MAX_SAMPLES) if "samples" in row else 1
    chunk = row["chunk_samples"].count(most=_MAX_SAMPLES) if "chunk_samples" in row else 1
    if "samples" in row and "chunk_samples" in row and chunk > samples:
        row["chunk_samples"].problem(f"a chunk of {chunk} samples is more than all {samples}; make chunks smaller")
    if "chunk_samples" in row and samples // chunk > _MAX_CHUNKS:
        row["chunk_samples"].problem(f"{samples // chunk} chunks are more than {_MAX_CHUNKS}; make them larger")
    bounded = "passes" in row and _text(row["passes"]) != "none"
    return samples, max(1, samples // chunk), row["passes"].count(most=10**6) if bounded else None


def _read_places(at: Field) -> tuple[int, OuterPlaces]:
    """Return the model's bytes, and what is known of places and clusters."""
    row = at.table(required=("model", "clusters", "places"))
    throughput: dict[str, float] = {}
    lines: dict[str, float] = {}
    for item in _items(row.get("clusters"), "cluster"):
        own = item.table(required=("name", "tokens_per_s"), optional=("line",))
        name = _name(own, item, "cluster", throughput)
        value = own["tokens_per_s"].number() if "tokens_per_s" in own else None
        if value is not None and value <= 0:
            own["tokens_per_s"].problem(f"{value:g} must be more than 0")
        throughput[name] = value or 1.0
        if "line" in own:
            lines[name] = own["line"].quantity(parse_bandwidth)
    bandwidth: dict[str, Mapping[str, float]] = {}
    memory: dict[str, int] = {}
    for item in _items(row.get("places"), "place"):
        own = item.table(required=("name", "bandwidth"), optional=("memory",))
        name = _name(own, item, "place", bandwidth)
        bandwidth[name] = _read_rates(own["bandwidth"], tuple(throughput)) if "bandwidth" in own else {}
        if "memory" in own:
            memory[name] = round(own["memory"].quantity(parse_bytes))
    return round(row["model"].quantity(parse_bytes)) if "model" in row else 1, OuterPlaces(
        throughput=throughput, line_bytes_per_s=lines, bandwidth_bytes_per_s=bandwidth, memory_bytes=memory
    )


def _items(at: Field | None, what: str, most: int = _MAX_ITEMS, remedy: str = "leave some out") -> list[Field]:
    items = at.items() if at else []
    if at and not items and at.is_list_or_empty:
        at.problem(f"at least one {what} is needed")
    if at and len(items) > most:
        at.problem(f"{len(items)} {what}s are more than {most}; {remedy}")
    return items[:most]


def _read_rates(at: Field, clusters: tuple[str, ...]) -> dict[str, float]:
    """Return a place's bandwidth to each cluster."""
    rates = at.entries()
    for cluster, one in rates.items():
        if cluster not in clusters:
            one.problem(at.problems.unknown("cluster", cluster, clusters))
    missing = [cluster for cluster in clusters if cluster not in rates]
    if missing and at.is_table:
        at.problem(f"needs a bandwidth to each cluster; {', '.join(missing)} is missing")
    return {cluster: one.quantity(parse_bandwidth) for cluster, one in rates.items()}
