"""What a cluster's process has done by one thread: in order, and nothing of a connection that has ended."""

import threading
from typing import Any

import torch

from spantrain.core.outer.commands import Move
from spantrain.core.outer.events import ClusterBeat, LayerTransfer, Ticket, TransferLost, TransferWay
from spantrain.core.outer.layers import Layer, ParameterSpec
from spantrain.outer.client.action_queue import ActionQueue
from spantrain.outer.client.replica import ClusterCopy
from spantrain.outer.link.link import MasterWelcome
from spantrain.outer.pipeline import StageWorker
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.layers.interface import LayerKey
from testing.patience import PATIENCE_S, until

TICKET = Ticket(1, 1)
LAYERS = tuple(Layer(name=f"{k}", parameters=(ParameterSpec(name=f"{k}.w", shape=(2,)),)) for k in (0, 1))
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
        self.full_for: int | None = None
        """A layer that it refuses."""

    def set_peers(self, peers: Any) -> None:
        self._told.append(peers)

    def expect(self, peer: str, key: LayerKey, parameters: Any) -> None:
        if key.layer == self.full_for:
            raise ValueError("no room")
        self._told.append(key.layer)

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


def test_the_wire_says_goodbye_before_the_master_hears_one():
    """As soon as the master has, it tells the shards that this is no peer any more, and they hang up."""
    ways = Ways()
    actions = actions_with(ways)
    actions.do(lambda: actions.link.tell(BEAT))
    actions.close()
    assert ways.told == [(BEAT,), "wire closed", "link closed"]


def test_what_was_to_be_done_over_a_connection_that_ended_is_left_out():
    ways, busy, go = Ways(), threading.Event(), threading.Event()
    actions = actions_with(ways)

    def takes_long() -> None:
        busy.set()
        assert go.wait(PATIENCE_S)
        ways.told.append("done")

    actions.do(takes_long)
    actions.do(lambda: actions.wire.forget(TICKET))
    assert busy.wait(PATIENCE_S)
    actions.connect()
    go.set()
    actions.do(lambda: actions.link.tell(BEAT))
    actions.close()
    assert ways.told == ["done", (BEAT,), "wire closed", "link closed"]


def worker_with(ways: Ways) -> StageWorker:
    worker = StageWorker("a/w1", LAYERS, (0, 1), ClusterCopy({"0.w": torch.zeros(2), "1.w": torch.zeros(2)}))
    worker.connect(ways.link, ways.wire)
    return worker


def test_dialling_anew_leaves_no_connection_of_before():
    ways = Ways()
    worker = worker_with(ways)
    worker.joined(MasterWelcome(layout=None, rule=Nesterov(), settings=OuterSettings(), peers=SHARDS))
    worker.close()
    assert ways.told[:2] == [(), SHARDS]


def test_a_layer_that_cannot_be_moved_is_lost_and_the_next_is_moved():
    ways = Ways()
    ways.wire.full_for = 0
    worker = worker_with(ways)
    moves = [
        LayerTransfer(ticket=TICKET, cluster="a", worker="a/w1", layer=layer, shard="s0", size_bytes=8)
        for layer in (0, 1)
    ]
    for transfer in moves:
        worker.commanded(Move(way=TransferWay.PULL, transfer=transfer, version=1, reason=""))
    until(lambda: len(ways.told) == 2)
    worker.close()
    assert ways.told[:2] == [1, (TransferLost(way=TransferWay.PULL, transfer=moves[0], reason="no room"),)]
