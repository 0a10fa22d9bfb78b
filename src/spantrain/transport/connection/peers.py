"""Who a peer is: its name, where it listens, the CURVE key that proves it, and what it says on each connection."""

import re
from dataclasses import dataclass, field, replace

from spantrain.core.records import Record

_ENDPOINT = re.compile(
    r"tcp://(\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[\w-]{1,63}(\.[\w-]{1,63})*):\d{1,5}|memory://\S+", re.ASCII
)
PUBLIC_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class KeyPair(Record):
    """A public key, which peers must know, and its secret; both in Z85 text of 40 characters."""

    public_key: str
    secret_key: str = field(repr=False)

    @classmethod
    def generate(cls) -> "KeyPair":
        """Make a new pair."""
        import zmq  # whoever knows addresses alone needs none of it

        public, secret = zmq.curve_keypair()
        return cls(public_key=public.decode(), secret_key=secret.decode())


class PeerAddress(Record):
    """Who a peer is and where it listens."""

    name: str
    endpoint: str
    """`tcp://10.0.0.2:5000`, or empty if it cannot be dialled (then it dials)."""
    public_key: str
    """Z85; empty only when encryption is off."""
    near: str = ""
    """Where those of its own site reach it, if that is elsewhere."""
    site: str = ""

    def __post_init__(self) -> None:
        for endpoint in (self.endpoint, self.near):
            if endpoint and _ENDPOINT.fullmatch(endpoint) is None:
                raise ValueError(
                    f"peer {self.name:.64}: an endpoint looks like tcp://10.0.0.2:5000, got {endpoint[:60]!r}"
                )
        if self.public_key and PUBLIC_KEY.fullmatch(self.public_key) is None:
            raise ValueError(
                f"peer {self.name:.64}: a public key has 40 characters of Z85, got {self.public_key[:60]!r}"
            )

    def seen_from(self, other: "PeerAddress") -> "PeerAddress":
        """Return how another peer reaches it."""
        return replace(self, endpoint=self.near) if self.near and self.site == other.site else self

    def is_relayed_to(self, other: "PeerAddress") -> bool:
        """Whether another peer reaches it by a relay."""
        return bool(self.near) and self.site != other.site


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What a dialling side says on each connection; the other side answers with one of its own."""

    name: str
    """Who speaks."""
    session: int
    """Made anew when the speaker has lost its state, or each time that it dials."""
    epoch: int = 0
    """How often it has dialled in this session; 0 where each time has a session of its own."""
    connection: int
    """Which of the connections this is; 0 is for control."""
    connections: int
