"""All that reads bytes from the network, each with a generator of what a hostile peer might send."""

from random import Random

from fuzz.messages import altered, packed
from fuzz.network_frames import FRAME_TARGETS
from fuzz.target import Target
from spantrain.errors import ProtocolError
from spantrain.transport.control.codec import decode

__all__ = ["TARGETS"]


def control_message(chance: Random) -> bytes:
    message = {"connection": 1, "events": [{"kind": "x", "at": [1.5, None]}], "body": b"xy", "name": "a"}
    return packed(chance, altered(chance, message))


TARGETS: tuple[Target, ...] = (
    Target(
        name="control-message",
        make=control_message,
        run=lambda case, _folder: decode(case, limit_bytes=2**20),
        refusals=(ProtocolError,),
    ),
    *FRAME_TARGETS,
)
