"""Beginnings, ends, credit and generations as docs/wire-protocol.md states them, mostly without a network."""

import contextlib
import re
import time
from collections.abc import Iterator

import pytest
import torch
import zmq

from spantrain.core.messages import MessageKey
from spantrain.core.span import Span
from spantrain.transport.connection.bounds import BYE, HELLO, RESET, WHO, Refusal
from spantrain.transport.connection.links import AcceptedLink, DialledLink, PeerLink
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.mailbox.exchange import Exchange, MailboxPeer
from spantrain.transport.mailbox.inbox import Inbox
from spantrain.transport.mailbox.interface import Limits
from spantrain.transport.mailbox.loop import MailboxLoop
from spantrain.transport.mailbox.mailbox import Mailbox
from spantrain.transport.mailbox.outbox import Outbox, OutgoingMessage, Pace
from spantrain.transport.mailbox.wire import WELCOME, Chunk, Greeting, encode_bye, encode_greeting
from testing.patience import PATIENCE_S, until

Dialled = DialledLink[MailboxPeer]
NOTHING = ((0, ()), (0, ()))
NOWHERE = "tcp://127.0.0.1:9"


def outgoing(size_bytes: int = 100, *, generation: int = 1, step: int = 0) -> OutgoingMessage:
    key = MessageKey(generation=generation, step=step, lane="forward", cut=3, span=Span(0, 4))
    return OutgoingMessage.pack(key, [torch.zeros(size_bytes, dtype=torch.uint8)], 10**9, 0.0)


def exchange_of(name: str, *peers: str, dialable: bool = True) -> Exchange:
    made = Exchange(name=name, limits=Limits(), encrypted=False, dialable=dialable)
    made.set_peers(1, [PeerAddress(name=one, endpoint=NOWHERE, public_key="") for one in peers], dial=True)
    return made


def hello(connection: int, connections: int, *, epoch: int = 1) -> Greeting:
    return Greeting(
        name="a", session=5, peer_session=0, epoch=epoch, connection=connection, connections=connections, done=NOTHING,
        first=(1, 1), granted_bytes=10**8,
    )  # fmt: skip


@contextlib.contextmanager
def dialled_by(exchange: Exchange) -> Iterator[tuple[MailboxLoop, Dialled]]:
    """The thread's work without the thread, and its link to `b`, which was dialled."""
    loop = MailboxLoop(exchange, "", None, lambda _: None)
    loop.obey()
    link = loop.links["b"]
    assert isinstance(link, DialledLink)
    try:
        yield loop, link
    finally:
        loop._close()


# Who dials, and what goes by which connection.


def test_whose_name_sorts_first_dials_and_so_does_who_cannot_be_dialled() -> None:
    assert exchange_of("a", "b").peers["b"].dials
    assert not exchange_of("b", "a").peers["a"].dials
    assert exchange_of("b", "a", dialable=False).peers["a"].dials
    hidden = exchange_of("a")
    hidden.set_peers(1, [PeerAddress(name="b", endpoint="", public_key="")], dial=True)
    assert not hidden.peers["b"].dials


@pytest.mark.parametrize(
    ("sites", "relayed", "dials"),
    [
        ("xy", "ab", "a"),  # both are behind a relay: the first name
        ("xy", "b", "b"),  # one is: it dials, and nothing goes through the relay
        ("xy", "a", "a"),
        ("xx", "b", "a"),  # they need none
        ("xx", "ab", "a"),
    ],
)
def test_who_is_behind_a_relay_dials_who_is_not(sites: str, relayed: str, dials: str) -> None:
    a, b = (
        PeerAddress(
            name=name, endpoint=f"tcp://far-{name}:1", public_key="", site=site,
            near=f"tcp://near-{name}:1" if name in relayed else "",
        )
        for name, site in zip("ab", sites, strict=True)
    )  # fmt: skip
    for own, other in ((a, b), (b, a)):
        side = exchange_of(own.name)
        side.set_peers(1, [own, other.seen_from(own)], dial=True)
        known = side.peers[other.name]
        assert known.dials == (own.name == dials)
        near = sites == "xx" and other.name in relayed
        assert known.peer.endpoint == f"tcp://{'near' if near else 'far'}-{other.name}:1"


class Noted(PeerLink[MailboxPeer]):
    """Notes by which connection each frame leaves."""

    def __init__(self, known: MailboxPeer) -> None:
        super().__init__(known.peer, known)
        self.connections = 4
        self.left: list[tuple[int, bytes]] = []

    def send(self, connection, frames, *, copy=True) -> bool:
        self.left.append((connection, bytes(frames[0][:1])))
        return True


def test_control_small_and_large_messages_have_connections_of_their_own() -> None:
    exchange = exchange_of("a", "b")
    known = exchange.peers["b"]
    known.outbox.restart(NOTHING, 10**9, 0.0)
    known.inbox.acknowledgement_due = True
    for size_bytes in (32 * 1024, 32 * 1024 + 1):
        known.outbox.offer(outgoing(size_bytes))
    link = Noted(known)
    MailboxLoop(exchange, "", None, print).flush(link)
    assert link.left == [(0, b"A"), (1, b"C"), (2, b"C")]


def test_a_link_has_a_socket_for_each_of_its_connections() -> None:
    exchange = Exchange(name="a", limits=Limits(bulk_connections=3), encrypted=False, dialable=True)
    exchange.set_peers(1, [PeerAddress(name="b", endpoint=NOWHERE, public_key="")], dial=True)
    with dialled_by(exchange) as (_, link):
        assert [socket.type for socket in link.sockets] == [zmq.DEALER] * 5


def test_what_may_be_on_its_way_is_rate_times_quickest_answer_and_a_fifth_of_a_second() -> None:
    pace = Pace()
    assert pace.room_bytes == 64 * 1024
    pace.came(1.0, 100_000, left_s=0.0, mark=pace.left(0.0, others=0))
    assert pace.room_bytes == 100_000 * 1.2


def test_a_listener_with_another_key_is_told_nothing() -> None:
    with_wrong_key, listener = Mailbox(name="a"), Mailbox(name="b")
    try:
        listener.set_peers(1, [with_wrong_key.address])
        other = KeyPair.generate().public_key
        with_wrong_key.set_peers(1, [PeerAddress(name="b", endpoint=listener.endpoint, public_key=other)])
        with_wrong_key.send("b", outgoing().header.key, [torch.ones(3)])
        until(lambda: listener.counters().refused.get("handshake", 0) > 0)
        assert listener.counters().refused.keys() == {"handshake"}
        assert listener.receive(0) == []
    finally:
        with_wrong_key.close()
        listener.close()


def test_a_reason_is_counted_each_time_and_logged_ever_more_seldom(caplog: pytest.LogCaptureFixture) -> None:
    exchange = exchange_of("a", "b")
    for reason in ("malformed", "oversized", "malformed", "malformed", "malformed", "malformed"):
        exchange.refused.refuse(Refusal(reason, "it is so"), "b")
    assert exchange.counters().refused == {"malformed": 5, "oversized": 1}
    counts = [re.search(r"\(\w+, (\d+) by now\)", record.message) for record in caplog.records]
    assert [found and int(found[1]) for found in counts] == [1, 1, 2, 4]


# Beginnings and ends.


def test_a_new_connection_is_asked_who_it_is_and_a_stranger_to_begin_again() -> None:
    mailbox = Mailbox(name="b", encrypted=False)
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.setsockopt(zmq.PROBE_ROUTER, 1)
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
        raw.connect(mailbox.endpoint)
        assert raw.recv() == WHO
        raw.send(b"A")
        assert raw.recv() == RESET
        until(lambda: mailbox.counters().refused == {"no greeting": 1})
    mailbox.close()


def test_the_welcome_comes_on_every_connection_when_all_have_said_hello() -> None:
    known = exchange_of("b", "a").peers["a"]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        link = AcceptedLink(known.peer, known, router)
        link.restart(hello(0, 3))
        assert [link.hello(b"%d" % k, hello(k, 3), k) for k in range(3)] == [False, False, True]
    mailbox = Mailbox(name="b", encrypted=False)
    mailbox.set_peers(1, [PeerAddress(name="a", endpoint="", public_key="")])
    with zmq.Context() as context:
        raws = [context.socket(zmq.DEALER) for _ in range(3)]
        for k, raw in enumerate(raws):
            raw.setsockopt(zmq.LINGER, 0)
            raw.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
            raw.connect(mailbox.endpoint)
            raw.send(encode_greeting(HELLO, hello(k, 3)))
        assert [raw.recv()[:1] for raw in raws] == [WELCOME] * 3
        for raw in raws:
            raw.close()
    mailbox.close()


@pytest.fixture
def dialling() -> Iterator[tuple[MailboxLoop, Dialled]]:
    with dialled_by(exchange_of("a", "b")) as made:
        yield made


def test_a_second_who_and_a_reset_begin_a_new_epoch(dialling: tuple[MailboxLoop, Dialled]) -> None:
    loop, link = dialling
    for frames in ([WHO, WHO], [RESET]):
        epoch, before = link.epoch, list(link.sockets)
        for frame in frames:
            assert link.sockets == before
            loop.take_dialled(before[0], link, [zmq.Frame(frame)])
        loop._go_on({})
        assert link.epoch == epoch + 1
        assert all(socket.closed for socket in before)
        assert len(link.sockets) == len(before)


def test_after_a_bye_a_side_of_a_later_generation_dials_at_once_and_others_in_a_minute(
    dialling: tuple[MailboxLoop, Dialled],
) -> None:
    loop, link = dialling
    peer = link.state.peer
    before_s = time.monotonic()
    loop.take_dialled(link.sockets[0], link, [zmq.Frame(encode_bye(1))])
    assert link.sockets == []
    assert before_s + 60.0 <= link.redial_s <= time.monotonic() + 60.0
    loop._exchange.set_peers(2, [peer], dial=True)
    loop.obey()
    assert len(link.sockets) == 4, "its own peers were set anew"
    before = list(link.sockets)
    loop.take_dialled(link.sockets[0], link, [zmq.Frame(BYE + encode_bye(1)[1:])])
    loop._go_on({})
    assert all(socket.closed for socket in before)
    assert len(link.sockets) == 4, "they were set anew since that bye"


def test_a_peer_that_cannot_be_dialled_is_tried_again() -> None:
    mailbox = Mailbox(name="a", limits=Limits(welcome_s=0.002))
    try:
        mailbox.set_peers(1, [PeerAddress(name="b", endpoint=NOWHERE, public_key="#" * 40)])
        until(lambda: mailbox.counters().refused.get("bad address", 0) >= 2)
    finally:
        mailbox.close()


# Credit and generations.


def test_a_message_begins_when_credit_covers_all_of_it() -> None:
    outbox, one = Outbox(), outgoing()
    outbox.restart(NOTHING, one.header.charge_bytes - 1, 0.0)
    outbox.offer(one)
    assert outbox.peek(one.track, 0.0) is None
    outbox.acknowledge(NOTHING, one.header.charge_bytes, 0.0)
    assert outbox.peek(one.track, 0.0) is one


def test_credit_grows_when_messages_are_taken_out_from_a_window_of_512_mib_and_262_kib() -> None:
    assert Limits().send_queue_bytes == Limits().receive_queue_bytes == 512 * 2**20
    inbox, one = Inbox("a", Limits(), checked=False), outgoing()
    inbox.restart(anew=True)
    before_bytes = inbox.granted_bytes
    assert before_bytes == 512 * 2**20 + 262 * 2**10
    came = inbox.accept(Chunk(one.track, 1, 0, 0, one.header_bytes), memoryview(bytes(100)), 0.0)
    assert came is not None
    assert inbox.granted_bytes == before_bytes
    inbox.consume(came[1])
    assert inbox.granted_bytes == before_bytes + one.header.charge_bytes


def test_a_number_too_far_ahead_is_refused() -> None:
    inbox, one = Inbox("a", Limits(), checked=False), outgoing()
    inbox.restart(anew=True)
    with pytest.raises(Refusal, match="16385 is too far ahead"):
        inbox.accept(Chunk(one.track, 16385, 0, 0, one.header_bytes), memoryview(bytes(100)), 0.0)
    assert inbox.accept(Chunk(one.track, 16384, 0, 0, one.header_bytes), memoryview(bytes(100)), 0.0)


def test_what_was_not_started_when_its_generation_ended_is_dropped_and_counted() -> None:
    exchange = exchange_of("a", "b")
    peer = exchange.peers["b"].peer
    assert exchange.offer("b", outgoing(), 0.0)
    exchange.set_peers(2, [peer], dial=True)
    assert exchange.counters().refused == {"old generation, not sent": 1}
    assert exchange.peers["b"].outbox.held_bytes(yields=False) == 0


def test_the_times_of_the_newest_65536_messages_are_kept() -> None:
    exchange, one = exchange_of("a", "b"), outgoing()
    one.started_s = 1.0
    with exchange.condition:
        exchange.settle(exchange.peers["b"], [one] * 65537)
    assert len(exchange.take_intervals()) == 65536
