"""A step as plain numbers, for searches that simulate it hundreds of times."""

from dataclasses import dataclass
from functools import cache

from spantrain.core.action import Action, Direction, Op
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.schedule.layout import Router
from spantrain.sim.costs import StepCosts
from spantrain.sim.network.sums import sum_behind_s

Message = tuple[int, float, float, int, int, int]
"""Link, seconds that it is busy, seconds from its last byte sent to there; then device, part and index it is for."""


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """Replicas are devices, numbered stage by stage. Each own micro-batch passes the parts of a device in turn.

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
    limits: list[int]
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
        return StepModel(
            seconds=_turned(self.seconds),
            messages=[[[tuple(sent) for sent in row] for row in parts] for parts in messages],
            awaited=[[[len(sent) for sent in reversed(row)] for row in reversed(parts)] for parts in self.messages],
            sizes=[row[::-1] for row in self.sizes],
            limits=self.limits,
            tails=[0.0] * len(self.tails),
            num_links=self.num_links,
        )


def _turned(table: list[list[list[float]]]) -> list[list[list[float]]]:
    return [[row[::-1] for row in parts[::-1]] for parts in table]


def model_of(plan: Plan, costs: StepCosts, *, split: bool = True) -> StepModel:
    """Return a plan's step as the costs have it; messages on the same link go one after the other.

    `split` is whether stages other than the first run backwards as I and W.
    """
    return _Builder(plan, costs, split=split).build()


class _Builder:
    def __init__(self, plan: Plan, costs: StepCosts, *, split: bool) -> None:
        self._split = split
        self._plan = plan
        self._costs = costs
        self._router = Router(plan)
        self._links: dict[str, int] = {}
        self._places = [
            (stage, number, replica.devices[0])
            for stage, row in enumerate(plan.stages)
            for number, replica in enumerate(row.replicas)
        ]
        self._number = {leader: number for number, (_, _, leader) in enumerate(self._places)}
        self._spans = [plan.stages[stage].replica_spans(number) for stage, number, _ in self._places]
        self._index = [_by_sample(spans, plan.global_batch) for spans in self._spans]

    def build(self) -> StepModel:
        ops = [
            (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if self._split and stage else (Op.FORWARD, Op.BACKWARD)
            for stage, _, _ in self._places
        ]
        messages = [
            [[self._sent(device, op, span) for span in self._spans[device]] for op in ops[device]]
            for device in range(len(ops))
        ]
        awaited = [[[0] * len(self._spans[device]) for _ in ops[device]] for device in range(len(ops))]
        for parts in messages:
            for row in parts:
                for _, _, _, device, part, index in (message for sent in row for message in sent):
                    awaited[device][part][index] += 1
        left_s = [sum_behind_s(self._plan, self._costs, stage) for stage in range(len(self._plan.stages))]
        return StepModel(
            seconds=[[self._seconds(device, op) for op in ops[device]] for device in range(len(ops))],
            messages=messages,
            awaited=awaited,
            sizes=[[span.size for span in spans] for spans in self._spans],
            limits=[self._plan.stages[stage].replicas[number].in_flight_limit for stage, number, _ in self._places],
            tails=[left_s[stage] for stage, _, _ in self._places],
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
        for target, piece in self._router.destinations(leader, direction, span):
            way = self._costs.transfer(leader, target, direction, stage, piece)
            link = self._links.setdefault(way.links[0], len(self._links))
            number = self._number[target]
            found.append((link, way.occupancy_s, way.latency_s, number, part, self._index[number][piece.lo]))
        return tuple(found)


def _by_sample(spans: tuple[Span, ...], total: int) -> list[int]:
    """Return which of a device's own micro-batches a sample is in."""
    found = [0] * total
    for index, span in enumerate(spans):
        found[span.lo : span.hi] = [index] * span.size
    return found
