"""The master: registers clusters and shards, lets pushes in, opens windows, commands updates and pulls. No parameters.

Di-PS, 3.2 (control flow), 4.2 and algorithm 1. Kept: the six steps of a round (push, completion in two stages, a
window with a time of grace, its end, update, pull to those that took part), heartbeats, versions, tokens by cluster,
that a new cluster gets the newest version, that a round is skipped when a shard is lost. Decided here:

- A push is the pseudo-gradient, start of the round minus now, made by the cluster. (Algorithm 1 subtracts from the
  shards' present parameters, which charges a cluster with what others did meanwhile.)
- A push has been accepted when every shard says that it holds all of it. It counts, tokens and samples, when the update
  with it is decided. One that comes to nothing was never counted: its cluster trains on from the same start.
- A window also ends when every cluster has pushed. A cluster has one push in a window. What is accepted during an
  update waits for the next.
- Nobody waits for a cluster. What it had accepted when it was lost still counts. One that does not train, since it only
  evaluates, counts nowhere: it gets versions (`trainers`).
- Version numbers are written down before any shard stages them, and a decision before any shard commits it. So a
  master that was started again, or a shard that comes back late, never takes one content for another.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import OuterEvent, PushOutcome, Ticket, TransferWay
from spantrain.core.outer.layers import ShardLayout
from spantrain.errors import ProtocolError
from spantrain.outer.policy.chunks import ChunkLedger
from spantrain.outer.policy.exchanges import ExchangeControl, SharedLines
from spantrain.outer.policy.liveness import Liveness, Overdue, StuckShards, Trainers
from spantrain.outer.policy.members import ClusterTable, ShardTable
from spantrain.outer.policy.settings import MasterState, OuterSettings
from spantrain.outer.policy.update import UpdateOutcome
from spantrain.outer.policy.updates import Updates


class OuterMaster:
    """Hears events with their time; answers with commands, to be carried out in order."""

    def __init__(
        self, layout: ShardLayout, settings: OuterSettings | None = None, state: MasterState | None = None,
        *, now_s: float = 0.0, lines: SharedLines | None = None, fragment: tuple[int, int] = (0, 1),
    ) -> None:  # fmt: skip
        """Begin, or go on from a saved state: clusters and shards register again, pushes under way are gone.

        `lines` are shared with the masters of other fragments; `fragment`: which of how many this is (see `fragments`).
        """
        self.layout = self._layout = layout
        self._settings = settings or OuterSettings()
        before = state or MasterState()
        lease_s = self._settings.lease_s
        self._ledger = ChunkLedger(before.chunks, lease_s=lease_s, now_s=now_s) if before.chunks else None
        self._clusters = ClusterTable(lost_after_s=self._settings.lost_after_s, ledger=self._ledger)
        self._alive = Liveness(lost_after_s=self._settings.lost_after_s)
        self.shards = ShardTable(layout.shards)
        """To look at."""
        self._versions = Overdue(least=self._settings.lost_after_s, known=False, at=now_s)
        self._stuck = StuckShards(layout.shards, patience_s=self._settings.lost_after_s)
        self._fragment = fragment
        self._trainers = Trainers(least_s=self._settings.lost_after_s)
        self._updates = Updates(layout, self._settings, replace(before, epoch=before.epoch + 1), self._trainers)
        self._traffic = ExchangeControl(
            layout, self._settings, clusters=self._clusters, shards=self.shards, updates=self._updates,
            new_ticket=self._ticket, lines=lines,
        )  # fmt: skip
        self._next_ticket = 0
        self._out: list[OuterCommand] = [do.Save(reason=f"start {self._updates.state.epoch} of the master")]
        self.dropped: Counter[str] = Counter()
        """Events of what has ended, by sort."""

    @property
    def state(self) -> MasterState:
        """What to keep when told to save."""
        return replace(self._updates.state, chunks=self._ledger.state if self._ledger else None)

    @property
    def last_outcome(self) -> UpdateOutcome | None:
        """What the last update came to."""
        return self._updates.last_outcome

    @property
    def clusters(self) -> tuple[str, ...]:
        """Those that are registered."""
        return self._clusters.names

    def trains(self, now_s: float) -> tuple[str, ...]:
        """Return those of them that train."""
        return self._trainers.of(now_s, self._clusters.names)

    def workers_of(self, cluster: str) -> Mapping[str, tuple[int, ...]]:
        """Return the layers of a cluster's workers, by name; none of one that is not registered."""
        return self._clusters.workers.get(cluster, {})

    def got(self, cluster: str) -> tuple[int | None, float | None]:
        """Return the version that a registered cluster has got last, and when."""
        return self._clusters.begun_from.get(cluster), self._clusters.got_s.get(cluster)

    def late_s(self, now_s: float) -> float | None:
        """Return for how long there was no version, where clusters have something to give and it should have come."""
        busy = {*self.waiting, *(one.cluster for one in self._traffic.under_way)} & {*self._clusters.names}
        since_s = self._trainers.wait(now_s, self._clusters.names, busy)
        late = since_s is not None and self._versions.is_late(now_s, since=since_s)
        return now_s - self._versions.last if late else None

    @property
    def answers_to_come(self) -> tuple[str, ...]:
        """Shards that an update waits for."""
        return self._updates.missing

    @property
    def waiting(self) -> tuple[str, ...]:
        """Clusters with an accepted push of which nothing is decided yet."""
        return tuple(push.cluster for push in self._updates.pending)

    @property
    def transfers(self) -> tuple[tuple[TransferWay, on.LayerTransfer], ...]:
        """Layers under way."""
        return self._traffic.under_way.moving

    @property
    def wake_s(self) -> float | None:
        """When time itself will change something: send `Ticked` then."""
        told_s = self.shards.waits_since_s
        times = (
            self._clusters.wake_s, self._alive.next_limit_s, self._traffic.under_way.next_limit_s,
            self._updates.wake_s, None if told_s is None else told_s + self._settings.transfer_limit_s,
        )  # fmt: skip
        return min((time_s for time_s in times if time_s is not None), default=None)

    def on_event(self, now_s: float, event: OuterEvent) -> tuple[OuterCommand, ...]:
        """Take in an event; return what is to be done, in this order.

        Raises:
            ProtocolError: the event is not possible; nothing has changed.
        """
        match event:
            case (
                on.ClusterRegistered() | on.ClusterBeat() | on.ClusterLeft() | on.TrainingBegun() | on.RoundKept()
                | on.PullAsked() | on.ChunkAsked()
            ):  # fmt: skip
                self._of_cluster(now_s, event)
            case on.PushAsked() | on.PushSent() | on.PushChecked() | on.Moved() | on.TransferLost():
                self._of_exchange(now_s, event)
            case on.ShardRegistered() | on.ShardBeat() | on.ShardLost() | on.Restored():
                self._of_shard(now_s, event)
            case on.NormsMeasured() | on.MeanCombined() | on.Staged() | on.Committed():
                self._of_update(now_s, event)
            case on.Ticked():
                pass
        self._time_passes(now_s)
        self._advance(now_s)
        commands, self._out = tuple(self._out), []
        return commands

    # Clusters.

    def _of_cluster(
        self, now_s: float,
        event: (
            on.ClusterRegistered | on.ClusterBeat | on.ClusterLeft | on.TrainingBegun | on.RoundKept | on.PullAsked
            | on.ChunkAsked
        ),
    ) -> None:  # fmt: skip
        if isinstance(event, on.ClusterRegistered):
            self._register(now_s, event)
        elif isinstance(event, on.ClusterLeft):
            self._drop_cluster(event.cluster, (), "it left")
        elif self._knows(now_s, event.cluster):
            if isinstance(event, on.PullAsked):
                self._traffic.owe(event.cluster, "it asked")
            elif isinstance(event, on.TrainingBegun):
                self._trainers.begun(now_s, event.cluster)
            elif isinstance(event, on.RoundKept):
                self._updates.excuse(event.cluster)
            elif isinstance(event, on.ChunkAsked):
                self._out += self._clusters.lease(now_s, event.cluster, self._updates.pending, self._trainers)

    def _register(self, now_s: float, event: on.ClusterRegistered) -> None:
        layers = sorted(layer for layers in event.workers.values() for layer in layers)
        if layers != list(range(len(self._layout.layers))):
            raise ProtocolError(
                f"{event.cluster}: its workers must hold each of {len(self._layout.layers)} layers once, got {layers}"
            )
        fate = self._updates.fate(event.cluster, event.unresolved) if event.unresolved else None
        self._drop_cluster(event.cluster, event.leases, "it registered again")
        adopted = event.unresolved if fate is PushOutcome.PENDING else None
        self._clusters.joined(now_s, event, adopted=adopted, pending=self._updates.pending)
        state = self._updates.state
        version = state.version if state.seeded else None
        reason = f"{len(self._clusters.names)} clusters are registered"
        leases = tuple(sorted(self._clusters.leases(event.cluster) & set(event.leases)))
        self._out.append(do.Welcome(cluster=event.cluster, version=version, fate=fate, leases=leases, reason=reason))
        if state.seeded and fate in (None, PushOutcome.COUNTED):
            self._traffic.owe(event.cluster, "it is new" if fate is None else "its push was counted")

    def _knows(self, now_s: float, cluster: str) -> bool:
        """Whether a cluster is registered, and then note that it lives; else tell it."""
        if cluster not in self._clusters:
            self._out.append(do.RegisterAgain(member=cluster, reason="not registered, or not heard of for too long"))
            return False
        self._clusters.heard(now_s, cluster)
        return True

    def _drop_cluster(self, cluster: str, leases: tuple[int, ...], reason: str) -> None:
        if cluster not in self._clusters:
            return
        pending = [push for push in self._updates.pending if push.cluster == cluster]
        self._clusters.left(cluster, pending, keep=leases)
        self._out += self._traffic.cluster_left(cluster, reason)

    # Pushes and pulls.

    def _of_exchange(
        self, now_s: float, event: on.PushAsked | on.PushSent | on.PushChecked | on.Moved | on.TransferLost
    ) -> None:
        commands: list[OuterCommand] | None
        match event:
            case on.PushAsked():
                self._trainers.asked(now_s, event.cluster)
                commands = self._traffic.asked(now_s, event) if self._knows(now_s, event.cluster) else []
            case on.PushSent():
                commands = self._traffic.sent(event) if self._knows(now_s, event.cluster) else []
            case on.PushChecked():
                commands = self._traffic.checked(now_s, event)
            case on.Moved():
                commands = self._traffic.moved(now_s, event)
                self._stuck.moved(event.transfer)
            case on.TransferLost():
                commands = self._traffic.lost(event)
                if commands is not None:
                    self._stuck.failed(now_s, event.transfer)
        self._follow(event, commands)

    # Shards and updates.

    def _of_shard(self, now_s: float, event: on.ShardRegistered | on.ShardBeat | on.ShardLost | on.Restored) -> None:
        shard = event.shard
        if shard not in self.shards:
            known = ", ".join(self._layout.shards)
            raise ProtocolError(f"{shard}: no shard of this model; its shards are {known}; start it with one's name")
        if isinstance(event, on.ShardRegistered):
            self._lose_shard(now_s, shard, "it registered again")
            self._alive.heard(now_s, shard)
            self.shards.joined(shard, event.versions)
        elif isinstance(event, on.ShardLost):
            self._lose_shard(now_s, shard, event.reason)
        elif not self.shards.is_present(shard):
            self._out.append(do.RegisterAgain(member=shard, reason="not registered, or not heard of for too long"))
        else:
            self._alive.heard(now_s, shard)
            if isinstance(event, on.ShardBeat):
                self.shards.holds(shard, event.versions)
                return
            self.shards.answered(shard, event.versions)
            if not self.shards.restored(shard, event.version):
                self._drop(event)
            elif self.shards.all_ready:
                self._trainers.resume(now_s)

    def _lose_shard(self, now_s: float, shard: str, reason: str) -> None:
        if not self.shards.is_present(shard):
            return
        self._alive.forget(shard)
        self._stuck.forget(shard)
        self.shards.lost(shard)
        told = f"{shard} is lost: {reason}"
        self._out += self._traffic.shard_lost(told)
        self._out += self._updates.abort(self.shards.present, told)
        self._settle(now_s)

    def _of_update(self, now_s: float, event: on.NormsMeasured | on.MeanCombined | on.Staged | on.Committed) -> None:
        committing = self._updates.committing
        if isinstance(event, on.Committed):
            self.shards.answered(event.shard, event.versions)
        commands = self._updates.heard(event, self._traffic.pulled, self._traffic.bases)
        if self._updates.committing and not committing:
            self.shards.told(now_s)
            if self._updates.state.updates > 1:
                self._versions.came(now_s)
            else:
                self._versions = Overdue(least=self._settings.lost_after_s, known=False, at=now_s)
        self._follow(event, commands)
        self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        """Give those whose push counted the version, and count their data; end leases of clusters that are gone."""
        for push in self._updates.counted:
            if self._clusters.count(now_s, push):
                self._traffic.owe(push.cluster, f"its push was part of update {self._updates.state.updates}")
            for cluster in self._clusters.names if push.parameters else ():
                self._traffic.owe(cluster, "there are parameters now")
        self._updates.counted.clear()
        self._clusters.settle(now_s, self._updates.pending)

    # Time.

    def _time_passes(self, now_s: float) -> None:
        for cluster, silent_s in self._clusters.members.silent(now_s).items():
            self._drop_cluster(cluster, (), f"not heard of for {silent_s:.3g} s")
        for shard, silent_s in self._alive.silent(now_s).items():
            self._lose_shard(now_s, shard, f"not heard of for {silent_s:.3g} s")
        self._out += self._traffic.time_passes(now_s)
        limit_s = self._settings.transfer_limit_s
        for shard in sorted({*self._updates.late_shards(now_s), *self.shards.late(now_s, limit_s)}):
            self._lose_shard(now_s, shard, f"no answer for {limit_s:.3g} s")
            self._out.append(do.RegisterAgain(member=shard, reason="it kept the others waiting for too long"))
        for shard, reason in self._stuck.at(now_s, self._clusters.names, len(self.trains(now_s))):
            self._lose_shard(now_s, shard, reason)
            self._out.append(do.StartAnew(shard=shard, reason=reason))
        self._settle(now_s)

    def _advance(self, now_s: float) -> None:
        """Do what has become possible."""
        if self.shards.to_restore:
            self._restore(now_s)
        if not self.shards.all_ready:
            return
        self._out += self._updates.begin(now_s, self._ticket, self.trains(now_s))
        if self._updates.state.seeded and not self._updates.committing:
            self._out += self._traffic.pull(now_s)
        self._out += self._traffic.moves(now_s)

    def _restore(self, now_s: float) -> None:
        version, source = self._updates.go_back(self.shards.common())
        if source is None:
            self.shards.no_parameters()
            self._give_up_counted()
            return
        if source != version:
            self._out.append(do.Save(reason=f"version {source} is now {version}"))
        self._out += self.shards.restore(now_s, source, version)

    def _give_up_counted(self) -> None:
        """Tell clusters not to wait for the version that their last push went into: no shards have one together."""
        reason = "the shards lost the version that it was in, and all others"
        lost = self._updates.uncount_last()
        if lost:
            self._out.append(do.Save(reason="all versions are lost"))
        for cluster in sorted(lost.keys() & set(self._clusters.names)):
            self._out.append(do.SkipRound(cluster=cluster, push=lost[cluster], reason=reason))

    def _ticket(self) -> Ticket:
        self._next_ticket += 1
        number, count = self._fragment
        return Ticket(self._updates.state.epoch, self._next_ticket * count + number)

    def _follow(self, event: OuterEvent, commands: list[OuterCommand] | None) -> None:
        """Do what an event asks for; None: it is of something that has ended."""
        if commands is None:
            self._drop(event)
        else:
            self._out += commands

    def _drop(self, event: OuterEvent) -> None:
        self.dropped[type(event).__name__] += 1
