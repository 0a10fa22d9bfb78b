"""A step as plain numbers, for searches that simulate it hundreds of times, by ranks or in a fixed order."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappop, heappush

from spantrain.core.action import Action, Direction, Op
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.core.span import Span
from spantrain.schedule.layout import Router, neighbour
from spantrain.sim.costs import StepCosts
from spantrain.sim.sums import sum_behind_s


class Room(Record):
    """What a device may hold of samples in flight."""

    size_bytes: float
    sample_bytes: Mapping[int, float]
    """By stage."""

    def of(self, order: tuple[Action, ...]) -> bool:
        """Whether an order stays in it."""
        held = 0.0
        for action in order:
            size = action.span.size * self.sample_bytes[action.stage]
            if action.op is Op.FORWARD:
                held += size
                if held > self.size_bytes:
                    return False
            elif action.op is not Op.BACKWARD_INPUT:
                held -= size
        return True


Piece = tuple[int, int, int]
"""Device, part, own micro-batch."""
Message = tuple[int, float, float, int, int, int]
"""Link, seconds that it is busy, seconds from its last byte sent to there; then device, part and index it is for.

The link is negative where a device's next stage takes it, at once."""


class StepModel(Record):
    """Replicas are devices, numbered stage by stage. Each own micro-batch passes the parts of a device in turn.

    In interleaved plans some of them are one in truth, a crew: they do one thing at a time, and share their memory.

    Parts are F, I, W, or F and B, as on stage 0; a device does each part by rising micro-batch. A sample is held from
    the start of the first part to the end of the last one. Tables are by device, then part, then own micro-batch.
    """

    seconds: list[list[list[float]]]
    messages: list[list[list[tuple[Message, ...]]]]
    """What is sent when a part ends."""
    awaited: list[list[list[int]]]
    """How many messages a part needs."""
    sizes: list[list[int]]
    """Samples, by device and own micro-batch."""
    limits: list[float]
    """What each may hold, as `weights` has it."""
    weights: list[float]
    """What a sample takes of that."""
    needs: list[float]
    """What there must be room for with each sample that begins."""
    crews: list[tuple[int, ...]]
    """By device: the ones that are one with it, itself among them, by rising stage."""
    tails: list[float]
    """By device: the least seconds from its last action to the end of the step's gradient sums."""
    num_links: int

    def backwards(self) -> "StepModel":
        """Return the step with time turned round: what was done last comes first, messages go back."""
        devices = range(len(self.seconds))
        messages: list[list[list[list[Message]]]] = [
            [[[] for _ in part] for part in self.seconds[device]] for device in devices
        ]
        for device in devices:
            last_part = len(self.seconds[device]) - 1
            for part, row in enumerate(self.messages[device]):
                for index, sent in enumerate(row):
                    back = (device, last_part - part, len(row) - 1 - index)
                    for link, busy_s, lag_s, target, target_part, target_index in sent:
                        parts = messages[target]
                        at = parts[len(parts) - 1 - target_part]
                        at[len(at) - 1 - target_index].append((link, busy_s, lag_s, *back))
        return replace(
            self,
            seconds=turned(self.seconds),
            messages=[[[tuple(sent) for sent in row] for row in parts] for parts in messages],
            awaited=[[[len(sent) for sent in reversed(row)] for row in reversed(parts)] for parts in self.messages],
            sizes=[row[::-1] for row in self.sizes],
            tails=[0.0] * len(self.tails),
        )


def turned(table: list[list[list[float]]], sign: float = 1.0) -> list[list[list[float]]]:
    """Return a table of times for the step seen from its other end."""
    return [[[sign * value for value in reversed(row)] for row in reversed(parts)] for parts in table]


def model_of(plan: Plan, costs: StepCosts, *, split: bool = True, rooms: Mapping[str, Room] | None = None) -> StepModel:
    """Return a plan's step as the costs have it; messages on the same link go one after the other.

    `split` is whether stages other than the first run backwards as I and W; `rooms` are of devices with several stages.
    """
    return _Builder(plan, costs, split=split).build(rooms or {})


def model_within(plan: Plan, costs: StepCosts, rooms: Mapping[str, Room], most_s: float) -> StepModel | None:
    """Return the same; None, and sooner, where a device is certain to work for longer than that."""
    builder = _Builder(plan, costs, split=True)
    return builder.build(rooms) if builder.busiest_s() <= most_s else None


class _Builder:
    def __init__(self, plan: Plan, costs: StepCosts, *, split: bool) -> None:
        self._plan = plan
        self._costs = costs
        self._router = Router(plan)
        self._links: dict[str, int] = {}
        self._ways: dict[tuple[int, int, Direction, int], tuple[int, float, float]] = {}
        """By sender, receiver, direction and samples: a message's link, how long it is busy, and what comes behind."""
        self._places = [
            (stage, number, replica.devices[0])
            for stage, row in enumerate(plan.stages)
            for number, replica in enumerate(row.replicas)
        ]
        self._number = {(stage, leader): number for number, (stage, _, leader) in enumerate(self._places)}
        self._spans = [plan.stages[stage].replica_spans(number) for stage, number, _ in self._places]
        self._index = [_by_sample(spans, plan.global_batch) for spans in self._spans]
        self._ops = [
            (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if split and stage else (Op.FORWARD, Op.BACKWARD)
            for stage, _, _ in self._places
        ]
        self._crews: dict[str, list[int]] = {}
        for device, (_, _, leader) in enumerate(self._places):
            self._crews.setdefault(leader, []).append(device)
        left_s = [sum_behind_s(plan, costs, stage) for stage in range(len(plan.stages))]
        self._tails = [left_s[stage] for stage, _, _ in self._places]
        self._work_s = [[self._seconds(device, op) for op in row] for device, row in enumerate(self._ops)]

    def busiest_s(self) -> float:
        """Return the least seconds from the first action of a device to the end of the step's gradient sums."""
        works_s = [sum(map(sum, parts)) for parts in self._work_s]
        return max(
            sum(works_s[one] for one in crew) + min(self._tails[one] for one in crew) for crew in self._crews.values()
        )

    def build(self, rooms: Mapping[str, Room]) -> StepModel:
        ops, crews = self._ops, self._crews
        messages = [
            [[self._sent(device, op, span) for span in self._spans[device]] for op in ops[device]]
            for device in range(len(ops))
        ]
        awaited = [[[0] * len(self._spans[device]) for _ in ops[device]] for device in range(len(ops))]
        for parts in messages:
            for row in parts:
                for _, _, _, device, part, index in (message for sent in row for message in sent):
                    awaited[device][part][index] += 1
        limits, weights, needs = [], [], []
        for device, (stage, number, leader) in enumerate(self._places):
            crew = crews[leader]
            bytes_each = (
                [rooms[leader].sample_bytes[self._places[other][0]] for other in crew] if len(crew) > 1 else [1]
            )
            own = crew.index(device)
            weights.append(bytes_each[own])
            needs.append(sum(bytes_each[own:]))
            limit = self._plan.stages[stage].replicas[number].in_flight_limit
            limits.append(rooms[leader].size_bytes if len(crew) > 1 else limit)
        return StepModel(
            seconds=self._work_s,
            messages=messages,
            awaited=awaited,
            sizes=[[span.size for span in spans] for spans in self._spans],
            limits=limits,
            weights=weights,
            needs=needs,
            crews=[tuple(crews[leader]) for _, _, leader in self._places],
            tails=self._tails,
            num_links=len(self._links),
        )

    def _seconds(self, device: int, op: Op) -> list[float]:
        stage, _, leader = self._places[device]

        @cache
        def of(samples: int) -> float:
            return self._costs.action_s(leader, Action(stage, op, Span(0, samples))) + self._costs.action_overhead_s

        return [of(span.size) for span in self._spans[device]]

    def _sent(self, device: int, op: Op, span: Span) -> tuple[Message, ...]:
        stage, _, leader = self._places[device]
        if op is Op.BACKWARD_WEIGHT:
            return ()
        direction = Direction.FORWARD if op is Op.FORWARD else Direction.BACKWARD
        part = 0 if op is Op.FORWARD else 1
        found: list[Message] = []
        for target, piece in self._router.destinations(stage, direction, span):
            number = self._number[neighbour(stage, direction), target]
            key = device, number, direction, piece.size
            way = self._ways.get(key)
            if way is None and target == leader:
                way = self._ways[key] = -1, 0.0, 0.0
            elif way is None:
                cost = self._costs.transfer(leader, target, direction, stage, piece)
                link = self._links.setdefault(cost.links[0], len(self._links))
                way = self._ways[key] = link, cost.occupancy_s, cost.latency_s
            found.append((*way, number, part, self._index[number][piece.lo]))
        return tuple(found)


def _by_sample(spans: tuple[Span, ...], total: int) -> list[int]:
    """Return which of a device's own micro-batches a sample is in."""
    found = [0] * total
    for index, span in enumerate(spans):
        found[span.lo : span.hi] = [index] * span.size
    return found


Ranks = list[list[list[float]]]
"""By device, part and own micro-batch: the least goes first."""
Orders = list[list[int]]
"""By device: the part that each action is of; each part by rising micro-batch."""


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


def run_ranks(model: StepModel, ranks: Ranks, most_s: float = math.inf) -> Outcome:
    """Run what is ready, the least rank first, without ever waiting while something is; stop as `run_orders` does."""
    return _ModelRun(model, ranks, None, most_s).go()


def run_orders(model: StepModel, orders: Orders, most_s: float = math.inf) -> Outcome:
    """Run a fixed order, each piece as soon as it can; stop if it certainly takes over so long."""
    return _ModelRun(model, None, orders, most_s).go()


class _ModelRun:
    def __init__(self, model: StepModel, ranks: Ranks | None, orders: Orders | None, most_s: float) -> None:
        devices = len(model.seconds)
        self._most_s = most_s
        works_s = [sum(map(sum, parts)) for parts in model.seconds]
        self._left_s = [
            sum(works_s[one] for one in crew) + min(model.tails[one] for one in crew) for crew in model.crews
        ]
        self._model = model
        self._ranks = ranks
        self._planned = orders
        self._awaited = [[row.copy() for row in parts] for parts in model.awaited]
        self._begun = [[0] * len(parts) for parts in model.seconds]
        self._ended = [[0] * len(parts) for parts in model.seconds]
        self._held: list[float] = [0] * devices
        self._home = [crew[0] for crew in model.crews]
        """Where is kept what a crew holds, has left to do, and whether it is busy."""
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
        home = self._home
        for device in range(len(busy)):
            if home[device] == device:
                self._start(device, 0.0, None)
        while due:
            now_s, kind, device, part, index, source = heappop(due)
            if kind == 0:
                awaited[device][part][index] -= 1
                if not busy[home[device]]:
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
        self._busy[self._home[device]] = False
        ended = self._ended[device]
        ended[part] = index + 1
        if part == len(ended) - 1:
            self._held[self._home[device]] -= model.sizes[device][index] * model.weights[device]
        for link, busy_s, lag_s, target, target_part, target_index in model.messages[device][part][index]:
            if link < 0:
                self._awaited[target][target_part][target_index] -= 1
                continue
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
        model, home = self._model, self._home[device]
        device, part = self._of_least_rank(home) if self._planned is None else (device, self._in_order(device))
        if part < 0:
            return
        if now_s + self._left_s[home] > self._most_s:
            self._due.clear()
            return
        index = self._begun[device][part]
        self._begun[device][part] = index + 1
        if part == 0:
            self._held[home] += model.sizes[device][index] * model.weights[device]
        self._busy[home] = True
        out = self._out
        out.starts[device][part][index] = now_s
        out.orders[device].append(part)
        if cause is not None:
            out.causes[device, part, index] = cause
        seconds = model.seconds[device][part][index]
        self._left_s[home] -= seconds
        heappush(self._due, (now_s + seconds, 1, device, part, index, None))

    def _of_least_rank(self, home: int) -> tuple[int, int]:
        """Return whose part a crew should run, and which; -1 if none can."""
        assert self._ranks is not None
        least, found = math.inf, (home, -1)
        for device in self._model.crews[home]:
            awaited, ranks = self._awaited[device], self._ranks[device]
            for part, index in enumerate(self._begun[device]):
                row = ranks[part]
                if index < len(row) and row[index] < least and not awaited[part][index] and self._may(device, part):
                    least, found = row[index], (device, part)
        return found

    def _in_order(self, device: int) -> int:
        """Return the part that a fixed order has next; -1 if that cannot run."""
        assert self._planned is not None
        order, done = self._planned[device], len(self._out.orders[device])
        if done == len(order) or self._ready(device, order[done]):
            return order[done] if done < len(order) else -1
        count = len(self._model.sizes[device])
        if any(begun < count and self._ready(device, part) for part, begun in enumerate(self._begun[device])):
            self._out.waits.add((device, done))
        return -1

    def _ready(self, device: int, part: int) -> bool:
        return not self._awaited[device][part][self._begun[device][part]] and self._may(device, part)

    def _may(self, device: int, part: int) -> bool:
        """Whether the part before is done, or there is room."""
        index = self._begun[device][part]
        if part:
            return self._ended[device][part - 1] > index
        model = self._model
        needed = model.sizes[device][index] * model.needs[device]
        return self._held[self._home[device]] + needed <= model.limits[device]
