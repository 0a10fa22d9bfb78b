"""The virtual-clock driver of the outer optimizer: the very master and clients that train, over lines that share.

Di-PS, 5.1, compares methods on clusters of unequal speed and lines. Here that is done in virtual time: inner steps,
commands, events and layers take the time that the case says; decisions are those of `outer.policy`. The arithmetic is
whatever `bodies` do. A member that is killed loses what it has in memory; layers that were on their way still take
their line until they would have arrived, and are dropped there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import LayerTransfer, OuterEvent, Ticket, TransferWay
from spantrain.outer.policy.fragments import FragmentedMaster, FragmentedState
from spantrain.sim.network import Network
from spantrain.sim.transfers import Arrived, TransferCost, VirtualClock
from spantrain_studies.outer.bodies import Bodies, PlainBodies
from spantrain_studies.outer.case import MASTER, ClusterFigures, OuterCase, OuterResult
from spantrain_studies.outer.members import ClusterMember, ShardMember


class LineNetwork:
    """Carries messages from line to line; pairs share a line equally."""

    def __init__(self, clock: VirtualClock, case: OuterCase) -> None:
        self._network = Network(clock)
        self._lines = case.lines
        self._transfers: dict[tuple[str, str, int], TransferCost] = {}

    def send(self, source: str, target: str, size_bytes: int, arrived: Arrived) -> None:
        """Carry so many bytes; one message of a pair after the other."""
        key = source, target, size_bytes
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = self._transfers[key] = self._transfer(*key)
        self._network.send(source, target, transfer, arrived)

    def _transfer(self, source: str, target: str, size_bytes: int) -> TransferCost:
        ends = self._lines[source], self._lines[target]
        slower = min(end.bandwidth_bytes_per_s for end in ends)
        return TransferCost(
            size_bytes=size_bytes,
            latency_s=sum(end.latency_s for end in ends),
            occupancy_s=size_bytes / slower,
            links=(f"{source} up", f"{target} down"),
            usage=tuple(slower / end.bandwidth_bytes_per_s for end in ends),
        )


_ROUNDING_S = 1e-6
"""Late enough that what was to be due at a time is."""
_BEATS = 4
"""In the time after which a member is lost."""
_PATIENCE = 50
"""Times the longest that anything may take; who makes no progress for so long never will."""


def simulate_outer(case: OuterCase, bodies: Bodies | None = None) -> OuterResult:
    """Run a case to its end.

    Raises:
        AssertionError: nothing goes on any more, which is a fault of a policy.

    >>> from spantrain_studies.outer.case import MemberLine, SimulatedCluster, SimulatedShard, equal_layers
    >>> line = MemberLine(bandwidth_bytes_per_s=1e6)
    >>> speeds = {"a": 1.0, "b": 2.0}
    >>> found = simulate_outer(OuterCase(
    ...     clusters=tuple(SimulatedCluster(name=name, step_s=step_s, line=line) for name, step_s in speeds.items()),
    ...     shards=(SimulatedShard(name="s0", line=line),), layers=equal_layers(4, 1_000_000),
    ...     inner_steps=10, steps=90))
    >>> [(one.inner_steps, one.tokens_counted) for one in found.clusters.values()]
    [(60, 60), (30, 30)]
    """
    return OuterSimulation(case, bodies or PlainBodies()).run()


@dataclass
class _Staleness:
    versions: int = 0
    pushes: int = 0


class OuterSimulation:
    """One run."""

    def __init__(self, case: OuterCase, bodies: Bodies) -> None:
        self.case, self._bodies = case, bodies
        self.clock = VirtualClock()
        self.lines = LineNetwork(self.clock, case)
        """What carries layers; another may take its place before the run."""
        self._clusters = {one.name: one for one in case.clusters}
        self._shards = {one.name: one for one in case.shards}
        self.saved = FragmentedState.of(case.settings.fragments)
        """What outlives the master."""
        self.master: FragmentedMaster | None = None
        self.members: dict[str, ClusterMember | ShardMember] = {}
        """Those that live."""
        self._down: set[str] = set()
        self._past: dict[str, list[ClusterMember]] = {name: [] for name in self._clusters}
        self._connections = dict.fromkeys((*self._clusters, *self._shards), 0)
        self._attached: dict[str, int] = {}
        """By member: the connection over which the master speaks to it."""
        self._wake_s: float | None = None
        self._taken = 0
        self._ended = False
        self._stale = {name: _Staleness() for name in self._clusters}
        self._seeds: set[Ticket] = set()
        self._outcomes: dict[int, Ticket] = {}
        """The last, by fragment."""
        self._changed_s = 0.0
        self._first_s: float | None = None
        self._last_s = 0.0

    @property
    def now_s(self) -> float:
        """Time."""
        return self.clock.now_s

    def run(self) -> OuterResult:
        """Run to the end."""
        self._start_master()
        for shard in self._shards:
            self._start(shard)
        for cluster in self.case.clusters:
            self.clock.at(cluster.begins_s, self._start, cluster.name)
        for fault in self.case.faults:
            self.clock.at(fault.at_s, self._kill, fault.member)
            self.clock.at(fault.at_s + fault.down_s, self._revive, fault.member)
        self._beat()
        self.clock.run()
        return self._result()

    # What members ask for.

    def later(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call something after a while."""
        self.clock.at(self.now_s + delay_s, call, *arguments)

    def may_step(self) -> bool:
        """Whether another step is to be taken, by whoever asks."""
        case = self.case
        more = self._taken < case.steps if case.steps is not None else self.now_s < (case.seconds or 0.0)
        if more:
            self._taken += 1
            self._changed_s = self.now_s
            self._first_s = self.now_s if self._first_s is None else self._first_s
        return more

    @property
    def _all_taken(self) -> bool:
        return self._taken >= self.case.steps if self.case.steps is not None else self.now_s >= (self.case.seconds or 0)

    def settled(self) -> None:
        """End the run when all clusters have nothing left to push."""
        clusters = [one for one in self.members.values() if isinstance(one, ClusterMember)]
        if self._all_taken and all(one.done for one in clusters):
            self._ended = True

    def stepped(self) -> None:
        """Note the end of a step."""
        self._changed_s = self._last_s = self.now_s

    def tell(self, member: str, event: OuterEvent) -> None:
        """Send the master an event."""
        delay_s = self.case.lines[member].latency_s
        self.later(delay_s, self._told, member, self._connections[member], event)

    def carry(self, way: TransferWay, transfer: LayerTransfer, version: int, content: Any) -> None:
        """Send a layer."""
        ends = (transfer.cluster, transfer.shard) if way is TransferWay.PUSH else (transfer.shard, transfer.cluster)
        connections = [self._connections[end] for end in ends]
        del version

        def arrived(_start_s: float, _sent_s: float) -> None:
            same = connections == [self._connections[end] for end in ends]
            if same and all(end in self.members for end in ends):
                self._arrived(way, transfer, content)

        self.lines.send(*ends, transfer.size_bytes, arrived)

    def connect(self, member: str) -> None:
        """Give a member a new connection: what was on its way is lost."""
        self._connections[member] += 1
        self._attached.pop(member, None)
        if member in self.members:
            self.members[member].registered()

    # What is on its way.

    def _arrived(self, way: TransferWay, transfer: LayerTransfer, content: Any) -> None:
        cluster, shard = self.members[transfer.cluster], self.members[transfer.shard]
        number = transfer.ticket.number % len(self.case.fragments)
        if way is TransferWay.PUSH:
            assert isinstance(shard, ShardMember)
            assert isinstance(cluster, ClusterMember)
            shard.got(number, transfer, content)
            cluster.sent(number, transfer)
        else:
            assert isinstance(cluster, ClusterMember)
            cluster.got(number, transfer, content)

    def _told(self, member: str, connection: int, event: OuterEvent) -> None:
        if self.master is None or connection != self._connections[member]:
            return
        if isinstance(event, on.ClusterRegistered | on.ShardRegistered):
            self._attached[member] = connection
        self._decide(event)

    def _decide(self, event: OuterEvent) -> None:
        assert self.master is not None
        for command in self.master.on_event(self.now_s, event):
            self._command(command)
        self._note_outcome()
        self._plan_wake()

    def _command(self, command: OuterCommand) -> None:
        if isinstance(command, do.Save):
            assert self.master is not None
            self.saved = self.master.state
        elif isinstance(command, do.StageVersion) and command.parameters:
            self._seeds.add(command.update)
        for member in command.recipients:
            connection = self._attached.get(member)
            if connection is not None:
                self.later(self.case.lines[member].latency_s, self._hear, member, connection, command)

    def _hear(self, member: str, connection: int, command: OuterCommand) -> None:
        if connection == self._connections[member] and member in self.members:
            self.members[member].heard(command)

    def _note_outcome(self) -> None:
        assert self.master is not None
        for number, part in enumerate(self.master.parts):
            last = part.updates.last
            if last is None or last.ticket == self._outcomes.get(number):
                continue
            self._outcomes[number], self._changed_s = last.ticket, self.now_s
            for cluster, versions in last.staleness.items() if last.ticket not in self._seeds else ():
                self._stale[cluster].versions += versions
                self._stale[cluster].pushes += 1

    # Time.

    def _plan_wake(self) -> None:
        wake_s = self.master.wake_s if self.master else None
        if wake_s is not None and (self._wake_s is None or wake_s < self._wake_s - _ROUNDING_S) and not self._ended:
            self._wake_s = max(wake_s, self.now_s) + _ROUNDING_S
            self.clock.at(self._wake_s, self._wake, self._wake_s)

    def _wake(self, planned_s: float) -> None:
        if planned_s == self._wake_s:
            self._wake_s = None
            if self.master is not None and not self._ended:
                self._decide(on.Ticked())

    def _beat(self) -> None:
        if self._ended:
            return
        for name, member in self.members.items():
            if isinstance(member, ShardMember):
                member.beat()
            else:
                self.tell(name, on.ClusterBeat(cluster=name))
        self._check_progress()
        self.settled()
        self.later(self.case.settings.lost_after_s / _BEATS, self._beat)

    def _check_progress(self) -> None:
        assert self.now_s - self._changed_s < self._patience_s, f"nothing goes on after {self._changed_s:.4g} s"

    @property
    def _patience_s(self) -> float:
        case, settings = self.case, self.case.settings
        slowest = min(line.bandwidth_bytes_per_s for line in case.lines.values())
        exchange_s = case.model_bytes * (len(case.clusters) + 1) / slowest
        step_s = max(one.step_s * (1 + one.gap) for one in case.clusters)
        faults_s = max((one.at_s + one.down_s for one in case.faults), default=0.0)
        begins_s = max(one.begins_s for one in case.clusters)
        longest_s = max(step_s, exchange_s, settings.grace_s, settings.lost_after_s)
        return _PATIENCE * longest_s + 2 * settings.transfer_limit_s + faults_s + begins_s

    # Who lives.

    def _start_master(self) -> None:
        self.master = FragmentedMaster(self.case.layout, self.case.settings, self.saved, now_s=self.now_s)
        self._wake_s = None
        for name in self.members:
            self.connect(name)

    def _start(self, name: str) -> None:
        if name in self._clusters:
            cluster = ClusterMember(self, self._clusters[name], self.case, self._bodies.cluster(name))
            self.members[name] = cluster
            self._past[name].append(cluster)
        else:
            bodies = [self._bodies.shard(name, layout, number) for number, layout in enumerate(self.case.fragments)]
            self.members[name] = ShardMember(self, self._shards[name], self.case, bodies)
        self.connect(name)

    def _kill(self, name: str) -> None:
        if name == MASTER:
            self.master, self._attached = None, {}
            for member in self._connections:
                self._connections[member] += 1
            for one in self.members.values():
                if isinstance(one, ClusterMember):
                    one.cut_off()
        elif name in self.members:
            self._down.add(name)
            self.members.pop(name).dead = True
            self.connect(name)

    def _revive(self, name: str) -> None:
        if self._ended:
            return
        if name == MASTER and self.master is None:
            self._start_master()
        elif name in self._down:
            self._down.remove(name)
            self._start(name)

    def _result(self) -> OuterResult:
        case, state = self.case, self.master.state if self.master else self.saved
        begin_s = self._first_s or 0.0
        return OuterResult(
            method="outer",
            clusters={name: self._figures(name, state) for name in self._clusters},
            versions=sum(one.updates for one in state.fragments),
            rejected_updates=sum(one.left_out for one in state.fragments),
            span_s=self._last_s - begin_s,
            end_s=self.now_s,
            ideal_tokens_per_s=sum(case.tokens_per_step / one.mean_step_s for one in case.clusters),
        )

    def _figures(self, name: str, state: FragmentedState) -> ClusterFigures:
        record = state.leading.clusters.get(name)
        counted = record.tokens if record else 0
        lives, stale = self._past[name], self._stale[name]
        tokens = sum(one.steps for one in lives) * self.case.tokens_per_step
        train_s = sum(one.train_s for one in lives)
        return ClusterFigures(
            tokens=tokens,
            tokens_counted=counted,
            tokens_lost=tokens - counted,
            inner_steps=sum(one.steps for one in lives),
            outer_rounds=sum(one.rounds for one in lives),
            mean_staleness=stale.versions / stale.pushes if stale.pushes else 0.0,
            comm_s=sum(one.comm_s for one in lives),
            train_s=train_s,
            stood_still_s=max(0.0, self._last_s - (self._first_s or 0.0) - train_s),
        )
