"""Layers that come: pieces are put in their places beside the network, and whole layers handed over.

Di-PS, 3.1: a producer takes bytes from the network while consumers put them where they belong, one thread for each
layer in flight, into memory that is used again. Kept: that. Decided here: the network waits for the copying only when
a layer's window is full.

Memory of layers: buffers that are used again, and where each parameter lies in one.

Di-PS, 3.1 ("Operation Overlapping") keeps parameters in memory pools. Kept: that. Decided here: a buffer goes back by
itself when the last tensor in it is gone, whoever held it; so nothing has to be given back by hand, and nothing is used
twice at once.
"""

import math
import threading
import time
import weakref
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spantrain.core.outer.layers import ParameterSpec
from spantrain.transport.connection.threads import Died, ReliedOnThread
from spantrain.transport.layers.interface import LayerKey

Bytes = NDArray[np.uint8]

_ALIGNMENT = 64
_GRAIN_BYTES = 65536
"""Buffers have sizes of whole grains: so one fits layers that differ little."""
_EXAMPLE_BYTES = 2**25 - 2**16
"""A little under the largest that the C library learns from."""


def keep_freed_memory() -> None:
    """Have the C library keep memory that frames leave, for the frames that come next.

    glibc gives large pieces back to the kernel, which clears new pages for the next: that takes longer than to copy
    them. But it learns from what is freed: after one of this size it keeps up to 64 MiB at the end of each thread's
    memory (mallopt(3), M_MMAP_THRESHOLD). Nothing is written to the example, so it takes no page. Elsewhere it has no
    effect.
    """
    np.empty(_EXAMPLE_BYTES, dtype=np.uint8)


class BufferPool:
    """Lends buffers of bytes; any thread may take one, and let go of one.

    >>> pool = BufferPool()
    >>> buffer = pool.take(100)
    >>> place = buffer.ctypes.data
    >>> del buffer
    >>> pool.take(90).ctypes.data == place
    True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: defaultdict[int, list[Bytes]] = defaultdict(list)
        self._back: deque[Bytes] = deque()

    def take(self, size_bytes: int) -> Bytes:
        """Return a buffer with whatever it held before; it comes back when nothing refers to it any more."""
        grains_bytes = -(-max(1, size_bytes) // _GRAIN_BYTES) * _GRAIN_BYTES
        with self._lock:
            while self._back:
                back = self._back.popleft()
                self._idle[len(back)].append(back)
            idle = self._idle[grains_bytes]
            whole = idle.pop() if idle else _aligned(grains_bytes)
        lent = whole[:size_bytes]
        # The end of a buffer may come at any point of any thread, also where the lock is held: no lock is taken there.
        weakref.finalize(lent, self._back.append, whole).atexit = False
        return lent


def _aligned(size_bytes: int) -> Bytes:
    """Return new memory that begins as parameters do: what crosses lines of the cache takes longer to work on."""
    room = np.empty(size_bytes + _ALIGNMENT, dtype=np.uint8)
    begin = -room.ctypes.data % _ALIGNMENT
    return room[begin : begin + size_bytes]


class LayerBytes:
    """Where the parameters of a layer lie: in a stream without gaps, and in a buffer where each begins aligned.

    >>> layer = LayerBytes([ParameterSpec(name="a", shape=(3,)), ParameterSpec(name="b", shape=(2, 2))])
    >>> layer.stream_bytes, layer.buffer_bytes, list(layer.places(8, 12))
    (28, 80, [(8, 12), (64, 72)])
    """

    def __init__(self, parameters: Sequence[ParameterSpec]) -> None:
        self._parameters = tuple(parameters)
        sizes = [one.size_bytes for one in parameters]
        room = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        self._starts = [0, *accumulate(sizes)]
        self._places = [0, *accumulate(room)]
        self.stream_bytes = self._starts[-1]
        self.buffer_bytes = self._places[-2] + sizes[-1]

    def places(self, offset_bytes: int, length_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield where in the buffer a piece of the stream belongs: begin and end, in the order of the stream."""
        end = offset_bytes + length_bytes
        k = bisect_right(self._starts, offset_bytes) - 1
        while offset_bytes < end:
            upto = min(end, self._starts[k + 1])
            shift = self._places[k] - self._starts[k]
            yield offset_bytes + shift, upto + shift
            offset_bytes, k = upto, k + 1

    def put(self, buffer: Bytes, offset_bytes: int, piece: Bytes) -> None:
        """Copy a piece of the stream to its place."""
        taken = 0
        for begin, end in self.places(offset_bytes, len(piece)):
            np.copyto(buffer[begin:end], piece[taken : taken + end - begin])
            taken += end - begin

    def tensors(self, buffer: Bytes) -> dict[str, Tensor]:
        """Return the parameters in a buffer, which they keep alive."""
        return {
            one.name: torch.frombuffer(
                buffer, dtype=getattr(torch, one.dtype), count=math.prod(one.shape), offset=place
            ).view(one.shape)
            for one, place in zip(self._parameters, self._places, strict=False)
        }


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
        """At its place; counted by the copier, as the next."""
        self.copied_pieces = 0
        self.told_bytes = 0
        """Copied when that was last told."""
        self.told_s = time.monotonic()
        self.copier: int | None = None
        """Which of the threads has it; each piece goes to the same, so they stay in order."""
        self._buffer = pool.take(self.layout.buffer_bytes)

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
