"""The master apart from network, threads and clock: who enters, what is heard, what follows, what is kept.

It drives the pure `FragmentedMaster`: events one by one, in the order in which they came; what is to be saved is on the
disk before any command after it can be fetched. Not for several threads at once.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import OuterEvent
from spantrain.core.outer.layers import Layer, ShardLayout, divide
from spantrain.errors import ProtocolError
from spantrain.outer.link.codec import encode_message, encode_value
from spantrain.outer.link.link import MasterWelcome, MemberFacts
from spantrain.outer.master import connections
from spantrain.outer.master.config import MasterConfig
from spantrain.outer.master.files import MasterFiles
from spantrain.outer.policy.fragments import FragmentedMaster, FragmentedState
from spantrain.transport.connection.bounds import RefusalCounter
from spantrain.transport.control.protocol import RemoteRefusal

_OUTBOX_LIMIT = 20_000
"""Notices: whoever lets so many wait has stopped fetching them."""
_SILENT_S = 2.5
"""After which a member, which gives a sign of life each second, has ended as it seems: another may take its place."""
_LAYOUT_LIMIT_BYTES = 6 * 2**20

_log = logging.getLogger(__name__)


class MasterService:
    """Hears members by their names, which the caller has made sure of."""

    def __init__(
        self, config: MasterConfig, files: MasterFiles, now_s: float, *, outbox_limit: int = _OUTBOX_LIMIT
    ) -> None:
        """Begin, or go on from what is kept. `outbox_limit`: notices that may wait for one member.

        Raises:
            UsageError: what is kept is damaged, or of other shards or data.
        """
        self.config = config
        self.connections = connections.Connections(outbox_limit=outbox_limit)
        self.refusals = RefusalCounter("the master")
        self.dropped: Counter[str] = Counter()
        """What came from, or went to, members that are not registered."""
        self.layout = files.load_layout(config)
        self.master: FragmentedMaster | None = None
        """None before a cluster has described the model."""
        self._files = files
        self._kept = files.load_state(config)
        self._events: deque[OuterEvent] = deque()
        if self.layout:
            self._begin(now_s, self.layout)

    @property
    def state(self) -> FragmentedState:
        """What outlives the master."""
        return self.master.state if self.master else self._kept

    @property
    def wake_s(self) -> float | None:
        """When time itself will change something: call `tick` then."""
        silent_s = [one.heard_s + self.config.settings.lost_after_s for one in self.connections]
        wake_s = self.master.wake_s if self.master else None
        return min(silent_s if wake_s is None else [*silent_s, wake_s], default=None)

    # Members.

    def join(self, now_s: float, name: str, brief: dict[str, Any]) -> dict[str, Any]:
        """Let a member join; in the place of one that is silent only what would be let in as that.

        Raises:
            RemoteRefusal: it would only push that one out.
        """
        here = self.connections.get(name)
        if here is None or brief == here.facts.brief:
            return {}
        unlike = {**brief, "process": here.facts.process} != here.facts.brief
        if unlike or now_s - here.heard_s < _SILENT_S:
            which = f"{here.facts.process[:200]}{', of another kind, model or encryption' * unlike}"
            raise RemoteRefusal(f"{here.facts.kind} {name} is there already, {which}: take another name, or end it")
        return {}

    def enter(self, now_s: float, name: str, facts: MemberFacts) -> tuple[int, MasterWelcome]:
        """Begin a member's connection, in the place of an earlier one; return its number, and what to know.

        Raises:
            RemoteRefusal: it cannot be let in; the message says why.
            StateNotKept: the layout could not be written.
        """
        problem = connections.join_problem(name, facts, self.config)
        if problem is None and facts.layers:
            problem = self._model_problem(now_s, facts.layers)
        if problem:
            self.refuse("not_let_in", problem)
            raise RemoteRefusal(problem)
        connection = self.connections.open(now_s, name, facts)
        _log.info("%s %s is connected (%d)", facts.kind, name, connection.number)
        self._announce(now_s)
        return connection.number, MasterWelcome(
            layout=self.layout,
            rule=self.config.rule,
            settings=self.config.settings,
            peers=self.connections.peers_of(facts.kind),
            samples=self.config.samples,
            chunks=self.config.chunks,
        )

    def _model_problem(self, now_s: float, layers: Sequence[Layer]) -> str | None:
        """Take the model from the first cluster; compare that of another."""
        if self.layout:
            return connections.model_problem(self.layout.layers, layers)
        try:
            layout = divide(layers, self.config.shards, fragments=self.config.settings.fragments)
        except ValueError as error:
            return f"the model cannot be divided: {error}"
        size_bytes = sum(len(one.name) + 60 for layer in layers for one in layer.parameters)
        if size_bytes > _LAYOUT_LIMIT_BYTES:
            return f"the names of its parameters take {size_bytes} bytes, at most {_LAYOUT_LIMIT_BYTES} can be told"
        self._files.save(layout)
        self._begin(now_s, layout)
        for connection in self.connections:
            connection.outbox.put({"layout": encode_value(layout)})
        return None

    def _begin(self, now_s: float, layout: ShardLayout) -> None:
        self.layout = layout
        self.master = FragmentedMaster(layout, self.config.settings, self._kept, now_s=now_s)

    def leave(self, now_s: float, name: str, reason: str) -> None:
        """End a member's connection, if there is one."""
        connection = self.connections.get(name)
        if connection:
            self._lose(connection, reason)
            self._drain(now_s)

    def late_s(self, now_s: float) -> float | None:
        """Return for how long there was no version of some fragment, where that is too long."""
        late_s = [part.late_s(now_s) for part in self.master.parts] if self.master else []
        return max((one for one in late_s if one is not None), default=None)

    # What is said.

    def tell(self, now_s: float, name: str, number: int, batch: int, events: Sequence[OuterEvent]) -> tuple[str, ...]:
        """Take in a batch of events; return why some of them were refused.

        A batch that was taken in before, and sent again since the answer was lost, changes nothing.

        Raises:
            RemoteRefusal: the connection has ended, a batch before this one is missing, or it registers a second time.
            StateNotKept: the state could not be written.
        """
        connection = self.connections.of(name, number)
        connection.heard_s = now_s
        if batch <= connection.told:
            return ()
        if batch != connection.told + 1:
            self.refuse("out_of_order", f"{name}: batch {batch} came after {connection.told}")
            raise RemoteRefusal(f"batch {batch} came after {connection.told}: begin a new connection")
        connection.told = batch
        return tuple(problem for event in events if (problem := self._hear(now_s, connection, event)))

    def _hear(self, now_s: float, connection: connections.Connection, event: OuterEvent) -> str | None:
        """Take in one event; return why it was refused, if it was."""
        facts, name = connection.facts, connection.name
        problem = connections.speaker_problem(facts.kind, name, event)
        if problem:
            return self.refuse("foreign", problem)
        fragment, registers = event.fragment, isinstance(event, on.ClusterRegistered | on.ShardRegistered)
        if self.master is None:
            return self.refuse("no_model", f"{name}: {type(event).__name__} before any cluster described the model")
        knows = fragment in connection.registered
        if not knows and not registers:
            self.dropped[f"{type(event).__name__} before registering"] += 1
            return None
        if knows and registers:
            raise RemoteRefusal(f"{name} has registered on this connection: begin a new one to register again")
        connection.registered.add(fragment)
        self._events.append(event)
        try:
            self._drain(now_s)
        except ProtocolError as error:
            if registers:
                connection.registered.discard(fragment)
            return self.refuse("impossible", str(error))
        return None

    def outbox(self, now_s: float, name: str, number: int) -> connections.NoticeQueue:
        """Return where what is for a member waits.

        Raises:
            RemoteRefusal: the connection has ended.
        """
        connection = self.connections.of(name, number)
        connection.heard_s = now_s
        return connection.outbox

    def tick(self, now_s: float) -> None:
        """Let time pass.

        Raises:
            StateNotKept: the state could not be written.
        """
        for connection in self.connections:
            silent_s = now_s - connection.heard_s
            if silent_s >= self.config.settings.lost_after_s:
                self._lose(connection, f"not heard of for {silent_s:.3g} s")
        self._events.append(on.Ticked())
        self._drain(now_s)

    # What follows.

    def _drain(self, now_s: float) -> None:
        """Let the policy hear what has happened, and what comes of that here."""
        while self._events:
            event, seeded = self._events.popleft(), self.state.seeded
            commands = self.master.on_event(now_s, event) if self.master else ()
            if seeded and not self.state.seeded:
                _log.warning("the shards hold no version in common any more: the next push brings new first parameters")
            if any(isinstance(command, do.Save) for command in commands):
                self._files.save(self.state)
            for command in commands:
                self._give(command)
        self._announce(now_s)

    def _give(self, command: OuterCommand) -> None:
        """Put a command where those it is for can fetch it."""
        notice = {"command": encode_message(command)}
        for name in command.recipients:
            connection = self.connections.attached(name, command.fragment)
            if connection is None:
                self.dropped[f"{type(command).__name__} for one that is not there"] += 1
            elif not connection.outbox.put(notice):
                self._lose_full(connection)
        if isinstance(command, do.Move) and not self.connections.attached(command.transfer.worker, command.fragment):
            reason = f"worker {command.transfer.worker} is not connected"
            self._events.append(on.TransferLost(way=command.way, transfer=command.transfer, reason=reason))

    def _announce(self, now_s: float) -> None:
        for connection in self.connections.announce():
            self._lose_full(connection)
        if self._events:
            self._drain(now_s)

    def _lose_full(self, connection: connections.Connection) -> None:
        self.refuse("does_not_fetch", f"{connection.name} lets too many notices wait")
        self._lose(connection, "it does not fetch what is for it")

    def _lose(self, connection: connections.Connection, reason: str) -> None:
        """End a connection; what the policy is to hear of that is put in line."""
        self.connections.close(connection, reason)
        _log.info("%s %s is gone: %s", connection.facts.kind, connection.name, reason)
        self._events.extend(self._loss(connection, reason))

    def _loss(self, connection: connections.Connection, reason: str) -> Iterator[OuterEvent]:
        name = connection.name
        if connection.facts.kind == "shard":
            yield on.ShardLost(shard=name, reason=reason)
        elif connection.facts.kind == "cluster":
            yield on.ClusterLeft(cluster=name)
        elif self.master:
            for way, transfer in self.master.lines.moving:
                if transfer.worker == name:
                    yield on.TransferLost(way=way, transfer=transfer, reason=f"worker {name} is gone: {reason}")

    def refuse(self, reason: str, text: str) -> str:
        """Count a refusal by its reason, and return its text."""
        self.refusals.add(reason, text)
        return text
