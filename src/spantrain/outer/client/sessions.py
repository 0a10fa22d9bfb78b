"""A cluster's end where the model is in fragments: a session for each, over one connection and one data plane.

Streaming DiLoCo (Douillard et al., 2025). Kept: each fragment has exchanges of its own. Decided here: the master says
how many there are, when this cluster first reaches it; until then all layers are one. The first fragment's session also
has what is there once: signs of life, leases of data, and where shards are.

The sessions are connected to a master over the network, or by whatever a test gives them (`Connector`).
"""

import logging
from dataclasses import field, replace
from typing import Protocol

from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import OuterEvent
from spantrain.core.outer.layers import Layer, ShardLayout, fragment_layers, fragment_layouts
from spantrain.core.records import Record
from spantrain.outer.client.action_queue import LayerMover
from spantrain.outer.client.session import ClientSession
from spantrain.outer.link.link import LinkListener, MasterLink, MasterWelcome, MemberFacts
from spantrain.outer.shard.numerics import Tensors
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.control.address import Address
from spantrain.transport.control.credentials import JoinToken
from spantrain.transport.control.members import check_name
from spantrain.transport.layers.interface import LayerKey, WireListener
from spantrain.transport.layers.transport import LayerTransport

_LOG = logging.getLogger(__name__)


class FragmentSessions(LayerMover):
    """Hears link and wire (`LinkListener`, `WireListener`), and the loop; the sessions do the rest."""

    def __init__(self, cluster: str, layers: tuple[Layer, ...]) -> None:
        """Begin without a connection, and with one fragment."""
        first = ClientSession(cluster, layers)
        super().__init__(cluster, layers, beside=first)
        self.settled = False
        """Whether the number of fragments is known."""
        self.sessions: tuple[ClientSession, ...] = (first,)
        self.chunks, self.meter = first.chunks, first.meter
        """Shared by all sessions."""

    def close(self) -> None:
        """Say goodbye, and end; link and wire are closed here."""
        self.sessions[0].close()

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
                    self.name, count, len(self.sessions),
                )  # fmt: skip
                return ()
            layouts: tuple[ShardLayout | None, ...] = (None,) * count
            if welcome.layout is not None and welcome.layout.layers == self._layers:
                layouts = fragment_layouts(welcome.layout, count)
            sessions = zip(self.sessions, layouts, strict=True)
            return tuple(event for one, layout in sessions for event in one.joined(replace(welcome, layout=layout)))

    def _settle(self, count: int) -> None:
        """Divide the layers as the master has."""
        if count > 1:
            self.sessions = tuple(
                ClientSession(
                    self.name, fragment_layers(self._layers, number, count), fragment=number, beside=self.sessions[0]
                )
                for number in range(count)
            )
        self.settled = True
        self.changed.notify_all()

    def beat(self) -> tuple[OuterEvent, ...]:
        """Return a sign of life."""
        return self.sessions[0].beat()

    def peers_changed(self, peers: tuple[PeerAddress, ...]) -> None:
        """Pass on where shards listen."""
        for session in self.sessions if self.settled else ():
            session.peers_changed(peers)

    def disconnected(self, reason: str) -> None:
        """Train on: nothing is pushed until there is a connection again."""
        for session in self.sessions:
            session.disconnected(reason)

    def died(self, fault: str) -> None:
        """Say that this cluster takes no part any more."""
        for session in self.sessions:
            session.died(fault)

    def commanded(self, command: OuterCommand) -> None:
        """Take a command."""
        if command.fragment < len(self.sessions):
            self.sessions[command.fragment].commanded(command)

    # From the wire.

    def arrived(self, peer: str, key: LayerKey, tensors: Tensors) -> None:
        """Take a layer of a version."""
        self._session_of(key).arrived(peer, key, tensors)

    def sent(self, peer: str, key: LayerKey) -> None:
        """Note that a layer of a push has left."""
        self._session_of(key).sent(peer, key)

    def lost(self, peer: str, key: LayerKey, reason: str) -> None:
        """Tell the master that a layer did not come, or could not be sent."""
        self._session_of(key).lost(peer, key, reason)

    def _session_of(self, key: LayerKey) -> ClientSession:
        return self.sessions[key.ticket.number % len(self.sessions)]


class Hearing(LinkListener, WireListener, Protocol):
    """A cluster's end that hears link and wire."""


class Connector(Protocol):
    """Makes a connection that keeps itself up, once it is started."""

    def connect(self, session: Hearing, cluster: str, layers: tuple[Layer, ...]) -> tuple[MasterLink, LayerTransport]:
        """Return the way to the master, and that to the shards; what they hear they tell the session."""


class NetworkConnector(Record):
    """Dials the master, for ever, and the shards that it names."""

    master: str
    """HOST:PORT."""
    token: str = field(repr=False)
    encrypted: bool = True
    """Whether layers are; what is said to the master always is."""

    def connect(
        self, session: Hearing, cluster: str, layers: tuple[Layer, ...] = ()
    ) -> tuple[MasterLink, LayerTransport]:
        """Make both ends, of a cluster or, without layers, of a worker of one; nothing is dialled yet.

        Raises:
            UsageError: address, token or name are none; the token is not repeated.
        """
        Address.parse(self.master)
        JoinToken.parse(self.token)
        check_name(cluster)
        keypair = KeyPair.generate() if self.encrypted else None
        wire = LayerTransport(name=cluster, bind="", keypair=keypair, listener=session)
        facts = MemberFacts(kind="cluster" if layers else "worker", public_key=wire.public_key, layers=layers)
        link = MasterLink(address=self.master, token=self.token, member=cluster, facts=facts, listener=session)
        return link, wire
