"""What a mailbox refuses and survives: strangers, impostors, bad frames, broken connections, peers that start anew."""

import contextlib
import socket
import threading

import msgpack
import pytest
import torch
import zmq

from spantrain.core.messages import MessageKey
from spantrain.core.span import Span
from spantrain.transport.connection.bounds import HELLO
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.mailbox.mailbox import Mailbox
from spantrain.transport.mailbox.wire import (
    CHUNK,
    Chunk,
    Greeting,
    encode_bye,
    encode_chunk,
    encode_greeting,
    encode_header,
    header_of,
)
from testing.patience import PATIENCE_S, until

KEY = MessageKey(1, 0, "forward", 3, Span(0, 4))


@pytest.fixture
def open_mailbox():
    with contextlib.ExitStack() as stack:

        def make(name, **options):
            mailbox = Mailbox(name=name, **options)
            stack.callback(mailbox.close)
            return mailbox

        yield make


@pytest.fixture
def dial():
    """Open a raw ZeroMQ connection, with a key or without."""
    context = zmq.Context()
    opened = []

    def make(mailbox, keys=None):
        raw = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            raw.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_key.encode())
            raw.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key.encode())
            raw.setsockopt(zmq.CURVE_SERVERKEY, mailbox.public_key.encode())
        raw.connect(mailbox.endpoint)
        opened.append(raw)
        return raw

    yield make
    for raw in opened:
        raw.close()
    context.term()


def hello(name, connection=0, session=5):
    return encode_greeting(
        HELLO,
        Greeting(
            name=name,
            session=session,
            peer_session=0,
            epoch=1,
            connection=connection,
            connections=1,
            done=((0, ()), (0, ())),
            first=(1, 1),
            granted_bytes=10**8,
        ),
    )


def chunk(number, tensor, offset=0, checksum=0):
    header = encode_header(header_of(KEY, [tensor], 1.0))
    return encode_chunk(Chunk(0, number, offset, checksum, header))


def refused(mailbox, reason):
    return mailbox.counters().refused.get(reason, 0)


def test_a_stranger_is_refused_counted_and_disturbs_nobody(open_mailbox, dial, collect):
    b, c = open_mailbox("b"), open_mailbox("c")
    b.set_peers(1, [c.address])
    c.set_peers(1, [b.address])
    stranger = dial(b, KeyPair.generate())
    stranger.send(hello("c"))
    until(lambda: refused(b, "unknown peer") > 0)
    c.send("b", KEY, [torch.ones(3)])
    collect(b, 1)
    assert b.counters().peers["c"].messages_received == 1


def test_a_known_key_cannot_speak_for_another_name(open_mailbox, dial):
    b = open_mailbox("b")
    a_keys, c_keys = KeyPair.generate(), KeyPair.generate()
    b.set_peers(
        1, [PeerAddress(name=n, endpoint="", public_key=k.public_key) for n, k in (("a", a_keys), ("c", c_keys))]
    )
    impostor = dial(b, c_keys)
    impostor.send(hello("a"))
    until(lambda: refused(b, "unknown peer") == 1)
    impostor.send_multipart([chunk(1, torch.ones(3)), torch.ones(3).numpy().tobytes()])
    until(lambda: refused(b, "no greeting") == 1)
    assert b.receive(0) == []


def test_a_name_that_is_not_a_peer_is_refused_without_encryption_too(open_mailbox, dial):
    b = open_mailbox("b", encrypted=False)
    b.set_peers(1, [PeerAddress(name="a", endpoint="", public_key="")])
    dial(b).send(hello("z"))
    until(lambda: refused(b, "unknown peer") == 1)


def test_someone_without_encryption_is_refused_and_counted(open_mailbox, dial):
    b = open_mailbox("b")
    dial(b).send(hello("a"))
    until(lambda: refused(b, "handshake") > 0)


def test_an_unknown_key_is_counted_once(open_mailbox, dial):
    b = open_mailbox("b")
    stranger = dial(b, KeyPair.generate())
    until(lambda: refused(b, "unknown peer") == 1)
    stranger.close()
    host, port = b.endpoint.removeprefix("tcp://").split(":")
    socket.create_connection((host, int(port))).close()
    until(lambda: refused(b, "handshake") > 0)
    assert b.counters().refused == {"unknown peer": 1, "handshake": 1}


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 10, b"\xff" + bytes(300)])
@pytest.mark.parametrize("encrypted", [True, False])
def test_someone_who_speaks_no_zeromq_is_counted_and_does_no_harm(open_mailbox, collect, said, encrypted):
    b, c = (open_mailbox(name, encrypted=encrypted) for name in "bc")
    b.set_peers(1, [c.address])
    c.set_peers(1, [b.address])
    host, port = b.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(said)
        c.send("b", KEY, [torch.ones(3)])
        collect(b, 1)
    until(lambda: refused(b, "handshake") == 1)


GOOD = torch.ones(3)
DATA = GOOD.numpy().tobytes()
BAD_FRAMES = {
    "no second frame": ([chunk(1, GOOD)], "truncated"),
    "short data": ([chunk(1, GOOD), DATA[:-1]], "truncated"),
    "short head": ([CHUNK + b"123", DATA], "truncated"),
    "long data": ([chunk(1, GOOD), DATA + b"x"], "oversized"),
    "huge tensor": ([chunk(1, torch.empty(2**30 + 2**20, dtype=torch.uint8, device="meta")), b"x"], "oversized"),
    "three frames": ([chunk(1, GOOD), DATA, DATA], "malformed"),
    "not msgpack": ([CHUNK + b"\0" * 21 + b"\xc1\xc1", DATA], "repeated"),
    "bad header": ([CHUNK + b"\0\1" + b"\0" * 19 + b"\xc1\xc1", DATA], "malformed"),
    "unknown kind": ([b"Zebra"], "malformed"),
    "bad hello": ([HELLO + b"nonsense"], "malformed"),
    "bad version": ([HELLO + msgpack.packb([99, *([0] * 9)])], "wrong version"),
    "bad acknowledgement": ([b"A" + msgpack.packb([1, 2, 3])], "malformed"),
    "bad checksum": ([chunk(1, GOOD, checksum=7), DATA], "bad checksum"),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
def test_bad_frames_of_a_peer_are_refused_counted_and_do_no_harm(open_mailbox, dial, collect, case):
    frames, reason = BAD_FRAMES[case]
    b = open_mailbox("b", encrypted=reason != "bad checksum")
    keys = KeyPair.generate() if reason != "bad checksum" else None
    b.set_peers(1, [PeerAddress(name="a", endpoint="", public_key=keys.public_key if keys else "")])
    a = dial(b, keys)
    a.send(hello("a"))
    a.send_multipart(frames)
    until(lambda: refused(b, reason) == 1)
    assert sum(b.counters().refused.values()) == 1
    if keys:
        a.send_multipart([chunk(1, GOOD), DATA])
        (message,) = collect(b, 1)
        assert torch.equal(message.tensors[0], GOOD)


def test_a_frame_beyond_every_bound_is_counted_and_costs_the_connection_only(open_mailbox, dial, collect):
    b, c = open_mailbox("b"), open_mailbox("c")
    keys = KeyPair.generate()
    b.set_peers(1, [c.address, PeerAddress(name="a", endpoint="", public_key=keys.public_key)])
    c.set_peers(1, [b.address])
    a = dial(b, keys)
    a.send(hello("a"))
    a.recv()  # libzmq may tell of the end of a connection before it hands over what came last
    a.send_multipart([chunk(1, GOOD), bytes(8 * 2**20)])
    c.send("b", KEY, [GOOD])
    assert collect(b, 1)[0].source == "c"
    until(lambda: refused(b, "cut off") == 1)


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_connection_that_breaks_without_goodbye_is_counted_and_one_with_is_not(
    open_mailbox, dial, collect, encrypted
):
    b = open_mailbox("b", encrypted=encrypted)
    keys = KeyPair.generate() if encrypted else None
    b.set_peers(1, [PeerAddress(name="a", endpoint="", public_key=keys.public_key if keys else "")])
    for goodbye in (True, False):
        a = dial(b, keys)
        a.send(hello("a"))
        a.recv()
        if goodbye:
            a.send(encode_bye(1))
        a.close(linger=round(1000 * PATIENCE_S))  # what was said is sent before the connection ends
    until(lambda: sum(b.counters().refused.values()) > 0)
    assert b.counters().refused == {"cut off": 1}


@pytest.mark.parametrize("silent", ["a", "b"])
def test_either_side_may_be_the_one_that_cannot_be_dialled(open_mailbox, collect, silent):
    a, b = (open_mailbox(name, bind="" if name == silent else "tcp://127.0.0.1:0") for name in "ab")
    a.set_peers(1, [b.address])
    b.set_peers(1, [a.address])
    for source, target in ((a, b), (b, a)):
        source.send(target.name, KEY, [GOOD])
        collect(target, 1)


def test_a_side_told_that_it_cannot_be_dialled_dials(open_mailbox, collect):
    a, b = open_mailbox("a"), open_mailbox("b")
    hidden = PeerAddress(name="b", endpoint="", public_key=b.public_key)
    a.set_peers(1, [a.address, hidden])
    b.set_peers(1, [a.address, hidden])
    a.send("b", KEY, [GOOD])
    collect(b, 1)


def test_two_sides_that_cannot_be_dialled_are_an_error(open_mailbox):
    a, b = open_mailbox("a", bind=""), open_mailbox("b", bind="")
    with pytest.raises(ValueError, match="neither a nor b can be dialled"):
        a.set_peers(1, [b.address])


def test_a_busy_port_is_named(open_mailbox):
    a = open_mailbox("a")
    with pytest.raises(OSError, match=f"cannot listen on {a.endpoint}"):
        open_mailbox("b", bind=a.endpoint)


@pytest.mark.parametrize("address", [("b", "10.0.0.1:5", "k" * 40), ("b", "tcp://10.0.0.1:5", "short")])
def test_addresses_are_checked(open_mailbox, address):
    name, endpoint, public_key = address
    with pytest.raises(ValueError, match="peer b"):
        open_mailbox("a").set_peers(1, [PeerAddress(name=name, endpoint=endpoint, public_key=public_key)])


def test_a_peer_may_be_late_and_nothing_is_lost(open_mailbox, collect):
    a, b = open_mailbox("a"), open_mailbox("b")
    a.set_peers(1, [b.address])
    for step in range(5):
        a.send("b", MessageKey(1, step, "forward", 0, Span(0, 1)), [GOOD])
    until(lambda: refused(b, "unknown peer") > 0)
    b.set_peers(1, [a.address])
    assert {message.key.step for message in collect(b, 5)} == set(range(5))


def test_a_peer_that_starts_anew_is_met_again(open_mailbox, collect):
    keys = {name: KeyPair.generate() for name in "ab"}
    for restarted, other in (("a", "b"), ("b", "a")):
        left = open_mailbox(restarted, keypair=keys[restarted])
        stays = open_mailbox(other, keypair=keys[other])
        left.set_peers(1, [stays.address])
        stays.set_peers(1, [left.address])
        left.send(other, KEY, [GOOD])
        collect(stays, 1)
        endpoint = left.endpoint
        left.close()
        back = open_mailbox(restarted, keypair=keys[restarted], bind=endpoint)
        back.set_peers(1, [stays.address])
        stays.send(restarted, KEY, [GOOD])
        back.send(other, KEY, [GOOD])
        collect(back, 1)
        collect(stays, 1)
        back.close()
        stays.close()


class Cutter:
    """Carries TCP to a port; breaks all connections each time that another so many bytes have passed."""

    def __init__(self, endpoint, cut_at_bytes):
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        self._open = []
        self._lock = threading.Lock()
        self._passed_bytes = 0
        self._cut_at_bytes = list(cut_at_bytes)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(self._target)
                with self._lock:
                    self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
                self._count(len(data))
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    @property
    def cuts_left(self):
        return len(self._cut_at_bytes)

    def _count(self, size_bytes):
        with self._lock:
            self._passed_bytes += size_bytes
            due = self._cut_at_bytes and self._passed_bytes >= self._cut_at_bytes[0]
            if due:
                self._cut_at_bytes.pop(0)
        if due:
            self._cut()

    def _cut(self):
        with self._lock:
            victims, self._open = self._open, []
        for end in victims:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self._cut()


def test_broken_connections_lose_and_repeat_nothing(open_mailbox, collect):
    a, b = open_mailbox("a"), open_mailbox("b")
    cutter = Cutter(b.endpoint, [1e6, 6e6, 20e6, 40e6])
    a.set_peers(1, [PeerAddress(name="b", endpoint=cutter.endpoint, public_key=b.public_key)])
    b.set_peers(1, [a.address])
    sizes = [2_000, 800_000, 10, 100_000] * 5
    for step, size in enumerate(sizes):
        for source, target in ((a, "b"), (b, "a")):
            source.send(
                target, MessageKey(1, step, f"tied:{step % 3}", 0, Span(0, 1)), [torch.full((size,), step % 99)]
            )
    for mailbox in (a, b):
        messages = collect(mailbox, len(sizes))
        assert sorted(message.key.step for message in messages) == list(range(len(sizes)))
        assert all((message.tensors[0] == message.key.step % 99).all() for message in messages)
        assert mailbox.receive(0) == []
    assert cutter.cuts_left == 0
    a.send("b", KEY, [GOOD])
    collect(b, 1)
    assert a.counters().peers["b"].reconnections >= 1
    cutter.close()
