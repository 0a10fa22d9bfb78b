"""What several devices of one place lack is taken from afar once, and by each of them a part."""

from spantrain.core.checkpoint import StoredTensor
from spantrain.core.shares import TensorPart
from spantrain.runtime.redistribution.exchange import ExchangeGroup, HeldTensors, takers_of

SITE = {"a": 0, "b": 0, "c": 0, "x": 1, "y": 1}
NOTHING = ((), {})
NAMES = [f"t{number}" for number in range(6)]


def group(own):
    peers = tuple(name for name in SITE if name != own)
    return ExchangeGroup(own=own, peers=peers, nearness=lambda peer: 1 if SITE[peer] == SITE[own] else 2)


def files(**held):
    stored = StoredTensor(part=TensorPart(full_shape=(2, 3)), dtype="float32")
    return {name: HeldTensors(device=name, tensors=dict.fromkeys(held.get(name, ()), stored)) for name in SITE}


def test_all_divide_what_nobody_near_holds_alike():
    there = files(x=NAMES, c=NAMES[:2])
    found = takers_of(group("a"), ["b", "a", "y"], NAMES, there)
    assert found == takers_of(group("b"), ["b", "a", "y"], NAMES, there)
    assert found == (("a", "b"), {"t2": "a", "t3": "b", "t4": "a", "t5": "b"})


def test_who_is_alone_in_its_place_or_holds_something_else_takes_all_itself():
    there = files(x=NAMES)
    assert takers_of(group("a"), ["a", "y"], NAMES, there) == NOTHING
    assert takers_of(group("c"), ["a", "b"], NAMES, there) == NOTHING
    assert takers_of(group("a"), ["a", "b"], NAMES, files(c=NAMES))[1] == {}
    assert takers_of(group("a"), [], NAMES, there) == NOTHING
