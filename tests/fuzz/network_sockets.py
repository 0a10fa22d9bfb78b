"""Targets: any frames, from an admitted peer, to a mailbox and a layer wire that live; they refuse, and live on."""

import atexit
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import zmq

from fuzz.mutation import corrupted
from fuzz.network_frames import GREETING, HELLO, KEY, OPENING, TENSORS, header_bytes, opening_bytes
from fuzz.target import Target
from spantrain.transport.connection import bounds
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.layers import format as layers
from spantrain.transport.layers.transport import LayerTransport
from spantrain.transport.mailbox import wire
from spantrain.transport.mailbox.mailbox import Mailbox

Frames = list[bytes]
_PATIENCE_S = 60.0


def _frames(kinds: Callable[[Random], Frames]) -> Callable[[Random], list[Frames]]:
    def make(chance: Random) -> list[Frames]:
        return [_broken(chance, kinds(chance)) for _ in range(chance.randrange(1, 6))]

    return make


def _broken(chance: Random, frames: Frames) -> Frames:
    """Return frames as they are, or with one changed, doubled, left out or added."""
    act = chance.randrange(10)
    at = chance.randrange(len(frames))
    if act == 0:
        return [*frames, chance.randbytes(chance.choice((0, 1, 100)))]
    if act == 1:
        return frames[:at] + frames[at + 1 :] or [b""]
    if act == 2:
        return frames * 2
    if act < 5:
        return [*frames[:at], corrupted(chance, frames[at]), *frames[at + 1 :]]
    return frames


def _of_mailbox(chance: Random) -> Frames:
    chunk = wire.Chunk(chance.randrange(2), chance.choice((1, 2, 3, 2**63)), 0, 0, header_bytes(chance))
    valid = wire.encode_header(wire.header_of(KEY, TENSORS, 1.5))
    whole = wire.decode_header(valid, 2**20).payload_bytes
    return chance.choice((
        [wire.encode_chunk(chunk), chance.randbytes(chance.choice((0, 1, 200)))],
        [wire.encode_chunk(wire.Chunk(0, chance.choice((1, 2, 3)), 0, 0, valid)), bytes(whole)],
        [wire.encode_greeting(bounds.HELLO, GREETING)],
        [wire.encode_greeting(wire.WELCOME, GREETING)],
        [wire.encode_acknowledgement(wire.Acknowledgement(done=GREETING.done, granted_bytes=9))],
        [wire.encode_bye(chance.choice((0, 1, 2**31 - 1)))], [bounds.WHO], [bounds.RESET], [b""], [b"\0"],
    ))  # fmt: skip


def _of_layers(chance: Random) -> Frames:
    number = chance.choice((0, 1, 3, 2**64 - 1))
    return chance.choice((
        [opening_bytes(chance)], [layers.encode_opening(OPENING)],
        [layers.encode_pair(layers.DATA, number, 0), chance.randbytes(chance.choice((0, 1, 30)))],
        [layers.encode_pair(layers.GRANT, number, 2**64 - 1)], [layers.encode_number(layers.DONE, number)],
        [layers.encode_number(layers.CANCEL, number)], [layers.encode_refused(number, "no")],
        [layers.encode_hello(bounds.HELLO, HELLO)], [layers.encode_hello(layers.WELCOME, HELLO)],
        [bounds.RESET], [b""], [b"\0"],
    ))  # fmt: skip


class _Listener:
    """Hears what a wire tells; a fault it keeps."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def arrived(self, *_: Any) -> None: ...
    def sent(self, *_: Any) -> None: ...
    def lost(self, *_: Any) -> None: ...
    def died(self, fault: str) -> None:
        self.faults.append(fault)


class _Side:
    """One that listens, and the hostile peer's two connections to it."""

    def __init__(self, endpoint: str, faults: list[str], hellos: list[bytes], refused: Callable[[], int]) -> None:
        self.faults, self._hellos, self._refused = faults, hellos, refused
        self._context = zmq.Context()
        self._endpoint = endpoint
        self._sockets: list[zmq.Socket[bytes]] = []
        self._count = 0
        self.dial()

    def dial(self) -> None:
        """Greet as a peer does, by connections of their own."""
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets = []
        for hello in self._hellos:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.RCVTIMEO, int(1000 * _PATIENCE_S))
            socket.connect(self._endpoint)
            socket.send(hello)
            self._sockets.append(socket)

    def feed(self, case: list[Frames], _folder: Path) -> None:
        """Send, and wait until all of it was looked at: a last frame that is certainly refused tells."""
        before = self._refused()
        for frames in case:
            self._sockets[-1].send_multipart(frames)
        self._sockets[-1].send_multipart([b"\xff", b"never"] * 3)
        deadline = threading.Event()
        for _ in range(int(_PATIENCE_S / 0.0005)):
            assert not self.faults, self.faults
            if self._refused() > before:
                break
            deadline.wait(0.0005)
        else:
            raise AssertionError("it does not answer any more")
        self._count += 1
        if self._count % 20 == 0:
            self.dial()


@cache
def _mailbox() -> _Side:
    faults: list[str] = []
    mailbox = Mailbox(name="here", encrypted=False, died=faults.append)
    atexit.register(mailbox.close)
    mailbox.set_peers(1, [PeerAddress(name="a", endpoint="", public_key="")])
    hellos = [wire.encode_greeting(bounds.HELLO, _greeting(k)) for k in range(3)]
    return _Side(mailbox.endpoint, faults, hellos, lambda: sum(mailbox.counters().refused.values()))


def _greeting(connection: int) -> wire.Greeting:
    return wire.Greeting(
        name="a", session=5, peer_session=0, epoch=1, connection=connection, connections=3, done=((0, ()), (0, ())),
        first=(1, 1), granted_bytes=2**20,
    )  # fmt: skip


@cache
def _layer_wire() -> _Side:
    listener = _Listener()
    made = LayerTransport(name="here", bind="tcp://127.0.0.1:0", keypair=None, listener=listener)
    atexit.register(made.close)
    made.set_peers([PeerAddress(name="a", endpoint="", public_key="")])
    hellos = [
        layers.encode_hello(bounds.HELLO, layers.LayerHello(
            name="a", session=3, connection=line, connections=2, frame_bytes=65536, window_bytes=65536))
        for line in range(2)
    ]  # fmt: skip
    return _Side(made.endpoint, listener.faults, hellos, lambda: sum(made.counters().refused.values()))


def _target(name: str, kinds: Callable[[Random], Frames], side: Callable[[], _Side]) -> Target:
    return Target(
        name=f"socket-{name}", make=_frames(kinds), run=lambda case, folder: side().feed(case, folder), refusals=(),
        most_s=10.0,
    )  # fmt: skip


SOCKET_TARGETS: tuple[Target, ...] = (
    _target("mailbox", _of_mailbox, _mailbox),
    _target("layers", _of_layers, _layer_wire),
)
