"""A relay: listens in the place of those that can only dial out, and copies what comes to them and back.

Whoever calls a port that a tunnel was given, and says something, is announced through the tunnel under a number that
nobody can guess; the connection that comes back with it becomes the other half. Nothing that is copied is looked into.
"""

import asyncio
import contextlib
import hmac
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from spantrain.core.quantities import format_bytes
from spantrain.core.records import Record
from spantrain.errors import ConfigError
from spantrain.transport.connection.bounds import ConnectionPace, Refusal
from spantrain.transport.control.address import Address
from spantrain.transport.relay import protocol
from spantrain.transport.relay.protocol import WORD_BYTES, Meter, RelayFrame, Stream, proof, splice

_MAX_SILENT = 256
"""Connections that have not said what they want; one more, and the oldest goes. As many that call a port."""
_SILENT_S = 10.0
"""How long a caller may say nothing."""
_BACKLOG = 512
_BURST, _CALLS_PER_S = 256, 16.0
"""Connections that one port takes from one address at once, and then in a second: each costs the worker behind it."""
_PACED = 4096
"""Addresses that are told from each other."""


class RelayLimits(Record):
    """The most for each token."""

    ports: int = 64
    connections: int = 512
    waiting: int = 64
    """Connections that nobody has come back for yet."""
    bytes_per_s: float | None = None
    """Both ways together."""


class RelayNews(Record):
    """A tunnel has `joined` or `left`."""

    event: str
    token: str
    """Its name."""
    origin: str
    ports: tuple[int, ...]
    connections: int
    """Of the token, now."""
    bytes: int
    """Of the token, since the relay began."""
    refused: dict[str, int]
    """Of all, by reason."""

    def __str__(self) -> str:
        refused = ", ".join(f"{count} {reason}" for reason, count in sorted(self.refused.items()))
        return (
            f"{self.token}: {self.origin} has {self.event}, port {', '.join(map(str, self.ports))}; "
            f"{self.connections} connections, {format_bytes(self.bytes)} so far{refused and f'; refused: {refused}'}"
        )


class _Account:
    """What one token uses."""

    def __init__(self, name: str, token: str, limits: RelayLimits) -> None:
        self.name, self.token, self.limits = name, token, limits
        self.ports = self.connections = self.waiting = 0
        self.meter = Meter(limits.bytes_per_s)


@dataclass(kw_only=True)
class _HeldTunnel:
    account: _Account
    session: str
    writer: asyncio.StreamWriter
    listeners: dict[int, asyncio.Server] = field(default_factory=dict)
    awaited: dict[bytes, asyncio.Future[Stream]] = field(default_factory=dict)
    """Connections back, by their numbers."""

    def let_go(self) -> None:
        """Listen and wait no more; what goes through already goes on."""
        for waits in self.awaited.values():
            waits.cancel()
        for listener in self.listeners.values():
            listener.close()
        self.account.ports -= len(self.listeners)
        self.listeners.clear()


class RelayServer:
    """For one event loop."""

    def __init__(
        self, *, listen: Address, ports: range, tokens: Mapping[str, str], limits: RelayLimits,
        told: Callable[[RelayNews], None],
    ) -> None:  # fmt: skip
        """Take which ports may be given, and the tokens by name."""
        self._listen, self._ports, self._told = listen, ports, told
        self._accounts = [_Account(name, token, limits) for name, token in tokens.items()]
        self._tunnels: list[_HeldTunnel] = []
        self._greeting: dict[asyncio.StreamWriter, None] = {}
        self._calling: dict[asyncio.StreamWriter, None] = {}
        self._paces: dict[tuple[int, str], ConnectionPace] = {}
        """By port and address of the caller."""
        self.refused: Counter[str] = Counter()
        """By reason."""

    async def serve(self, ready: Callable[[Address], None]) -> None:
        """Listen, say where, and go on until cancelled.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        try:
            listener = await self._listener(self._listen.port, self._greet)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"--listen {self._listen}: {why}; give an address of this machine, a free port") from None
        async with listener:
            ready(self._listen.at_port(listener.sockets[0].getsockname()[1]))
            await listener.serve_forever()

    async def _listener(self, port: int, take: Callable[[Stream], Awaitable[None]]) -> asyncio.Server:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with self._refusing(writer):
                await take((reader, writer))

        host, limit = self._listen.host, protocol.CHUNK_BYTES
        return await asyncio.start_server(accepted, host, port, limit=limit, backlog=_BACKLOG)

    @contextlib.asynccontextmanager
    async def _refusing(self, writer: asyncio.StreamWriter) -> AsyncIterator[None]:
        """Count why one was refused, and close it; one that is served stays with who serves it."""
        try:
            protocol.keep_alive(writer)
            yield
        except (Refusal, TimeoutError, OSError, EOFError, asyncio.CancelledError) as error:
            if isinstance(error, (Refusal, TimeoutError)):
                self.refused[error.reason if isinstance(error, Refusal) else "too slow"] += 1
            writer.close()
            asyncio.get_running_loop().call_later(protocol.HANDSHAKE_S, writer.transport.abort)

    @contextlib.asynccontextmanager
    async def _silent(
        self, writer: asyncio.StreamWriter, held: dict[asyncio.StreamWriter, None]
    ) -> AsyncIterator[None]:
        """Hold one that has said nothing yet: too many of them cost each other, and nobody who speaks."""
        held[writer] = None
        if len(held) > _MAX_SILENT:
            oldest = next(iter(held))
            del held[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(_SILENT_S if held is self._calling else protocol.HANDSHAKE_S):
                yield
        finally:
            held.pop(writer, None)

    async def _greet(self, dialled: Stream) -> None:
        """Hear what one that has dialled the relay wants, and serve a tunnel as long as it is there."""
        reader, writer = dialled
        async with self._silent(writer, self._greeting):
            kind, word = await protocol.heard_greeting(reader)
            if kind == b"B":
                awaited = next((one.awaited.pop(word) for one in self._tunnels if word in one.awaited), None)
                if awaited is None or awaited.done():
                    raise Refusal("nobody waits", "its number was used, is too late or made up")
                awaited.set_result(dialled)
                return
            account = await self._proved(dialled, word)
            asked = await RelayFrame.receive(reader)
        held = _HeldTunnel(account=account, session=asked.said, writer=writer)
        for old in self._tunnels:  # one that dials again takes over what it had
            if (old.account, old.session) == (account, held.session):
                old.let_go()
                old.writer.transport.abort()
        self._tunnels.append(held)
        try:
            await self._open(held, asked.ports)
            await self._keep(held, reader)
        finally:
            self._tunnels.remove(held)
            held.let_go()

    async def _keep(self, held: _HeldTunnel, reader: asyncio.StreamReader) -> None:
        ports = tuple(held.listeners)
        self._tell("joined", held, ports)
        try:
            if await reader.read(1):
                raise Refusal("malformed", "a tunnel says nothing more")
            held.writer.close()
        finally:
            self._tell("left", held, ports)

    async def _proved(self, dialled: Stream, theirs: bytes) -> _Account:
        reader, writer = dialled
        nonces = secrets.token_bytes(WORD_BYTES) + theirs
        writer.write(nonces[:WORD_BYTES])
        said = await reader.readexactly(WORD_BYTES)
        for account in self._accounts:
            if hmac.compare_digest(said, proof(account.token, b"dials", nonces)):
                writer.write(proof(account.token, b"relays", nonces))
                return account
        writer.write(bytes(WORD_BYTES))
        raise Refusal("wrong token", "none of this relay's")

    async def _open(self, held: _HeldTunnel, asked: tuple[int, ...]) -> None:
        """Listen on what was asked for."""
        account = held.account
        try:
            if account.ports + len(asked) > account.limits.ports:
                raise Refusal("too many ports", f"its token has {account.ports} of {account.limits.ports} already")
            for wanted in asked:
                port, listener = await self._given(held, wanted)
                held.listeners[port] = listener
                account.ports += 1
        except Refusal as refusal:
            RelayFrame(kind="refused", said=str(refusal), ports=asked).send(held.writer)
            raise
        RelayFrame(kind="listening", said=held.session, ports=tuple(held.listeners)).send(held.writer)

    async def _given(self, held: _HeldTunnel, wanted: int) -> tuple[int, asyncio.Server]:
        if wanted and wanted not in self._ports:
            given = f"{self._ports[0]} to {self._ports[-1]}"
            raise Refusal("port not given", f"it gives ports {given}, and was asked for {wanted}")
        used = {port for one in self._tunnels for port in one.listeners}
        # Those that are asked for by number are mostly the first.
        for port in (wanted,) if wanted else (port for port in reversed(self._ports) if port not in used):
            with contextlib.suppress(OSError):
                return port, await self._listener(port, partial(self._call, held, port))
        raise Refusal("port in use", f"{wanted or 'all of them'}")

    def _tell(self, event: str, held: _HeldTunnel, ports: tuple[int, ...]) -> None:
        account, peer = held.account, held.writer.get_extra_info("peername")
        self._told(
            RelayNews(
                event=event, token=account.name, origin=peer[0] if peer else "", ports=ports,
                connections=account.connections, bytes=account.meter.bytes, refused=dict(self.refused),
            )
        )  # fmt: skip

    async def _call(self, held: _HeldTunnel, port: int, caller: Stream) -> None:
        """Have one that calls a port, and says something, met by a connection back."""
        account, (reader, writer) = held.account, caller
        async with self._silent(writer, self._calling):
            first = await reader.read(protocol.CHUNK_BYTES)
        if not first:
            raise EOFError
        self._check_pace(port, writer)
        if account.connections >= account.limits.connections or account.waiting >= account.limits.waiting:
            raise Refusal("too many connections", account.name)
        account.connections += 1
        try:
            back = await self._met(held, port)
            await account.meter.pass_on(len(first))
            back[1].write(first)
            await splice(caller, back, account.meter)
        finally:
            account.connections -= 1

    def _check_pace(self, port: int, writer: asyncio.StreamWriter) -> None:
        """Count one that has said something.

        Raises:
            Refusal: too many come from there.
        """
        now_s, peer = asyncio.get_running_loop().time(), writer.get_extra_info("peername")
        if len(self._paces) >= _PACED:
            self._paces = {key: one for key, one in self._paces.items() if not one.is_full(now_s)}
        where = port, (peer[0] if peer and len(self._paces) < _PACED else "others")
        if self._paces.setdefault(where, ConnectionPace(burst=_BURST, per_s=_CALLS_PER_S)).wait_s(now_s) > 0:
            raise Refusal("too many calls", where[1])

    async def _met(self, held: _HeldTunnel, port: int) -> Stream:
        word = secrets.token_bytes(WORD_BYTES)
        waits: asyncio.Future[Stream] = asyncio.get_running_loop().create_future()
        held.awaited[word] = waits
        held.account.waiting += 1
        try:
            RelayFrame(kind="open", said=word.hex(), ports=(port,)).send(held.writer)
            async with asyncio.timeout(protocol.DIAL_BACK_S):
                await held.writer.drain()
                return await waits
        finally:
            held.account.waiting -= 1
            held.awaited.pop(word, None)
