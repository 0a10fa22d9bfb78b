"""How a cluster's session is connected: to a master over the network, or by whatever a test gives it."""

from dataclasses import dataclass, field
from typing import Protocol

from spantrain.core.outer.layers import Layer
from spantrain.outer.client.action_queue import WireLike
from spantrain.outer.link.link import LinkLike, LinkListener, MasterLink, MemberFacts
from spantrain.transport.connection.keys import KeyPair
from spantrain.transport.control.address import Address
from spantrain.transport.control.members import check_name
from spantrain.transport.control.token import JoinToken
from spantrain.transport.layers.interface import WireListener
from spantrain.transport.layers.transport import LayerWire


class Hearing(LinkListener, WireListener, Protocol):
    """A cluster's end that hears link and wire."""


class Connector(Protocol):
    """Makes a connection that keeps itself up."""

    def connect(self, session: Hearing, cluster: str, layers: tuple[Layer, ...]) -> tuple[LinkLike, WireLike]:
        """Return the way to the master, and that to the shards; what they hear they tell the session."""

    def start(self) -> None:
        """Begin: from now on the session hears."""


@dataclass(kw_only=True)
class NetworkConnector:
    """Dials the master, for ever, and the shards that it names."""

    master: str
    """HOST:PORT."""
    token: str = field(repr=False)
    encrypted: bool = True
    """Whether layers are; what is said to the master always is."""

    def connect(self, session: Hearing, cluster: str, layers: tuple[Layer, ...]) -> tuple[LinkLike, WireLike]:
        """Make both ends; nothing is dialled yet.

        Raises:
            UsageError: address, token or name are none; the token is not repeated.
        """
        Address.parse(self.master)
        JoinToken.parse(self.token)
        check_name(cluster)
        keypair = KeyPair.generate() if self.encrypted else None
        wire = LayerWire(name=cluster, bind="", keypair=keypair, listener=session)
        facts = MemberFacts(kind="cluster", public_key=wire.public_key, layers=layers)
        self._link = MasterLink(address=self.master, token=self.token, member=cluster, facts=facts, listener=session)
        return self._link, wire

    def start(self) -> None:
        """Join."""
        self._link.start()
