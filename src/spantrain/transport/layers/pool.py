"""Memory of layers: buffers that are used again, and where each parameter lies in one.

Di-PS, 3.1 ("Operation Overlapping") keeps parameters in memory pools. Kept: that. Decided here: a buffer goes back by
itself when the last tensor in it is gone, whoever held it; so nothing has to be given back by hand, and nothing is used
twice at once.
"""

import math
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spantrain.core.outer.layers import ParameterSpec

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
    >>> len(buffer), pool.lent_bytes, pool.idle_bytes
    (100, 65536, 0)
    >>> del buffer
    >>> pool.lent_bytes, pool.idle_bytes
    (0, 65536)
    """

    def __init__(self, *, idle_bytes: int = 2**40) -> None:
        """Begin empty; keep at most `idle_bytes` that nobody uses."""
        self._most_idle_bytes = idle_bytes
        self._lock = threading.Lock()
        self._idle: dict[int, list[Bytes]] = {}
        self._back: deque[Bytes] = deque()
        self._idle_bytes = 0
        self._lent_bytes = 0

    def take(self, size_bytes: int) -> Bytes:
        """Return a buffer with whatever it held before; it comes back when nothing refers to it any more."""
        grains_bytes = -(-max(1, size_bytes) // _GRAIN_BYTES) * _GRAIN_BYTES
        with self._lock:
            self._collect()
            found = self._idle.get(grains_bytes)
            if found:
                whole = found.pop()
                self._idle_bytes -= grains_bytes
            else:
                self._make_room(grains_bytes)
                whole = _aligned(grains_bytes)
            self._lent_bytes += grains_bytes
        lent = whole[:size_bytes]
        # The end of a buffer may come at any point of any thread, also where the lock is held: no lock is taken there.
        weakref.finalize(lent, self._back.append, whole).atexit = False
        return lent

    def _collect(self) -> None:
        while self._back:
            whole = self._back.popleft()
            self._lent_bytes -= len(whole)
            self._idle_bytes += len(whole)
            self._idle.setdefault(len(whole), []).append(whole)
        self._make_room(0)

    def _make_room(self, size_bytes: int) -> None:
        """Free what nobody uses until so much more fits, the largest first."""
        for grains_bytes in sorted(self._idle, reverse=True):
            while self._idle[grains_bytes] and self._idle_bytes + size_bytes > self._most_idle_bytes:
                self._idle[grains_bytes].pop()
                self._idle_bytes -= grains_bytes

    @property
    def lent_bytes(self) -> int:
        """Bytes in use."""
        with self._lock:
            self._collect()
            return self._lent_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for the next."""
        with self._lock:
            self._collect()
            return self._idle_bytes


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
