"""A cluster's end where the model is in fragments: a session for each, over one connection and one data plane.

Streaming DiLoCo (Douillard et al., 2025). Kept: each fragment has exchanges of its own. Decided here: the master says
how many there are, when this cluster first reaches it; until then all layers are one. The first fragment's session also
has what is there once: signs of life, leases of data, and where shards are.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import OuterEvent, of_fragment
from spantrain.core.outer.layers import Layer, ShardLayout, fragment_layers, fragment_layouts
from spantrain.outer.client.action_queue import WireLike
from spantrain.outer.client.leases import LeasedChunks
from spantrain.outer.client.metrics import ClientMeter, FragmentMeter
from spantrain.outer.client.session import ClientSession
from spantrain.outer.link.link import LinkLike, MasterWelcome
from spantrain.outer.shard.numerics import Tensors
from spantrain.transport.layers.interface import LayerKey
from spantrain.transport.mailbox.interface import PeerAddress

_LOG = logging.getLogger(__name__)


class FragmentSessions:
    """Hears link and wire (`LinkListener`, `WireListener`), and the loop; the sessions do the rest."""

    def __init__(
        self, cluster: str, layers: tuple[Layer, ...], *, clock: Callable[[], float] = time.monotonic
    ) -> None:  # fmt: skip
        """Begin without a connection, and with one fragment."""
        self._cluster, self._layers, self._clock = cluster, layers, clock
        self._link: LinkLike | None = None
        self._wire: WireLike | None = None
        self.changed = threading.Condition()
        """Held by all sessions; notified whenever something was heard."""
        self.chunks = LeasedChunks()
        self.meter = ClientMeter(clock)
        self.settled = False
        """Whether the number of fragments is known."""
        self.sessions = self._divided(1)

    def _divided(self, count: int) -> tuple[ClientSession, ...]:
        return tuple(
            ClientSession(
                self._cluster,
                fragment_layers(self._layers, number, count),
                clock=self._clock,
                changed=self.changed,
                chunks=None if number else self.chunks,
                meter=FragmentMeter(self.meter, number) if number else self.meter,
            )
            for number in range(count)
        )

    def connect(self, link: LinkLike, wire: WireLike) -> None:
        """Talk by these from now on."""
        self._link, self._wire = link, wire

    def close(self) -> None:
        """Say goodbye, and end; link and wire are closed here."""
        for session in reversed(self.sessions):
            session.close()
        if not self.settled:
            for end in (self._wire, self._link):
                if end is not None:
                    end.close()

    # From the loop.

    @property
    def heard(self) -> int:
        """How often something was heard."""
        return sum(session.heard for session in self.sessions)

    def wait(self, heard: int, limit_s: float) -> None:
        """Wait until something was heard since `heard` was read, or the time is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.heard != heard, timeout=limit_s)

    @property
    def registered(self) -> bool:
        """Whether the master knows this cluster, with its first fragment."""
        return self.sessions[0].registered

    @property
    def data(self) -> MasterWelcome | None:
        """The last welcome."""
        return self.sessions[0].data

    @property
    def missed_s(self) -> float:
        """For how long the master has been away: without a connection, or with a question for data not answered."""
        return self.sessions[0].missed_s

    def ask_for_chunks(self) -> None:
        """Ask for data, if little is left and nobody has asked."""
        self.sessions[0].ask_for_chunks()

    # From the link.

    def joined(self, welcome: MasterWelcome) -> tuple[OuterEvent, ...]:
        """Take note of a new connection; return the events to register with."""
        count = welcome.settings.fragments
        with self.changed:
            if not self.settled:
                self._settle(count)
            if count != len(self.sessions):
                _LOG.warning(
                    "cluster %s: the master has the model in %d fragments now, this cluster in %d; start it again",
                    self._cluster, count, len(self.sessions),
                )  # fmt: skip
                return ()
            layouts: tuple[ShardLayout | None, ...] = (None,) * count
            if welcome.layout is not None and welcome.layout.layers == self._layers:
                layouts = fragment_layouts(welcome.layout, count)
            return tuple(
                of_fragment(number, event)
                for number, session in enumerate(self.sessions)
                for event in session.joined(replace(welcome, layout=layouts[number]))
            )

    def _settle(self, count: int) -> None:
        """Divide the layers as the master has."""
        assert self._link, "connect first"
        assert self._wire, "connect first"
        if count > 1:
            before, self.sessions = self.sessions, self._divided(count)
            before[0].close()
        for number, session in enumerate(self.sessions):
            link, wire = _FragmentLink(self._link, number), _FragmentWire(self._wire)
            session.connect(link if number else self._link, wire if number else self._wire)
        self.settled = True
        self.changed.notify_all()

    def beat(self) -> tuple[OuterEvent, ...]:
        """Return a sign of life."""
        return self.sessions[0].beat()

    def peers_changed(self, peers: tuple[PeerAddress, ...]) -> None:
        """Pass on where shards listen."""
        for session in self.sessions if self.settled else ():
            session.peers_changed(peers)

    def layout_known(self, layout: ShardLayout) -> tuple[OuterEvent, ...]:  # noqa: ARG002
        """Register with nothing: a cluster told its layers when it joined."""
        return ()

    def disconnected(self, reason: str) -> None:
        """Train on: nothing is pushed until there is a connection again."""
        for session in self.sessions:
            session.disconnected(reason)

    def died(self, fault: str) -> None:
        """Say that this cluster takes no part any more."""
        self.sessions[0].died(fault)

    def commanded(self, command: OuterCommand) -> None:
        """Take a command."""
        if command.fragment < len(self.sessions):
            self.sessions[command.fragment].commanded(command)

    # From the wire. A layer is of one push or pull, and that of one fragment: the other sessions do not know it.

    def arrived(self, peer: str, key: LayerKey, tensors: Tensors) -> None:
        """Take a layer of a version."""
        for session in self.sessions:
            session.arrived(peer, key, tensors)

    def sent(self, peer: str, key: LayerKey) -> None:
        """Note that a layer of a push has left."""
        for session in self.sessions:
            session.sent(peer, key)

    def lost(self, peer: str, key: LayerKey, reason: str) -> None:
        """Tell the master that a layer did not come, or could not be sent."""
        for session in self.sessions:
            session.lost(peer, key, reason)


class _FragmentLink:
    """The link as a further fragment's session has it."""

    def __init__(self, link: LinkLike, number: int) -> None:
        self._link, self._number = link, number

    def tell(self, *events: OuterEvent) -> None:
        """Tell the master of this fragment; that the cluster leaves is said once."""
        said = [of_fragment(self._number, event) for event in events if not isinstance(event, on.ClusterLeft)]
        self._link.tell(*said)

    def register_again(self, reason: str) -> None:
        """Begin a new connection, for all fragments."""
        self._link.register_again(reason)

    def close(self) -> None:
        """Leave it to the first fragment's session."""


class _FragmentWire:
    """The data plane as a further fragment's session has it: whom it talks to, and its end, are the first one's."""

    def __init__(self, wire: WireLike) -> None:
        self.expect, self.send, self.forget = wire.expect, wire.send, wire.forget

    def set_peers(self, peers: tuple[PeerAddress, ...]) -> None:
        """Leave it to the first fragment's session."""

    def close(self) -> None:
        """Leave it to the first fragment's session."""
