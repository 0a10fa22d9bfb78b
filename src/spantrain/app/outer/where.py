"""Where the outer optimizer's master is and the token to join it with; where its shards belong."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spantrain.config.files.text_files import read_text
from spantrain.core.outer.layers import ParameterSpec
from spantrain.errors import ConfigError, UsageError
from spantrain.outer.config.outer_file import OuterConfig, load_outer
from spantrain.outer.config.rows import MasterPlace
from spantrain.outer.policy.placement import PlacementRequest, ShardPlacement, place_shards
from spantrain.transport.control.address import Address
from spantrain.transport.control.credentials import JoinToken

_SUFFIXES = (".yaml", ".yml")
_START = "start the master first, with `spantrain outer master` or `spantrain outer up`"
_ELSEWHERE = f"{_START}; on another machine give --token-file FILE, or the token in SPANTRAIN_OUTER_TOKEN"


@contextmanager
def naming_state(config: OuterConfig) -> Iterator[None]:
    """Say of what is wrong with the master's folder which field of which file names it.

    Raises:
        ConfigError: the folder, or something in it, cannot be used.
    """
    try:
        yield
    except UsageError as error:
        raise ConfigError(f"{config.source}: master.state: {error}") from None


def address_file(master: MasterPlace) -> Path:
    """Return where the master writes how others reach it."""
    return master.state / "address"


def token_file(master: MasterPlace) -> Path:
    """Return where the master keeps the token that members join with."""
    return master.state / "token"


def master_address(config: OuterConfig) -> str:
    """Return how others reach the master.

    Raises:
        ConfigError: it may take any port, and has not said which one it took.
    """
    master = config.master
    if master.port:
        return str(Address(host=master.host, port=master.port))
    return read_text(address_file(master), remedy=_START).strip()


def reach(where: str, *, token: str | None, token_file: Path | None) -> tuple[str, str]:
    """Return address and token of a master that is named by its file or its address.

    Raises:
        ConfigError: it is neither, or there is no token.
        UsageError: the token is cut or mistyped.
    """
    if Path(where).suffix in _SUFFIXES:
        config = load_outer(Path(where))
        return master_address(config), master_token(config, text=token, file=token_file)
    try:
        address = str(Address.parse(where))
    except UsageError as error:
        raise ConfigError(f"{error}; or the file, ending in {' or '.join(_SUFFIXES)}") from None
    return address, master_token(None, text=token, file=token_file)


def master_token(config: OuterConfig | None, *, text: str | None, file: Path | None) -> str:
    """Return the token: as it is given, out of a file, or out of the master's state folder.

    Raises:
        ConfigError: there is no such file, or nothing to take it from.
        UsageError: it is cut or mistyped.
    """
    if file is not None:
        found = read_text(file, remedy="name the file that the master wrote")
    elif text:
        found = text
    elif config is not None:
        found = read_text(token_file(config.master), remedy=_ELSEWHERE)
    else:
        raise ConfigError("give the master's token: --token-file FILE, or SPANTRAIN_OUTER_TOKEN")
    JoinToken.parse(found)
    return found.strip()


_REMEDY = "add it as docs/outer.md shows: model, clusters, and places with their bandwidths"


def place_outer(config: OuterConfig) -> ShardPlacement:
    """Return the best place of each shard.

    Raises:
        ConfigError: the file says nothing of places, or they have too little memory together.
    """
    places = config.places
    if places is None:
        raise ConfigError(f"{config.source}: has no placement section; {_REMEDY}")
    count, settings = len(config.shards), config.settings
    held = len(places.throughput) if settings.compensation else 0
    size, more = divmod(places.model_bytes, count)
    try:
        model = ParameterSpec(name="model", shape=(max(1, places.model_bytes // 4),))
        request = PlacementRequest(
            bandwidth_bytes_per_s=places.bandwidth_bytes_per_s,
            throughput=places.throughput,
            shard_bytes={shard.name: max(1, size + (k < more)) for k, shard in enumerate(config.shards)},
            line_bytes_per_s=places.line_bytes_per_s,
            memory_bytes=places.memory_bytes,
            bytes_held_per_byte=PlacementRequest.bytes_held_per_byte + held,
            bytes_pushed_per_byte=model.sent_as(settings.push_format).size_bytes / model.size_bytes,
        )
        return place_shards(request)
    except ValueError as error:
        raise ConfigError(f"{config.source}: {error}") from None
