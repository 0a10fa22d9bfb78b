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
- Nobody waits for a cluster. What it had accepted when it was lost still counts.
- Version numbers are written down before any shard stages them, and a decision before any shard commits it. So a
  master that was started again, or a shard that comes back late, never takes one content for another.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from spantrain.core import outer_commands as do
from spantrain.core import outer_events as on
from spantrain.core.outer_commands import OuterCommand
from spantrain.core.outer_events import Fate, OuterEvent, Ticket, Way
from spantrain.core.outer_layers import ShardLayout
from spantrain.errors import ProtocolError
from spantrain.policy.outer.chunks import ChunkLedger
from spantrain.policy.outer.clusters import ClusterTable
from spantrain.policy.outer.exchanges import Exchange, Exchanges, Push
from spantrain.policy.outer.members import Members
from spantrain.policy.outer.rounds import UpdateOutcome
from spantrain.policy.outer.settings import MasterState, OuterSettings
from spantrain.policy.outer.shards import ShardTable
from spantrain.policy.outer.updates import Updates

__all__ = ["OuterMaster"]

_PULL_FIRST = ": pull that first"
"""The end of a refusal after which a pull begins."""


class OuterMaster:
    """Hears events with their time; answers with commands, to be carried out in order."""

    def __init__(
        self, layout: ShardLayout, settings: OuterSettings | None = None, state: MasterState | None = None,
        *, now_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Begin, or go on from a saved state: clusters and shards register again, pushes under way are gone."""
        self._layout = layout
        self._settings = settings or OuterSettings()
        before = state or MasterState()
        lease_s = self._settings.lease_s
        self._ledger = ChunkLedger(before.chunks, lease_s=lease_s, now_s=now_s) if before.chunks else None
        self._clusters = ClusterTable(lost_after_s=self._settings.lost_after_s, ledger=self._ledger)
        self._alive = Members(lost_after_s=self._settings.lost_after_s)
        self.shards = ShardTable(layout.shards)
        """To look at."""
        self._exchanges = Exchanges(layout, self._settings)
        self._updates = Updates(layout, self._settings, replace(before, epoch=before.epoch + 1))
        self._owed: dict[str, str] = {}
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

    def workers_of(self, cluster: str) -> Mapping[str, tuple[int, ...]]:
        """Return the layers of a cluster's workers, by name; none of one that is not registered."""
        return self._clusters.workers.get(cluster, {})

    @property
    def waiting(self) -> tuple[str, ...]:
        """Clusters with an accepted push of which nothing is decided yet."""
        return tuple(push.cluster for push in self._updates.pending)

    @property
    def transfers(self) -> tuple[tuple[Way, on.Transfer], ...]:
        """Layers under way."""
        return self._exchanges.moving

    @property
    def wake_s(self) -> float | None:
        """When time itself will change something: send `Ticked` then."""
        told_s = self.shards.waits_since_s
        times = (
            self._clusters.wake_s, self._alive.next_limit_s, self._exchanges.next_limit_s, self._updates.wake_s,
            None if told_s is None else told_s + self._settings.transfer_limit_s,
        )  # fmt: skip
        return min((time_s for time_s in times if time_s is not None), default=None)

    def on_event(self, now_s: float, event: OuterEvent) -> tuple[OuterCommand, ...]:
        """Take in an event; return what is to be done, in this order.

        Raises:
            ProtocolError: the event is not possible; nothing has changed.
        """
        match event:
            case (
                on.ClusterRegistered() | on.ClusterBeat() | on.ClusterLeft() | on.RoundKept() | on.PullAsked()
                | on.ChunkAsked()
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
            on.ClusterRegistered | on.ClusterBeat | on.ClusterLeft | on.RoundKept | on.PullAsked | on.ChunkAsked
        ),
    ) -> None:  # fmt: skip
        if isinstance(event, on.ClusterRegistered):
            self._register(now_s, event)
        elif isinstance(event, on.ClusterLeft):
            self._drop_cluster(event.cluster, (), "it left")
        elif self._knows(now_s, event.cluster):
            if isinstance(event, on.PullAsked):
                self._owed[event.cluster] = "it asked"
            elif isinstance(event, on.RoundKept):
                self._updates.excuse(event.cluster)
            elif isinstance(event, on.ChunkAsked):
                self._out += self._clusters.lease(now_s, event.cluster)

    def _register(self, now_s: float, event: on.ClusterRegistered) -> None:
        layers = sorted(layer for layers in event.workers.values() for layer in layers)
        if layers != list(range(len(self._layout.layers))):
            raise ProtocolError(
                f"{event.cluster}: its workers must hold each of {len(self._layout.layers)} layers once, got {layers}"
            )
        fate = self._updates.fate(event.cluster, event.unresolved) if event.unresolved else None
        self._drop_cluster(event.cluster, event.leases, "it registered again")
        adopted = event.unresolved if fate is Fate.PENDING else None
        self._clusters.joined(now_s, event, adopted=adopted, pending=self._updates.pending)
        state = self._updates.state
        version = state.version if state.seeded else None
        reason = f"{len(self._clusters.names)} clusters are registered"
        leases = tuple(sorted(self._clusters.leases(event.cluster) & set(event.leases)))
        self._out.append(do.Welcome(cluster=event.cluster, version=version, fate=fate, leases=leases, reason=reason))
        if state.seeded and fate in (None, Fate.COUNTED):
            self._owed[event.cluster] = "it is new" if fate is None else "its push was counted"

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
        self._owed.pop(cluster, None)
        for exchange in [one for one in self._exchanges if one.cluster == cluster]:
            self._end(exchange, f"{cluster}: {reason}")

    # Pushes and pulls.

    def _of_exchange(
        self, now_s: float, event: on.PushAsked | on.PushSent | on.PushChecked | on.Moved | on.TransferLost
    ) -> None:
        match event:
            case on.PushAsked():
                if self._knows(now_s, event.cluster):
                    self._ask_push(now_s, event)
            case on.PushSent():
                if self._knows(now_s, event.cluster):
                    self._sent(event)
            case on.PushChecked():
                self._checked(now_s, event)
            case on.Moved():
                self._moved(event)
            case on.TransferLost():
                exchange = self._exchanges.get(event.transfer.ticket)
                if exchange is None or not self._exchanges.is_moving(event.way, event.transfer):
                    self._drop(event)
                else:
                    self._end(exchange, f"layer {event.transfer.layer}: {event.reason}")

    def _ask_push(self, now_s: float, event: on.PushAsked) -> None:
        reason = self._why_not(event)
        if reason:
            self._out.append(do.RefusePush(cluster=event.cluster, push=None, reason=reason))
            if reason.endswith(_PULL_FIRST):
                self._owed[event.cluster] = reason
            return
        before = self._exchanges.of(Way.PUSH, event.cluster)
        if before:
            self._end(before, "the cluster asked for a newer push")
        seeds = not self._updates.state.seeded
        push = Push(
            ticket=self._ticket(),
            cluster=event.cluster,
            base_version=event.base_version,
            tokens=event.tokens,
            progress=event.progress,
            parameters=seeds,
        )
        reason = "first parameters" if seeds else "all shards are ready"
        self._out.append(do.StartPush(cluster=push.cluster, push=push.ticket, parameters=seeds, reason=reason))
        self._begin(now_s, Way.PUSH, push.ticket, push.cluster, push.base_version, push)
        if event.ends_round:
            busy = {one.cluster for one in self._exchanges if one.way is Way.PUSH} | set(self.waiting)
            others = [name for name in self._clusters.names if name not in busy]
            self._out += self._updates.end_round(event.cluster, others)

    def _why_not(self, event: on.PushAsked) -> str:
        """Return why a cluster must not push now; empty if it may."""
        state = self._updates.state
        if not self.shards.all_ready:
            return f"not ready: {', '.join(self.shards.away) or 'shards that restore'}"
        waiting = [push.ticket for push in self._updates.pending if push.cluster == event.cluster]
        if waiting:
            return f"its push {waiting[0]} waits for an update"
        if not state.seeded:
            others = [one.cluster for one in self._exchanges if one.way is Way.PUSH and one.cluster != event.cluster]
            others += [push.cluster for push in self._updates.pending]
            return f"{others[0]} brings the first parameters" if others else ""
        record = state.clusters.get(event.cluster)
        if record and event.base_version < record.version:
            return f"its last push went into version {record.version}{_PULL_FIRST}"
        if event.base_version > state.version:
            return f"there is no version {event.base_version} yet, the newest is {state.version}{_PULL_FIRST}"
        return "" if event.tokens else "no tokens: nothing was learned"

    def _begin(
        self, now_s: float, way: Way, ticket: Ticket, cluster: str, version: int, push: Push | None = None
    ) -> None:
        exchange = Exchange(way=way, ticket=ticket, cluster=cluster, version=version, begun_s=now_s, push=push)
        self._exchanges.begin(exchange, self._clusters.workers[cluster])

    def _sent(self, event: on.PushSent) -> None:
        exchange = self._exchanges.get(event.push)
        if exchange is not None and exchange.cluster == event.cluster and exchange.push:
            exchange.sent = True
            self._check(exchange)
        elif self._updates.fate(event.cluster, event.push) is not Fate.SKIPPED:
            self._out.append(do.AcceptPush(cluster=event.cluster, push=event.push, reason="it was accepted before"))
        else:
            self._out.append(do.RefusePush(cluster=event.cluster, push=event.push, reason="it is not under way"))

    def _check(self, exchange: Exchange) -> None:
        """Ask the shards, once, when both ends say that all was moved."""
        if exchange.sent and not exchange.waiting and not exchange.asked:
            exchange.asked = True
            reason = f"{exchange.cluster} has sent all"
            for shard in self._layout.shards:
                self._out.append(do.CheckPush(shard=shard, push=exchange.ticket, reason=reason))

    def _checked(self, now_s: float, event: on.PushChecked) -> None:
        exchange = self._exchanges.get(event.push)
        if exchange is None or not exchange.asked or exchange.push is None or event.shard not in self.shards:
            self._drop(event)
            return
        if not event.complete:
            self._end(exchange, f"{event.shard} does not have all of it")
            return
        exchange.checked.add(event.shard)
        if len(exchange.checked) == len(self._layout.shards):
            self._exchanges.drop(exchange.ticket)
            reason = self._updates.accept(now_s, exchange.push)
            self._out.append(do.AcceptPush(cluster=exchange.cluster, push=exchange.ticket, reason=reason))

    def _moved(self, event: on.Moved) -> None:
        exchange = self._exchanges.moved(event.way, event.transfer)
        if exchange is None:
            self._drop(event)
        elif exchange.push:
            self._check(exchange)
        elif not exchange.waiting:
            self._exchanges.drop(exchange.ticket)
            self._clusters.begun_from[exchange.cluster] = exchange.version

    def _end(self, exchange: Exchange, reason: str) -> None:
        """End a push or a pull before its time, and tell both sides."""
        self._exchanges.drop(exchange.ticket)
        if exchange.push:
            self._out += [
                do.Forget(shard=shard, ticket=exchange.ticket, reason=reason) for shard in self.shards.present
            ]
        if exchange.cluster not in self._clusters:
            return
        if exchange.push:
            self._out.append(do.RefusePush(cluster=exchange.cluster, push=exchange.ticket, reason=reason))
        else:
            self._out.append(do.EndPull(cluster=exchange.cluster, pull=exchange.ticket, reason=reason))

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

    def _lose_shard(self, now_s: float, shard: str, reason: str) -> None:
        if not self.shards.is_present(shard):
            return
        self._alive.forget(shard)
        self.shards.lost(shard)
        told = f"{shard} is lost: {reason}"
        for exchange in self._exchanges:
            if exchange.way is Way.PULL:
                self._owed[exchange.cluster] = told
            self._end(exchange, told)
        self._out += self._updates.abort(self.shards.present, told)
        self._settle(now_s)

    def _of_update(self, now_s: float, event: on.NormsMeasured | on.MeanCombined | on.Staged | on.Committed) -> None:
        pulled = {one.version for one in self._exchanges if one.way is Way.PULL}
        committing = self._updates.committing
        if isinstance(event, on.Committed):
            self.shards.answered(event.shard, event.versions)
        commands = self._updates.heard(event, pulled, self._bases())
        if self._updates.committing and not committing:
            self.shards.told(now_s)
        if commands is None:
            self._drop(event)
        else:
            self._out += commands
        self._settle(now_s)

    def _bases(self) -> set[int]:
        """Return the versions that pushes begin from, where shards must know what parameters did since."""
        if not self._settings.compensation:
            return set()
        under_way = [one.version for one in self._exchanges]
        pending = [push.base_version for push in self._updates.pending]
        return {*under_way, *pending, *self._clusters.begun_from.values()}

    def _settle(self, now_s: float) -> None:
        """Give those whose push counted the version, and count their data; end leases of clusters that are gone."""
        for push in self._updates.counted:
            if self._clusters.count(now_s, push):
                self._owed[push.cluster] = f"its push was part of update {self._updates.state.updates}"
            if push.parameters:
                self._owed |= dict.fromkeys(self._clusters.names, "there are parameters now")
        self._updates.counted.clear()
        self._clusters.settle(now_s, self._updates.pending)

    # Time.

    def _time_passes(self, now_s: float) -> None:
        for cluster, silent_s in self._clusters.members.silent(now_s).items():
            self._drop_cluster(cluster, (), f"not heard of for {silent_s:.3g} s")
        for shard, silent_s in self._alive.silent(now_s).items():
            self._lose_shard(now_s, shard, f"not heard of for {silent_s:.3g} s")
        for exchange in self._exchanges.overdue(now_s):
            self._end(exchange, f"it took over {self._settings.transfer_limit_s:.3g} s")
        limit_s = self._settings.transfer_limit_s
        for shard in sorted({*self._updates.late_shards(now_s), *self.shards.late(now_s, limit_s)}):
            self._lose_shard(now_s, shard, f"no answer for {limit_s:.3g} s")
            self._out.append(do.RegisterAgain(member=shard, reason="it kept the others waiting for too long"))
        self._settle(now_s)

    def _advance(self, now_s: float) -> None:
        """Do what has become possible."""
        if self.shards.to_restore:
            self._restore(now_s)
        if not self.shards.all_ready:
            return
        self._out += self._updates.begin(now_s, self._ticket, self._clusters.names)
        if self._updates.state.seeded and not self._updates.committing:
            self._pull(now_s)
        self._out += self._exchanges.moves()

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
        for cluster in self._clusters.names:
            last = self._updates.last_push(cluster)
            if last:
                reason = "the shards lost the version that it was in, and all others"
                self._out.append(do.SkipRound(cluster=cluster, push=last, reason=reason))

    def _pull(self, now_s: float) -> None:
        version = self._updates.state.version
        for cluster, reason in sorted(self._owed.items()):
            if self._exchanges.of(Way.PULL, cluster) is None:
                del self._owed[cluster]
                ticket = self._ticket()
                last = self._updates.last_push(cluster)
                left_out = self._updates.left_out(cluster)
                self._out.append(
                    do.StartPull(
                        cluster=cluster, pull=ticket, version=version, counted=last, left_out=left_out, reason=reason
                    )
                )
                self._begin(now_s, Way.PULL, ticket, cluster, version)

    def _ticket(self) -> Ticket:
        self._next_ticket += 1
        return Ticket(self._updates.state.epoch, self._next_ticket)

    def _drop(self, event: OuterEvent) -> None:
        self.dropped[type(event).__name__] += 1
