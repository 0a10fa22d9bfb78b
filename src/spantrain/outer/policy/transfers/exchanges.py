"""Pushes and pulls under way: which layers of each are still to move, and what shards say of a push."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from spantrain.core.outer.commands import Move
from spantrain.core.outer.events import ChunkProgress, LayerTransfer, Ticket, TransferWay
from spantrain.core.outer.layers import ShardLayout
from spantrain.formats.registry import WireFormat
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.policy.transfers.transfers import TransferSchedule


@dataclass(frozen=True, kw_only=True)
class Push:
    """What a cluster brings."""

    ticket: Ticket
    cluster: str
    base_version: int
    tokens: int
    progress: tuple[ChunkProgress, ...]
    parameters: bool
    """Whether it brings parameters rather than a pseudo-gradient."""


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
