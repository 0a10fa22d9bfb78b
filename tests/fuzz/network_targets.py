"""All that reads bytes from the network, each with a generator of what a hostile peer might send."""

from random import Random
from typing import Any

import msgpack

from fuzz.mutation import changed, corrupted, wild
from fuzz.target import Target
from spantrain.errors import ProtocolError
from spantrain.transport.control.codec import decode

__all__ = ["TARGETS"]


def packed(chance: Random, value: Any) -> bytes:
    """Return msgpack of a plain value, sometimes with its bytes changed; what it cannot hold becomes an extension."""
    data: bytes = msgpack.packb(value, default=lambda one: msgpack.ExtType(5, repr(one).encode()))
    return corrupted(chance, data) if chance.random() < 0.2 else data


def control_message(chance: Random) -> bytes:
    message = {"connection": 1, "events": [{"kind": "x", "at": [1.5, None]}], "body": b"xy", "name": "a"}
    return packed(chance, wild(chance) if chance.random() < 0.1 else changed(chance, message))


TARGETS: tuple[Target, ...] = (
    Target(
        name="control-message",
        make=control_message,
        run=lambda case, _folder: decode(case, limit_bytes=2**20),
        refusals=(ProtocolError,),
    ),
)
