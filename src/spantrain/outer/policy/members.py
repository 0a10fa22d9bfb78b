"""The members that are registered: clusters with their chunks of data, shards with the versions that they hold."""

from collections.abc import Collection, Iterable, Mapping

from spantrain.core.outer.commands import LeaseChunk, LeaseNothing, OuterCommand, Restore, Save
from spantrain.core.outer.events import MAX_LEASES, ClusterRegistered, Ticket
from spantrain.errors import ProtocolError
from spantrain.outer.policy.chunks import ChunkLedger
from spantrain.outer.policy.liveness import Liveness, Trainers
from spantrain.outer.policy.pushes import Push


class ClusterTable:
    """Who is registered, and what each has on lease.

    An accepted push of a cluster that went still counts, with its samples; what it had on lease is given to others only
    when that is decided.
    """

    def __init__(self, *, lost_after_s: float, ledger: ChunkLedger | None) -> None:
        self.alive = Liveness(lost_after_s=lost_after_s)
        self.workers: dict[str, Mapping[str, tuple[int, ...]]] = {}
        """By cluster, then by worker: layers."""
        self.got: dict[str, tuple[int, float]] = {}
        """By cluster: the version that it has got last, and when."""
        self._ledger = ledger
        self._orphaned: dict[Ticket, Push] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.alive

    @property
    def wake_s(self) -> float | None:
        """When time itself will change something here."""
        times = (self.alive.next_limit_s, self._ledger.next_end_s if self._ledger else None)
        return min((time_s for time_s in times if time_s is not None), default=None)

    def joined(
        self, now_s: float, event: ClusterRegistered, *, adopted: Ticket | None, pending: Collection[Push]
    ) -> None:
        """Take a cluster in.

        `adopted` is an accepted push of an earlier connection that it still knows of, `pending` are all accepted
        pushes. What it had on lease and does not work on any more is free, but for what these may still count.
        """
        self.alive.heard(now_s, event.cluster)
        self.workers[event.cluster] = dict(event.workers)
        if adopted:
            self._orphaned.pop(adopted, None)
        if self._ledger:
            self._ledger.end(self._ledger.of(event.cluster) - _leases(pending) - set(event.leases))

    def leases(self, cluster: str) -> frozenset[int]:
        """Return the numbers of what a cluster has on lease."""
        return self._ledger.of(cluster) if self._ledger else frozenset()

    def heard(self, now_s: float, cluster: str) -> None:
        """Note that a cluster lives, and renew what it has on lease."""
        self.alive.heard(now_s, cluster)
        if self._ledger:
            self._ledger.renew(now_s, cluster)

    def left(self, cluster: str, pending: Collection[Push], *, keep: Collection[int]) -> None:
        """Take a cluster out; `pending`: its accepted pushes, `keep`: leases that it comes back for."""
        self.alive.forget(cluster)
        del self.workers[cluster]
        self.got.pop(cluster, None)
        self._orphaned |= {push.ticket: push for push in pending}
        if self._ledger:
            self._ledger.end(self._ledger.of(cluster) - _leases(pending) - set(keep))

    def count(self, now_s: float, push: Push) -> bool:
        """Count a push's samples; return whether the cluster that made it is still there."""
        for one in push.progress if self._ledger else ():
            assert self._ledger
            self._ledger.report(now_s, push.cluster, one.lease, one.upto)
        return push.cluster in self and push.ticket not in self._orphaned

    def settle(self, now_s: float, pending: Collection[Push]) -> None:
        """End leases that ran out, and those of clusters that went, but for what pending pushes may still count."""
        for ticket in self._orphaned.keys() - {push.ticket for push in pending}:
            push = self._orphaned.pop(ticket)
            if self._ledger:
                self._ledger.end(_leases([push]))
        if self._ledger:
            self._ledger.expire(now_s, but=_leases(pending))

    def lease(
        self, now_s: float, cluster: str, pending: Collection[Push], trainers: Trainers
    ) -> list[OuterCommand]:  # fmt: skip
        """Lease the next chunk: one that is free, or else one that another keeps and does not train on.

        A cluster may have half of all chunks at once, where it is not alone.

        Raises:
            ProtocolError: there is no data to lease.
        """
        ledger = self._ledger
        if ledger is None:
            raise ProtocolError(f"{cluster}: asked for a chunk, but this master has no data to lease; bring your own")
        chunks, done, has = ledger.state.chunks, ledger.state.finished, len(ledger.of(cluster))
        most = min(MAX_LEASES, max(2, chunks // 2) if len(self.alive.names) > 1 else chunks)
        if has >= most and not done:
            reason = f"it has {has} chunks, at most {most} at once"
            return [LeaseNothing(cluster=cluster, finished=False, reason=reason)]
        lease = ledger.lease(now_s, cluster)
        if lease is None and not done:
            ledger.take_back(now_s, trainers.patience_s, but=_leases(pending))
            lease = ledger.lease(now_s, cluster)
        if lease is None:
            reason = "all data is counted" if done else "all that is left is on lease"
            return [LeaseNothing(cluster=cluster, finished=done, reason=reason)]
        leased = LeaseChunk(cluster=cluster, lease=lease, reason="the first that is free")
        return [Save(reason=f"lease {lease.number}"), leased]


def _leases(pushes: Collection[Push]) -> frozenset[int]:
    return frozenset(one.lease for push in pushes for one in push.progress)


class ShardTable:
    """The shards of a layout: away, joined, restoring, or ready.

    A shard that joins tells the versions that it can restore. When all have joined, those that are not ready go to the
    present version, if all of them have it. If not, all go back to the newest version that all have, under a new
    number: so a number never stands for two contents, on whichever shards. What a shard holds is not known from when it
    is told to commit or to restore until it answers; nothing is restored meanwhile.
    """

    def __init__(self, names: Iterable[str], *, lost_after_s: float, answer_s: float) -> None:
        """`answer_s`: how long an answer may take."""
        self.alive = Liveness(lost_after_s=lost_after_s)
        """Those that have joined."""
        self._names, self._answer_s = tuple(names), answer_s
        self.versions: dict[str, frozenset[int]] = {}
        """What those that have joined can restore, as far as is known."""
        self.ready: set[str] = set()
        """Those that serve the present version."""
        self._unsure: dict[str, float] = {}
        """Those that were told to commit or to restore and have not answered, and when."""
        self._restoring: int | None = None

    @property
    def all_ready(self) -> bool:
        """Whether all serve the present version."""
        return len(self.ready) == len(self._names)

    @property
    def away(self) -> tuple[str, ...]:
        """Those that have not joined."""
        return tuple(name for name in self._names if name not in self.alive)

    @property
    def present(self) -> tuple[str, ...]:
        """Those that have joined."""
        return tuple(name for name in self._names if name in self.alive)

    @property
    def wake_s(self) -> float | None:
        """When time itself will change something here."""
        due_s = [told_s + self._answer_s for told_s in self._unsure.values()]
        lost_s = self.alive.next_limit_s
        return min(due_s if lost_s is None else [*due_s, lost_s], default=None)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def joined(self, now_s: float, name: str, versions: Iterable[int]) -> None:
        """Note that a shard has come."""
        self.alive.heard(now_s, name)
        self.ready.discard(name)
        self.versions[name] = frozenset(versions)

    def holds(self, name: str, versions: Iterable[int]) -> None:
        """Note what a shard can restore, by a sign of life."""
        if name in self.alive and name not in self._unsure:
            self.versions[name] = frozenset(versions)

    def told(self, now_s: float) -> None:
        """Note that all shards were told to commit."""
        self._unsure |= dict.fromkeys(self.versions, now_s)

    def answered(self, name: str, versions: Iterable[int]) -> None:
        """Note what a shard can restore, by its answer to what it was told."""
        self._unsure.pop(name, None)
        self.holds(name, versions)

    def lost(self, name: str) -> None:
        """Note that a shard is away; a restoring that was under way begins again when it is back."""
        self.alive.forget(name)
        self.versions.pop(name, None)
        self._unsure.pop(name, None)
        self.ready.discard(name)
        self._restoring = None

    @property
    def to_restore(self) -> bool:
        """Whether all have joined, some are not ready, and nobody told them how to become so."""
        return not self.away and not self.all_ready and not self._unsure and self._restoring is None

    def common(self) -> frozenset[int]:
        """Return the versions that all can restore."""
        return frozenset.intersection(*self.versions.values())

    def no_parameters(self) -> None:
        """Note that there is nothing to restore: all are ready for first parameters."""
        self.ready = set(self._names)

    def restore(self, now_s: float, source: int, version: int) -> list[OuterCommand]:
        """Command shards to go to a version; those that serve it already are left alone."""
        if source != version:
            self.ready.clear()
        self._restoring = version
        told = [name for name in self._names if name not in self.ready]
        self._unsure |= dict.fromkeys(told, now_s)
        reason = f"all shards have version {source}" + ("" if source == version else f", which is now {version}")
        return [Restore(shard=name, source=source, version=version, reason=reason) for name in told]

    def late(self, now_s: float) -> tuple[str, ...]:
        """Return those that were told something too long ago, and have not answered."""
        return tuple(name for name, told_s in sorted(self._unsure.items()) if now_s - told_s >= self._answer_s)

    def restored(self, name: str, version: int) -> bool:
        """Note that a shard has restored; return whether it was told to."""
        if version != self._restoring or name in self.ready or name not in self.alive:
            return False
        self.ready.add(name)
        if self.all_ready:
            self._restoring = None
        return True
