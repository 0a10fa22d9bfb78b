"""Layers that come: pieces are put in their places beside the network, and whole layers handed over.

Di-PS, 3.1: a producer takes bytes from the network while consumers put them where they belong, one thread for each
layer in flight, into memory that is used again. Kept: that. Decided here: the network waits for the copying only when
a layer's window is full.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import SimpleQueue

import numpy as np
from torch import Tensor

from spantrain.core.outer.layers import ParameterSpec
from spantrain.transport.connection.threads import Died, ReliedOnThread
from spantrain.transport.layers.interface import LayerKey
from spantrain.transport.layers.pool import BufferPool, LayerBytes

_TELL_S = 1.0


class ComingLayer:
    """A layer that was expected and opened; its bytes come in order."""

    def __init__(
        self, peer: str, key: LayerKey, number: int, parameters: tuple[ParameterSpec, ...], pool: BufferPool
    ) -> None:
        self.peer, self.key, self.number = peer, key, number
        self.layout = LayerBytes(parameters)
        self.came_bytes = 0
        """Handed to a copier; of the sockets' thread."""
        self.granted_bytes = 0
        """How far the sender was told that it may go; of the sockets' thread."""
        self.came_pieces = 0
        self.copied_bytes = 0
        """Of the copier, as the next."""
        self.copied_pieces = 0
        self.told_bytes = 0
        """Copied when that was last told."""
        self.told_s = time.monotonic()
        self.copier: int | None = None
        """Which of the threads has it; each piece goes to the same, so they stay in order."""
        self._buffer = pool.take(self.layout.buffer_bytes)

    @property
    def waiting_pieces(self) -> int:
        """How many wait for a copier."""
        return self.came_pieces - self.copied_pieces

    @property
    def whole(self) -> bool:
        """Whether all of it is in its place."""
        return self.copied_bytes == self.layout.stream_bytes

    def worth_telling(self, every_bytes: int, now_s: float) -> bool:
        """Return whether the sender should hear how far this is: it needs that to go on, or to know that it is taken.

        Each telling wakes both sides; a layer that may come whole is told of no more often than by the second.
        """
        may_all_come = self.granted_bytes >= self.layout.stream_bytes
        enough = self.copied_bytes - self.told_bytes >= every_bytes
        return enough and (not may_all_come or now_s - self.told_s >= _TELL_S)

    def put(self, offset_bytes: int, piece: memoryview) -> None:
        """Copy a piece to its place."""
        self.layout.put(self._buffer, offset_bytes, np.frombuffer(piece, dtype=np.uint8))
        self.copied_pieces += 1
        self.copied_bytes += len(piece)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what came, by name."""
        assert self.whole
        return self.layout.tensors(self._buffer)


class Copiers:
    """Threads that copy; with none, whoever brings a piece copies it."""

    def __init__(
        self, count: int, *, name: str, every_bytes: int, progressed: Callable[[ComingLayer], None],
        hand_over: Callable[[ComingLayer], None], died: Died,
    ) -> None:  # fmt: skip
        """Begin; `progressed` is called with a layer about so often and at its end, `hand_over` with whole ones.

        `died` is told why a thread has ended, if a fault ends it.
        """
        self._every_bytes = every_bytes
        self._progressed, self._hand_over = progressed, hand_over
        self._lines: list[SimpleQueue[tuple[ComingLayer, int, memoryview] | None]] = [
            SimpleQueue() for _ in range(count)
        ]
        self._threads = [
            ReliedOnThread(partial(self._run, line), name=f"copier {k} of {name}", died=died)
            for k, line in enumerate(self._lines)
        ]
        self._turn = 0
        for thread in self._threads:
            thread.start()

    def put(self, layer: ComingLayer, piece: memoryview) -> None:
        """Have the next piece of a layer copied; called by the sockets' thread only."""
        offset_bytes = layer.came_bytes
        layer.came_bytes += len(piece)
        layer.came_pieces += 1
        if not self._lines:
            self._copy(layer, offset_bytes, piece)
            return
        if layer.copier is None:
            layer.copier = self._turn
            self._turn = (self._turn + 1) % len(self._lines)
        self._lines[layer.copier].put((layer, offset_bytes, piece))

    def _run(self, line: "SimpleQueue[tuple[ComingLayer, int, memoryview] | None]") -> None:
        while (order := line.get()) is not None:
            self._copy(*order)
            del order  # or the last layer's buffer would not come back before the next piece

    def _copy(self, layer: ComingLayer, offset_bytes: int, piece: memoryview) -> None:
        layer.put(offset_bytes, piece)
        if layer.whole:
            self._progressed(layer)
            self._hand_over(layer)
            return
        now_s = time.monotonic()
        if layer.worth_telling(self._every_bytes, now_s):
            layer.told_bytes, layer.told_s = layer.copied_bytes, now_s
            self._progressed(layer)

    def close(self) -> None:
        """End the threads, after what they have; called by any other thread."""
        for line in self._lines:
            line.put(None)
        for thread in self._threads:
            thread.join()
