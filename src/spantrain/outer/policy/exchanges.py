"""Pushes and pulls under way: which may begin, which are whole, which come to nothing, and who is owed a version.

Part of the master; what of the paper is kept is said there. It knows who is registered and which shards are there, and
decides nothing about either.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import LayerTransfer, PushOutcome, Ticket, TransferWay
from spantrain.core.outer.layers import ShardLayout
from spantrain.formats.registry import WireFormat
from spantrain.outer.policy.members import ClusterTable, ShardTable
from spantrain.outer.policy.pushes import Push
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.policy.transfers import TransferSchedule
from spantrain.outer.policy.updates import Updates


@dataclass(kw_only=True)
class OngoingExchange:
    """A push or a pull that is under way."""

    ticket: Ticket
    cluster: str
    version: int
    begun_s: float
    push: Push | None = None
    """None of a pull."""
    waiting: set[int] = field(default_factory=set)
    """Layers that have not arrived."""
    sent: bool = False
    """Whether the cluster says that it sent all."""
    checked: set[str] | None = None
    """Shards that have all; None before they were asked."""

    @property
    def way(self) -> TransferWay:
        """Which way its layers go."""
        return TransferWay.PUSH if self.push else TransferWay.PULL


class SharedLines:
    """The lines between workers and shards, over which layers of all fragments go."""

    def __init__(self, shards: Iterable[str], settings: OuterSettings) -> None:
        slots = dict.fromkeys(shards, settings.shard_slots)
        self.schedules = {
            way: TransferSchedule(slots, settings.worker_slots, patience_s=settings.lost_after_s) for way in TransferWay
        }
        self.exchanges: dict[Ticket, OngoingExchange] = {}
        """That are under way."""

    @property
    def moving(self) -> tuple[tuple[TransferWay, LayerTransfer], ...]:
        """Layers under way."""
        return tuple((way, one) for way, schedule in self.schedules.items() for one in sorted(schedule.running))

    def moves(self, now_s: float) -> list[OuterCommand]:
        """Return the layers to move now."""
        return [self._move(way, one) for way, schedule in self.schedules.items() for one in schedule.begin(now_s)]

    def _move(self, way: TransferWay, transfer: LayerTransfer) -> do.Move:
        exchange = self.exchanges[transfer.ticket]
        reason = f"{transfer.worker} of {transfer.cluster} and {transfer.shard} are both free"
        version, parameters = exchange.version, bool(exchange.push and exchange.push.parameters)
        return do.Move(way=way, transfer=transfer, version=version, parameters=parameters, reason=reason)


_PULL_FIRST = ": pull that first"
"""The end of a refusal after which a pull begins."""


class ExchangeControl:
    """Answers what clusters and shards say of a push or a pull: with commands, or None where no such is under way.

    A cluster has one push and one pull under way at most.
    """

    def __init__(
        self, layout: ShardLayout, settings: OuterSettings, *, clusters: ClusterTable, shards: ShardTable,
        updates: Updates, new_ticket: Callable[[], Ticket], lines: SharedLines | None = None,
    ) -> None:  # fmt: skip
        """Begin with nothing under way; `lines`: shared with others."""
        self.under_way: dict[Ticket, OngoingExchange] = {}
        """To look at."""
        self._layout, self._settings, self._new_ticket = layout, settings, new_ticket
        self._clusters, self._shards, self._updates = clusters, shards, updates
        self.lines = lines or SharedLines(layout.shards, settings)
        self._size_bytes = {
            wire_format: [sum(one.size_bytes for one in layer.sent_as(wire_format)) for layer in layout.layers]
            for wire_format in (WireFormat.NATIVE, settings.push_format)
        }
        self._owed: dict[str, str] = {}

    @property
    def next_limit_s(self) -> float | None:
        """When the next has taken too long, or a layer of any keeps a shard no longer."""
        slow_s = [schedule.slow_s for schedule in self.lines.schedules.values()]
        ends_s = (one.begun_s + self._settings.transfer_limit_s for one in self.under_way.values())
        return min((time_s for time_s in (*slow_s, *ends_s) if time_s is not None), default=None)

    def _of(self, way: TransferWay, cluster: str) -> OngoingExchange | None:
        """Return what a cluster has under way in one direction."""
        return next((one for one in self.under_way.values() if one.way is way and one.cluster == cluster), None)

    @property
    def _pushing(self) -> tuple[str, ...]:
        """Clusters with a push that is under way, or waits for an update."""
        under_way = (one.cluster for one in self.under_way.values() if one.push)
        return (*under_way, *(push.cluster for push in self._updates.pending))

    # What clusters and shards say.

    def asked(self, now_s: float, event: on.PushAsked) -> list[OuterCommand]:
        """Let a registered cluster push, or tell it why not.

        Who asks has no push under way: one that is, as far as is known here, was begun for a question that the cluster
        has given up since (its connection ended meanwhile), and nobody else would end it.
        """
        before = self._of(TransferWay.PUSH, event.cluster)
        ended = self._end(before, f"{event.cluster} has asked again") if before else []
        reason = self._why_not(event)
        if reason:
            if reason.endswith(_PULL_FIRST):
                self.owe(event.cluster, reason)
            return [*ended, do.RefusePush(cluster=event.cluster, push=None, reason=reason)]
        seeds = not self._updates.state.seeded
        push = Push(
            ticket=self._new_ticket(),
            cluster=event.cluster,
            base_version=event.base_version,
            tokens=event.tokens,
            progress=event.progress,
            parameters=seeds,
        )
        reason = "first parameters" if seeds else "all shards are ready"
        self._begin(now_s, push.ticket, push.cluster, push.base_version, push)
        start = do.StartPush(cluster=push.cluster, push=push.ticket, parameters=seeds, reason=reason)
        others = [name for name in self._clusters.alive.names if name not in self._pushing] if event.ends_round else []
        return [*ended, start, *(self._updates.end_round(event.cluster, others) if event.ends_round else ())]

    def _why_not(self, event: on.PushAsked) -> str:
        """Return why a cluster must not push now; empty if it may."""
        state = self._updates.state
        if not self._shards.all_ready:
            return f"not ready: {', '.join(self._shards.away) or 'shards that restore'}"
        waiting = [push.ticket for push in self._updates.pending if push.cluster == event.cluster]
        if waiting:
            return f"its push {waiting[0]} waits for an update"
        if not state.seeded:
            return f"{self._pushing[0]} brings the first parameters" if self._pushing else ""
        record = state.clusters.get(event.cluster)
        if record and event.base_version < record.version:
            return f"its last push went into version {record.version}{_PULL_FIRST}"
        if event.base_version > state.version:
            return f"there is no version {event.base_version} yet, the newest is {state.version}{_PULL_FIRST}"
        return "" if event.tokens else "no tokens: nothing was learned"

    def sent(self, event: on.PushSent) -> list[OuterCommand]:
        """Note that a registered cluster has sent all of a push, or tell it what became of that."""
        exchange = self.under_way.get(event.push)
        if exchange is not None and exchange.cluster == event.cluster and exchange.push:
            exchange.sent = True
            return self._check(exchange)
        if self._updates.fate(event.cluster, event.push) is not PushOutcome.SKIPPED:
            return [do.AcceptPush(cluster=event.cluster, push=event.push, reason="it was accepted before")]
        return [do.RefusePush(cluster=event.cluster, push=event.push, reason="it is not under way")]

    def moved(self, now_s: float, event: on.Moved) -> list[OuterCommand] | None:
        """Note that a layer arrived."""
        if not self.lines.schedules[event.way].end(now_s, event.transfer):
            return None
        exchange = self.under_way[event.transfer.ticket]
        exchange.waiting.remove(event.transfer.layer)
        if exchange.push:
            return self._check(exchange)
        if not exchange.waiting:
            self._drop(exchange)
            self._clusters.got[exchange.cluster] = (exchange.version, now_s)
        return []

    def lost(self, event: on.TransferLost) -> list[OuterCommand] | None:
        """End what a layer belongs to that did not arrive."""
        exchange = self.under_way.get(event.transfer.ticket)
        if exchange is None or event.transfer not in self.lines.schedules[event.way].running:
            return None
        return self._end(exchange, f"layer {event.transfer.layer}: {event.reason}")

    def checked(self, now_s: float, event: on.PushChecked) -> list[OuterCommand] | None:
        """Note what a shard has of a push; it is accepted when all have all."""
        exchange = self.under_way.get(event.push)
        if exchange is None or exchange.checked is None or exchange.push is None or event.shard not in self._shards:
            return None
        if not event.complete:
            return self._end(exchange, f"{event.shard} does not have all of it")
        exchange.checked.add(event.shard)
        if len(exchange.checked) < len(self._layout.shards):
            return []
        self._drop(exchange)
        reason = self._updates.accept(now_s, exchange.push)
        return [do.AcceptPush(cluster=exchange.cluster, push=exchange.ticket, reason=reason)]

    def _check(self, exchange: OngoingExchange) -> list[OuterCommand]:
        """Ask the shards, once, when both ends say that all was moved."""
        if not exchange.sent or exchange.waiting or exchange.checked is not None:
            return []
        exchange.checked = set()
        reason = f"{exchange.cluster} has sent all"
        return [do.CheckPush(shard=shard, push=exchange.ticket, reason=reason) for shard in self._layout.shards]

    # What begins.

    def owe(self, cluster: str, reason: str) -> None:
        """Note that a cluster is to get the newest version as soon as that is possible."""
        self._owed[cluster] = reason

    def pull(self, now_s: float) -> list[OuterCommand]:
        """Begin pulls of the present version by all who are owed one and have none under way."""
        version = self._updates.state.version
        commands: list[OuterCommand] = []
        for cluster, reason in sorted(self._owed.items()):
            if self._of(TransferWay.PULL, cluster) is None:
                del self._owed[cluster]
                pull = do.StartPull(
                    cluster=cluster,
                    pull=self._new_ticket(),
                    version=version,
                    counted=self._updates.last_push(cluster),
                    left_out=self._updates.left_out(cluster),
                    reason=reason,
                )
                self._begin(now_s, pull.pull, cluster, version)
                commands.append(pull)
        return commands

    def _begin(self, now_s: float, ticket: Ticket, cluster: str, version: int, push: Push | None = None) -> None:
        """Put all layers of a push or a pull in line."""
        exchange = OngoingExchange(ticket=ticket, cluster=cluster, version=version, begun_s=now_s, push=push)
        assert self._of(exchange.way, cluster) is None
        self.under_way[ticket] = self.lines.exchanges[ticket] = exchange
        exchange.waiting = set(range(len(self._layout.layers)))
        wire_format = self._settings.push_format if push and not push.parameters else WireFormat.NATIVE
        self.lines.schedules[exchange.way].add(
            LayerTransfer(
                ticket=ticket,
                cluster=cluster,
                worker=worker,
                layer=layer,
                shard=self._layout.shard_of(layer),
                size_bytes=self._size_bytes[wire_format][layer],
                wire_format=wire_format,
            )
            for worker, layers in sorted(self._clusters.workers[cluster].items())
            for layer in layers
        )

    def _drop(self, exchange: OngoingExchange) -> None:
        """Take out a push or a pull, whole or not."""
        del self.under_way[exchange.ticket], self.lines.exchanges[exchange.ticket]
        self.lines.schedules[exchange.way].drop(exchange.ticket)

    # What ends before its time.

    def cluster_left(self, cluster: str, reason: str) -> list[OuterCommand]:
        """End what a cluster that went had under way; it is owed nothing."""
        self._owed.pop(cluster, None)
        ending = [one for one in self.under_way.values() if one.cluster == cluster]
        return [command for one in ending for command in self._end(one, f"{cluster}: {reason}")]

    def shard_lost(self, reason: str) -> list[OuterCommand]:
        """End all that is under way; pulls begin again when all shards are back."""
        commands: list[OuterCommand] = []
        for exchange in tuple(self.under_way.values()):
            if not exchange.push:
                self.owe(exchange.cluster, reason)
            commands += self._end(exchange, reason)
        return commands

    def time_passes(self, now_s: float) -> list[OuterCommand]:
        """End what has taken too long."""
        limit_s = self._settings.transfer_limit_s
        overdue = [one for one in self.under_way.values() if now_s - one.begun_s >= limit_s]
        return [command for one in overdue for command in self._end(one, f"it took over {limit_s:.3g} s")]

    def _end(self, exchange: OngoingExchange, reason: str) -> list[OuterCommand]:
        """End a push or a pull before its time, and tell both sides."""
        self._drop(exchange)
        cluster, ticket = exchange.cluster, exchange.ticket
        here = cluster in self._clusters
        if not exchange.push:
            return [do.EndPull(cluster=cluster, pull=ticket, reason=reason)] if here else []
        refusal = [do.RefusePush(cluster=cluster, push=ticket, reason=reason)] if here else []
        return [*(do.Forget(shard=name, ticket=ticket, reason=reason) for name in self._shards.present), *refusal]

    # What shards must keep.

    @property
    def pulled(self) -> set[int]:
        """Versions that are being pulled."""
        return {one.version for one in self.under_way.values() if not one.push}

    @property
    def bases(self) -> set[int]:
        """Versions that pushes begin from, where shards must know what parameters did since."""
        if not self._settings.compensation:
            return set()
        under_way = [one.version for one in self.under_way.values()]
        pending = [push.base_version for push in self._updates.pending]
        return {*under_way, *pending, *(version for version, _ in self._clusters.got.values())}
