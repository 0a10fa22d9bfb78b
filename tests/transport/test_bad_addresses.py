"""A peer whose address nobody can dial: it is refused by name, and the others are talked to as before."""

import pytest
import torch

from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.mailbox.mailbox import Mailbox
from testing.outer.layer_wires import Wires, a_key, a_layer, has_refused, same, specs
from testing.patience import until

NO_KEY = "#" * 40
"""Looks like Z85, and stands for no 32 bytes."""


@pytest.mark.parametrize(
    ("endpoint", "key", "told"),
    [
        ("tcp://", "", "an endpoint looks like"),
        ("ipc:///tmp/x", "", "an endpoint looks like"),
        ("tcp://h:1\n", "", "an endpoint looks like"),
        ("tcp://h:1", "short", "40 characters of Z85"),
        ("tcp://h:1", "ä" * 40, "40 characters of Z85"),
    ],
)
def test_what_cannot_be_an_address_is_none(endpoint, key, told):
    with pytest.raises(ValueError, match=f"peer b: .*{told}"):
        PeerAddress(name="b", endpoint=endpoint, public_key=key)


@pytest.mark.parametrize(
    "endpoint", ["tcp://[fe80::1%eth0]:5000", "tcp://[::1]:5000", "tcp://gpu_1.lab.example:5000", ""]
)
def test_what_can_be_dialled_is_an_address(endpoint):
    assert PeerAddress(name="b", endpoint=endpoint, public_key="").endpoint == endpoint


def test_a_mailbox_lives_on_beside_a_peer_that_cannot_be_dialled(key, collect):
    a, c = Mailbox(name="a"), Mailbox(name="c")
    try:
        nobody = PeerAddress(name="b", endpoint="tcp://127.0.0.1:9", public_key=NO_KEY)
        c.set_peers(1, [a.address])
        a.set_peers(1, [nobody, c.address])
        until(lambda: a.counters().refused.get("bad address", 0) > 0)
        a.send("c", key(), [torch.ones(3)])
        assert collect(c, 1)[0].source == "a"
    finally:
        a.close()
        c.close()


def test_a_layer_wire_lives_on_beside_a_peer_that_cannot_be_dialled():
    with Wires() as wires:
        shard, worker = wires.met("a")
        worker.set_peers([wires.address("s"), PeerAddress(name="t", endpoint="tcp://127.0.0.1:9", public_key=NO_KEY)])
        shard.expect("a", a_key(), specs(a_layer()))
        worker.send("s", a_key(), a_layer())
        assert same(wires.heard["s"].layer("a", a_key()), a_layer())
        has_refused(worker, {"bad address": 1})
