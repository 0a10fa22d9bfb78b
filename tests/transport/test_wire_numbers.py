"""The numbers and forms that docs/wire-protocol.md states."""

import math
import time

import msgpack
import pytest
import torch
import zmq

from spantrain.core.messages import ControlKey, MessageKey
from spantrain.core.outer.layers import Layer, ParameterSpec, ShardLayout, ShardRun
from spantrain.core.span import Span
from spantrain.transport.connection import bounds
from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.connection.links import data_socket
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.layers import format as layers_format
from spantrain.transport.mailbox import wire
from spantrain.transport.mailbox.exchange import Exchange
from spantrain.transport.mailbox.inbox import Inbox
from spantrain.transport.mailbox.interface import Limits
from spantrain.transport.mailbox.loop import SOCKET_LIMITS, MailboxLoop
from spantrain.transport.mailbox.outbox import OutgoingMessage
from testing.outer.layer_wires import Wires, a_key

KEY = MessageKey(generation=1, step=2, lane="forward", cut=3, span=Span(4, 8))
TENSORS = [torch.zeros(5, dtype=torch.uint8), torch.zeros(0, 3), torch.ones(2, 3)]


def header(*kinds):
    return wire.header_of(KEY, [torch.empty(shape, dtype=dtype) for dtype, shape in kinds], 1.5)


def test_each_kind_of_frame_has_its_form():
    greeting = wire.Greeting(
        name="a", session=5, peer_session=6, epoch=7, connection=0, connections=4, done=((1, (3,)), (0, ())),
        first=(1, 2), granted_bytes=9,
    )  # fmt: skip
    fields = [3, "a", 5, 6, 7, 0, 4, [[1, [3]], [0, []]], [1, 2], 9]
    assert wire.encode_greeting(bounds.HELLO, greeting) == b"H" + msgpack.packb(fields)
    assert wire.encode_greeting(wire.WELCOME, greeting) == b"O" + msgpack.packb(fields)
    told = wire.Acknowledgement(done=greeting.done, granted_bytes=9)
    assert wire.encode_acknowledgement(told) == b"A" + msgpack.packb([[[1, [3]], [0, []]], 9])
    assert wire.encode_bye(4) == b"B" + msgpack.packb([4])
    assert (bounds.WHO, bounds.RESET) == (b"?", b"R")
    prefix = b"C\x01" + (2).to_bytes(8, "little") + (3).to_bytes(8, "little") + (4).to_bytes(4, "little")
    assert wire.encode_chunk(wire.Chunk(wire.BULK, 2, 3, 4, b"header")) == prefix + b"header"
    assert bounds.HELLO + layers_format.WELCOME + layers_format.OPEN + layers_format.DATA == b"HWOD"
    assert layers_format.GRANT + layers_format.DONE + layers_format.REFUSED + layers_format.CANCEL == b"GENC"
    assert bounds.BYE + bounds.RESET == b"BR"


def test_a_header_says_key_kinds_and_bytes_and_tensors_begin_at_multiples_of_64():
    made = wire.header_of(KEY, TENSORS, 1.5)
    kinds = [["uint8", [5]], ["float32", [0, 3]], ["float32", [2, 3]]]
    assert msgpack.unpackb(wire.encode_header(made)) == [3, 1.5, [1, 2, "forward", 3, 4, 8], kinds, 64 + 24]
    assert [one.offset for one in made.tensors] == [0, 64, 64]


def test_what_carries_no_samples_has_an_address_without_them():
    made = wire.header_of(ControlKey(1, 2, "tied:wte:0", 7), [], 1.5)
    data = wire.encode_header(made)
    assert msgpack.unpackb(data)[2] == [1, 2, "tied:wte:0", 7]
    assert wire.decode_header(data, 0).key == made.key


def test_the_types_are_those_that_are_named():
    named = "float16 float32 float64 bfloat16 int8 int16 int32 int64 uint8 bool complex64"
    for name in named.split():
        assert header((getattr(torch, name), (3,))).payload_bytes == 3 * getattr(torch, name).itemsize
    with pytest.raises(ValueError, match=r"a tensor of torch\.complex128"):
        header((torch.complex128, (3,)))


@pytest.mark.parametrize(
    ("send", "told"),
    [
        (lambda: header(*[(torch.uint8, (0,))] * 257), "257 tensors, at most 256"),
        (lambda: header((torch.uint8, (1,) * 17)), "with 17 dimensions, at most 16"),
        (lambda: header((torch.float64, (0, 2**31 - 1, 2**31 - 1))), "oversized: a tensor of shape"),
        (lambda: header((torch.uint8, (0, 2**31))), "need a whole number from 0 up to 2147483648"),
        (lambda: wire.header_of(MessageKey(1, 2, "é" * 129, 3, Span(0, 1)), [], 0.0), "neither empty nor long"),
        (lambda: wire.header_of(MessageKey(2**31, 2, "x", 3, Span(0, 1)), [], 0.0), "need a whole number"),
    ],
)
def test_what_a_receiver_would_refuse_is_not_sent(send, told):
    with pytest.raises(ValueError, match=told):
        send()


def test_whatever_may_be_sent_can_be_received():
    """Also with nothing in it: torch multiplies sizes that are beside a 0."""
    limits = Limits(max_message_bytes=10**6, receive_queue_bytes=10**7)
    inbox = Inbox("a", limits, checked=False)
    inbox.restart(anew=True)
    for number, shape in enumerate([(0, 2**31 - 1, 2**31 - 1), (2**31 - 1, 0), (1,) * 16, (), (0,) * 16], start=1):
        sent = [torch.zeros(shape, dtype=dtype) for dtype in (torch.uint8, torch.bool)]
        outgoing = OutgoingMessage.pack(KEY, sent, 10**6, 0.0)
        chunk = wire.Chunk(wire.EXPRESS, number, 0, 0, outgoing.header_bytes)
        message, _ = inbox.accept(chunk, memoryview(outgoing.payload.piece(0, outgoing.header.payload_bytes)), 0.0)
        assert [(one.shape, one.dtype) for one in message.tensors] == [(one.shape, one.dtype) for one in sent]
        assert [one.clone().reshape(-1).tolist() for one in message.tensors] == [
            one.reshape(-1).tolist() for one in sent
        ]


def test_a_message_is_charged_for_itself_and_for_each_of_its_tensors():
    made = wire.header_of(KEY, TENSORS, 1.5)
    assert made.charge_bytes == made.payload_bytes + 6144 + 3 * 1024
    assert OutgoingMessage.pack(KEY, TENSORS, 10**6, 0.0).header.charge_bytes == made.charge_bytes


def test_sizes_of_chunks_small_messages_frames_and_heads():
    assert (wire.CHUNK_BYTES, wire.EXPRESS_BYTES, wire.MAX_FRAME_BYTES) == (128 * 1024, 32 * 1024, 512 * 1024)
    ahead = tuple(range(2**62, 2**62 + wire.MAX_AHEAD))
    largest = wire.Acknowledgement(done=((2**62, ahead), (2**62, ahead)), granted_bytes=2**62)
    assert wire.MAX_AHEAD == 16384
    assert len(wire.encode_acknowledgement(largest)) < wire.MAX_FRAME_BYTES - 1024
    assert wire.decode_acknowledgement(wire.encode_acknowledgement(largest)) == largest
    with pytest.raises(Refusal, match="a chunk's first frame has"):
        wire.decode_chunk(bytes(32 * 1024 + 65))


def test_a_peer_that_does_not_answer_is_dialled_after_2_4_8_and_8_seconds_and_one_that_said_bye_after_a_minute():
    exchange = Exchange(name="a", limits=Limits(), encrypted=False, dialable=True)
    exchange.set_peers(1, [PeerAddress(name="b", endpoint="tcp://127.0.0.1:9", public_key="")], dial=False)
    loop = MailboxLoop(exchange, "", None, lambda _: None)
    loop.obey()
    link = loop.links["b"]
    assert link.redial_s == math.inf
    for expected_s in (2.0, 4.0, 8.0, 8.0):
        before_s = time.monotonic()
        loop.dial(link)
        assert before_s + expected_s <= link.redial_s <= time.monotonic() + expected_s
        loop.hang_up_for(link, 0.0, "again")
    loop.dial(link)
    before_s = time.monotonic()
    loop.take_dialled(link.sockets[0], link, [zmq.Frame(wire.encode_bye(1))])
    assert before_s + 60.0 <= link.redial_s <= time.monotonic() + 60.0
    assert link.connections == 2 + Limits().bulk_connections
    loop._close()


def test_sockets_have_heartbeats_keep_alive_and_bounds():
    with zmq.Context() as context, data_socket(context, zmq.DEALER, None, SOCKET_LIMITS) as socket:
        options = (zmq.HEARTBEAT_IVL, zmq.HEARTBEAT_TIMEOUT, zmq.TCP_KEEPALIVE, zmq.MAXMSGSIZE, zmq.RCVHWM)
        assert [socket.getsockopt(one) for one in options] == [2000, 15000, 1, 512 * 1024, 64]


def test_bounds_of_layers_hold_at_both_ends():
    with pytest.raises(ValueError, match="at most 16 dimensions"):
        ParameterSpec(name="w", shape=(1,) * 17)
    with pytest.raises(ValueError, match="at most 512 bytes"):
        ParameterSpec(name="é" * 257, shape=(1,))
    with pytest.raises(ValueError, match="no machine holds"):
        ParameterSpec(name="w", shape=(2**31, 2**30))
    with pytest.raises(ValueError, match="at most 8192 parameters"):
        Layer(name="0", parameters=tuple(ParameterSpec(name=f"{k}", shape=(1,)) for k in range(8193)))
    one = Layer(name="0", parameters=(ParameterSpec(name="w", shape=(1,)),))
    with pytest.raises(ValueError, match="each of 1 layers once"):
        ShardLayout(layers=(one,), runs=(ShardRun(shard="s", first=0, end=2**62),))
    with Wires() as wires:
        (_, worker) = wires.met("a")
        with pytest.raises(ValueError, match="at most 8192 and 1048576 are allowed"):
            worker.send("s", a_key(), {f"{k}": torch.ones(1) for k in range(8193)})
