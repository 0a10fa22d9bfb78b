"""Targets: the frames of both data planes."""

from collections.abc import Callable
from random import Random
from typing import Any

import msgpack
import torch

from fuzz.messages import altered, packed
from fuzz.mutation import corrupted
from fuzz.target import Target
from spantrain.core.messages import MessageKey
from spantrain.core.outer.events import Ticket, TransferWay
from spantrain.core.outer.layers import ParameterSpec
from spantrain.core.span import Span
from spantrain.transport.connection import bounds
from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.layers import format as layers
from spantrain.transport.layers.interface import LayerKey
from spantrain.transport.mailbox import wire
from spantrain.transport.relay.protocol import RelayFrame

LIMIT_BYTES = 2**20
KEY = MessageKey(generation=1, step=2, lane="forward", cut=3, span=Span(0, 8))
TENSORS = (torch.zeros(4, 3), torch.zeros(0, 2), torch.tensor([True]), torch.zeros((), dtype=torch.int64))
SPECS = (ParameterSpec(name="0.weight", shape=(3, 2)), ParameterSpec(name="0.bias", shape=(3,), dtype="bfloat16"))
OPENING = layers.Opening(number=3, key=LayerKey(ticket=Ticket(1, 2), way=TransferWay.PUSH, layer=4), parameters=SPECS)
GREETING = wire.Greeting(
    name="a", session=5, peer_session=6, epoch=1, connection=0, connections=4, done=((3, (5, 6)), (0, ())),
    first=(1, 1), granted_bytes=2**20,
)  # fmt: skip
HELLO = layers.LayerHello(name="a", session=3, connection=0, connections=2, frame_bytes=2**20, window_bytes=2**22)
HUGE = (2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**63, 0)


def _msgpack_after(valid: bytes, prefix_bytes: int) -> Callable[[Random], bytes]:
    """Return what makes a head whose fields, behind some first bytes, were changed."""
    fields = msgpack.unpackb(valid[prefix_bytes:])

    def make(chance: Random) -> bytes:
        head = corrupted(chance, valid[:prefix_bytes]) if chance.random() < 0.05 else valid[:prefix_bytes]
        return head + packed(chance, altered(chance, fields))

    return make


def header_bytes(chance: Random) -> bytes:
    """A header, often with shapes that no memory holds, or that overflow where they are multiplied."""
    fields = msgpack.unpackb(wire.encode_header(wire.header_of(KEY, TENSORS, 1.5)))
    if chance.random() < 0.4:
        sizes = [chance.choice((*HUGE, 1, 2)) for _ in range(chance.randrange(17))]
        fields[3] = [[chance.choice(("float32", "bool", "int64", "uint8")), sizes]] * chance.choice((1, 2, 255, 256))
        fields[4] = 0 if 0 in sizes else fields[4]
    return packed(chance, altered(chance, fields))


def opening_bytes(chance: Random) -> bytes:
    """An OPEN, often with shapes whose product no machine holds."""
    valid = layers.encode_opening(OPENING)
    fields = msgpack.unpackb(valid[9:])
    if chance.random() < 0.4:
        sizes = [chance.choice((*HUGE, 1, 2)) for _ in range(chance.randrange(17))]
        fields[4] = [[f"{k}", chance.choice(("float32", "uint8")), sizes] for k in range(chance.choice((1, 3, 300)))]
    return valid[:9] + packed(chance, altered(chance, fields))


def _corrupted_of(*valid: bytes) -> Callable[[Random], bytes]:
    return lambda chance: corrupted(chance, chance.choice(valid))


def _target(name: str, make: Callable[[Random], bytes], read: Callable[[bytes], Any]) -> Target:
    return Target(name=f"frame-{name}", make=make, run=lambda case, _folder: read(case), refusals=(Refusal,))


FRAME_TARGETS = (
    _target("header", header_bytes, lambda data: wire.decode_header(data, LIMIT_BYTES)),
    _target(
        "chunk", _corrupted_of(wire.encode_chunk(wire.Chunk(wire.BULK, 3, 0, 0, b"header" * 9))), wire.decode_chunk
    ),
    _target("greeting", _msgpack_after(wire.encode_greeting(bounds.HELLO, GREETING), 1), wire.decode_greeting),
    _target(
        "acknowledgement",
        _msgpack_after(wire.encode_acknowledgement(wire.Acknowledgement(done=GREETING.done, granted_bytes=7)), 1),
        wire.decode_acknowledgement,
    ),
    _target("bye", _msgpack_after(wire.encode_bye(4), 1), wire.decode_bye),
    _target("layer-hello", _msgpack_after(layers.encode_hello(bounds.HELLO, HELLO), 1), layers.decode_hello),
    _target("layer-opening", opening_bytes, layers.decode_opening),
    _target(
        "layer-number",
        _corrupted_of(layers.encode_number(layers.DONE, 4), layers.encode_pair(layers.GRANT, 4, 5)),
        lambda data: (layers.decode_number(data), layers.decode_pair(data)),
    ),
    _target("relay", _msgpack_after(RelayFrame(kind="open", said="0", ports=(7000,)).encode(), 0), RelayFrame.decode),
    _target("layer-refused", _corrupted_of(layers.encode_refused(3, "why: \x1b[2J")), layers.decode_refused),
)  # fmt: skip
