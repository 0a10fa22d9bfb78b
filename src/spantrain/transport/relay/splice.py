"""Copies what comes by one stream into another and back, no faster than it is taken, or than a rate."""

import asyncio
import time

from spantrain.transport.relay.protocol import CHUNK_BYTES, Stream

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
    ways = {
        asyncio.create_task(_copy(one[0], other[1], meter)),
        asyncio.create_task(_copy(other[0], one[1], meter)),
    }
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
