"""The connection of a shard or a cluster to the master, and what both say to each other besides events and commands."""

import contextlib
import hashlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import replace
from datetime import datetime
from functools import partial
from socket import gethostname
from typing import Any, Protocol

from spantrain.core.outer.commands import OuterCommand, RegisterAgain
from spantrain.core.outer.events import OuterEvent
from spantrain.core.outer.layers import Layer, ShardLayout
from spantrain.core.records import Record
from spantrain.errors import PeerLostError, ProtocolError, SpanTrainError
from spantrain.outer.link.codec import decode_command, decode_value, encode_message, encode_value
from spantrain.outer.link.session import MAX_BATCH, LinkSession
from spantrain.outer.link.status import MasterStatus
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.registry import OuterRule
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.connection.threads import ReliedOnThread
from spantrain.transport.control.client import ControlClient

MEMBER_KINDS = ("shard", "cluster", "worker")
"""A cluster is its leader: the process that talks to the master for it. A worker only sends and gets layers."""

_JOIN_S = 5.0
"""One attempt to reach a master that is not there; the next follows."""
_MAX_PAUSE_S = 3.0
"""After a master that is there, and refuses or ends a connection again and again."""
_MIN_PAUSE_S = 0.2
_QUEUE_LIMIT = 50_000
_MAX_WAIT_S = 60.0
_FAREWELL_S = 0.5
_CALL_S = 10.0

_log = logging.getLogger(__name__)


class MemberFacts(Record):
    """What a member says of itself when it joins."""

    kind: str
    """One of `MEMBER_KINDS`."""
    public_key: str
    """CURVE, Z85; empty when encryption is off."""
    endpoint: str = ""
    """Where its data plane listens, as others dial it; empty if it only dials."""
    layers: tuple[Layer, ...] = ()
    """Of a cluster: its whole model, in order."""
    process: str = ""
    """Which one it is, as people find it: no two are called the same."""

    def __post_init__(self) -> None:
        PeerAddress(name=self.kind, endpoint=self.endpoint, public_key="")
        if self.kind not in MEMBER_KINDS:
            raise ValueError(f"a member's kind must be one of {', '.join(MEMBER_KINDS)}, got {self.kind!r}")
        if (self.kind == "cluster") != bool(self.layers):
            raise ValueError(f"a cluster tells its layers, and only a cluster; got {len(self.layers)} of a {self.kind}")

    @property
    def brief(self) -> dict[str, Any]:
        """What decides whether it is let in: who joins in a member's place must say the same, but for the process."""
        model = hashlib.sha256(repr(self.layers).encode()).hexdigest()
        return {"kind": self.kind, "encrypted": bool(self.public_key), "model": model, "process": self.process}


class MasterWelcome(Record):
    """What the master answers to a member that joins."""

    layout: ShardLayout | None
    """None: no cluster has described the model yet."""
    rule: OuterRule
    settings: OuterSettings
    peers: tuple[PeerAddress, ...]
    """Of the data plane: for a cluster or a worker the shards; for a shard all workers, which dial it."""
    samples: int = 0
    """Of the data set that the master leases in chunks; 0 where the clusters bring their own."""
    chunks: int = 0
    """How many the samples are cut into, as `ChunkState` has them."""


class LinkListener(Protocol):
    """What a link tells its owner, from its own thread: nothing here may block for long."""

    def joined(self, welcome: MasterWelcome) -> tuple[OuterEvent, ...]:
        """Take note of a new connection; return the event to register with, or none if there is none to make yet."""

    def beat(self) -> tuple[OuterEvent, ...]:
        """Return the sign of life to give now; called while registered. A worker has none to give."""

    def peers_changed(self, peers: tuple[PeerAddress, ...]) -> None:
        """Take note of who is to be talked to on the data plane from now on."""

    def layout_known(self, layout: ShardLayout) -> tuple[OuterEvent, ...]:
        """Take note of the layout, after a welcome without one; return the event to register with."""

    def commanded(self, command: OuterCommand) -> None:
        """Take a command; they come in the master's order."""

    def disconnected(self, reason: str) -> None:
        """Take note that the connection is gone: what was told and not taken in is lost. The link joins again."""

    def died(self, fault: str) -> None:
        """Take note that a fault has ended the link's thread: there will be no connection any more."""


class MasterLink:
    """A member's connection to the master, made again for ever: over lost networks and restarts of the master.

    One thread joins, enters, registers, tells, listens and beats, and calls the listener. What is told while the member
    is not registered is dropped: it belongs to a connection that has ended.
    """

    def __init__(
        self, *, address: str, token: str, member: str, facts: MemberFacts, listener: LinkListener, beat_s: float = 1.0
    ) -> None:
        """`address` and `token` are what the master prints; `beat_s`: between signs of life."""
        self._member = member
        begun = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S.%f %z}"
        self._facts = facts = replace(facts, process=f"process {os.getpid()} on {gethostname()}, begun {begun}")
        self._listener = listener
        self._beat_s = beat_s
        self._queue: deque[OuterEvent] = deque()
        self._open = False
        """Whether what is told is for the present connection."""
        self._again: str | None = None
        self._woken, self._closing = threading.Event(), threading.Event()
        self._join = partial(
            ControlClient.join, address, token, name=member, facts=facts.brief, timeout_s=_JOIN_S,
            cancelled=self._closing, role="master",
        )  # fmt: skip
        self._lock = threading.Lock()
        """Of what is told, and of whether it is for the present connection."""
        self.problem: str | None = "not connected yet"
        """Why there is no connection; None while there is one."""
        self.refused: SpanTrainError | None = None
        """Why the master does not let it in, after some tries in a row; None for one that was let in before."""
        self._let_in = False
        self._thread = ReliedOnThread(self._run, name=f"outer-link-{member}", died=self._died)

    def start(self) -> None:
        """Begin; returns at once, also where no master is there."""
        self._thread.start()

    def tell(self, *events: OuterEvent) -> None:
        """Tell the master, in order; never blocks. Dropped while not registered."""
        with self._lock:
            if not self._open or self._closing.is_set():
                return
            self._queue.extend(events)
            if len(self._queue) > _QUEUE_LIMIT:
                self._again = f"{len(self._queue)} events wait to be told"
        self._woken.set()

    def register_again(self, reason: str) -> None:
        """Begin a new connection: this side lost what it needs to go on with the present one."""
        self._again = reason
        self._woken.set()

    def close(self) -> None:
        """Tell what was told before, if the master answers at once, and end; nothing is left.

        Where an attempt to connect is under way, that is waited for: a few seconds at most.
        """
        self._closing.set()
        self._woken.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # The thread.

    def _died(self, fault: str) -> None:
        self.problem = fault
        self._listener.died(fault)

    def _run(self) -> None:
        pause_s = _MIN_PAUSE_S
        while not self._closing.is_set():
            begun_s = time.monotonic()
            joined = away = False
            try:
                with contextlib.closing(self._join()) as client:
                    joined = True
                    self._connected(client)
            except SpanTrainError as error:
                away = not joined and isinstance(error, PeerLostError)
                lasts = not isinstance(error, PeerLostError | ProtocolError) and pause_s > _MAX_PAUSE_S / 2
                self.refused = error if lasts and not self._let_in else None
                self._note(str(error))
            lasted = time.monotonic() - begun_s > 2 * _JOIN_S
            pause_s = _MIN_PAUSE_S if lasted or away else min(2 * pause_s, _MAX_PAUSE_S)
            self._closing.wait(pause_s)

    def _note(self, problem: str) -> None:
        if problem != self.problem and not self._closing.is_set():
            _log.warning("%s has no connection to the master: %s", self._member, problem)
        self.problem = problem

    def _connected(self, client: ControlClient) -> None:
        """Go on with a connection until it ends.

        Raises:
            SpanTrainError: it was refused, or has ended; the message says why.
        """
        answer = client.call("enter", {"facts": encode_value(self._facts)}, timeout_s=_CALL_S)
        number, welcome = answer.get("connection"), decode_value(MasterWelcome, answer.get("welcome"), "welcome")
        if type(number) is not int:
            raise ProtocolError("the master's welcome lacks the connection's number")
        self._again = self.problem = self.refused = None
        self._let_in = True
        session = LinkSession(client, number, patience_s=welcome.settings.lost_after_s, wake=self._woken.set)
        reason = "this side closes it"
        try:
            self._register(self._listener.joined(welcome))
            self._serve(session)
        except SpanTrainError as error:
            reason = str(error)
            raise
        finally:
            with self._lock:
                self._open = False
                self._queue.clear()
            self._listener.disconnected(reason)

    def _register(self, events: tuple[OuterEvent, ...]) -> None:
        with self._lock:
            self._queue.extend(events)
            self._open = self._open or bool(events) or self._facts.kind == "worker"

    def _serve(self, session: LinkSession) -> None:
        """Tell, listen and beat until this side closes.

        Raises:
            SpanTrainError: the connection has ended, or must begin anew.
        """
        beat_due_s = time.monotonic() + self._beat_s
        while not self._closing.is_set():
            for notice in session.poll(time.monotonic()):
                self._take(notice)
            if self._again is not None:
                raise PeerLostError(f"to be registered again: {self._again}")
            if not session.sending and self._send(session, beat=time.monotonic() >= beat_due_s):
                beat_due_s = time.monotonic() + self._beat_s
            until_s = session.again_s if session.sending else min(beat_due_s, session.again_s)
            self._wait(until_s)
        self._farewell(session)

    def _send(self, session: LinkSession, *, beat: bool) -> bool:
        """Tell what waits, or a sign of life; return whether there was anything to tell."""
        signs = self._listener.beat() if beat and self._open else ()
        with self._lock:
            self._queue.extend(signs)
            if not self._queue and not beat:
                return False
            events = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
        session.send([encode_message(event) for event in events])
        return True

    def _wait(self, until_s: float) -> None:
        self._woken.wait(min(max(0.0, until_s - time.monotonic()), _MAX_WAIT_S))
        self._woken.clear()

    def _take(self, notice: dict[str, Any]) -> None:
        match notice:
            case {"command": told}:
                command = decode_command(told)
                if isinstance(command, RegisterAgain):
                    self.register_again(command.reason)
                else:
                    self._listener.commanded(command)
            case {"peers": list(peers)}:
                self._listener.peers_changed(tuple(decode_value(PeerAddress, peer, "peer") for peer in peers))
            case {"layout": layout}:
                self._register(self._listener.layout_known(decode_value(ShardLayout, layout, "layout")))
            case _:
                raise ProtocolError(f"the master told something unknown: {', '.join(sorted(notice))}"[:200])

    def _farewell(self, session: LinkSession) -> None:
        """Tell what waits, and leave, in a short time."""
        end_s = time.monotonic() + _FAREWELL_S
        with contextlib.suppress(SpanTrainError):
            while time.monotonic() < end_s:
                session.poll(time.monotonic())
                if not session.sending and not self._send(session, beat=False):
                    session.leave(end_s - time.monotonic())
                    return
                self._wait(min(end_s, session.again_s))


def ask_status(address: str, token: str, *, timeout_s: float = 5.0) -> MasterStatus:
    """Ask a master for its status without being a member of the run.

    Raises:
        UsageError: the token or address is wrong.
        PeerLostError: no master answers in time.
        SpanTrainError: it answers that it cannot.
    """
    name = f"status-{secrets.token_hex(6)}"
    end_s = time.monotonic() + timeout_s
    joined = ControlClient.join(address, token, name=name, facts={}, timeout_s=timeout_s, role="master")
    with contextlib.closing(joined) as client:
        answer = client.call("status", {}, timeout_s=max(0.5, end_s - time.monotonic()))
        with contextlib.suppress(SpanTrainError):
            client.call("leave", {}, timeout_s=max(0.5, end_s - time.monotonic()))
    return decode_value(MasterStatus, answer.get("status"), "status")
