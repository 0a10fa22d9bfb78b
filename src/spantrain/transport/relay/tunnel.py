"""The side that can only dial out: keeps a tunnel to a relay, and dials back for each connection that comes there."""

import asyncio
import concurrent.futures
import contextlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence

from spantrain.core.records import Record
from spantrain.errors import PeerLostError, ProtocolError, UsageError
from spantrain.transport.connection.threads import ReliedOnThread
from spantrain.transport.control.address import Address
from spantrain.transport.relay import protocol
from spantrain.transport.relay.protocol import WORD_BYTES, Meter, RelayAccess, RelayFrame, Stream, proof, splice

_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0
_PATIENCE_S = 10.0
"""How long a relay that is not there yet is waited for."""
_LAST_WORDS_S = 0.5
_MAX_BACK = 1024
"""Connections at once."""
_WORD = re.compile(f"[0-9a-f]{{{2 * WORD_BYTES}}}")
_log = logging.getLogger(__name__)


class TunnelEnd(Record):
    """Something here that others are to reach."""

    at: Address
    """Where it listens."""
    port: int = 0
    """Of the relay; 0: any."""


@contextlib.contextmanager
def tunnel(access: RelayAccess, ends: Sequence[TunnelEnd]) -> Iterator[tuple[Address, ...]]:
    """Have these reached through a relay while this lasts; give where.

    A relay that goes away is dialled again and again, and asked for the same ports.

    Raises:
        UsageError: the relay does not know the token or does not give the ports; or it is none.
        PeerLostError: no relay answers.
    """
    kept = _KeptTunnel(access, ends)
    thread = ReliedOnThread(kept.run, name="tunnel", died=kept.fail)
    thread.start()
    try:
        yield kept.places.result()
    finally:
        kept.end()
        thread.join()


class _KeptTunnel:
    def __init__(self, access: RelayAccess, ends: Sequence[TunnelEnd]) -> None:
        self._access, self._ends = access, tuple(ends)
        self._ports = tuple(end.port for end in ends)
        self._session = secrets.token_hex(16)
        self._pause_s = _PAUSE_S
        self._back: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._needless = asyncio.Event()
        self.places = concurrent.futures.Future[tuple[Address, ...]]()

    def fail(self, why: str) -> None:
        """Tell who waits for it that its thread has ended."""
        if not self.places.done():
            self.places.set_exception(PeerLostError(why))

    def end(self) -> None:
        """Have its thread end; it may have ended by itself."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._needless.set)

    def run(self) -> None:
        """Be there until it is needed no more; in its thread."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_needless())

    async def _until_needless(self) -> None:
        kept = asyncio.ensure_future(self._keep())
        await asyncio.wait((kept, asyncio.ensure_future(self._needless.wait())), return_when=asyncio.FIRST_COMPLETED)
        if kept.done():
            kept.result()
        elif self._back:  # what is closed here says so there
            await asyncio.wait(self._back, timeout=_LAST_WORDS_S)

    async def _keep(self) -> None:
        since_s = time.monotonic()
        while True:
            try:
                await self._serve()
            except (OSError, EOFError, TimeoutError, ProtocolError, UsageError) as error:
                if not self.places.done():
                    if why := self._hopeless(error, time.monotonic() - since_s):
                        self.places.set_exception(why)
                        return
                elif self._pause_s == _PAUSE_S:
                    _log.warning("the relay at %s: %s; it is dialled again", self._access.address, _told(error))
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _hopeless(self, error: Exception, waited_s: float) -> Exception | None:
        """Return what to raise, of a relay that was never there; None: wait for it a little longer."""
        where = self._access.address
        if isinstance(error, UsageError):
            return error
        if waited_s < _PATIENCE_S and not isinstance(error, ProtocolError):
            return None
        if isinstance(error, (EOFError, ConnectionResetError, ProtocolError)):
            return UsageError(
                f"what answers at {where} is no relay: give --relay the address that `spantrain relay` says"
            )
        return PeerLostError(
            f"no relay answers at {where}: {_told(error)}; start `spantrain relay` there, or let this machine through"
        )

    async def _serve(self) -> None:
        """Be there until the relay is not, which raises."""
        async with asyncio.timeout(protocol.HANDSHAKE_S):
            reader, writer = await _dial(self._access.address)
        try:
            async with asyncio.timeout(protocol.HANDSHAKE_S):
                await self._prove(reader, writer)
                RelayFrame(kind="listen", said=self._session, ports=self._ports).send(writer)
                self._take(await RelayFrame.receive(reader))
            while True:
                asked = await RelayFrame.receive(reader)
                if asked.kind != "open" or asked.ports[0] not in self._ports or not _WORD.fullmatch(asked.said):
                    raise ProtocolError("it asks for what this side has not")
                if len(self._back) < _MAX_BACK:
                    end = self._ends[self._ports.index(asked.ports[0])]
                    task = asyncio.ensure_future(self._meet(end, bytes.fromhex(asked.said)))
                    self._back.add(task)
                    task.add_done_callback(self._back.discard)
        finally:
            writer.close()

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Prove the token, and have the relay prove it, too."""
        token, ours = self._access.token, secrets.token_bytes(WORD_BYTES)
        writer.write(protocol.greeting(b"T", ours))
        nonces = await reader.readexactly(WORD_BYTES) + ours
        writer.write(proof(token, b"dials", nonces))
        if not hmac.compare_digest(await reader.readexactly(WORD_BYTES), proof(token, b"relays", nonces)):
            raise UsageError(
                f"the relay at {self._access.address} does not know the token in SPANTRAIN_RELAY_TOKEN: take one "
                "from the relay's --token-file"
            )

    def _take(self, answer: RelayFrame) -> None:
        where = self._access.address
        if answer.kind != "listening" or len(answer.ports) != len(self._ends):
            raise UsageError(f"the relay at {where} gives no ports: {answer.said}")
        self._ports, self._pause_s = answer.ports, _PAUSE_S
        if self.places.done():
            _log.warning("the relay at %s is back", where)
        else:
            self.places.set_result(tuple(where.at_port(port) for port in answer.ports))

    async def _meet(self, end: TunnelEnd, word: bytes) -> None:
        """Join what waits at the relay and what listens here."""
        ends: list[Stream] = []
        try:
            async with asyncio.timeout(protocol.DIAL_BACK_S):
                for where in (end.at, self._access.address):
                    ends.append(await _dial(where))
            ends[1][1].write(protocol.greeting(b"B", word))
            await splice(ends[0], ends[1], Meter())
        except (OSError, TimeoutError) as error:
            _log.info("a connection through the relay at %s was not made: %s", self._access.address, _told(error))
        finally:
            for _, writer in ends:
                writer.close()


async def _dial(where: Address) -> Stream:
    found = await asyncio.open_connection(where.host, where.port, limit=protocol.CHUNK_BYTES)
    protocol.keep_alive(found[1])
    return found


def _told(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number and number > 0:  # names that are unknown have others
        return os.strerror(number)
    return "it has hung up" if isinstance(error, EOFError) else str(error) or "no answer in time"
