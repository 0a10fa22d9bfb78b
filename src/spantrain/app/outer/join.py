"""How the outer optimizer's master is found and joined, and by which runs; where its shards belong."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from spantrain.config.files.text_files import read_text
from spantrain.core.names import is_member_name
from spantrain.core.outer.layers import ParameterSpec
from spantrain.core.outer.stages import OuterCluster
from spantrain.errors import ConfigError, UsageError
from spantrain.outer.master.files import token_file
from spantrain.outer.outer_file import OuterConfig, load_outer
from spantrain.outer.policy.placement import PlacementRequest, ShardPlacement, place_shards
from spantrain.transport.control.address import Address
from spantrain.transport.control.credentials import JoinToken

if TYPE_CHECKING:
    from spantrain.app.session import Session

_SUFFIXES = (".yaml", ".yml")
_START = "start the master first, with `spantrain outer master` or `spantrain outer up`"
_ELSEWHERE = f"{_START}; on another machine give --token-file FILE, or the token in SPANTRAIN_OUTER_TOKEN"


@contextmanager
def naming(config: OuterConfig, field: str) -> Iterator[None]:
    """Say of what cannot be used which field of which file names it.

    Raises:
        ConfigError: a folder, something in it, or an address cannot be used.
    """
    try:
        yield
    except UsageError as error:
        raise ConfigError(f"{config.source}: {field}: {error}") from None


def address_file(config: OuterConfig) -> Path:
    """Return where the master writes how others reach it."""
    return config.master.folder / "address"


def master_address(config: OuterConfig) -> str:
    """Return how others reach the master.

    Raises:
        ConfigError: it may take any port, and has not said which one it took.
    """
    if config.master.address.port:
        return str(config.master.address)
    return read_text(address_file(config), remedy=_START).strip()


def reach(where: str, *, token: str | None, file: Path | None) -> tuple[str, str]:
    """Return address and token of a master that is named by its file or its address.

    Raises:
        ConfigError: it is neither, or there is no token.
        UsageError: the token is cut or mistyped.
    """
    if Path(where).suffix in _SUFFIXES:
        config = load_outer(Path(where))
        return master_address(config), master_token(config, text=token, file=file)
    try:
        address = str(Address.parse(where))
    except UsageError as error:
        raise ConfigError(f"{error}; or the file, ending in {' or '.join(_SUFFIXES)}") from None
    return address, master_token(None, text=token, file=file)


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
        found = read_text(token_file(config.master.folder), remedy=_ELSEWHERE)
    else:
        raise ConfigError("give the master's token: --token-file FILE, or SPANTRAIN_OUTER_TOKEN")
    JoinToken.parse(found)
    return found.strip()


# Who joins.


def check_cluster(config: OuterConfig, name: str) -> None:
    """Make sure that a cluster may be called this.

    Raises:
        ConfigError: the master would let none of this name in.
    """
    if "/" in name or not is_member_name(name) or name in [shard.name for shard in config.shards]:
        wanted = "up to 64 letters, digits or . _ : @ -, a letter or digit first, and no shard's name"
        raise ConfigError(f"--cluster: {name!r} is no cluster's name; take {wanted}")


def become(command: Sequence[str], cluster: OuterCluster) -> None:
    """Replace this process by a cluster's training command: signals, output and exit code are then the command's own.

    Raises:
        ConfigError: there is no such command, or it cannot be run.
    """
    try:
        # gRPC must know before it is loaded: its handlers of fork() would end workers of a DataLoader, which use none.
        environment = {**os.environ, **cluster.variables, "GRPC_ENABLE_FORK_SUPPORT": "false"}
        os.execvpe(command[0], list(command), environment)
    except FileNotFoundError:
        raise ConfigError(f"{command[0]}: there is no such command; give one that runs here, after `--`") from None
    except OSError as error:
        raise ConfigError(f"{command[0]}: cannot be run: {error.strerror}") from None


def outer_cluster(variables: Mapping[str, str] = os.environ) -> OuterCluster | None:
    """Return as whom this command was started by `spantrain outer run`; None if it was not.

    Raises:
        UsageError: its variables are not whole.
    """
    return OuterCluster.read(variables) if variables.get("SPANTRAIN_OUTER_MASTER") else None


def check_outer(session: "Session") -> None:
    """Make sure that a run can be a cluster.

    Raises:
        ConfigError: its devices reach no master.
    """
    if session.testbed:
        raise ConfigError(
            "this run cannot be a cluster of an outer optimizer: its devices are in an emulated network, which leads "
            "to no master (--no-network)"
        )


# Where shards belong.

_REMEDY = "add it as docs/outer.md shows: model, clusters, and places with their bandwidths"


def place_outer(config: OuterConfig) -> ShardPlacement:
    """Return the best place of each shard.

    Raises:
        ConfigError: the file says nothing of places, or they have too little memory together.
    """
    places, model_bytes = config.places, config.model_bytes
    if places is None:
        raise ConfigError(f"{config.source}: has no placement section; {_REMEDY}")
    settings = config.for_master.settings
    held = len(places.throughput) if settings.compensation else 0
    size, more = divmod(model_bytes, len(config.shards))
    try:
        model = ParameterSpec(name="model", shape=(max(1, model_bytes // 4),))  # as of float32
        request = PlacementRequest(
            places=places,
            shard_bytes={shard.name: max(1, size + (k < more)) for k, shard in enumerate(config.shards)},
            bytes_held_per_byte=PlacementRequest.bytes_held_per_byte + held,
            bytes_pushed_per_byte=model.sent_as(settings.push_format).size_bytes / model.size_bytes,
        )
        return place_shards(request)
    except ValueError as error:
        raise ConfigError(f"{config.source}: {error}") from None
