"""Who is connected to the master, what waits for each until it says that it has it, and who must know whose address.

Here it is also decided whom the master lets in as what, which model fits, and who may say what.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, takewhile, zip_longest
from typing import Any

from spantrain.core.outer import events as on
from spantrain.core.outer.events import OuterEvent
from spantrain.core.outer.layers import Layer
from spantrain.outer.link.codec import encode_value
from spantrain.outer.link.link import MemberFacts
from spantrain.outer.master.config import MasterConfig
from spantrain.transport.connection.peers import PUBLIC_KEY, PeerAddress
from spantrain.transport.control.protocol import MESSAGE_LIMIT_BYTES, RemoteRefusal, encode

_NOTICE_LIMIT_BYTES = MESSAGE_LIMIT_BYTES - 2**16
_WAITING_BYTES = 64 * 2**20
"""Of all notices that wait for a member."""
_ANSWER_BYTES = 2 * 2**20
"""After so much an answer is sent, and the next asked for."""


class NoticeQueue:
    """Notices numbered from 1; safe from any thread.

    A notice is kept until a later `take` says that it arrived, so an answer that is lost on its way is given again.

    >>> outbox = NoticeQueue(limit=10)
    >>> outbox.put({"kind": "x"}), outbox.put({"kind": "y"})
    (True, True)
    >>> first, notices = outbox.take(0, timeout_s=0.0)
    >>> first, len(notices), outbox.take(1, timeout_s=0.0)[0]
    (1, 2, 2)
    """

    def __init__(self, *, limit: int) -> None:
        """`limit`: notices that may wait; of their bytes no more than `_WAITING_BYTES`, but for one."""
        self._limit = limit
        self._waiting_bytes = 0
        self._first = 1
        self._waiting: deque[bytes] = deque()
        self._ended: str | None = None
        self._changed = threading.Condition()

    def put(self, notice: Mapping[str, Any]) -> bool:
        """Add a notice; return whether there was room.

        Raises:
            ProtocolError: it is too large for a message.
        """
        body = encode(dict(notice), limit_bytes=_NOTICE_LIMIT_BYTES)
        with self._changed:
            if len(self._waiting) >= self._limit or self._waiting_bytes > _WAITING_BYTES:
                return False
            self._waiting.append(body)
            self._waiting_bytes += len(body)
            self._changed.notify_all()
            return True

    def end(self, reason: str) -> None:
        """Drop all; whoever takes is refused with this reason."""
        with self._changed:
            self._ended = self._ended or reason
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify_all()

    def take(self, after: int, *, timeout_s: float) -> tuple[int, list[bytes]]:
        """Drop notices up to `after`; wait for one; return the number of the first, and those that wait, encoded.

        Raises:
            RemoteRefusal: it was ended, or `after` is a number that was not given out.
        """
        with self._changed:
            if not self._first - 1 <= after < self._first + len(self._waiting):
                raise RemoteRefusal(self._ended or f"there is no notice {after}: begin a new connection")
            for _ in range(after - self._first + 1):
                self._waiting_bytes -= len(self._waiting.popleft())
            self._first = after + 1
            self._changed.wait_for(lambda: self._waiting or self._ended, timeout_s)
            if self._ended:
                raise RemoteRefusal(self._ended)
            upto_bytes = zip(self._waiting, accumulate(map(len, self._waiting)), strict=True)
            taken = [body for body, _ in takewhile(lambda one: one[1] <= _ANSWER_BYTES, upto_bytes)]
            return self._first, taken or [*self._waiting][:1]


class Connection:
    """From a member's entering to its end, or to its next entering."""

    def __init__(self, number: int, name: str, facts: MemberFacts, now_s: float, limit: int) -> None:
        self.number = number
        self.name = name
        self.facts = facts
        self.address = PeerAddress(name=name, endpoint=facts.endpoint, public_key=facts.public_key)
        """On the data plane."""
        self.outbox = NoticeQueue(limit=limit)
        self.heard_s = now_s
        self.registered: set[int] = {0} if facts.kind == "worker" else set()
        """Fragments whose master knows of this connection: commands made before that belong to an earlier one."""
        self.told = 0
        """Number of the last batch of events that was taken in."""


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
            before.outbox.end(f"another process has joined as {name}: each needs a name of its own")
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


_SHOWN = 5


def join_problem(name: str, facts: MemberFacts, config: MasterConfig) -> str | None:
    """Return why a member cannot be let in, None if it can.

    >>> from spantrain.outer.link.link import MemberFacts
    >>> config = MasterConfig(shards=("s0", "s1"), encrypted=False)
    >>> join_problem("s2", MemberFacts(kind="shard", public_key="", endpoint="tcp://h:1"), config)
    's2 is none of the shards s0, s1: start it under one of these names'
    """
    if facts.kind == "shard":
        if name not in config.shards:
            return f"{name} is none of the shards {', '.join(config.shards)}: start it under one of these names"
        if not facts.endpoint:
            return f"shard {name} must listen, and tell where: clusters dial it"
    elif name in config.shards:
        return f"{name} is a shard's name: take another for a {facts.kind}"
    elif facts.kind == "cluster" and "/" in name:
        return f"a cluster's name has no slash, got {name}: that is for its further workers"
    elif facts.kind == "worker" and config.settings.fragments > 1:
        return (
            f"{name} is a stage of a pipeline, and this master has the model in {config.settings.fragments} fragments: "
            "a pipeline takes part only with `fragments: 1` in the master's settings"
        )
    elif facts.kind == "worker" and not all(name.partition("/")):
        return f"a worker is named as its cluster, a slash and a name of its own, like a/w1; got {name}"
    return _key_problem(name, facts, config.encrypted)


def _key_problem(name: str, facts: MemberFacts, encrypted: bool) -> str | None:
    if not encrypted:
        remedy = "switch encryption off there, or on at the master"
        return f"{name} encrypts its data, this run does not: {remedy}" if facts.public_key else None
    if not facts.public_key:
        return f"{name} does not encrypt its data, this run does: switch encryption on there, or off at the master"
    if PUBLIC_KEY.fullmatch(facts.public_key) is None:
        return f"{name}: a public key has 40 characters of Z85, got {len(facts.public_key)} characters"
    return None


def model_problem(known: Sequence[Layer], told: Sequence[Layer]) -> str | None:
    """Return how a cluster's model differs from the one that is trained, None if it does not."""
    if tuple(known) == tuple(told):
        return None
    ours, theirs = _specs(known), _specs(told)
    unlike = [name for name in ours if theirs.get(name, ours[name]) != ours[name]]
    parts = [
        _listed("it lacks", ours.keys() - theirs.keys()),
        _listed("it has besides", theirs.keys() - ours.keys()),
        _listed("unlike are", [f"{name} ({theirs[name]}, wanted {ours[name]})" for name in unlike]),
    ]
    found = "; ".join(filter(None, parts))
    if not found:
        at = next(k for k, pair in enumerate(zip_longest(known, told)) if pair[0] != pair[1])
        found = f"the same parameters are in other layers, from layer {at} on ({len(told)} layers, wanted {len(known)})"
    return f"this is not the model that is trained here: {found}; give all clusters the same model and grouping"


def _specs(layers: Sequence[Layer]) -> dict[str, str]:
    parameters = chain.from_iterable(layer.parameters for layer in layers)
    return {one.name: f"{list(one.shape)} {one.dtype}" for one in parameters}


def _listed(what: str, names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"{what} {', '.join(ordered[:_SHOWN])}{more}" if ordered else ""


def speaker_problem(kind: str, name: str, event: OuterEvent) -> str | None:
    """Return why a member may not say this, None if it may: each speaks for itself alone.

    >>> speaker_problem("cluster", "a", on.PullAsked(cluster="b"))
    'a, a cluster, cannot say PullAsked: only b can'
    """
    if isinstance(event, on.Ticked):
        return f"{name} cannot say what time it is for the master"
    if (kind, name) not in event.speakers:
        who = " or ".join(sorted({speaker for _, speaker in event.speakers}))
        return f"{name}, a {kind}, cannot say {type(event).__name__}: only {who} can"
    if isinstance(event, on.ClusterRegistered):
        foreign = [worker for worker in event.workers if worker != name and not worker.startswith(f"{name}/")]
        return _listed(f"the workers of {name} are named {name} or {name}/..., not", foreign) or None
    return None
