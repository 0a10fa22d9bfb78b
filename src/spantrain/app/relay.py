"""A relay in this process, and how those that dial out to one know it."""

import asyncio
import os
import resource
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from spantrain.config.files.text_files import make_private_folder, read_private, write_atomically
from spantrain.errors import ConfigError, UsageError
from spantrain.runtime.launch.environment import Environment
from spantrain.transport.control.address import Address
from spantrain.transport.relay.protocol import RelayAccess, is_token
from spantrain.transport.relay.server import RelayLimits, RelayNews, RelayServer
from spantrain.transport.relay.tunnel import TunnelEnd, tunnel

if TYPE_CHECKING:
    from spantrain.outer.outer_file import MemberPlace, OuterConfig

_MAX_TOKENS = 64


def relay_access(text: str | None, *, encrypted: bool) -> RelayAccess | None:
    """Return where a relay is, as `--relay` says, with the token of SPANTRAIN_RELAY_TOKEN; None: there is none.

    Raises:
        UsageError: it is no address, there is no token, or what goes through would not be encrypted.
    """
    if text is None:
        return None
    if not encrypted:
        raise ConfigError("--relay: takes only what is encrypted; leave out --insecure")
    address = Address.parse(text, "--relay")
    token = Environment.read(os.environ).relay_token
    if token is None:
        raise ConfigError("--relay: give the relay's token in SPANTRAIN_RELAY_TOKEN; it is in the relay's --token-file")
    return RelayAccess(address=address, token=token)


def outer_relay(text: str | None, config: "OuterConfig", *places: "MemberPlace") -> RelayAccess | None:
    """Return by which relay a master or shards of an outer.yaml are reached, as `--relay` says; None: by none.

    Raises:
        UsageError: as `relay_access`; or the file turns encryption off, or lets one of them listen at any port.
    """
    if text is None:
        return None
    if not config.for_master.encrypted:
        raise ConfigError(f"{config.source}: encryption: off, and --relay takes only what is encrypted; leave it out")
    for place in places:
        if not place.address.port:
            told = f"{config.source}: {f'shards.{place.name}' if place.name else 'master'}.address: {place.address}"
            raise ConfigError(f"{told}: with --relay it needs a port, one of the relay's")
    return relay_access(text, encrypted=True)


def reached_through(relay: RelayAccess, listen: Address, ports: int) -> AbstractContextManager[tuple[Address, ...]]:
    """Have what listens here, at a port and the ones behind it, reached at the same ports of a relay.

    Raises:
        UsageError: any port will do here, or the relay does not give these, or does not know the token.
        PeerLostError: no relay answers.
    """
    if not listen.port:
        raise UsageError("--relay: --listen needs a port, one of the relay's")
    here = [listen.at_port(listen.port + number).from_here() for number in range(ports)]
    return tunnel(relay, [TunnelEnd(at=one, port=one.port) for one in here])


def port_range(text: str) -> range:
    """Return the ports that `FIRST-LAST` names.

    >>> port_range("7000-7099")
    range(7000, 7100)

    Raises:
        ConfigError: it names none.
    """
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536):
        raise ConfigError(f"--ports {text}: give FIRST-LAST, e.g. 7000-7099")
    return range(int(first), int(last) + 1)


def serve_relay(
    listen: str, ports: str, token_file: Path, limits: RelayLimits, *,
    ready: Callable[[Address], None], told: Callable[[RelayNews], None],
) -> None:  # fmt: skip
    """Serve until interrupted; `ready` hears where.

    Raises:
        UsageError: an address, the ports or the file of tokens cannot be used.
    """
    at, given, tokens = Address.parse(listen), port_range(ports), relay_tokens(token_file)
    if at.path:
        raise ConfigError(f"--listen {listen}: give HOST:PORT")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection that goes through has two
    asyncio.run(RelayServer(listen=at, ports=given, tokens=tokens, limits=limits, told=told).serve(ready))


def relay_tokens(path: Path) -> dict[str, str]:
    """Return the tokens of a file by name; where there is no file it is made, with one.

    Raises:
        UsageError: others may read it, or a line is not NAME TOKEN.
    """
    said = read_private(path)
    if said is None:
        make_private_folder(path.absolute().parent)
        said = f"default {secrets.token_urlsafe(24)}\n"
        write_atomically(path, said, private=True)
    tokens: dict[str, str] = {}
    for number, line in enumerate(said.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not is_token(words[1]) or words[0] in tokens or words[1] in tokens.values():
            raise ConfigError(
                f"{path}, line {number}: wanted NAME TOKEN, each once, a token of 32 to 128 letters, digits, - and _; "
                "`python3 -c 'import secrets; print(secrets.token_urlsafe(24))'` makes one"
            )
        tokens[words[0]] = words[1]
    if not 0 < len(tokens) <= _MAX_TOKENS:
        raise ConfigError(f"{path}: has {len(tokens)} tokens, wanted 1 to {_MAX_TOKENS}, each a line NAME TOKEN")
    return tokens
