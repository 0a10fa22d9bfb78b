"""Who is connected to the master: connections, what waits for each, and who must know whose address."""

from collections.abc import Iterator

from spantrain.outer.link.codec import encode_value
from spantrain.outer.link.link import MemberFacts
from spantrain.outer.master.outbox import NoticeQueue
from spantrain.transport.control.protocol import RemoteRefusal
from spantrain.transport.mailbox.interface import PeerAddress


class Connection:
    """From a member's entering to its end, or to its next entering."""

    def __init__(self, number: int, name: str, facts: MemberFacts, now_s: float, limit: int) -> None:
        self.number = number
        self.name = name
        self.facts = facts
        self.outbox = NoticeQueue(limit=limit)
        self.heard_s = now_s
        self.registered: set[int] = {0} if facts.kind == "worker" else set()
        """Fragments whose master knows of this connection: commands made before that belong to an earlier one."""
        self.told = 0
        """Number of the last batch of events that was taken in."""

    @property
    def address(self) -> PeerAddress:
        """On the data plane."""
        return PeerAddress(name=self.name, endpoint=self.facts.endpoint, public_key=self.facts.public_key)


class Connections:
    """All of them, one for each name."""

    def __init__(self, *, outbox_limit: int) -> None:
        """`outbox_limit`: notices that may wait for one member."""
        self._outbox_limit = outbox_limit
        self._by_name: dict[str, Connection] = {}
        self._opened = 0
        self._told: dict[str, tuple[PeerAddress, ...]] = {}

    def open(self, now_s: float, name: str, facts: MemberFacts) -> Connection:
        """Begin a connection, in the place of an earlier one of this name."""
        before = self._by_name.get(name)
        if before:
            before.outbox.end(f"{name} began a new connection")
        self._opened += 1
        made = self._by_name[name] = Connection(self._opened, name, facts, now_s, self._outbox_limit)
        self._told[name] = self.peers_of(facts.kind)
        return made

    def of(self, name: str, number: int) -> Connection:
        """Return a member's connection.

        Raises:
            RemoteRefusal: it has ended.
        """
        found = self._by_name.get(name)
        if found is None or found.number != number:
            raise RemoteRefusal(f"connection {number} of {name} has ended: begin a new one")
        return found

    def get(self, name: str) -> Connection | None:
        """Return the connection of a name, if there is one."""
        return self._by_name.get(name)

    def close(self, connection: Connection, reason: str) -> None:
        """End a connection; who holds it is told why when it next asks."""
        if self._by_name.get(connection.name) is connection:
            del self._by_name[connection.name]
            del self._told[connection.name]
        connection.outbox.end(reason)

    def close_all(self, reason: str) -> None:
        """End all."""
        for connection in tuple(self._by_name.values()):
            self.close(connection, reason)

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._by_name.values()))

    def silent(self, now_s: float, limit_s: float) -> tuple[Connection, ...]:
        """Return those that were not heard of for so long."""
        return tuple(one for one in self._by_name.values() if now_s - one.heard_s >= limit_s)

    def next_silent_s(self, limit_s: float) -> float | None:
        """Return when the next will have been silent for so long."""
        return min((one.heard_s + limit_s for one in self._by_name.values()), default=None)

    def peers_of(self, kind: str) -> tuple[PeerAddress, ...]:
        """Return whom a member of this kind talks to: shards to all workers, the others to shards."""
        return tuple(
            one.address for _, one in sorted(self._by_name.items()) if (one.facts.kind == "shard") != (kind == "shard")
        )

    def announce(self) -> tuple[Connection, ...]:
        """Tell those whose peers have changed; return those for whom too much waits already."""
        full = []
        for name, one in self._by_name.items():
            peers = self.peers_of(one.facts.kind)
            if self._told[name] != peers:
                self._told[name] = peers
                if not one.outbox.put({"peers": [encode_value(peer) for peer in peers]}):
                    full.append(one)
        return tuple(full)

    def attached(self, name: str, fragment: int) -> Connection | None:
        """Return a member's connection, if a fragment's master knows of it."""
        one = self._by_name.get(name)
        return one if one and fragment in one.registered else None
