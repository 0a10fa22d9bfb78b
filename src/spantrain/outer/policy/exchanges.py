"""Pushes and pulls under way: which may begin, which are whole, which come to nothing, and who is owed a version.

Part of the master; what of the paper is kept is said there. It knows who is registered and which shards are there, and
decides nothing about either.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from spantrain.core.outer import commands as do
from spantrain.core.outer import events as on
from spantrain.core.outer.commands import Move, OuterCommand
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

    way: TransferWay
    ticket: Ticket
    cluster: str
    version: int
    begun_s: float
    push: Push | None = None
    """Of a push."""
    waiting: set[int] = field(default_factory=set)
    """Layers that have not arrived."""
    sent: bool = False
    """Whether the cluster says that it sent all."""
    asked: bool = False
    """Whether the shards were asked if they have all."""
    checked: set[str] = field(default_factory=set)
    """Shards that have."""


class SharedLines:
    """The lines between workers and shards, over which layers of all fragments go."""

    def __init__(self, shards: Iterable[str], settings: OuterSettings) -> None:
        slots = dict.fromkeys(shards, settings.shard_slots)
        self.schedules = {
            way: TransferSchedule(slots, settings.worker_slots, patience_s=settings.lost_after_s) for way in TransferWay
        }
        self.exchanges: dict[Ticket, OngoingExchange] = {}
        """That are under way."""

    def moves(self, now_s: float) -> list[Move]:
        """Return the layers to move now."""
        return [self._move(way, transfer) for way in TransferWay for transfer in self.schedules[way].begin(now_s)]

    def _move(self, way: TransferWay, transfer: LayerTransfer) -> Move:
        exchange = self.exchanges[transfer.ticket]
        return Move(
            way=way,
            transfer=transfer,
            version=exchange.version,
            parameters=exchange.push is not None and exchange.push.parameters,
            reason=f"{transfer.worker} of {transfer.cluster} and {transfer.shard} are both free",
        )


class OngoingExchanges:
    """All that is under way; a cluster has one push and one pull at most."""

    def __init__(self, layout: ShardLayout, settings: OuterSettings, lines: SharedLines | None = None) -> None:
        """Begin with nothing; `lines`: shared with others."""
        self._layout = layout
        self._limit_s = settings.transfer_limit_s
        self._lines = lines or SharedLines(layout.shards, settings)
        self._schedules = self._lines.schedules
        self._open: dict[Ticket, OngoingExchange] = {}
        self._whole = _sizes(layout, WireFormat.NATIVE)
        self._pushed = _sizes(layout, settings.push_format)

    def __iter__(self) -> Iterator[OngoingExchange]:
        return iter(tuple(self._open.values()))

    def get(self, ticket: Ticket) -> OngoingExchange | None:
        """Return a push or pull that is under way."""
        return self._open.get(ticket)

    def of(self, way: TransferWay, cluster: str) -> OngoingExchange | None:
        """Return what a cluster has under way in one direction."""
        return next((one for one in self._open.values() if one.way is way and one.cluster == cluster), None)

    def begin(self, exchange: OngoingExchange, workers: Mapping[str, Iterable[int]]) -> None:
        """Put all layers of a push or a pull in line."""
        assert self.of(exchange.way, exchange.cluster) is None
        self._open[exchange.ticket] = self._lines.exchanges[exchange.ticket] = exchange
        exchange.waiting = set(range(len(self._layout.layers)))
        sizes, wire_format = self._pushed if exchange.push and not exchange.push.parameters else self._whole
        self._schedules[exchange.way].add(
            LayerTransfer(
                ticket=exchange.ticket,
                cluster=exchange.cluster,
                worker=worker,
                layer=layer,
                shard=self._layout.shard_of(layer),
                size_bytes=sizes[layer],
                wire_format=wire_format,
            )
            for worker, layers in sorted(workers.items())
            for layer in layers
        )

    def moved(self, now_s: float, way: TransferWay, transfer: LayerTransfer) -> OngoingExchange | None:
        """Note that a layer arrived; return whose it is, None if it was not under way."""
        if not self._schedules[way].end(now_s, transfer):
            return None
        exchange = self._open[transfer.ticket]
        exchange.waiting.remove(transfer.layer)
        return exchange

    def is_moving(self, way: TransferWay, transfer: LayerTransfer) -> bool:
        """Whether a layer is under way."""
        return transfer in self._schedules[way].running

    @property
    def moving(self) -> tuple[tuple[TransferWay, LayerTransfer], ...]:
        """Layers under way."""
        running = ((way, transfer) for way in TransferWay for transfer in sorted(self._schedules[way].running))
        return tuple((way, transfer) for way, transfer in running if transfer.ticket in self._open)

    def drop(self, ticket: Ticket) -> None:
        """End a push or a pull, whole or not."""
        exchange = self._open.pop(ticket)
        del self._lines.exchanges[ticket]
        self._schedules[exchange.way].drop(ticket)

    def overdue(self, now_s: float) -> list[OngoingExchange]:
        """Return what has taken too long."""
        return [one for one in self._open.values() if now_s - one.begun_s >= self._limit_s]

    @property
    def next_limit_s(self) -> float | None:
        """When the next has taken too long, or a layer of any keeps a shard no longer."""
        slow_s = [self._schedules[way].slow_s for way in TransferWay]
        ends_s = (one.begun_s + self._limit_s for one in self._open.values())
        return min((time_s for time_s in (*slow_s, *ends_s) if time_s is not None), default=None)

    def moves(self, now_s: float) -> list[Move]:
        """Return the layers to move now."""
        return self._lines.moves(now_s)


def _sizes(layout: ShardLayout, wire_format: WireFormat) -> tuple[tuple[int, ...], WireFormat]:
    """Return the bytes of each layer in a format, and the format."""
    layers = layout.layers
    return tuple(sum(one.size_bytes for one in layer.sent_as(wire_format)) for layer in layers), wire_format


_PULL_FIRST = ": pull that first"
"""The end of a refusal after which a pull begins."""


class ExchangeControl:
    """Answers what clusters and shards say of a push or a pull: with commands, or None where no such is under way."""

    def __init__(
        self,
        layout: ShardLayout,
        settings: OuterSettings,
        *,
        clusters: ClusterTable,
        shards: ShardTable,
        updates: Updates,
        new_ticket: Callable[[], Ticket],
        lines: SharedLines | None = None,
    ) -> None:
        self.under_way = OngoingExchanges(layout, settings, lines)
        """To look at."""
        self._layout = layout
        self._settings = settings
        self._clusters = clusters
        self._shards = shards
        self._updates = updates
        self._new_ticket = new_ticket
        self._owed: dict[str, str] = {}

    # What clusters and shards say.

    def asked(self, now_s: float, event: on.PushAsked) -> list[OuterCommand]:
        """Let a registered cluster push, or tell it why not.

        Who asks has no push under way: one that is, as far as is known here, was begun for a question that the cluster
        has given up since (its connection ended meanwhile), and nobody else would end it.
        """
        before = self.under_way.of(TransferWay.PUSH, event.cluster)
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
        self._begin(now_s, TransferWay.PUSH, push.ticket, push.cluster, push.base_version, push)
        start = do.StartPush(cluster=push.cluster, push=push.ticket, parameters=seeds, reason=reason)
        return [*ended, start, *(self._end_round(event.cluster) if event.ends_round else ())]

    def _end_round(self, cluster: str) -> list[OuterCommand]:
        """End the round of all that have no push on its way."""
        busy = {one.cluster for one in self.under_way if one.way is TransferWay.PUSH}
        busy |= {push.cluster for push in self._updates.pending}
        return self._updates.end_round(cluster, [name for name in self._clusters.names if name not in busy])

    def _why_not(self, event: on.PushAsked) -> str:
        """Return why a cluster must not push now; empty if it may."""
        state = self._updates.state
        if not self._shards.all_ready:
            return f"not ready: {', '.join(self._shards.away) or 'shards that restore'}"
        waiting = [push.ticket for push in self._updates.pending if push.cluster == event.cluster]
        if waiting:
            return f"its push {waiting[0]} waits for an update"
        if not state.seeded:
            others = [
                one.cluster for one in self.under_way if one.way is TransferWay.PUSH and one.cluster != event.cluster
            ]
            others += [push.cluster for push in self._updates.pending]
            return f"{others[0]} brings the first parameters" if others else ""
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
        exchange = self.under_way.moved(now_s, event.way, event.transfer)
        if exchange is None:
            return None
        if exchange.push:
            return self._check(exchange)
        if not exchange.waiting:
            self.under_way.drop(exchange.ticket)
            self._clusters.begun_from[exchange.cluster] = exchange.version
            self._clusters.got_s[exchange.cluster] = now_s
        return []

    def lost(self, event: on.TransferLost) -> list[OuterCommand] | None:
        """End what a layer belongs to that did not arrive."""
        exchange = self.under_way.get(event.transfer.ticket)
        if exchange is None or not self.under_way.is_moving(event.way, event.transfer):
            return None
        return self._end(exchange, f"layer {event.transfer.layer}: {event.reason}")

    def checked(self, now_s: float, event: on.PushChecked) -> list[OuterCommand] | None:
        """Note what a shard has of a push; it is accepted when all have all."""
        exchange = self.under_way.get(event.push)
        if exchange is None or not exchange.asked or exchange.push is None or event.shard not in self._shards:
            return None
        if not event.complete:
            return self._end(exchange, f"{event.shard} does not have all of it")
        exchange.checked.add(event.shard)
        if len(exchange.checked) < len(self._layout.shards):
            return []
        self.under_way.drop(exchange.ticket)
        reason = self._updates.accept(now_s, exchange.push)
        return [do.AcceptPush(cluster=exchange.cluster, push=exchange.ticket, reason=reason)]

    def _check(self, exchange: OngoingExchange) -> list[OuterCommand]:
        """Ask the shards, once, when both ends say that all was moved."""
        if not exchange.sent or exchange.waiting or exchange.asked:
            return []
        exchange.asked = True
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
            if self.under_way.of(TransferWay.PULL, cluster) is None:
                del self._owed[cluster]
                pull = do.StartPull(
                    cluster=cluster,
                    pull=self._new_ticket(),
                    version=version,
                    counted=self._updates.last_push(cluster),
                    left_out=self._updates.left_out(cluster),
                    reason=reason,
                )
                self._begin(now_s, TransferWay.PULL, pull.pull, cluster, version)
                commands.append(pull)
        return commands

    def moves(self, now_s: float) -> list[OuterCommand]:
        """Return the layers to move now."""
        return [*self.under_way.moves(now_s)]

    def _begin(
        self, now_s: float, way: TransferWay, ticket: Ticket, cluster: str, version: int, push: Push | None = None
    ) -> None:
        exchange = OngoingExchange(way=way, ticket=ticket, cluster=cluster, version=version, begun_s=now_s, push=push)
        self.under_way.begin(exchange, self._clusters.workers[cluster])

    # What ends before its time.

    def cluster_left(self, cluster: str, reason: str) -> list[OuterCommand]:
        """End what a cluster that went had under way; it is owed nothing."""
        self._owed.pop(cluster, None)
        ending = [one for one in self.under_way if one.cluster == cluster]
        return [command for one in ending for command in self._end(one, f"{cluster}: {reason}")]

    def shard_lost(self, reason: str) -> list[OuterCommand]:
        """End all that is under way; pulls begin again when all shards are back."""
        commands: list[OuterCommand] = []
        for exchange in self.under_way:
            if exchange.way is TransferWay.PULL:
                self.owe(exchange.cluster, reason)
            commands += self._end(exchange, reason)
        return commands

    def time_passes(self, now_s: float) -> list[OuterCommand]:
        """End what has taken too long."""
        reason = f"it took over {self._settings.transfer_limit_s:.3g} s"
        return [command for one in self.under_way.overdue(now_s) for command in self._end(one, reason)]

    def _end(self, exchange: OngoingExchange, reason: str) -> list[OuterCommand]:
        """End a push or a pull before its time, and tell both sides."""
        self.under_way.drop(exchange.ticket)
        commands: list[OuterCommand] = []
        if exchange.push:
            commands += [do.Forget(shard=name, ticket=exchange.ticket, reason=reason) for name in self._shards.present]
        if exchange.cluster in self._clusters:
            if exchange.push:
                commands.append(do.RefusePush(cluster=exchange.cluster, push=exchange.ticket, reason=reason))
            else:
                commands.append(do.EndPull(cluster=exchange.cluster, pull=exchange.ticket, reason=reason))
        return commands

    # What shards must keep.

    @property
    def pulled(self) -> set[int]:
        """Versions that are being pulled."""
        return {one.version for one in self.under_way if one.way is TransferWay.PULL}

    @property
    def bases(self) -> set[int]:
        """Versions that pushes begin from, where shards must know what parameters did since."""
        if not self._settings.compensation:
            return set()
        under_way = [one.version for one in self.under_way]
        pending = [push.base_version for push in self._updates.pending]
        return {*under_way, *pending, *self._clusters.begun_from.values()}
