"""Real shards and made-up clusters on loopback, with a master in this process: whole rounds through real sockets."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import SendLayer, SkipPush, UseVersion
from spantrain.core.outer.events import LayerTransfer, TransferWay
from spantrain.core.outer.layers import divide
from spantrain.outer.link.link import LinkListener, MasterWelcome, MemberFacts
from spantrain.outer.policy.client import OuterClient
from spantrain.outer.policy.master import OuterMaster
from spantrain.outer.policy.settings import MasterState, OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.rules.registry import OuterRule
from spantrain.outer.shard.server import ShardServer
from spantrain.outer.shard.snapshots import FolderSnapshots, SnapshotStore
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.layers.interface import LayerKey
from spantrain.transport.layers.transport import LayerTransport
from testing.outer.layer_wires import patient
from testing.outer.rounds import layers_of, random_tensors
from testing.patience import PATIENCE_S

Tensors = Mapping[str, torch.Tensor]


class FakeLink:
    """A shard's link that hands all to the supervisor's one thread."""

    def __init__(self, supervisor: "LocalOuterRun", name: str, facts: MemberFacts, listener: LinkListener) -> None:
        self.supervisor, self.name, self.facts, self.listener = supervisor, name, facts, listener
        self.closed = False

    def start(self) -> None:
        self.supervisor.inbox.put(("join", self))

    def tell(self, *events: Any) -> None:
        if not self.closed:
            self.supervisor.inbox.put(("tell", (self, events)))

    def register_again(self, reason: str) -> None:
        self.supervisor.inbox.put(("join", self))

    def close(self) -> None:
        self.closed = True


class FakeCluster:
    """A cluster of one process: the real policy and the real wire, and tensors that are what they are told to be."""

    def __init__(self, supervisor: "LocalOuterRun", name: str) -> None:
        self.supervisor, self.name = supervisor, name
        layers = tuple(range(len(supervisor.layout.layers)))
        self.client = OuterClient(name, {name: layers})
        self.keys = KeyPair.generate() if supervisor.encrypted else None
        self.wire = LayerTransport(name=name, bind="", keypair=self.keys, listener=self, limits=supervisor.limits)
        self.moves: dict[LayerKey, LayerTransfer] = {}
        self.pushed: Tensors = {}
        self.came: dict[str, torch.Tensor] = {}
        self.used: list[int] = []
        self.skipped: list[str] = []
        self.lost_layers: list[str] = []

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(name=self.name, endpoint="", public_key=self.wire.public_key)

    def ask(self, tensors: Tensors, tokens: int) -> None:
        self.pushed = tensors
        self.say([*self.client.step(), *self.client.ask(tokens=tokens)])

    def say(self, said: Sequence[Any]) -> None:
        for one in said:
            match one:
                case SendLayer():
                    self._send(one.transfer)
                case SkipPush():
                    self.skipped.append(one.reason)
                case UseVersion():
                    self.used.append(one.version)
                case _:
                    self.supervisor.inbox.put(("event", one))

    def _send(self, transfer: LayerTransfer) -> None:
        key = LayerKey(ticket=transfer.ticket, way=TransferWay.PUSH, layer=transfer.layer)
        self.moves[key] = transfer
        names = [one.name for one in self.supervisor.layout.layers[transfer.layer].parameters]
        self.wire.send(transfer.shard, key, {name: self.pushed[name] for name in names})

    def commanded(self, command: Any) -> None:
        if isinstance(command, do.Move) and command.way is TransferWay.PULL:
            transfer = command.transfer
            key = LayerKey(ticket=transfer.ticket, way=TransferWay.PULL, layer=transfer.layer)
            self.moves[key] = transfer
            self.wire.expect(transfer.shard, key, self.supervisor.layout.layers[transfer.layer].parameters)
        elif isinstance(command, do.RegisterAgain):
            self.say(self.client.registered(0.0))
        else:
            self.say(self.client.on_command(0.0, command))

    # From the wire's threads.

    def arrived(self, peer: str, key: LayerKey, tensors: Tensors) -> None:
        self.supervisor.inbox.put(("arrived", (self, key, tensors)))

    def sent(self, peer: str, key: LayerKey) -> None:
        self.supervisor.inbox.put(("sent", (self, key)))

    def lost(self, peer: str, key: LayerKey, reason: str) -> None:
        self.supervisor.inbox.put(("lost", (self, key, reason)))

    def died(self, fault: str) -> None:
        raise AssertionError(fault)


class LocalOuterRun(contextlib.ExitStack):
    """A master, its shards and clusters; all that is said goes through one queue, which `until` empties."""

    def __init__(
        self, parameters: Tensors, *, shards: int, clusters: str, folder: Path | None = None, encrypted: bool = True,
        settings: OuterSettings | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.encrypted, self.limits, self.folder = encrypted, patient(), folder
        self.layout = divide(layers_of(parameters), [f"s{k}" for k in range(shards)])
        self.settings = settings or OuterSettings(grace_s=1e6, lost_after_s=1e6)
        self.rule: OuterRule = Nesterov()
        self.saved = MasterState()
        self.heard: list[Any] = []
        self.inbox: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self.links: dict[str, FakeLink] = {}
        self.shards: dict[str, ShardServer] = {}
        self.clusters: dict[str, FakeCluster] = {}
        self.master = OuterMaster(self.layout, self.settings, now_s=0.0)
        for name in clusters:
            cluster = self.clusters[name] = FakeCluster(self, name)
            self.callback(cluster.wire.close)
        for name in self.layout.shards:
            self.start_shard(name)
        for cluster in self.clusters.values():
            cluster.say(cluster.client.registered(0.0))

    def start_shard(self, name: str, snapshots: SnapshotStore | None = None) -> None:
        assert self.folder is not None or snapshots is not None
        store = snapshots or FolderSnapshots(self.folder / name)
        server = ShardServer(
            name=name, bind="tcp://127.0.0.1:0", snapshots=store, encrypted=self.encrypted, limits=self.limits,
            link_of=lambda facts, listener: FakeLink(self, name, facts, listener),
        )  # fmt: skip
        self.shards[name] = server
        self.callback(server.close)
        server.start()

    def start_master(self) -> None:
        """Start it from what it saved last; all come again."""
        self.master = OuterMaster(self.layout, self.settings, self.saved, now_s=0.0)
        self.links = {name: link for name, link in self.links.items() if not link.closed}
        for link in list(self.links.values()):
            self._join(link)
        for cluster in self.clusters.values():
            cluster.say(cluster.client.registered(0.0))

    def _join(self, link: FakeLink) -> None:
        self.links[link.name] = link
        peers = tuple(cluster.address for cluster in self.clusters.values())
        welcome = MasterWelcome(layout=self.layout, rule=self.rule, settings=self.settings, peers=peers)
        known = [
            PeerAddress(name=one.name, endpoint=one.facts.endpoint, public_key=one.facts.public_key)
            for one in self.links.values()
        ]
        for cluster in self.clusters.values():
            cluster.wire.set_peers(known)
        for event in link.listener.joined(welcome):
            self._event(event)

    def _event(self, event: Any) -> None:
        self.heard.append(event)
        for command in self.master.on_event(0.0, event):
            if isinstance(command, do.Save):
                self.saved = self.master.state
            for name in command.recipients:
                listener = self.links[name].listener if name in self.links else self.clusters[name]
                listener.commanded(command)

    def _handle(self, kind: str, what: Any) -> None:
        if kind == "join":
            self._join(what)
        elif kind == "event":
            self._event(what)
        elif kind == "tell":
            link, events = what
            for event in events if self.links.get(link.name) is link else ():
                self._event(event)
        else:
            self._of_wire(kind, *what)

    def _of_wire(self, kind: str, cluster: FakeCluster, key: LayerKey, *more: Any) -> None:
        if kind == "sent":
            cluster.say(cluster.client.sent(cluster.moves[key]))
        elif kind == "arrived":
            cluster.came.update(more[0])
            cluster.say(cluster.client.arrived(cluster.moves[key]))
        else:
            cluster.lost_layers.append(more[0])
            cluster.say([on.TransferLost(way=key.way, transfer=cluster.moves[key], reason=more[0])])

    def until(self, holds: Callable[[], Any]) -> None:
        """Let everything be said until something has come true."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s, "it never came true"
            with contextlib.suppress(Empty):
                self._handle(*self.inbox.get(timeout=0.05))

    def round(self, tensors: Mapping[str, Tensors], *, tokens: int = 10) -> None:
        """Let all clusters push, and wait until each uses the new version."""
        target = self.master.state.version + 1
        for name, cluster in self.clusters.items():
            cluster.ask(tensors[name], tokens)
        self.until(lambda: all(one.used[-1] >= target for one in self.clusters.values()))

    def seed(self, tensors: Tensors) -> None:
        """Bring the first parameters."""
        first = next(iter(self.clusters.values()))
        self.until(lambda: len(self.links) == len(self.layout.shards))
        first.ask(tensors, 0)
        self.until(lambda: all(cluster.used for cluster in self.clusters.values()))


def some_tensors(seed: int, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
    return random_tensors(seed, scale=scale)
