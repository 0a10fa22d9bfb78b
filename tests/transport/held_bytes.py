"""Print what messages that wait cost in memory, and what they are charged: `PYTHONMALLOC=malloc python held_bytes.py`.

With that setting all that Python and torch hold is the C library's, which counts it.
"""

import ctypes
import json
from collections.abc import Callable, Sequence

import msgpack
import torch

from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.layers import format as layers_format
from spantrain.transport.layers.format import decode_opening
from spantrain.transport.mailbox import wire
from spantrain.transport.mailbox.exchange import Exchange
from spantrain.transport.mailbox.interface import Limits

MIB = 2**20
Kind = tuple[str, Sequence[int]]
BIG = (0, 70_000, 70_000, 70_000, *(1,) * 12)
"""Empty, of sixteen dimensions."""
SHAPES: dict[str, tuple[str, Sequence[Kind]]] = {
    "nothing": ("forward", ()),
    "a long lane": ("\N{GRINNING FACE}" * 64, ()),
    "one number": ("forward", [("float32", ())]),
    "one truth": ("forward", [("bool", (1,))]),
    "empty": ("forward", [("float32", (0,))] * 256),
    "empty, many dimensions": ("forward", [("float32", BIG)] * 256),
    "numbers, many dimensions": ("forward", [("uint8", (1,) * 16)] * 256),
    "many truths": ("forward", [("bool", (3,))] * 256),
    "a little over a page": ("forward", [("uint8", (4097,))]),
    "truths, large": ("forward", [("bool", (300_001,))]),
    "large": ("forward", [("float32", (1_000_001,))]),
}


class _Counts(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def held_bytes() -> int:
    """What the C library has given out."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Counts
    counts = library.mallinfo2()
    return int(counts.uordblks + counts.hblkhd)


def message(lane: str, kinds: Sequence[Kind]) -> tuple[bytes, int]:
    """A header, and how many bytes come behind it."""
    offset = 0
    for name, shape in kinds:
        numbers = 1
        for size in shape:
            numbers *= size
        offset = -(-offset // 64) * 64 + numbers * getattr(torch, name).itemsize
    fields = [wire.VERSION, 1.5, [1, 2**40, lane, 3, 2**40, 2**41], kinds, offset]
    return msgpack.packb(fields), offset


def cost(lane: str, kinds: Sequence[Kind], *, whole: bool) -> tuple[float, float]:
    """What one message costs, and what it is charged; half ones lack their last chunk."""
    exchange = Exchange(name="here", limits=Limits(receive_queue_bytes=2**40), encrypted=True, dialable=True)
    exchange.set_peers(1, [PeerAddress(name="a", endpoint="", public_key="")], dial=True)
    known = exchange.peers["a"]
    known.inbox.restart(anew=True)
    head, size_bytes = message(lane, kinds)
    count = max(4, min(60, 8 * MIB // max(1, size_bytes)))
    before_bytes = 0
    for number in range(1, count + 11):
        if number == 11:  # what grows by jumps has grown
            before_bytes, before_charge = held_bytes(), known.inbox._started_bytes
        for offset in range(0, max(1, size_bytes), wire.CHUNK_BYTES):
            last = offset + wire.CHUNK_BYTES >= size_bytes
            if whole or not last:
                piece = memoryview(bytes(min(wire.CHUNK_BYTES, size_bytes - offset)))
                track = wire.EXPRESS if size_bytes <= wire.EXPRESS_BYTES else wire.BULK
                exchange.take_chunk(known, wire.Chunk(track, number, offset, 0, bytes(bytearray(head))), piece)
    return (held_bytes() - before_bytes) / count, (known.inbox._started_bytes - before_charge) / count


def kept(make: Callable[[int], object], count: int) -> float:
    """What each of some things costs."""
    found = [make(0)]
    before_bytes = held_bytes()
    found += [make(number) for number in range(1, count + 1)]
    return (held_bytes() - before_bytes) / count


def opening(number: int) -> object:
    """A layer that is opened, with the largest parameters that fit in a head."""
    name, shape = f"{number}" + "\N{GRINNING FACE}" * 2 + "w" * 30, [2**20] + [1] * 15
    specs = [[f"{k}{name}", "float32", shape] for k in range(8192)]
    head = layers_format.OPEN + number.to_bytes(8, "little") + msgpack.packb([1, 1, "push", 0, specs])
    return decode_opening(head)


def main() -> None:
    """Print all, as JSON."""
    rows = {name: cost(lane, kinds, whole=True) for name, (lane, kinds) in SHAPES.items()}
    for name in ("truths, large", "large"):
        rows[f"half of {name}"] = cost(*SHAPES[name], whole=False)
    print(json.dumps({"messages": rows, "parameter": kept(opening, 2) / 8192}))


if __name__ == "__main__":
    main()
