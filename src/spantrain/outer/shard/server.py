"""A shard as it runs: takes and gives layers, does what the master commands, keeps snapshots, comes back after loss.

Di-PS, 3.1 and 4.2. Kept: data and control by separate ways, a thread for each layer in flight, several snapshots of the
newest versions. Decided here: the master's commands are carried out in order by one thread; layers go and come beside
them, and each push is measured as it comes; what belongs to an earlier connection to the master is dropped. Of a model
in fragments it has a memory, and a writer of snapshots, for each.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from urllib.parse import urlsplit

from torch import Tensor

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import LayerTransfer, OuterEvent, Ticket, TransferWay, of_fragment
from spantrain.core.outer.layers import ShardLayout, fragment_layouts
from spantrain.errors import ConfigError, ProtocolError
from spantrain.outer.link.link import LinkListener, MasterLink, MasterWelcome, MemberFacts
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.rules.registry import OuterRule
from spantrain.outer.shard.shard import OuterShard, ShardCommand
from spantrain.outer.shard.snapshots import SnapshotStore, SnapshotWriter
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.connection.threads import ReliedOnThread
from spantrain.transport.control.address import Address
from spantrain.transport.layers.copiers import BufferPool
from spantrain.transport.layers.interface import LayerCounters, LayerKey, LayerLimits
from spantrain.transport.layers.transport import LayerTransport

_LOG = logging.getLogger(__name__)


LinkMaker = Callable[[MemberFacts, LinkListener], MasterLink]
"""Makes a shard's link to the master, of what it says of itself and who listens."""


def master_link(*, address: str, token: str, name: str) -> LinkMaker:
    """Return what makes a shard's link to a real master."""
    return lambda facts, listener: MasterLink(
        address=address, token=token, member=name, facts=facts, listener=listener
    )  # fmt: skip


class ShardServer:
    """One shard, from `start` to `close`: it has threads for the link, the wire, commands, and files."""

    def __init__(
        self, *, name: str, bind: str, snapshots: SnapshotStore, link_of: LinkMaker, host: str = "",
        encrypted: bool = True, limits: LayerLimits | None = None,
    ) -> None:  # fmt: skip
        """Listen for layers at `bind`, like `tcp://0.0.0.0:0`; others dial `host`, if that is another.

        Raises:
            OSError: the address cannot be had.
        """
        self._name, self._snapshots = name, snapshots
        self._lock = threading.Lock()
        """Of what follows; held for moments."""
        self._connection = 0
        self._moving: dict[tuple[str, LayerKey], tuple[int, LayerTransfer]] = {}
        """With the fragment."""
        self._busy = threading.Lock()
        """Held while a command is carried out, and while the shard registers."""
        self._memories: tuple[OuterShard, ...] = ()
        """Of each fragment of the layers; none before the layout is known."""
        self._writers: tuple[SnapshotWriter, ...] = ()
        """They write them down."""
        self._model: tuple[ShardLayout, OuterRule, int] | None = None
        """With which they were made."""
        self._rule: OuterRule = Nesterov()
        self._count = 1
        self.failure: str | None = None
        """Why it cannot go on; None while it can."""
        self._closed = False
        self._pool = BufferPool()
        self._orders: SimpleQueue[tuple[int, do.Move | ShardCommand] | None] = SimpleQueue()
        """Commands, with the number of the connection that each came by."""
        self._wire = LayerTransport(
            name=name, bind=bind, keypair=KeyPair.generate() if encrypted else None, listener=self, limits=limits,
            pool=self._pool,
        )  # fmt: skip
        listened = self._wire.endpoint
        self.endpoint = f"tcp://{Address(host=host, port=urlsplit(listened).port or 0)}" if host else listened
        """Where clusters dial it for layers."""
        facts = MemberFacts(kind="shard", public_key=self._wire.public_key, endpoint=self.endpoint)
        self.link = link_of(facts, self)
        self._thread = ReliedOnThread(self._run, name=f"commands of {name}", died=self.died)

    def start(self) -> None:
        """Begin; returns at once, also where no master is there."""
        self._thread.start()
        self.link.start()

    def __enter__(self) -> "ShardServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def versions(self) -> tuple[int | None, ...]:
        """What it serves of each fragment, None before there is something; empty before the model is known."""
        serving = [one.serving for one in self._memories]
        return tuple(one.version if one is not None else None for one in serving)

    def counters(self) -> LayerCounters:
        """Return what its wire has done."""
        return self._wire.counters()

    def close(self) -> None:
        """Stop, and write the versions that are served down, if they are not; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self.link.close()
        self._orders.put(None)
        if self._thread.ident is not None:
            self._thread.join()
        self._wire.close()
        self._close_writers()

    def _close_writers(self) -> None:
        for memory, writer in zip(self._memories, self._writers, strict=True):
            writer.close(memory.serving)

    # What the link tells.

    def joined(self, welcome: MasterWelcome) -> tuple[OuterEvent, ...]:
        """Begin a connection: all of earlier ones is forgotten."""
        with self._busy:
            with self._lock:
                self._connection += 1
                ended = {key.ticket for _, key in self._moving}
                self._moving.clear()
            for ticket in ended:
                self._wire.forget(ticket)
            self.peers_changed(welcome.peers)
            self._rule, self._count = welcome.rule, welcome.settings.fragments
            return self._register(welcome.layout)

    def layout_known(self, layout: ShardLayout) -> tuple[OuterEvent, ...]:
        """Take note of the layout, and register."""
        with self._busy:
            return self._register(layout)

    def _register(self, layout: ShardLayout | None) -> tuple[OuterEvent, ...]:
        if layout is None:
            return ()
        if self._name not in layout.shards:
            raise ProtocolError(
                f"{self._name}: the master's shards are {', '.join(layout.shards)}; start this one with one's name"
            )
        if self._model != (layout, self._rule, self._count):
            self._close_writers()
            parts = fragment_layouts(layout, self._count)
            stores = [self._snapshots.of_fragment(number) for number in range(self._count)]
            self._model = layout, self._rule, self._count
            self._memories = tuple(
                OuterShard(self._name, part, snapshots=store, rule=self._rule, pool=self._pool)
                for part, store in zip(parts, stores, strict=True)
            )
            names = [f"{self._name} {number}" if number else self._name for number in range(self._count)]
            self._writers = tuple(
                SnapshotWriter(store, name=name, saved=self._saved, died=self.died)
                for store, name in zip(stores, names, strict=True)
            )
        return tuple(of_fragment(number, one.registered()) for number, one in enumerate(self._memories))

    def beat(self) -> tuple[OuterEvent, ...]:
        """Return a sign of life, with the versions that it can restore."""
        return tuple(
            of_fragment(number, on.ShardBeat(shard=self._name, versions=one.restorable))
            for number, one in enumerate(self._memories)
        )

    def peers_changed(self, peers: tuple[PeerAddress, ...]) -> None:
        """Let these workers, and no others, dial."""
        self._wire.set_peers(peers)

    def disconnected(self, reason: str) -> None:
        """Go on serving what is under way; a new connection begins anew."""
        _LOG.info("%s has no connection to the master: %s", self._name, reason)

    def commanded(self, command: OuterCommand) -> None:
        """Take a command: begin to take in a layer at once, carry the others out in order."""
        match command:
            case do.Move(way=TransferWay.PUSH):
                self._expect(command)
            case do.Forget():
                self._forget(command.ticket)
                self._order(command)
            case do.Move():
                if not self._give(command, late=False):
                    self._order(command)
            case do.StartAnew():
                self._fail(f"the master says that {command.reason}")
            case do.CheckPush() | do.Measure() | do.Combine() | do.StageVersion() | do.Commit() | do.Restore():
                self._order(command)
            case _:
                _LOG.warning("%s was told what is for others: %s", self._name, type(command).__name__)

    def _order(self, command: do.Move | ShardCommand) -> None:
        with self._lock:
            self._orders.put((self._connection, command))

    # Layers.

    def _memory(self, fragment: int) -> OuterShard:
        if fragment >= len(self._memories):
            raise ProtocolError(f"{self._name} holds {len(self._memories)} fragments, the master means {fragment}")
        return self._memories[fragment]

    def _expect(self, command: do.Move) -> None:
        shard, transfer = self._memory(command.fragment), command.transfer

        def expect(key: LayerKey) -> None:
            if transfer.layer not in shard.layers:
                raise ProtocolError(f"layer {transfer.layer} is not held here")
            self._wire.expect(transfer.worker, key, shard.layers[transfer.layer].sent_as(transfer.wire_format))

        self._move(command, expect)

    def _give(self, command: do.Move, *, late: bool) -> bool:
        """Send a layer of a version; False if that is not served yet, which is an error if it is `late`."""
        shard, transfer = self._memory(command.fragment), command.transfer
        try:
            tensors = shard.give(command.version, transfer.layer)
        except ProtocolError as error:
            if late:
                lost = on.TransferLost(way=TransferWay.PULL, transfer=transfer, reason=str(error))
                self.link.tell(of_fragment(command.fragment, lost))
            return False
        self._move(command, lambda key: self._wire.send(transfer.worker, key, tensors))
        return True

    def _move(self, command: do.Move, begin: Callable[[LayerKey], None]) -> None:
        """Have a layer begin to move; one that cannot is lost."""
        transfer = command.transfer
        key = LayerKey(ticket=transfer.ticket, way=command.way, layer=transfer.layer)
        with self._lock:
            self._moving[transfer.worker, key] = command.fragment, transfer
        try:
            begin(key)
        except (ProtocolError, ValueError) as error:
            self.lost(transfer.worker, key, str(error))

    def _forget(self, ticket: Ticket) -> None:
        with self._lock:
            for one in [one for one in self._moving if one[1].ticket == ticket]:
                del self._moving[one]
        self._wire.forget(ticket)

    def _moved(self, peer: str, key: LayerKey) -> tuple[int, int, LayerTransfer | None]:
        """Return the number of the connection, the fragment, and which layer is no longer moving."""
        with self._lock:
            fragment, transfer = self._moving.pop((peer, key), (0, None))
            return self._connection, fragment, transfer

    def arrived(self, peer: str, key: LayerKey, tensors: Mapping[str, Tensor]) -> None:
        """Keep a layer of a push, and measure it; called by the wire's threads."""
        connection, fragment, transfer = self._moved(peer, key)
        if transfer is None:
            return
        event: OuterEvent = on.Moved(way=TransferWay.PUSH, transfer=transfer)
        try:
            self._memory(fragment).take(key.ticket, key.layer, tensors, transfer.wire_format)
        except ProtocolError as error:
            event = on.TransferLost(way=TransferWay.PUSH, transfer=transfer, reason=str(error))
        with self._lock:
            if connection == self._connection:
                self.link.tell(of_fragment(fragment, event))
                return
        self._order(do.Forget(fragment=fragment, shard=self._name, ticket=key.ticket, reason="it is old"))

    def sent(self, peer: str, key: LayerKey) -> None:
        """Take note that a worker has a layer; it tells the master itself."""
        self._moved(peer, key)

    def lost(self, peer: str, key: LayerKey, reason: str) -> None:
        """Tell the master that a layer did not come, or could not be sent."""
        _, fragment, transfer = self._moved(peer, key)
        if transfer is not None:
            self.link.tell(of_fragment(fragment, on.TransferLost(way=key.way, transfer=transfer, reason=reason)))

    # Commands.

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            connection, command = order
            with self._busy:
                if connection == self._connection:
                    self._carry_out(command)

    def _carry_out(self, command: do.Move | ShardCommand) -> None:
        if isinstance(command, do.Move):
            self._give(command, late=True)
            return
        fragment = command.fragment
        try:
            answer = self._memory(fragment).on_command(command)
        except ConfigError as error:
            self._fail(str(error))
            return
        except ProtocolError as error:
            self.link.register_again(str(error))
            return
        if isinstance(answer, on.ShardRegistered):
            self.link.register_again("it does not have what it was told to restore")
        elif answer is not None:
            self.link.tell(of_fragment(fragment, answer))
        if isinstance(answer, on.Committed | on.Restored):
            self._writers[fragment].offer(self._memories[fragment].serving)

    def _saved(self, version: int) -> None:
        _LOG.debug("%s has written version %d down", self._name, version)
        self.link.tell(*self.beat())

    def died(self, fault: str) -> None:
        """End: without one of its threads a shard would only seem to serve; what keeps it up starts it again."""
        if not self._closed:
            self._fail(fault)

    def _fail(self, reason: str) -> None:
        _LOG.error("%s cannot go on: %s", self._name, reason)
        self.failure = reason
