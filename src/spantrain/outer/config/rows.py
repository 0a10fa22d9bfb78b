"""The `master` and `shards` of an outer.yaml: where each listens, and where it keeps what outlives it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from spantrain.config.files.yaml_fields import Field

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w-]{1,63}(?:\.[\w-]{1,63})*\.?)):(\d{1,5})", re.ASCII)
_EXAMPLE = "192.0.2.7:29500 or [2001:db8::7]:29500"
_ANYWHERE = ("0.0.0.0", "::")
_MAX_SHARDS = 100
"""A master has 128 members: clusters need places, too."""
_MAX_LETTERS = 32
"""Of a shard's name."""
_Key = TypeVar("_Key")


@dataclass(frozen=True, kw_only=True)
class MasterPlace:
    """Where the master is."""

    host: str
    """By which others reach it."""
    port: int
    """That members join at; what they say later goes to the next one. 0 for any."""
    listen: str
    """The address of its own machine that it listens on."""
    state: Path
    """Folder of what outlives it."""


@dataclass(frozen=True, kw_only=True)
class ShardPlace:
    """Where a shard is."""

    name: str
    host: str
    """By which workers of clusters reach it."""
    port: int
    """0 for any."""
    listen: str
    """The address of its own machine that it listens on."""
    snapshots: Path
    """Folder of its versions."""


def read_master(at: Field | None, folder: Path) -> MasterPlace:
    """Read where the master is; what is wrong becomes problems."""
    row = at.table(required=("address", "state"), optional=("listen",)) if at else {}
    host, port = _address(row)
    if port == 65535:
        row["address"].problem("the master needs this port and the next one; take a port below 65535")
    return MasterPlace(host=host, port=port, listen=_listen(row, host), state=_folder(row, "state", folder))


def read_shards(at: Field | None, folder: Path) -> tuple[ShardPlace, ...]:
    """Read the shards, in the order in which they hold layers; what is wrong becomes problems."""
    items = at.items() if at else []
    if at and not items and at.is_list_or_empty:
        at.problem("the outer optimizer needs at least one shard")
    if at and len(items) > _MAX_SHARDS:
        at.problem(f"{len(items)} shards are more than {_MAX_SHARDS}; give fewer, each with more layers")
    shards: list[ShardPlace] = []
    for item in items:
        row = item.table(required=("name", "address", "snapshots"), optional=("listen",))
        name = row["name"].name() if "name" in row else ""
        if name and name in {shard.name for shard in shards}:
            item.problem(f"two shards are named {name!r}; rename one")
        if len(name) > _MAX_LETTERS:
            row["name"].problem(f"{name!r} has {len(name)} letters; a shard's name has up to {_MAX_LETTERS}")
        host, port = _address(row)
        place = ShardPlace(
            name=name,
            host=host,
            port=port,
            listen=_listen(row, host),
            snapshots=_folder(row, "snapshots", folder),
        )
        shards.append(place)
    return tuple(shards)


def check_apart(at: Field | None, master: MasterPlace, shards: Sequence[ShardPlace]) -> None:
    """Refuse places that two would share: ports and folders."""
    ports: dict[tuple[str, int], str] = {(master.host, master.port + more): "the master" for more in (0, 1)}
    folders = {master.state: "the master"}
    for shard in shards:
        _claim(at, ports, (shard.host, shard.port), shard.name, f"{shard.host}:{shard.port}", unless=shard.port == 0)
        _claim(at, folders, shard.snapshots, shard.name, str(shard.snapshots), unless=shard.snapshots == Path())


def _claim(at: Field | None, taken: dict[_Key, str], key: _Key, name: str, told: str, *, unless: bool) -> None:
    if at and key in taken and not unless:
        at.problem(f"{name or 'a shard'} and {taken[key] or 'another'} would share {told}; give each its own")
    taken.setdefault(key, name)


def _address(row: Mapping[str, Field]) -> tuple[str, int]:
    text = row["address"].text() if "address" in row else None
    if text is None:
        return "", 0
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        row["address"].problem(f"{text!r} is not an address; write HOST:PORT, e.g. {_EXAMPLE}")
        return "", 0
    host = match[1] or match[2]
    if host in _ANYWHERE:
        row["address"].problem(
            f"{host} is where to listen, not where others find it; give the machine's name or address, and "
            f"`listen: {host}` beside it"
        )
    return host, int(match[3])


def _listen(row: Mapping[str, Field], host: str) -> str:
    """Return the address to listen on: that by which others reach it, unless another is given."""
    text = row["listen"].text() if "listen" in row else None
    if text is None:
        return host
    if _ADDRESS.fullmatch(f"[{text}]:1" if ":" in text else f"{text}:1") is None:
        row["listen"].problem(f"{text!r} is no host; write an address of that machine, without a port, e.g. 0.0.0.0")
    return text


def _folder(row: Mapping[str, Field], key: str, folder: Path) -> Path:
    text = row[key].text() if key in row else None
    return folder / text if text else Path()
