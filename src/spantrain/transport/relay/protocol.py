"""What a relay and those that dial out to it say to each other; everything is read within bounds and time.

Who dials says MAGIC, one byte, and 32 bytes:

- `T` (a tunnel) and a nonce. The relay answers with one of its own; each then proves, by HMAC-SHA256 over both, that
  it holds the token, which itself is never sent. Behind that come frames: two bytes of length, a msgpack array.
- `B` (a connection back) and the number of one that waits, which is good once. What follows are that one's bytes.
"""

import asyncio
import hmac
import re
import socket
import time
from dataclasses import field

from spantrain.core.records import Record
from spantrain.errors import UsageError
from spantrain.transport.connection.bounds import Refusal, array, packed, printable, text, unpack, whole_number
from spantrain.transport.control.address import Address

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
CHUNK_BYTES = 2**16
"""What is copied at once, and what a stream holds before it reads no more."""
WORD_BYTES = 32
"""Of nonces, proofs, and the numbers of connections that wait."""
HANDSHAKE_S = 5.0
"""Until the first frame has been answered."""
DIAL_BACK_S = 10.0
_MAGIC = b"STRELAY1"
_MAX_PORTS = 16
_MAX_TEXT = 300
_MAX_FRAME_BYTES = 2048
_KINDS = ("listen", "listening", "refused", "open")
_TOKEN = re.compile(r"[\w-]{32,128}", re.ASCII)
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 2, "TCP_USER_TIMEOUT": 30_000}


def is_token(said: str) -> bool:
    """Whether a text can be a token; a short one could be guessed from what is seen on the way."""
    return _TOKEN.fullmatch(said) is not None


class RelayAccess(Record):
    """Where a relay is, and the token that it takes."""

    address: Address
    token: str = field(repr=False)

    def __post_init__(self) -> None:
        if self.address.path or not self.address.port:
            raise UsageError(f"--relay {self.address}: give HOST:PORT, where `spantrain relay` listens")
        if not is_token(self.token):
            raise UsageError("SPANTRAIN_RELAY_TOKEN is cut or mistyped: copy it again from the relay's --token-file")


def proof(token: str, who: bytes, nonces: bytes) -> bytes:
    """Return what shows that one side of a tunnel with these two nonces holds the token."""
    return hmac.digest(token.encode(), _MAGIC + who + nonces, "sha256")


def greeting(kind: bytes, word: bytes) -> bytes:
    """Return what who dials says first."""
    return _MAGIC + kind + word


async def heard_greeting(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return its kind and its word.

    Raises:
        Refusal: it is none.
        EOFError: the stream has ended.
    """
    said = await reader.readexactly(len(_MAGIC) + 1 + WORD_BYTES)
    if not said.startswith((_MAGIC + b"T", _MAGIC + b"B")):
        raise Refusal("no greeting", "it does not speak as SpanTrain does")
    return said[-WORD_BYTES - 1 : -WORD_BYTES], said[-WORD_BYTES:]


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Have TCP notice within half a minute that the other end, or the way to it, is gone."""
    line: socket.socket = writer.get_extra_info("socket")
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class RelayFrame(Record):
    """What follows the handshake of a tunnel."""

    kind: str
    said: str
    """`listen`: who asks, the same whenever it dials again. `refused`: why. `open`: what waits, in hex."""
    ports: tuple[int, ...] = ()
    """`listen`: wanted ones, 0 for any. `listening`: those that are given. `open`: the one that was called."""

    def send(self, writer: asyncio.StreamWriter) -> None:
        """Hand it to a stream."""
        data = self.encode()
        writer.write(len(data).to_bytes(2, "big") + data)

    @classmethod
    async def receive(cls, reader: asyncio.StreamReader) -> "RelayFrame":
        """Return the next one.

        Raises:
            Refusal: what comes is none.
            EOFError: the stream has ended.
        """
        size = int.from_bytes(await reader.readexactly(2), "big")
        return cls.decode(await reader.readexactly(whole_number(size, 1, _MAX_FRAME_BYTES)))

    def encode(self) -> bytes:
        """Return its bytes."""
        return packed([self.kind, self.said[:_MAX_TEXT], list(self.ports)])

    @classmethod
    def decode(cls, data: bytes) -> "RelayFrame":
        """Return what some bytes are.

        Raises:
            Refusal: they are none.
        """
        kind, said, ports = unpack(data, 3, max_text=_MAX_FRAME_BYTES, max_entries=_MAX_PORTS)
        if kind not in _KINDS:
            raise Refusal("malformed", "no frame of a relay is called so")
        numbers = tuple(whole_number(port, 0, 65536) for port in array(ports, 1, _MAX_PORTS))
        return cls(kind=kind, said=printable(text(said, _MAX_FRAME_BYTES)), ports=numbers)


_BURST_S = 0.1
"""How long nothing may have come for it to be made up at once."""
_LAST_WORDS_S = 10.0
"""How long one direction may go on after the other has ended."""


class Meter:
    """Counts bytes, and holds back those that are more than a rate; of one event loop."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes = 0
        self._rate, self._free_s = bytes_per_s, 0.0

    async def pass_on(self, size: int) -> None:
        """Return when so many bytes may go on; whoever asks first goes first."""
        self.bytes += size
        if self._rate is None:
            return
        now_s = time.monotonic()
        self._free_s = max(self._free_s, now_s - _BURST_S) + size / self._rate
        if self._free_s > now_s:
            await asyncio.sleep(self._free_s - now_s)


async def splice(one: Stream, other: Stream, meter: Meter) -> None:
    """Copy both ways until both have ended, or one breaks; then both are closed."""
    ways = {asyncio.create_task(_copy(one[0], other[1], meter)), asyncio.create_task(_copy(other[0], one[1], meter))}
    try:
        ended, left = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if left and not any(task.exception() for task in ended):
            await asyncio.wait(left, timeout=_LAST_WORDS_S)
    finally:
        for task in ways:
            task.cancel()
        results = await asyncio.gather(*ways, return_exceptions=True)
        for _, writer in (one, other):
            writer.close()
            # What was not taken is not kept for ever.
            asyncio.get_running_loop().call_later(0.0 if any(results) else _LAST_WORDS_S, writer.transport.abort)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, meter: Meter) -> None:
    while data := await reader.read(CHUNK_BYTES):
        await meter.pass_on(len(data))
        writer.write(data)
        await writer.drain()
    writer.write_eof()
