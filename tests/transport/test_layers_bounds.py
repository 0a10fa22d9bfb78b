"""What one peer can make a layer wire keep, as docs/wire-protocol.md states it."""

import pytest
import zmq
from zmq.utils import z85

from spantrain.core.outer.layers import ParameterSpec
from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.connection.links import data_socket
from spantrain.transport.connection.listener import Admission
from spantrain.transport.connection.peers import KeyPair
from spantrain.transport.layers.arrivals import Arrivals
from spantrain.transport.layers.copiers import BufferPool, Copiers
from spantrain.transport.layers.format import OPEN, LayerHello, Opening, decode_opening
from spantrain.transport.layers.interface import LayerLimits
from spantrain.transport.layers.loop import LayerLoop, socket_limits
from testing.outer.layer_wires import KIB, SilentLink, Wires, a_key, has_refused, hello_of, patient, still_takes
from testing.patience import PATIENCE_S

MIB = 2**20
ONE = (ParameterSpec(name="w", shape=(1,)),)


def arrivals_of(limits):
    copiers = Copiers(0, name="s", every_bytes=1, progressed=print, hand_over=print, died=print)
    return Arrivals(limits, BufferPool(), copiers, lost=lambda *told: None)


def opening(number, parameters=ONE):
    return Opening(number=number, key=a_key(number), parameters=parameters)


def test_defaults_are_those_of_the_page():
    limits = LayerLimits()
    assert (limits.layer_bytes, limits.frame_bytes, limits.window_bytes) == (8 * 2**30, 4 * MIB, 16 * MIB)
    assert (limits.early_s, limits.no_progress_s) == (1.0, 30.0)


def test_pieces_are_as_large_as_both_sides_take():
    loop = LayerLoop("a", "", None, LayerLimits(), print)
    for theirs, agreed in ((MIB, MIB), (8 * MIB, 4 * MIB)):
        link = SilentLink(LayerLimits())
        loop.greeted(
            link,
            LayerHello(name="b", session=1, connection=0, connections=2, frame_bytes=theirs, window_bytes=32 * MIB),
        )
        assert (link.state.frame_bytes, link.state.window_bytes) == (agreed, 32 * MIB)


@pytest.mark.parametrize(("window", "unread"), [(4, 4), (16, 4), (64, 16)])
def test_frames_that_were_not_looked_at_are_4_messages_or_a_window(window, unread):
    limits = LayerLimits(window_bytes=window * MIB)
    with zmq.Context() as context, data_socket(context, zmq.DEALER, None, socket_limits(limits)) as socket:
        options = (zmq.RCVHWM, zmq.MAXMSGSIZE, zmq.HEARTBEAT_IVL)
        assert [socket.getsockopt(one) for one in options] == [unread, 4 * MIB + 64, 2000]


def test_a_head_over_a_mebibyte_is_refused():
    with pytest.raises(Refusal, match="at most 1048576 are allowed"):
        decode_opening(OPEN + bytes(8) + bytes(MIB + 1))


def test_64_layers_of_16384_parameters_may_be_opened_before_they_are_expected():
    arrivals, link = arrivals_of(LayerLimits()), SilentLink(LayerLimits())
    for number in range(64):
        arrivals.opened(link, opening(number), 0.0)
    with pytest.raises(Refusal, match=r"not expected: .* nor 64 before it"):
        arrivals.opened(link, opening(64), 0.0)
    arrivals = arrivals_of(LayerLimits())
    half = tuple(ParameterSpec(name=f"{k}", shape=(1,)) for k in range(8192))
    for number in range(2):
        arrivals.opened(link, opening(number, half), 0.0)
    with pytest.raises(Refusal, match="not expected"):
        arrivals.opened(link, opening(2), 0.0)


def test_1280_pieces_of_a_layer_may_come_before_it_is_expected():
    arrivals, link = arrivals_of(LayerLimits()), SilentLink(LayerLimits())
    arrivals.opened(link, opening(0, (ParameterSpec(name="w", shape=(10**6,)),)), 0.0)
    for place in range(1280):
        arrivals.data(link, 0, place, memoryview(b"x"), 0.0)
    with pytest.raises(Refusal, match="over 1280 pieces came before it was expected"):
        arrivals.data(link, 0, 1280, memoryview(b"x"), 0.0)


def test_64_keys_that_are_not_known_may_wait():
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        admission = Admission(context, lambda _key: None, early_s=PATIENCE_S)
        asking.connect("inproc://zeromq.zap.01")
        for number in range(65):
            key = z85.decode(KeyPair.generate().public_key)
            asking.send_multipart([b"", b"1.0", b"%d" % number, b"", b"", b"", b"CURVE", key])
        assert [refusal.reason for refusal in admission.answer()] == ["unknown peer"]
        assert asking.recv_multipart(zmq.NOBLOCK)[2:4] == [b"64", b"300"]
        assert admission.answer() == []
        admission.close()


def test_64_hellos_under_names_that_are_not_known_may_wait(raw):
    limits = patient(frame_bytes=64 * KIB, window_bytes=256 * KIB, early_s=PATIENCE_S)
    with Wires(encrypted=False, limits=limits) as wires:
        shard, worker = wires.met("a")
        for number, socket in enumerate(raw(shard, count=65)):
            socket.send(hello_of(f"x{number}"))
        has_refused(shard, {"unknown peer": 1})
        still_takes(wires, shard, worker)
        assert shard.counters().refused == {"unknown peer": 1}
