import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.messages import BACKGROUND, MessageKey
from spantrain.core.span import Span
from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.mailbox.inbox import Inbox
from spantrain.transport.mailbox.interface import Limits
from spantrain.transport.mailbox.outbox import Outbox, OutgoingMessage
from spantrain.transport.mailbox.wire import (
    BULK,
    CHUNK_BYTES,
    EXPRESS,
    MAX_AHEAD,
    Chunk,
    decode_acknowledgement,
    decode_chunk,
    decode_greeting,
    decode_header,
    encode_header,
    header_of,
)

KEY = MessageKey(1, 2, "forward", 3, Span(0, 8))
LIMIT = 10**7
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=10),
)


def reason_of(read, data):
    """Return why it is refused, or None; anything but a refusal is a failure."""
    try:
        read(data)
    except Refusal as refusal:
        return refusal.reason
    return None


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
            st.lists(st.integers(0, 5), max_size=4),
        ),
        max_size=5,
    )
)
@settings(deadline=None, max_examples=50)
def test_a_header_reads_back(kinds):
    header = header_of(KEY, [torch.zeros(shape, dtype=dtype) for dtype, shape in kinds], 12.5)
    assert decode_header(encode_header(header), LIMIT) == header


@given(plain | st.lists(plain, min_size=2, max_size=10))
@settings(deadline=None, max_examples=80)
def test_any_msgpack_is_read_or_refused(value):
    data = msgpack.packb(value)
    for read in (
        lambda d: decode_header(d, LIMIT),
        lambda d: decode_greeting(b"H" + d),
        lambda d: decode_acknowledgement(b"A" + d),
    ):
        assert reason_of(read, data) in (None, "malformed", "wrong version", "oversized")


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=300)
def test_any_bytes_are_read_or_refused(data):
    for read in (lambda d: decode_header(d, LIMIT), decode_chunk, decode_greeting, decode_acknowledgement):
        assert reason_of(read, data) != ""


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_a_header_with_one_byte_changed_is_read_or_refused(data):
    encoded = bytearray(encode_header(header_of(KEY, [torch.zeros(2, 3)], 1.0)))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    assert reason_of(lambda d: decode_header(d, LIMIT), bytes(encoded)) != ""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda f: f.__setitem__(0, 1), "wrong version"),
        (lambda f: f.__setitem__(1, "now"), "malformed"),
        (lambda f: f[2].__setitem__(0, -1), "malformed"),
        (lambda f: f[2].__setitem__(5, 0), "malformed"),
        (lambda f: f[2].__setitem__(2, ""), "malformed"),
        (lambda f: f[3][0].__setitem__(0, "object"), "malformed"),
        (lambda f: f[3][0].__setitem__(1, [-1]), "malformed"),
        (lambda f: f[3][0].__setitem__(1, [True]), "malformed"),
        (lambda f: f.__setitem__(4, 25), "malformed"),
        (lambda f: (f[3][0].__setitem__(1, [10**7]), f.__setitem__(4, 4 * 10**7)), "oversized"),
        (lambda f: f[3][0].__setitem__(1, [2**31 - 1] * 16), "oversized"),
        (lambda f: f[3][0].__setitem__(1, [0, 2**31 - 1, 2**31 - 1, 2**31 - 1]), "oversized"),
        (lambda f: f.__setitem__(1, float("nan")), "malformed"),
    ],
)
def test_each_bound_of_a_header_is_checked(change, reason):
    fields = msgpack.unpackb(encode_header(header_of(KEY, [torch.zeros(2, 3)], 1.0)))
    change(fields)
    with pytest.raises(Refusal) as caught:
        decode_header(msgpack.packb(fields), LIMIT)
    assert caught.value.reason == reason


def outgoing(step, size, lane="forward"):
    key = MessageKey(1, step, lane, 3, Span(0, 8))
    return OutgoingMessage.pack(key, [torch.full((size,), step % 251, dtype=torch.uint8)], LIMIT, 0.0)


def chunk_of(out):
    piece = memoryview(out.payload.piece(out.offset, out.length))
    return Chunk(out.track, out.number, out.offset, 0, out.header_bytes), piece


def test_lanes_take_turns_chunk_by_chunk_and_a_lane_keeps_its_order():
    outbox = Outbox()
    outbox.restart(((0, ()), (0, ())), 10**8, 0.0)
    for step, lane in enumerate(["forward", "forward", "backward"]):
        outbox.offer(outgoing(step, 3 * CHUNK_BYTES, lane))
    assert sent_now(outbox) == [0, 2, 0, 2, 0, 2], "and no third message while nothing is known of the link"
    outbox.acknowledge(((0, ()), (1, ())), 10**8, 1.0)
    assert sent_now(outbox) == [1, 1, 1]


def pieces(outbox):
    while (out := outbox.peek(BULK, 0.0)) is not None:
        yield chunk_of(out)
        outbox.advance(out)


def sent_now(outbox):
    order = []
    while (out := outbox.peek(BULK, 0.0)) is not None:
        order.append(out.header.key.step)
        outbox.advance(out)
    return order


def test_small_messages_pass_large_ones():
    outbox = Outbox()
    outbox.restart(((0, ()), (0, ())), 10**8, 0.0)
    outbox.offer(outgoing(0, 10 * CHUNK_BYTES))
    outbox.offer(outgoing(1, 100))
    assert outbox.peek(BULK, 0.0).header.key.step == 0
    assert outbox.peek(EXPRESS, 0.0).header.key.step == 1


def inbox_with(size, checked=False):
    limits = Limits(max_message_bytes=10**6, receive_queue_bytes=2 * 10**6)
    inbox, outbox = Inbox("a", limits, checked=checked), Outbox()
    inbox.restart(anew=True)
    outbox.restart(((0, ()), (0, ())), inbox.granted_bytes, 0.0)
    outbox.offer(outgoing(5, size))
    return inbox, outbox.peek(BULK, 0.0) or outbox.peek(EXPRESS, 0.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c, d: (c, d[:-1]), "truncated"),
        (lambda c, d: (c, memoryview(bytes(d) + b"x")), "oversized"),
        (lambda c, d: (Chunk(c.track, c.number, 1, 0, c.header), d), "malformed"),
        (lambda c, d: (Chunk(c.track, c.number, 2**60, 0, c.header), d), "malformed"),
        (lambda c, d: (Chunk(c.track, 0, c.offset, 0, c.header), d), "repeated"),
        (lambda c, d: (Chunk(c.track, c.number, c.offset, 0, c.header[:-1]), d), "malformed"),
        (lambda c, d: (Chunk(c.track, c.number, c.offset, 1, c.header), d), "bad checksum"),
    ],
)
def test_a_bad_chunk_is_refused_and_the_right_one_is_taken_after_it(change, reason):
    inbox, out = inbox_with(200_000, checked=reason == "bad checksum")
    chunk, data = chunk_of(out)
    with pytest.raises(Refusal) as caught:
        inbox.accept(*change(chunk, data), 0.0)
    assert caught.value.reason == reason
    if reason == "bad checksum":
        return
    assert inbox.accept(chunk, data, 0.0) is None
    out.next_chunk += 1
    message, _ = inbox.accept(*chunk_of(out), 0.0)
    assert message.size_bytes == 200_000


def test_more_than_was_granted_is_refused():
    inbox, _ = inbox_with(10)
    chunks = []
    for number in (1, 2, 3):
        out = outgoing(number, 900_000)
        out.number = number
        chunks.append(chunk_of(out))
    for chunk in chunks[:2]:
        assert inbox.accept(*chunk, 0.0) is None
    with pytest.raises(Refusal) as caught:
        inbox.accept(*chunks[2], 0.0)
    assert caught.value.reason == "over credit"


def test_many_half_messages_are_no_error_when_one_connection_lags():
    limits = Limits(max_message_bytes=10**7, receive_queue_bytes=10**9)
    outbox, inbox = Outbox(), Inbox("a", limits, checked=False)
    inbox.restart(anew=True)
    outbox.restart(((0, ()), (0, ())), inbox.granted_bytes, 0.0)
    outbox.offer(outgoing(300, CHUNK_BYTES))
    for piece in pieces(outbox):
        assert inbox.accept(*piece, 0.0)
    told = inbox.take_acknowledgement()
    outbox.acknowledge(told.done, told.granted_bytes, 1e-4)  # so it is a fast link
    for step in range(300):
        outbox.offer(outgoing(step, CHUNK_BYTES + 1))
    quick, lagging = [], []
    while (out := outbox.peek(BULK, 0.0)) is not None:
        (lagging if out.next_chunk == 0 else quick).append(chunk_of(out))
        outbox.advance(out)
    assert [inbox.accept(*piece, 0.0) for piece in quick] == [None] * 300
    assert all(inbox.accept(*piece, 0.0) for piece in lagging)


def test_no_message_starts_too_far_ahead_of_one_that_is_not_acknowledged():
    outbox = Outbox()
    outbox.restart(((0, ()), (0, ())), 10**12, 0.0)
    for step in range(MAX_AHEAD + 1):
        outbox.offer(outgoing(step, 1))
    started = 0
    while (out := outbox.peek(EXPRESS, 0.0)) is not None:
        outbox.advance(out)
        started += 1
    assert started == MAX_AHEAD
    outbox.acknowledge(((1, ()), (0, ())), 10**12, 0.0)
    assert outbox.peek(EXPRESS, 0.0) is not None


def test_background_lanes_start_when_no_others_wait_and_let_them_pass():
    outbox = Outbox()
    outbox.restart(((0, ()), (0, ())), 10**12, 0.0)
    outbox.offer(outgoing(0, 3 * CHUNK_BYTES, BACKGROUND + "copy"))
    outbox.offer(outgoing(1, 2 * CHUNK_BYTES, "forward"))
    outbox.offer(outgoing(2, 2 * CHUNK_BYTES, "backward"))
    order = []

    def send_one():
        out = outbox.peek(BULK, 0.0)
        outbox.advance(out)
        order.append(out.header.key.step)

    for _ in range(4):
        send_one()
    outbox.acknowledge(((0, ()), (2, ())), 10**12, 0.0)
    send_one()
    outbox.offer(outgoing(3, CHUNK_BYTES, "forward"))
    for _ in range(3):
        send_one()
    assert (sorted(order[:4]), order[4:]) == ([1, 1, 2, 2], [0, 3, 0, 0])
    assert outbox.held_bytes(yields=True) > 3 * CHUNK_BYTES


@given(
    sizes=st.lists(st.sampled_from([0, 1, 1000, 40_000, CHUNK_BYTES, 300_000, 700_000]), min_size=1, max_size=12),
    draws=st.lists(st.integers(0, 9), min_size=50, max_size=200),
)
@settings(deadline=None, max_examples=60)
def test_every_message_arrives_once_however_often_the_link_breaks(sizes, draws):
    limits = Limits(max_message_bytes=10**6, receive_queue_bytes=2 * 10**6)
    outbox, inbox = Outbox(), Inbox("a", limits, checked=False)
    arrived, waiting, wire = [], [], []
    for step, size in enumerate(sizes):
        outbox.offer(outgoing(step, size, ["forward", "backward", BACKGROUND + "copy"][step % 3]))

    def connect():
        wire.clear()
        inbox.restart(anew=False)
        inbox.skip_to(outbox.first_numbers)
        outbox.restart(inbox.done, inbox.granted_bytes, 0.0)

    def step(draw):
        if draw == 9:
            connect()
        elif draw < 6:
            out = outbox.peek(draw % 2, 0.0)
            if out is not None:
                wire.append(chunk_of(out))
                outbox.advance(out)
        elif draw == 6 and wire:
            came = inbox.accept(*wire.pop(len(wire) // 2), 0.0)
            if came is not None:
                arrived.append(came[0].key.step)
                waiting.append(came[1])
        elif draw == 7 and waiting:
            inbox.consume(waiting.pop())
        elif draw == 8:
            told = inbox.take_acknowledgement()
            outbox.acknowledge(told.done, told.granted_bytes, 0.0)

    connect()
    for draw in draws:
        step(draw)
    for _ in range(5000):
        if not (outbox.held_bytes(yields=False) or outbox.held_bytes(yields=True)):
            break
        for draw in (0, 1, 6, 7, 8):
            step(draw)
    assert sorted(arrived) == list(range(len(sizes)))
    assert outbox.held_bytes(yields=False) == outbox.held_bytes(yields=True) == 0
