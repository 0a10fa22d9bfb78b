"""What a cluster's process has done by one thread: in order, and nothing of a connection that has ended."""

import threading
from typing import Any

import torch

from spantrain.core.outer.events import ClusterBeat, Ticket, TransferWay
from spantrain.outer.client.action_queue import ActionQueue
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.layers.interface import LayerKey

KEY = LayerKey(ticket=Ticket(1, 1), way=TransferWay.PUSH, layer=0)
SHARDS = (PeerAddress(name="s0", endpoint="tcp://127.0.0.1:1", public_key=""),)
BEAT = ClusterBeat(cluster="a")


class Ways:
    """A link and a wire that remember what they were told, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.link, self.wire = _Link(self.told), _Wire(self.told)


class _Link:
    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def tell(self, *events: Any) -> None:
        self._told.append(events)

    def register_again(self, reason: str) -> None:
        self._told.append(reason)

    def close(self) -> None:
        self._told.append("link closed")


class _Wire:
    def __init__(self, told: list[Any]) -> None:
        self._told = told

    def set_peers(self, peers: Any) -> None:
        self._told.append(peers)

    def expect(self, peer: str, key: LayerKey, parameters: Any) -> None:
        self._told.append((peer, key, parameters))

    def send(self, peer: str, key: LayerKey, tensors: Any) -> None:
        self._told.append((peer, key, tensors))

    def forget(self, ticket: Ticket) -> None:
        self._told.append(ticket)

    def close(self) -> None:
        self._told.append("wire closed")


def actions_with(ways: Ways) -> ActionQueue:
    actions = ActionQueue("a")
    actions.use(ways.link, ways.wire)
    return actions


def never_lost(shard: str, key: LayerKey, reason: str) -> None:
    raise AssertionError(f"{key} to {shard} was lost: {reason}")


def test_the_wire_says_goodbye_before_the_master_hears_one():
    """As soon as the master has, it tells the shards that this is no peer any more, and they hang up."""
    ways = Ways()
    actions = actions_with(ways)
    actions.tell(BEAT)
    actions.close()
    assert ways.told == [(BEAT,), "wire closed", "link closed"]


def test_dialling_anew_leaves_no_connection_of_before():
    ways = Ways()
    actions = actions_with(ways)
    actions.dial_anew(SHARDS)
    actions.close()
    assert ways.told[:2] == [(), SHARDS]


def test_what_was_to_be_done_over_a_connection_that_ended_is_left_out():
    ways, busy, go = Ways(), threading.Event(), threading.Event()
    actions = actions_with(ways)

    def made_slowly() -> dict[str, torch.Tensor]:
        busy.set()
        assert go.wait(20.0)
        return {}

    actions.send("s0", KEY, made_slowly, lost=never_lost)
    actions.forget(KEY.ticket)
    assert busy.wait(20.0)
    actions.connect()
    go.set()
    actions.tell(BEAT)
    actions.close()
    assert ways.told == [("s0", KEY, {}), (BEAT,), "wire closed", "link closed"]


def test_a_layer_that_cannot_be_made_is_lost_and_the_next_is_sent():
    ways, lost = Ways(), []

    def broken() -> dict[str, torch.Tensor]:
        raise ValueError("no room")

    actions = actions_with(ways)
    actions.send("s0", KEY, broken, lost=lambda *told: lost.append(told))
    actions.send("s0", KEY, dict, lost=never_lost)
    actions.close()
    assert lost == [("s0", KEY, "no room")]
    assert ways.told[0] == ("s0", KEY, {})
