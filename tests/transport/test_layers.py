"""Layers go whole from one side to the other, whichever expects or sends first, whatever else is on its way."""

import pytest
import torch

from spantrain.core.outer.events import Ticket, TransferWay
from spantrain.errors import ProtocolError
from spantrain.transport.layers.arrivals import Arrivals
from spantrain.transport.layers.copiers import BufferPool, Copiers
from spantrain.transport.layers.format import Opening
from spantrain.transport.layers.interface import LayerLimits
from testing.outer.layer_wires import KIB, SilentLink, Wires, a_key, a_layer, patient, same, specs
from testing.patience import no_threads_left


@pytest.fixture(params=["curve", "plain"])
def wires(request):
    with Wires(encrypted=request.param == "curve") as opened:
        yield opened


@pytest.mark.parametrize("way", list(TransferWay))
@pytest.mark.parametrize("early", [False, True], ids=["expected first", "sent first"])
def test_a_layer_arrives_bit_for_bit(wires, way, early):
    shard, worker = wires.met("a")
    source, target = (worker, shard) if way is TransferWay.PUSH else (shard, worker)
    names = ("a", "s") if way is TransferWay.PUSH else ("s", "a")
    key, layer = a_key(way=way), a_layer()
    calls = [lambda: target.expect(names[0], key, specs(layer)), lambda: source.send(names[1], key, layer)]
    for call in reversed(calls) if early else calls:
        call()
    assert same(wires.heard[names[1]].layer(names[0], key), layer)
    wires.heard[names[0]].until(lambda told: told.gone == [(names[1], key)])
    assert not wires.heard[names[0]].missing


@pytest.mark.parametrize("copiers", [0, 1, 3])
def test_many_layers_both_ways_at_once_from_several_workers(copiers):
    limits = patient(frame_bytes=64 * KIB, window_bytes=64 * KIB, copiers=copiers)
    with Wires(limits=limits) as wires:
        shard, *workers = wires.met("a", "b")
        for k in range(6):
            for name, worker in zip("ab", workers, strict=True):
                seed = 10 * k + ord(name)
                up, down = a_key(k, number=ord(name)), a_key(k, number=ord(name), way=TransferWay.PULL)
                shard.expect(name, up, specs(a_layer(seed)))
                worker.send("s", up, a_layer(seed))
                worker.expect("s", down, specs(a_layer(seed + 1)))
                shard.send(name, down, a_layer(seed + 1))
        for k in range(6):
            for name in "ab":
                seed = 10 * k + ord(name)
                up, down = a_key(k, number=ord(name)), a_key(k, number=ord(name), way=TransferWay.PULL)
                assert same(wires.heard["s"].layer(name, up), a_layer(seed))
                assert same(wires.heard[name].layer("s", down), a_layer(seed + 1))
        for name in "ab":
            wires.heard[name].until(lambda told: len(told.gone) == 6)
        counters = shard.counters()
        assert counters.bytes_received == dict.fromkeys("ab", 6 * sum(one.size_bytes for one in specs(a_layer())))
        assert counters.refused == {}


def test_layers_to_one_peer_go_in_the_order_of_the_calls(wires):
    shard, worker = wires.met("a")
    for k in range(5):
        worker.send("s", a_key(k), {"w": torch.full((40_000,), float(k))})
    for k in reversed(range(5)):
        shard.expect("a", a_key(k), specs({"w": torch.zeros(40_000)}))
    wires.heard["a"].until(lambda told: len(told.gone) == 5)
    assert [wires.heard["s"].layer("a", a_key(k))["w"][0] for k in range(5)] == [0, 1, 2, 3, 4]


def test_what_came_is_its_owners_and_its_memory_is_used_again_only_when_nobody_holds_it(wires):
    shard, worker = wires.met("a")
    first = {"w": torch.randn(50_000)}
    kept = []
    for k in range(4):
        shard.expect("a", a_key(k), specs(first))
        worker.send("s", a_key(k), {"w": first["w"] + k})
        came = wires.heard["s"].layer("a", a_key(k))
        wires.heard["s"].whole.clear()
        if k == 0:
            kept.append(came)
        del came
    assert torch.equal(kept[0]["w"], first["w"])
    kept[0]["w"].zero_()


def test_a_forgotten_layer_is_told_of_nowhere_and_one_after_it_arrives(wires):
    shard, worker = wires.met("a")
    layer = a_layer()
    worker.send("s", a_key(0, number=1), layer)
    shard.forget(Ticket(1, 1))
    assert "1.1 has ended" in wires.heard["a"].reason("s", a_key(0, number=1))
    shard.expect("a", a_key(0, number=2), specs(layer))
    worker.send("s", a_key(0, number=2), layer)
    assert same(wires.heard["s"].layer("a", a_key(0, number=2)), layer)
    assert not wires.heard["s"].missing


def test_a_sender_that_forgets_is_noticed_by_who_expects(wires):
    shard, worker = wires.met("a")
    layer = a_layer()
    shard.expect("a", a_key(0), specs(layer)[:1])
    worker.send("s", a_key(0), dict(list(layer.items())[:1]))
    wires.heard["s"].layer("a", a_key(0))
    worker.send("s", a_key(1), layer)  # more than may come before it is expected: it hangs on
    worker.forget(Ticket(1, 1))
    worker.send("s", a_key(2, number=2), layer)
    shard.expect("a", a_key(2, number=2), specs(layer))
    assert same(wires.heard["s"].layer("a", a_key(2, number=2)), layer)
    assert not wires.heard["a"].missing


def test_closing_leaves_no_threads_and_may_be_done_twice():
    with no_threads_left(), Wires() as wires:
        shard, worker = wires.met("a")
        shard.expect("a", a_key(), specs(a_layer()))
        worker.send("s", a_key(), a_layer())
        wires.heard["s"].layer("a", a_key())
        worker.close()
        worker.close()
        with pytest.raises(ProtocolError, match="a: the layer wire is closed"):
            worker.send("s", a_key(1), a_layer())


def test_a_layer_after_a_long_silence_is_waited_for_anew():
    """The time that may pass begins with the layer, whenever the peer was last heard of."""
    limits = LayerLimits(frame_bytes=64 * KIB, window_bytes=64 * KIB)
    said = []
    arrivals = Arrivals(
        limits, BufferPool(),
        Copiers(0, name="s", every_bytes=1, progressed=said.append, hand_over=said.append, died=said.append),
        lost=lambda *told: said.append(told),
    )  # fmt: skip
    link = SilentLink(limits)
    layer = specs({"w": torch.zeros(4)})
    late_s = 10 * limits.no_progress_s
    arrivals.expect(link, "a", a_key(), layer, late_s)
    arrivals.opened(link, Opening(number=0, key=a_key(), parameters=layer), late_s)
    arrivals.overdue(late_s + 0.99 * limits.no_progress_s, {"a": link})
    assert said == []
    arrivals.overdue(late_s + limits.no_progress_s, {"a": link})
    assert said == [("a", a_key(), "nothing more came of it from a within 30 s")]
