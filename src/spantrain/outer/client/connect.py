"""How a cluster's session is connected: to a master over the network, or by whatever a test gives it.

What `spantrain outer run` tells a cluster's training command is read here, and nowhere else, from the environment.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from spantrain.core.outer.layers import Layer
from spantrain.errors import UsageError
from spantrain.outer.client.action_queue import WireLike
from spantrain.outer.link.link import LinkLike, LinkListener, MasterLink, MemberFacts
from spantrain.transport.connection.peers import KeyPair
from spantrain.transport.control.address import Address
from spantrain.transport.control.credentials import JoinToken
from spantrain.transport.control.members import check_name
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


_PREFIX = "SPANTRAIN_OUTER_"
_NEEDED = ("MASTER", "TOKEN", "CLUSTER")
_SWITCH = {"1": True, "0": False}


@dataclass(frozen=True, kw_only=True)
class ClientEnvironment:
    """Where to join, and as whom."""

    master: str
    """From SPANTRAIN_OUTER_MASTER: HOST:PORT."""
    token: str = field(repr=False)
    """From SPANTRAIN_OUTER_TOKEN."""
    cluster: str
    """From SPANTRAIN_OUTER_CLUSTER."""
    inner_steps: int | None = None
    """From SPANTRAIN_OUTER_INNER_STEPS; None where it is not set."""
    encrypted: bool = True
    """From SPANTRAIN_OUTER_ENCRYPTED, 1 or 0: whether layers are; the master's side decides that, too."""

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> "ClientEnvironment":
        """Read what `os.environ` holds.

        Raises:
            UsageError: a variable is missing or makes no sense; all such variables are in the message.

        >>> ClientEnvironment.read({"SPANTRAIN_OUTER_MASTER": "m:7000", "SPANTRAIN_OUTER_TOKEN": "st1",
        ...                         "SPANTRAIN_OUTER_CLUSTER": "a", "SPANTRAIN_OUTER_INNER_STEPS": "16"}).inner_steps
        16
        """
        text = {name: variables.get(_PREFIX + name, "").strip() for name in (*_NEEDED, "INNER_STEPS", "ENCRYPTED")}
        problems = [f"{_PREFIX}{name} is not set" for name in _NEEDED if not text[name]]
        steps, encrypted = text["INNER_STEPS"], text["ENCRYPTED"] or "1"
        if steps and not re.fullmatch(r"[1-9]\d{0,8}", steps, re.ASCII):
            problems.append(f"{_PREFIX}INNER_STEPS is {steps!r}, wanted a whole number from 1")
        if encrypted not in _SWITCH:
            problems.append(f"{_PREFIX}ENCRYPTED is {encrypted!r}, wanted 1 or 0")
        if problems:
            raise UsageError(
                f"environment: {'; '.join(problems)}; start the command with `spantrain outer run`, which sets them"
            )
        return cls(
            master=text["MASTER"],
            token=text["TOKEN"],
            cluster=text["CLUSTER"],
            inner_steps=int(steps) if steps else None,
            encrypted=_SWITCH[encrypted],
        )
