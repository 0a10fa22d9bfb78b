import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import zmq

from spantrain.core.messages import MessageKey
from spantrain.core.span import Span
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.mailbox.interface import Limits, Message
from spantrain.transport.mailbox.mailbox import Mailbox, MailboxLike
from testing.memory_mailbox import MemoryNetwork
from testing.outer.layer_wires import KIB, Wires, greet
from testing.outer.layer_wires import patient as patient_wires
from testing.patience import PATIENCE_S


@pytest.fixture
def key() -> Callable[..., MessageKey]:
    def make(step: int = 0, lane: str = "forward", generation: int = 1) -> MessageKey:
        return MessageKey(generation=generation, step=step, lane=lane, cut=3, span=Span(0, 4))

    return make


@pytest.fixture
def collect() -> Callable[[MailboxLike, int], list[Message]]:
    def take(mailbox: MailboxLike, count: int) -> list[Message]:
        found: list[Message] = []
        deadline_s = time.monotonic() + PATIENCE_S
        while len(found) < count:
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{len(found)} of {count} messages came"
            found += mailbox.receive(left_s)
        return found

    return take


PATIENT = Limits(welcome_s=PATIENCE_S)
"""Where all sides admit each other before one dials, nobody dials twice, however long a handshake takes."""


@pytest.fixture
def patient() -> Limits:
    return PATIENT


@pytest.fixture(params=["curve", "plain", "memory"])
def make_mailbox(request: pytest.FixtureRequest) -> Iterator[Callable[..., MailboxLike]]:
    network = MemoryNetwork()
    with contextlib.ExitStack() as stack:

        def make(name: str, limits: Limits | None = None) -> MailboxLike:
            mailbox: MailboxLike
            if request.param == "memory":
                mailbox = network.mailbox(name, limits)
            else:
                mailbox = Mailbox(name=name, limits=limits, encrypted=request.param == "curve")
            stack.callback(mailbox.close)
            return mailbox

        yield make


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [
        torch.randn(4, 3, 5),
        torch.randn(7, 3).to(torch.bfloat16),
        torch.arange(9),
        torch.tensor([True, False, True]),
        torch.randn(3, 2, dtype=torch.complex64),
        torch.empty(0, 4),
        torch.tensor(2.5),
        torch.randn(6, 4).t(),
    ]


@pytest.fixture
def raw():
    """Raw ZeroMQ connections to a wire, with a key or without; two, as a link needs them."""
    context = zmq.Context()
    opened = []

    def dial(wire, keys=None, count=2):
        sockets = []
        for _ in range(count):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
            if keys is not None:
                socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_key.encode())
                socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key.encode())
                socket.setsockopt(zmq.CURVE_SERVERKEY, wire.public_key.encode())
            socket.connect(wire.endpoint)
            sockets.append(socket)
        opened.extend(sockets)
        return sockets

    yield dial
    for socket in opened:
        socket.close()
    context.term()


@pytest.fixture
def intruder(raw):
    """A peer `b` of a shard that speaks the protocol by hand, beside an honest one."""
    with Wires(limits=patient_wires(frame_bytes=64 * KIB, window_bytes=64 * KIB)) as wires:
        shard, worker = wires.met("a")
        keys = KeyPair.generate()
        shard.set_peers([wires.address("a"), PeerAddress(name="b", endpoint="", public_key=keys.public_key)])
        sockets = raw(shard, keys)
        greet(sockets, "b")
        yield wires, shard, worker, sockets
