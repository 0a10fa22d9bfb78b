"""Runs a `StepModel`: by ranks, or by a fixed order; the heart of the search for good orders."""

from dataclasses import dataclass
from heapq import heappop, heappush

from spantrain.sim.search.model import StepModel

Ranks = list[list[list[float]]]
"""By device, part and own micro-batch: the least goes first."""
Orders = list[list[int]]
"""By device: the part that each action is of; each part by rising micro-batch."""
Piece = tuple[int, int, int]
"""Device, part, own micro-batch."""


@dataclass(kw_only=True)
class Outcome:
    """What came of a run."""

    seconds: float
    """Infinite if it stopped before its end."""
    starts: list[list[list[float]]]
    orders: Orders
    last: Piece | None
    """What ended last."""
    causes: dict[Piece, tuple[Piece, bool]]
    """What each piece of work waited for in the end: another one of its device (True), or one that sent a message."""
    waits: set[tuple[int, int]]
    """Device and position of actions of a fixed order that it waited for although another one could have run."""


def run_ranks(model: StepModel, ranks: Ranks) -> Outcome:
    """Run what is ready, the least rank first, without ever waiting while something is."""
    return _ModelRun(model, ranks, None).go()


def run_orders(model: StepModel, orders: Orders) -> Outcome:
    """Run a fixed order, each piece as soon as it can."""
    return _ModelRun(model, None, orders).go()


class _ModelRun:
    def __init__(self, model: StepModel, ranks: Ranks | None, orders: Orders | None) -> None:
        devices = len(model.seconds)
        self._model = model
        self._ranks = ranks
        self._planned = orders
        self._awaited = [[row.copy() for row in parts] for parts in model.awaited]
        self._begun = [[0] * len(parts) for parts in model.seconds]
        self._ended = [[0] * len(parts) for parts in model.seconds]
        self._held = [0] * devices
        self._busy = [False] * devices
        self._free_s = [0.0] * model.num_links
        self._behind: list[Piece | None] = [None] * model.num_links
        self._due: list[tuple[float, int, int, int, int, Piece | None]] = []
        self._out = Outcome(
            seconds=0.0,
            starts=[[[0.0] * len(row) for row in parts] for parts in model.seconds],
            orders=[[] for _ in range(devices)],
            last=None,
            causes={},
            waits=set(),
        )

    def go(self) -> Outcome:
        due, awaited, busy, out, tails = self._due, self._awaited, self._busy, self._out, self._model.tails
        for device in range(len(busy)):
            self._start(device, 0.0, None)
        while due:
            now_s, kind, device, part, index, source = heappop(due)
            if kind == 0:
                awaited[device][part][index] -= 1
                if not busy[device]:
                    self._start(device, now_s, (source, False) if source else None)
            else:
                self._end(device, part, index, now_s)
                piece = (device, part, index)
                if now_s + tails[device] >= out.seconds:
                    out.seconds, out.last = now_s + tails[device], piece
                self._start(device, now_s, (piece, True))
        if any(ended[-1] < len(parts[-1]) for ended, parts in zip(self._ended, self._model.seconds, strict=True)):
            out.seconds = float("inf")
        return out

    def _end(self, device: int, part: int, index: int, now_s: float) -> None:
        model = self._model
        self._busy[device] = False
        ended = self._ended[device]
        ended[part] = index + 1
        if part == len(ended) - 1:
            self._held[device] -= model.sizes[device][index]
        for link, busy_s, lag_s, target, target_part, target_index in model.messages[device][part][index]:
            piece: Piece | None = (device, part, index)
            begin_s = self._free_s[link]
            if begin_s > now_s:
                piece = self._behind[link]  # it waits for the one that the link became busy with
            else:
                begin_s = now_s
                self._behind[link] = piece
            self._free_s[link] = begin_s + busy_s
            heappush(self._due, (begin_s + busy_s + lag_s, 0, target, target_part, target_index, piece))

    def _start(self, device: int, now_s: float, cause: tuple[Piece, bool] | None) -> None:
        part = self._choose(device)
        if part < 0:
            return
        index = self._begun[device][part]
        self._begun[device][part] = index + 1
        if part == 0:
            self._held[device] += self._model.sizes[device][index]
        self._busy[device] = True
        out = self._out
        out.starts[device][part][index] = now_s
        out.orders[device].append(part)
        if cause is not None:
            out.causes[device, part, index] = cause
        heappush(self._due, (now_s + self._model.seconds[device][part][index], 1, device, part, index, None))

    def _choose(self, device: int) -> int:
        """Return the part to run next; -1 if none can or should."""
        if self._planned is not None:
            order, done = self._planned[device], len(self._out.orders[device])
            if done == len(order) or self._ready(device, order[done]):
                return order[done] if done < len(order) else -1
            if any(self._left(device, part) and self._ready(device, part) for part in range(len(self._begun[device]))):
                self._out.waits.add((device, done))
            return -1
        assert self._ranks is not None
        best, least = -1, float("inf")
        ranks, begun = self._ranks[device], self._begun[device]
        for part, index in enumerate(begun):
            if index < len(ranks[part]) and ranks[part][index] < least and self._ready(device, part):
                best, least = part, ranks[part][index]
        return best

    def _left(self, device: int, part: int) -> bool:
        return self._begun[device][part] < len(self._model.sizes[device])

    def _ready(self, device: int, part: int) -> bool:
        index = self._begun[device][part]
        if self._awaited[device][part][index]:
            return False
        if part:
            return self._ended[device][part - 1] > index
        model = self._model
        return self._held[device] + model.sizes[device][index] <= model.limits[device]
