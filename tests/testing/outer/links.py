"""Shards and clusters without numbers behind real links to a real master; layers go from hand to hand."""

import threading
from collections.abc import Callable
from typing import Any

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.events import LayerTransfer, OuterEvent, TransferWay
from spantrain.core.outer.layers import Layer, ShardLayout
from spantrain.outer.link.link import MasterLink, MasterWelcome, MemberFacts
from spantrain.transport.connection.peers import PeerAddress
from testing.outer.members import Content, MadeUpCluster, MadeUpShard
from testing.outer.policy import layers_of

LAYERS = layers_of(1, 2, 3, 4, 5)
WHOLE = tuple(range(len(LAYERS)))


class Hall:
    """Where members find each other: the data plane."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.shards: dict[str, LinkedShard] = {}
        self.clusters: dict[str, LinkedCluster] = {}


class _Linked:
    """What shards and clusters have in common."""

    def __init__(self, hall: Hall, name: str) -> None:
        self.hall = hall
        self.name = name
        self.link: MasterLink
        self.welcomes: list[MasterWelcome] = []
        self.peers: tuple[PeerAddress, ...] = ()
        self.losses: list[str] = []

    def connect(self, address: str, token: str, facts: MemberFacts) -> None:
        self.link = MasterLink(address=address, token=token, member=self.name, facts=facts, listener=self, beat_s=0.2)
        self.link.start()

    def joined(self, welcome: MasterWelcome) -> tuple[OuterEvent, ...]:
        with self.hall.changed:
            self.welcomes.append(welcome)
            self.peers = welcome.peers
            self.hall.changed.notify_all()
            return self.registration(welcome.layout)

    def layout_known(self, layout: ShardLayout) -> tuple[OuterEvent, ...]:
        with self.hall.lock:
            return self.registration(layout)

    def peers_changed(self, peers: tuple[PeerAddress, ...]) -> None:
        with self.hall.changed:
            self.peers = peers
            self.hall.changed.notify_all()

    def disconnected(self, reason: str) -> None:
        with self.hall.changed:
            self.losses.append(reason)
            self.hall.changed.notify_all()

    def died(self, fault: str) -> None:
        self.disconnected(fault)

    def commanded(self, command: Any) -> None:
        with self.hall.changed:
            self.heard(command)
            self.hall.changed.notify_all()

    def beat(self) -> tuple[OuterEvent, ...]:
        raise NotImplementedError

    def registration(self, layout: ShardLayout | None) -> tuple[OuterEvent, ...]:
        raise NotImplementedError

    def heard(self, command: Any) -> None:
        raise NotImplementedError


class LinkedShard(_Linked):
    """A shard whose memory outlives its link."""

    def __init__(self, hall: Hall, name: str, memory: MadeUpShard | None = None) -> None:
        super().__init__(hall, name)
        self.memory = memory
        hall.shards[name] = self

    def registration(self, layout: ShardLayout | None) -> tuple[OuterEvent, ...]:
        if layout is None:
            return ()
        self.memory = self.memory or MadeUpShard(self.name, layout.layers_of(self.name), counts_samples=True)
        return (self.memory.registered(),)

    def beat(self) -> tuple[OuterEvent, ...]:
        with self.hall.lock:
            assert self.memory
            return (self.memory.beat(),)

    def heard(self, command: Any) -> None:
        assert self.memory
        if isinstance(command, do.Move):
            if command.way is TransferWay.PULL:
                content = self.memory.can_restore()[command.version]
                self.hall.clusters[command.transfer.cluster].got(command.transfer, command.version, content)
        elif isinstance(command, do.Restore) and command.source not in self.memory.can_restore():
            self.link.register_again(f"there is no version {command.source}")
        elif answer := self.memory.on_command(command):
            self.link.tell(answer)

    def got(self, transfer: LayerTransfer, content: Content) -> None:
        assert self.memory
        self.memory.pushes.setdefault(transfer.ticket, {})[transfer.layer] = content
        self.link.tell(on.Moved(way=TransferWay.PUSH, transfer=transfer))


class LinkedCluster(_Linked):
    """A cluster with the real protocol; it trains when told to."""

    def __init__(self, hall: Hall, name: str) -> None:
        super().__init__(hall, name)
        self.cluster = MadeUpCluster(name, ({name: WHOLE},))
        self.early: list[tuple[LayerTransfer, int, Content]] = []
        """Layers of a pull that the master has not told this cluster of yet."""
        hall.clusters[name] = self

    def registration(self, layout: ShardLayout | None) -> tuple[OuterEvent, ...]:
        assert layout
        return tuple(self.cluster.registered())

    def beat(self) -> tuple[OuterEvent, ...]:
        return (on.ClusterBeat(cluster=self.name),)

    def heard(self, command: Any) -> None:
        self.say(self.cluster.on_command(command))
        if isinstance(command, do.StartPull):
            early, self.early = self.early, []
            for arrived in early:
                self.got(*arrived)

    def say(self, said: list[Any]) -> None:
        """Send layers, tell the rest."""
        for one in said:
            if isinstance(one, do.SendLayer):
                cluster = self.cluster
                content = cluster.content(0, parameters=one.parameters)
                self.hall.shards[one.transfer.shard].got(one.transfer, content)
                self.say(cluster.sent_layer(0, one.transfer))
            else:
                self.link.tell(one)

    def got(self, transfer: LayerTransfer, version: int, content: Content) -> None:
        pull = self.cluster.client.pull
        if pull and pull.pull >= transfer.ticket:
            self.say(self.cluster.got_layer(0, transfer, version, content))
        else:
            self.early.append((transfer, version, content))

    def act(self, what: Callable[[MadeUpCluster], list[Any]]) -> None:
        """Train, or ask."""
        with self.hall.changed:
            self.say(what(self.cluster))


def shard_facts(port: int = 1) -> MemberFacts:
    return MemberFacts(kind="shard", public_key="", endpoint=f"tcp://127.0.0.1:{port}")


def cluster_facts(layers: tuple[Layer, ...] = LAYERS) -> MemberFacts:
    return MemberFacts(kind="cluster", public_key="", layers=layers)
