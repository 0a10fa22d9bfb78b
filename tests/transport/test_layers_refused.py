"""What a layer wire refuses by name and counts, and what it survives: training goes on with the next layer."""

import itertools
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from spantrain.core.outer.events import TransferWay
from spantrain.core.outer.layers import ParameterSpec
from spantrain.transport.connection.bounds import RESET
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.layers.format import DATA, REFUSED, decode_refused, encode_pair
from spantrain.transport.layers.transport import LayerTransport
from testing.outer.layer_wires import (
    KIB,
    WORDS,
    Wires,
    a_key,
    a_layer,
    has_refused,
    hello_of,
    opened,
    patient,
    same,
    specs,
    still_takes,
)
from testing.patience import PATIENCE_S


@pytest.fixture(params=["curve", "plain"])
def wires(request):
    with Wires(encrypted=request.param == "curve") as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "told"),
    [
        ("w", (3, 4), "float32", r"w: got float32 of shape \(3, 4\), wanted float32 of shape \(4, 3\)"),
        ("w", (4, 3), "float16", r"w: got float16 of shape \(4, 3\), wanted float32"),
        ("v", (4, 3), "float32", r"v: got float32 of shape \(4, 3\), wanted none; w: got none, wanted"),
    ],
    ids=["shape", "type", "name"],
)
def test_another_model_is_refused_by_name_at_both_ends(wires, name, shape, dtype, told):
    shard, worker = wires.met("a")
    shard.expect("a", a_key(), [ParameterSpec(name="w", shape=(4, 3))])
    worker.send("s", a_key(), {name: torch.ones(shape, dtype=getattr(torch, dtype))})
    for heard, peer in ((wires.heard["s"], "a"), (wires.heard["a"], "s")):
        assert re.search(told, heard.reason(peer, a_key()))
    still_takes(wires, shard, worker)
    has_refused(shard, {"not as expected": 1})


def test_a_layer_that_nobody_expects_is_given_up_by_its_sender():
    with Wires(limits=patient(frame_bytes=64 * KIB, window_bytes=256 * KIB, no_progress_s=0.3)) as wires:
        _, worker = wires.met("a")
        worker.send("s", a_key(), a_layer())
        assert wires.heard["a"].reason("s", a_key())


def test_a_layer_that_does_not_come_is_lost_after_a_while():
    with Wires(limits=patient(frame_bytes=64 * KIB, window_bytes=256 * KIB, no_progress_s=0.3)) as wires:
        (shard, _) = wires.met("a")
        shard.expect("a", a_key(), specs(a_layer()))
        assert "nothing came of it from a within 0.3 s" in wires.heard["s"].reason("a", a_key())
        shard.send("b", a_key(), a_layer())
        assert "it is not connected" in wires.heard["s"].reason("b", a_key())


def test_a_layer_over_the_limit_is_refused_before_anything_is_sent():
    with Wires(limits=patient(frame_bytes=64 * KIB, window_bytes=256 * KIB, layer_bytes=1000)) as wires:
        shard, worker = wires.met("a")
        with pytest.raises(ValueError, match="has 1204 bytes, at most 1000 are allowed"):
            shard.expect("a", a_key(), [ParameterSpec(name="w", shape=(301,))])
        with pytest.raises(ValueError, match="at most 1000"):
            worker.send("s", a_key(), {"w": torch.ones(301)})
        with pytest.raises(ValueError, match=r"w: torch\.int64 on cpu"):
            worker.send("s", a_key(), {"w": torch.ones(3, dtype=torch.int64)})


def test_a_stranger_is_refused_counted_and_disturbs_nobody(raw):
    with Wires() as wires:
        shard, worker = wires.met("a")
        still_takes(wires, shard, worker, 1)
        raw(shard, KeyPair.generate(), count=1)[0].send(b"H")
        while not shard.counters().refused.get("unknown peer"):
            wires.heard["s"].until(lambda told: True)
        still_takes(wires, shard, worker, 2)


def test_a_known_key_cannot_speak_under_another_name(raw):
    with Wires() as wires:
        shard, worker = wires.met("a")
        other = KeyPair.generate()
        shard.set_peers([wires.address("a"), PeerAddress(name="b", endpoint="", public_key=other.public_key)])
        sockets = raw(shard, other, count=1)
        sockets[0].send(hello_of("a"))
        sockets[0].send(opened(a_key(), specs(a_layer())))
        assert sockets[0].recv() == RESET
        has_refused(shard, {"unknown peer": 1, "no greeting": 1})
        still_takes(wires, shard, worker)


def test_a_name_that_is_no_peers_is_refused_without_encryption_too(raw):
    with Wires(encrypted=False) as wires:
        shard, worker = wires.met("a")
        (socket,) = raw(shard, count=1)
        socket.send(hello_of("x"))
        socket.send(encode_pair(DATA, 0, 0))
        assert socket.recv() == RESET
        has_refused(shard, {"unknown peer": 1, "no greeting": 1})
        still_takes(wires, shard, worker)


def test_more_bytes_than_the_layer_has_are_refused(intruder):
    wires, shard, worker, (control, data) = intruder
    shard.expect("b", a_key(), WORDS)
    data.send(opened(a_key(), WORDS))
    data.send_multipart([encode_pair(DATA, 0, 0), bytes(401)])
    assert "more came than the 400 bytes that may" in wires.heard["s"].reason("b", a_key())
    while (answer := control.recv())[:1] != REFUSED:
        pass
    assert decode_refused(answer) == (0, "oversized: more came than the 400 bytes that may")
    still_takes(wires, shard, worker)
    has_refused(shard, {"oversized": 1})


def test_more_bytes_than_the_layer_has_are_refused_also_if_they_came_before_it_was_expected(intruder):
    wires, shard, worker, (_, data) = intruder
    data.send(opened(a_key(), WORDS))
    data.send_multipart([encode_pair(DATA, 0, 0), bytes(401)])
    data.send(b"?")  # counted after what came before it
    has_refused(shard, {"malformed": 1})
    shard.expect("b", a_key(), WORDS)
    assert "more came than the 400 bytes that may" in wires.heard["s"].reason("b", a_key())
    has_refused(shard, {"malformed": 1, "oversized": 1})
    still_takes(wires, shard, worker)


def test_pieces_out_of_place_change_nothing(intruder):
    wires, shard, worker, (_, data) = intruder
    shard.expect("b", a_key(), WORDS)
    data.send(opened(a_key(), WORDS))
    data.send_multipart([encode_pair(DATA, 0, 100), bytes(300)])
    data.send_multipart([encode_pair(DATA, 0, 0), b"\1" * 400])
    assert wires.heard["s"].layer("b", a_key())["w"].view(torch.uint8).eq(1).all()
    still_takes(wires, shard, worker)
    has_refused(shard, {"malformed": 1})


def test_too_much_before_it_is_expected_is_refused(intruder):
    wires, shard, worker, (control, data) = intruder
    large = [ParameterSpec(name="w", shape=(100_000,))]
    data.send(opened(a_key(), large))
    for k in range(3):
        data.send_multipart([encode_pair(DATA, 0, 32 * KIB * k), bytes(32 * KIB)])
    answer = control.recv()
    assert "over 65536 bytes came before it was expected" in decode_refused(answer)[1]
    still_takes(wires, shard, worker)
    has_refused(shard, {"not expected": 1})


def test_a_frame_over_the_limit_ends_the_connection_and_only_that(intruder):
    wires, shard, worker, (_, data) = intruder
    shard.expect("b", a_key(), WORDS)
    data.send(opened(a_key(), WORDS))
    data.send_multipart([encode_pair(DATA, 0, 0), bytes(2 * 2**20)])
    assert wires.heard["s"].reason("b", a_key()) == "its connection has ended"
    still_takes(wires, shard, worker)
    assert shard.counters().refused["cut off"] >= 1


CHILD = """
import sys, torch
sys.path[:0] = {path!r}
from testing.outer.layer_wires import Heard, a_key, a_layer
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.connection.peers import KeyPair
from spantrain.transport.layers.transport import LayerLimits, LayerTransport
wire = LayerTransport(name="b", bind="", keypair=None, listener=Heard(), limits=LayerLimits())
wire.set_peers([PeerAddress(name="s", endpoint={endpoint!r}, public_key="")])
wire.send("s", a_key(1), {{"w": torch.ones(3)}})
wire.send("s", a_key(0), {{"w": torch.ones(30_000_000)}})
print("sending", flush=True)
sys.stdin.read()
"""


def test_a_peer_that_is_killed_is_noticed_at_once_and_comes_back(tmp_path):
    """What was on its way is lost; from its next life all is taken in again."""
    with Wires(encrypted=False, limits=patient()) as wires:
        shard, worker = wires.met("a")
        shard.set_peers([wires.address("a"), PeerAddress(name="b", endpoint="", public_key="")])
        script = tmp_path / "child.py"
        script.write_text(CHILD.format(path=sys.path, endpoint=shard.endpoint))
        with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout.readline() == b"sending\n"
            for k in (1, 2):
                shard.expect("b", a_key(k), [ParameterSpec(name="w", shape=(3,))])
            wires.heard["s"].layer("b", a_key(1))
            os.kill(child.pid, signal.SIGKILL)
        assert wires.heard["s"].reason("b", a_key(2)) == "its connection has ended"
        still_takes(wires, shard, worker)
        again = wires.open("b")
        again.set_peers([wires.address("s")])
        shard.expect("b", a_key(3), specs(a_layer()))
        again.send("s", a_key(3), a_layer())
        assert same(wires.heard["s"].layer("b", a_key(3)), a_layer())


def test_a_shard_that_is_started_again_elsewhere_or_at_the_same_place_is_dialled_anew(wires):
    shard, worker = wires.met("a")
    worker.expect("s", a_key(0), specs(a_layer()))
    shard.send("a", a_key(0), a_layer())
    wires.heard["a"].layer("s", a_key(0))
    worker.expect("s", a_key(1), specs(a_layer()))
    shard.close()
    assert wires.heard["a"].reason("s", a_key(1)) == "the connection has ended"
    for bind in (shard.endpoint, "tcp://127.0.0.1:0"):
        again = wires.open("s", bind=bind)
        again.set_peers([wires.address("a")])
        worker.set_peers([wires.address("s")])
        worker.expect("s", a_key(2, way=TransferWay.PULL), specs(a_layer()))
        again.send("a", a_key(2, way=TransferWay.PULL), a_layer())
        assert same(wires.heard["a"].layer("s", a_key(2, way=TransferWay.PULL)), a_layer())
        wires.heard["a"].whole.clear()
        again.close()


def test_an_address_that_is_taken_is_named():
    with Wires() as wires:
        (shard,) = wires.met()
        with pytest.raises(OSError, match=r"cannot listen on tcp://127\.0"):
            LayerTransport(name="t", bind=shard.endpoint, keypair=None, listener=wires.heard["s"])


@pytest.mark.parametrize("encrypted", [True, False], ids=["curve", "plain"])
def test_a_worker_that_dials_before_it_is_known_waits_and_is_not_refused(encrypted):
    limits = patient(frame_bytes=64 * KIB, window_bytes=256 * KIB, early_s=PATIENCE_S)
    with Wires(encrypted=encrypted, limits=limits) as wires:
        shard, worker = wires.met("a")
        early = wires.open("b")
        early.set_peers([wires.address("s")])
        still_takes(wires, shard, worker, number=1)
        shard.set_peers([wires.address("a"), wires.address("b")])
        shard.expect("b", a_key(), specs(a_layer()))
        early.send("s", a_key(), a_layer())
        assert same(wires.heard["s"].layer("b", a_key()), a_layer())
        still_takes(wires, shard, worker)
        assert shard.counters().refused == early.counters().refused == {}


def test_who_waits_to_be_known_and_goes_is_counted(raw):
    limits = patient(frame_bytes=64 * KIB, window_bytes=256 * KIB, early_s=PATIENCE_S)
    with Wires(encrypted=False, limits=limits) as wires:
        shard, worker = wires.met("a")
        (socket,) = raw(shard, count=1)
        socket.send(hello_of("x"))
        socket.send(encode_pair(DATA, 0, 0))
        assert socket.recv() == RESET, "for the frame: the hello has come before it"
        socket.close()
        has_refused(shard, {"no greeting": 1, "unknown peer": 1})
        still_takes(wires, shard, worker)


@pytest.mark.parametrize("encrypted", [True, False], ids=["curve", "plain"])
def test_a_worker_that_was_refused_is_let_in_when_it_is_known(encrypted):
    limits = patient(frame_bytes=64 * KIB, window_bytes=256 * KIB, early_s=0.0)
    with Wires(encrypted=encrypted, limits=limits) as wires:
        shard, worker = wires.met("a")
        early = wires.open("b")
        early.set_peers([wires.address("s")])
        numbers = itertools.count(1)
        while not shard.counters().refused.get("unknown peer"):
            still_takes(wires, shard, worker, next(numbers))
        shard.set_peers([wires.address("a"), wires.address("b")])
        shard.expect("b", a_key(), specs(a_layer()))
        early.send("s", a_key(), a_layer())
        assert same(wires.heard["s"].layer("b", a_key()), a_layer())
