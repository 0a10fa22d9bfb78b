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
  master that was started again, or a shard that comes back late, never takes one content for another. A shard that
  holds versions with numbers that were never given out has those of another run, and is told to end.
"""

from collections import Counter
from dataclasses import replace

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import OuterEvent, PushOutcome, Ticket
from spantrain.core.outer.layers import ShardLayout
from spantrain.errors import ProtocolError
from spantrain.outer.policy.chunks import ChunkLedger
from spantrain.outer.policy.exchanges import ExchangeControl, SharedLines
from spantrain.outer.policy.liveness import Overdue, StuckShards, Trainers
from spantrain.outer.policy.members import ClusterTable, ShardTable
from spantrain.outer.policy.settings import MasterState, OuterSettings
from spantrain.outer.policy.updates import Updates

_UNKNOWN = "not registered, or not heard of for too long"


class OuterMaster:
    """Hears events with their time; answers with commands, to be carried out in order."""

    def __init__(
        self, layout: ShardLayout, settings: OuterSettings | None = None, state: MasterState | None = None,
        *, now_s: float = 0.0, lines: SharedLines | None = None, fragment: tuple[int, int] = (0, 1),
    ) -> None:  # fmt: skip
        """Begin, or go on from a saved state: clusters and shards register again, pushes under way are gone.

        `lines` are shared with the masters of other fragments; `fragment`: which of how many this is (see `fragments`).
        """
        settings, before = settings or OuterSettings(), state or MasterState()
        lost_after_s = settings.lost_after_s
        self.layout, self._settings, self._fragment = layout, settings, fragment
        self._ledger = ChunkLedger(before.chunks, lease_s=settings.lease_s, now_s=now_s) if before.chunks else None
        self._versions = Overdue(least=lost_after_s, known=False, at=now_s)
        self._stuck = StuckShards(layout.shards, patience_s=lost_after_s)
        self._trainers = Trainers(least_s=lost_after_s)
        # To look at, as what follows.
        self.members = ClusterTable(lost_after_s=lost_after_s, ledger=self._ledger)
        self.shards = ShardTable(layout.shards, lost_after_s=lost_after_s, answer_s=settings.transfer_limit_s)
        self.updates = Updates(layout, settings, replace(before, epoch=before.epoch + 1), self._trainers)
        self.traffic = ExchangeControl(
            layout, settings, clusters=self.members, shards=self.shards, updates=self.updates,
            new_ticket=self._ticket, lines=lines,
        )  # fmt: skip
        self.dropped: Counter[str] = Counter()
        """Events of what has ended, by sort."""
        self._next_ticket = 0
        self._out: list[OuterCommand] = [do.Save(reason=f"start {self.updates.state.epoch} of the master")]

    @property
    def state(self) -> MasterState:
        """What to keep when told to save."""
        return replace(self.updates.state, chunks=self._ledger.state if self._ledger else None)

    @property
    def clusters(self) -> tuple[str, ...]:
        """Those that are registered."""
        return self.members.alive.names

    def trains(self, now_s: float) -> tuple[str, ...]:
        """Return those of them that train."""
        return self._trainers.of(now_s, self.clusters)

    def late_s(self, now_s: float) -> float | None:
        """Return for how long there was no version, where clusters have something to give and it should have come."""
        busy = {*self.waiting, *(one.cluster for one in self.traffic.under_way.values())} & {*self.clusters}
        since_s = self._trainers.wait(now_s, self.clusters, busy)
        late = since_s is not None and self._versions.is_late(now_s, since=since_s)
        return now_s - self._versions.last if late else None

    @property
    def waiting(self) -> tuple[str, ...]:
        """Clusters with an accepted push of which nothing is decided yet."""
        return tuple(push.cluster for push in self.updates.pending)

    @property
    def wake_s(self) -> float | None:
        """When time itself will change something: send `Ticked` then."""
        times = (self.members.wake_s, self.shards.wake_s, self.traffic.next_limit_s, self.updates.wake_s)
        return min((time_s for time_s in times if time_s is not None), default=None)

    def on_event(self, now_s: float, event: OuterEvent) -> tuple[OuterCommand, ...]:
        """Take in an event; return what is to be done, in this order.

        Raises:
            ProtocolError: the event is not possible; nothing has changed.
        """
        match event:
            case on.ClusterRegistered():
                self._register(now_s, event)
            case on.ClusterLeft():
                self._drop_cluster(event.cluster, (), "it left")
            case on.ClusterEvent():
                self._of_cluster(now_s, event)
            case on.Moved():
                self._follow(event, self.traffic.moved(now_s, event))
                self._stuck.moved(event.transfer)
            case on.TransferLost():
                if self._follow(event, self.traffic.lost(event)):
                    self._stuck.failed(now_s, event.transfer)
            case on.PushChecked():
                self._follow(event, self.traffic.checked(now_s, event))
            case on.NormsMeasured() | on.MeanCombined() | on.Staged() | on.Committed():
                self._of_update(now_s, event)
            case on.ShardEvent():
                self._of_shard(now_s, event)
        self._time_passes(now_s)
        self._advance(now_s)
        commands, self._out = tuple(self._out), []
        return commands

    # Clusters, their pushes and pulls.

    def _of_cluster(self, now_s: float, event: on.ClusterEvent) -> None:
        if isinstance(event, on.PushAsked):
            self._trainers.asked(now_s, event.cluster)
        if event.cluster not in self.members:
            self._out.append(do.RegisterAgain(member=event.cluster, reason=_UNKNOWN))
            return
        self.members.heard(now_s, event.cluster)
        match event:
            case on.PushAsked():
                self._out += self.traffic.asked(now_s, event)
            case on.PushSent():
                self._out += self.traffic.sent(event)
            case on.PullAsked():
                self.traffic.owe(event.cluster, "it asked")
            case on.TrainingBegun():
                self._trainers.begun(now_s, event.cluster)
            case on.RoundKept():
                self.updates.excuse(event.cluster)
            case on.ChunkAsked():
                self._out += self.members.lease(now_s, event.cluster, self.updates.pending, self._trainers)

    def _register(self, now_s: float, event: on.ClusterRegistered) -> None:
        layers = sorted(layer for layers in event.workers.values() for layer in layers)
        if layers != list(range(len(self.layout.layers))):
            raise ProtocolError(
                f"{event.cluster}: its workers must hold each of {len(self.layout.layers)} layers once, got {layers}"
            )
        fate = self.updates.fate(event.cluster, event.unresolved) if event.unresolved else None
        self._drop_cluster(event.cluster, event.leases, "it registered again")
        adopted = event.unresolved if fate is PushOutcome.PENDING else None
        self.members.joined(now_s, event, adopted=adopted, pending=self.updates.pending)
        state = self.updates.state
        version = state.version if state.seeded else None
        reason = f"{len(self.clusters)} clusters are registered"
        leases = tuple(sorted(self.members.leases(event.cluster) & set(event.leases)))
        self._out.append(do.Welcome(cluster=event.cluster, version=version, fate=fate, leases=leases, reason=reason))
        if state.seeded and fate in (None, PushOutcome.COUNTED):
            self.traffic.owe(event.cluster, "it is new" if fate is None else "its push was counted")

    def _drop_cluster(self, cluster: str, leases: tuple[int, ...], reason: str) -> None:
        if cluster not in self.members:
            return
        pending = [push for push in self.updates.pending if push.cluster == cluster]
        self.members.left(cluster, pending, keep=leases)
        self._out += self.traffic.cluster_left(cluster, reason)

    # Shards and updates.

    def _of_shard(self, now_s: float, event: on.ShardEvent) -> None:
        shard, shards = event.shard, self.shards
        if shard not in shards:
            known = ", ".join(self.layout.shards)
            raise ProtocolError(f"{shard}: no shard of this model; its shards are {known}; start it with one's name")
        if isinstance(event, on.ShardRegistered):
            self._lose_shard(now_s, shard, "it registered again")
            newest, made = max(event.versions, default=0), self.updates.state.next_version - 1
            if newest <= made:
                shards.joined(now_s, shard, event.versions)
                return
            told = f"{shard} holds version {newest}, and this master has made {made or 'none'} at most"
            remedy = f"give {shard} an empty folder for its snapshots, or start the master with the folder of that run"
            self._out.append(do.StartAnew(shard=shard, reason=f"{told}: {remedy}"))
        elif isinstance(event, on.ShardLost):
            self._lose_shard(now_s, shard, event.reason)
        elif shard not in shards.alive:
            self._out.append(do.RegisterAgain(member=shard, reason=_UNKNOWN))
        else:
            shards.alive.heard(now_s, shard)
            if isinstance(event, on.ShardBeat):
                shards.holds(shard, event.versions)
            elif isinstance(event, on.Restored):
                shards.answered(shard, event.versions)
                if not shards.restored(shard, event.version):
                    self._follow(event, None)
                elif shards.all_ready:
                    self._trainers.resume(now_s)

    def _lose_shard(self, now_s: float, shard: str, reason: str) -> None:
        if shard not in self.shards.alive:
            return
        self._stuck.forget(shard)
        self.shards.lost(shard)
        told = f"{shard} is lost: {reason}"
        self._out += self.traffic.shard_lost(told)
        self._out += self.updates.abort(self.shards.present, told)
        self._settle(now_s)

    def _of_update(self, now_s: float, event: on.NormsMeasured | on.MeanCombined | on.Staged | on.Committed) -> None:
        committing = self.updates.committing
        if isinstance(event, on.Committed):
            self.shards.answered(event.shard, event.versions)
        commands = self.updates.heard(event, self.traffic.pulled, self.traffic.bases)
        if self.updates.committing and not committing:
            self.shards.told(now_s)
            if self.updates.state.updates > 1:
                self._versions.came(now_s)
            else:
                self._versions = Overdue(least=self._settings.lost_after_s, known=False, at=now_s)
        self._follow(event, commands)
        self._settle(now_s)

    def _settle(self, now_s: float) -> None:
        """Give those whose push counted the version, and count their data; end leases of clusters that are gone."""
        for push in self.updates.counted:
            if self.members.count(now_s, push):
                self.traffic.owe(push.cluster, f"its push was part of update {self.updates.state.updates}")
            for cluster in self.clusters if push.parameters else ():
                self.traffic.owe(cluster, "there are parameters now")
        self.updates.counted.clear()
        self.members.settle(now_s, self.updates.pending)

    # Time.

    def _time_passes(self, now_s: float) -> None:
        for cluster, silent_s in self.members.alive.silent(now_s).items():
            self._drop_cluster(cluster, (), f"not heard of for {silent_s:.3g} s")
        for shard, silent_s in self.shards.alive.silent(now_s).items():
            self._lose_shard(now_s, shard, f"not heard of for {silent_s:.3g} s")
        self._out += self.traffic.time_passes(now_s)
        limit_s = self._settings.transfer_limit_s
        for shard in sorted({*self.updates.late_shards(now_s), *self.shards.late(now_s)}):
            self._lose_shard(now_s, shard, f"no answer for {limit_s:.3g} s")
            self._out.append(do.RegisterAgain(member=shard, reason="it kept the others waiting for too long"))
        for shard, reason in self._stuck.at(now_s, self.clusters, len(self.trains(now_s))):
            self._lose_shard(now_s, shard, reason)
            self._out.append(do.StartAnew(shard=shard, reason=reason))
        self._settle(now_s)

    def _advance(self, now_s: float) -> None:
        """Do what has become possible."""
        if self.shards.to_restore:
            self._restore(now_s)
        if not self.shards.all_ready:
            return
        self._out += self.updates.begin(now_s, self._ticket, self.trains(now_s))
        if self.updates.state.seeded and not self.updates.committing:
            self._out += self.traffic.pull(now_s)
        self._out += self.traffic.lines.moves(now_s)

    def _restore(self, now_s: float) -> None:
        version, source = self.updates.go_back(self.shards.common())
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
        lost = self.updates.uncount_last()
        if lost:
            self._out.append(do.Save(reason="all versions are lost"))
        for cluster in sorted(lost.keys() & {*self.clusters}):
            self._out.append(do.SkipRound(cluster=cluster, push=lost[cluster], reason=reason))

    def _ticket(self) -> Ticket:
        self._next_ticket += 1
        number, count = self._fragment
        return Ticket(self.updates.state.epoch, self._next_ticket * count + number)

    def _follow(self, event: OuterEvent, commands: list[OuterCommand] | None) -> bool:
        """Do what an event asks for; None: it is of something that has ended. Return whether it is not."""
        if commands is None:
            self.dropped[type(event).__name__] += 1
        self._out += commands or ()
        return commands is not None
