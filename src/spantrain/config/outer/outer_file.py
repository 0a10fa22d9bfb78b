"""outer.yaml -> OuterConfig: where the outer optimizer's master and shards are, and with what numbers they work.

Strict, with all that is wrong in one message. The schema is in docs/outer.md.
"""

from dataclasses import dataclass
from pathlib import Path

from spantrain.config.files.problems import Problems
from spantrain.config.files.text_files import read_text
from spantrain.config.files.yaml_fields import Field, parse_yaml
from spantrain.config.outer.numbers import OuterNumbers, read_numbers, read_switch
from spantrain.config.outer.places import OuterPlaces, read_places
from spantrain.config.outer.rows import MasterPlace, ShardPlace, check_apart, read_master, read_shards
from spantrain.errors import ConfigError

_PAGE = "docs/outer.md"
_REMEDY = f"name a file such as {_PAGE} shows"
_OPTIONAL = ("inner_steps", "rule", "settings", "guard", "data", "encryption", "placement")
_MOST_SAMPLES = 10**12
_MOST_CHUNKS = 10**6
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
    numbers: OuterNumbers
    data: OuterData | None
    """None where clusters bring their own."""
    encrypted: bool
    """Whether parameters are encrypted and authenticated on their way; the control plane always is."""
    places: OuterPlaces | None
    """Where shards could be, and what is known of clusters."""

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
        numbers=read_numbers(top),
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
    samples = row["samples"].count(most=_MOST_SAMPLES) if "samples" in row else 1
    chunk = row["chunk_samples"].count(most=_MOST_SAMPLES) if "chunk_samples" in row else 1
    if "samples" in row and "chunk_samples" in row and chunk > samples:
        row["chunk_samples"].problem(f"a chunk of {chunk} samples is more than all {samples}; make chunks smaller")
    if "chunk_samples" in row and samples // chunk > _MOST_CHUNKS:
        row["chunk_samples"].problem(f"{samples // chunk} chunks are more than {_MOST_CHUNKS}; make them larger")
    passes = row["passes"].count(most=10**6) if "passes" in row else None
    return OuterData(samples=samples, chunk_samples=chunk, passes=passes)
