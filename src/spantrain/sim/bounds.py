"""Seconds that no order of work can beat, for a plan's own spans (DESIGN section 5).

Every device and every link must do all its work; before its first piece the samples must come from the first stage, and
after its last piece results must still go back there. The ways there and back are taken as if nothing else were in the
way, so what is returned holds for any order, static or decided at run time, with backwards whole or in halves.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from spantrain.core.action import Action, Direction, Op
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.schedule.layout import Router, neighbour
from spantrain.sim.costs import StepCosts
from spantrain.sim.rounds import Round, RoundWork, rounds_bound_s
from spantrain.sim.sums import sum_behind_s
from spantrain.sim.transfers import WITHIN_DEVICE, TransferCost

Node = tuple[str, int, Span]
"""Device, stage and one of its own spans."""


def pipeline_bound_s(plan: Plan, costs: StepCosts) -> float:
    """Return the least seconds from a step's first start to the end of its last action."""
    ways = _EmptyPipeline(plan, costs)
    columns = _columns(plan)
    shapes = {tuple(node[2].size for node in column): column for column in columns}
    rounds = [_round_of(plan, ways, column, len(columns)) for column in shapes.values()]
    if len(rounds) == 1:
        return rounds_bound_s(rounds[0])  # no less than the others
    least = _least_round(rounds)
    return max(*_device_bounds(ways), *_link_bounds(ways), rounds_bound_s(least) if least else 0.0)


def step_bound_s(plan: Plan, costs: StepCosts) -> float:
    """Return the least seconds of a whole step, for devices and links at their normal speed.

    No device starts before the first update ends; of the gradient sum of the stage whose last action ends last, some
    is left behind it (`sim.sums.sum_behind_s`); the barrier follows. Stages that share a parameter sum it behind their
    own gradient sums, whatever the others do. So the least update, then the larger of the pipeline's bound with the
    least that is left of a sum and of what leads to the last of the shared sums, then the barrier.
    """
    sums_s = [sum_behind_s(plan, costs, stage) for stage in range(len(plan.stages))]
    ends_s = [pipeline_bound_s(plan, costs) + min(sums_s)]
    shared = costs.tied_sums()
    if shared:
        summed_s = [end_s + sum_s for end_s, sum_s in zip(_stage_ends_s(plan, costs), sums_s, strict=True)]
        if len(shared[0].stages) == len(plan.stages):
            summed_s[0] = max(summed_s[0], ends_s[0])
        for tied in shared:
            end_s = max(summed_s[stage] for stage in tied.stages) + tied.seconds
            for stage in tied.stages:
                summed_s[stage] = end_s
        ends_s += summed_s
    return min(costs.optimizer_s(leader) for leader in plan.leaders) + max(ends_s) + costs.commit_s


def _stage_ends_s(plan: Plan, costs: StepCosts) -> list[float]:
    """Return for each stage the least seconds to the end of its last action; the first one's is often the last."""
    ways = _EmptyPipeline(plan, costs, to_first=True)
    ends_s = []
    for index, stage in enumerate(plan.stages):
        leaders = {replica.devices[0] for replica in stage.replicas}
        own = [
            min(map(ways.forward_ready_s, nodes)) + sum(sum(ways.seconds(node)) for node in nodes)
            for leader in leaders
            if (nodes := [node for node in ways.nodes if node[:2] == (leader, index)])
        ]
        ends_s.append(max(own, default=0.0))
    ends_s[0] = max(ends_s[0], *_device_bounds(ways, own_end=False), *_link_bounds(ways))
    return ends_s


class _EmptyPipeline:
    """Times of a sample's way through an empty pipeline.

    `to_first`: what counts ends with the first stage's last action, not with whichever is last.
    """

    def __init__(self, plan: Plan, costs: StepCosts, *, to_first: bool = False) -> None:
        self._costs, self._to_first = costs, to_first
        self._router = Router(plan)
        # The ways of a span are asked for again by each of its neighbours.
        self.forward_ready_s = cache(self._forward_ready_s)
        self.gradient_ready_s = cache(self._gradient_ready_s)
        self.after_forward_s = cache(self._after_forward_s)
        self.after_input_s = cache(self._after_input_s)
        self.seconds = cache(self._seconds)
        self.nodes: tuple[Node, ...] = tuple(
            (replica.devices[0], index, span)
            for index, stage in enumerate(plan.stages)
            for number, replica in enumerate(stage.replicas)
            for span in stage.replica_spans(number)
        )
        self.by_device: dict[str, list[Node]] = {}
        self._by_place: dict[tuple[str, int], list[Node]] = {}
        for node in sorted(self.nodes, key=lambda node: node[2]):
            self.by_device.setdefault(node[0], []).append(node)
            self._by_place.setdefault(node[:2], []).append(node)
        # Stage by stage, so that a way through hundreds of stages is not hundreds of calls deep.
        for node in self.nodes:
            self.forward_ready_s(node)
            self.after_input_s(node)
        for node in reversed(self.nodes):
            self.gradient_ready_s(node)
            self.after_forward_s(node)

    def _seconds(self, node: Node) -> tuple[float, float, float]:
        """Return the least seconds of F, of I, and of W behind I, whether the backward is whole or in halves."""
        device, stage, span = node
        of = {op: self._costs.action_s(device, Action(stage, op, span)) for op in Op}
        backward_s = min(of[Op.BACKWARD], of[Op.BACKWARD_INPUT] + of[Op.BACKWARD_WEIGHT])
        input_s = min(of[Op.BACKWARD], of[Op.BACKWARD_INPUT])
        return of[Op.FORWARD], input_s, backward_s - input_s

    def received(self, node: Node, direction: Direction) -> Iterable[tuple[Node, TransferCost]]:
        """Return who sends what to a node."""
        device, stage, span = node
        other = stage - 1 if direction is Direction.FORWARD else stage + 1
        for source, piece in self._router.sources(stage, direction, span):
            yield self._node(source, other, piece), self._way(source, device, direction, other, piece)

    def sent(self, node: Node, direction: Direction) -> Iterable[tuple[Node, TransferCost]]:
        """Return what a node sends to whom."""
        device, stage, span = node
        for target, piece in self._router.destinations(stage, direction, span):
            to = self._node(target, neighbour(stage, direction), piece)
            yield to, self._way(device, target, direction, stage, piece)

    def _way(self, source: str, target: str, direction: Direction, stage: int, piece: Span) -> TransferCost:
        return WITHIN_DEVICE if source == target else self._costs.transfer(source, target, direction, stage, piece)

    def _node(self, device: str, stage: int, piece: Span) -> Node:
        """Return the node of a device in a stage whose span holds a piece."""
        nodes = self._by_place[device, stage]
        return nodes[bisect_right(nodes, piece.lo, key=lambda node: node[2].lo) - 1]

    def _forward_ready_s(self, node: Node) -> float:
        """Return the earliest that a node's activations can all be there."""
        sources = self.received(node, Direction.FORWARD)
        return max(
            (self.forward_ready_s(source) + self.seconds(source)[0] + _alone_s(way) for source, way in sources),
            default=0.0,
        )

    def _gradient_ready_s(self, node: Node) -> float:
        """Return the earliest that a node's backward can begin."""
        own_s = self.forward_ready_s(node) + self.seconds(node)[0]
        sources = self.received(node, Direction.BACKWARD)
        return max(
            (self.gradient_ready_s(source) + self.seconds(source)[1] + _alone_s(way) for source, way in sources),
            default=own_s,
        )

    def _after_forward_s(self, node: Node) -> float:
        """Return the least seconds from the end of a node's forward to the end of the step."""
        ways = [
            _alone_s(way) + self.seconds(target)[0] + self.after_forward_s(target)
            for target, way in self.sent(node, Direction.FORWARD)
        ]
        return max([*ways, self.seconds(node)[1] + self.after_input_s(node)])

    def _after_input_s(self, node: Node) -> float:
        """Return the least seconds from the end of a node's I to the end of the step."""
        ways = [
            _alone_s(way) + self.seconds(target)[1] + self.after_input_s(target)
            for target, way in self.sent(node, Direction.BACKWARD)
        ]
        return max(ways) if ways and self._to_first else max([*ways, self.seconds(node)[2]])


def _alone_s(way: TransferCost) -> float:
    return way.latency_s + way.occupancy_s


def _device_bounds(ways: _EmptyPipeline, *, own_end: bool = True) -> list[float]:
    """Return what the work of each device allows; `own_end`: its own last action may be the last one that counts."""
    bounds = [0.0]
    for nodes in ways.by_device.values():
        forward_s, input_s, weight_s = (sum(ways.seconds(node)[part] for node in nodes) for part in range(3))
        arrival_s = min(map(ways.forward_ready_s, nodes))
        way_up_s = min(map(ways.after_input_s, nodes))
        bounds += [
            arrival_s + forward_s + input_s + (weight_s if own_end else 0.0),
            arrival_s + forward_s + input_s + way_up_s,
            arrival_s + forward_s + min(map(ways.after_forward_s, nodes)),
            min(map(ways.gradient_ready_s, nodes)) + input_s + way_up_s,
        ]
    return bounds


def _link_bounds(ways: _EmptyPipeline) -> list[float]:
    """Return what the traffic of each link allows."""
    ready_s: dict[str, list[float]] = {}
    busy_s: dict[str, float] = {}
    after_s: dict[str, list[float]] = {}
    # By direction: when a result can be sent, of which part, and what follows its arrival.
    for direction, ready, part, after in (
        (Direction.FORWARD, ways.forward_ready_s, 0, ways.after_forward_s),
        (Direction.BACKWARD, ways.gradient_ready_s, 1, ways.after_input_s),
    ):
        for node in ways.nodes:
            for target, way in ways.sent(node, direction):
                for link, used in way.uses:
                    ready_s.setdefault(link, []).append(ready(node) + ways.seconds(node)[part])
                    busy_s[link] = busy_s.get(link, 0.0) + used * way.occupancy_s
                    after_s.setdefault(link, []).append(way.latency_s + ways.seconds(target)[part] + after(target))
    return [min(ready_s[link]) + busy_s[link] + min(after_s[link]) for link in busy_s]


def _least_round(rounds: Sequence[Round]) -> Round | None:
    """Return a round that is no more than any of several; None if messages go other ways."""
    alike = {tuple((work.resources, work.before) for work in one.works) for one in rounds}
    if len(alike) != 1:
        return None
    return Round(works=tuple(map(_least, *(one.works for one in rounds))), count=rounds[0].count)


def _least(*shapes: RoundWork) -> RoundWork:
    """Return the least seconds of a work, and the most room, whatever the size of the micro-batch."""
    rooms = [work.room for work in shapes if work.room is not None]
    seconds = min(work.seconds for work in shapes)
    return replace(shapes[0], seconds=seconds, room=max(rooms, key=lambda room: room[1], default=None))


def _columns(plan: Plan) -> list[tuple[Node, ...]]:
    """Return the nodes of each micro-batch, if all stages and replicas take part in the same ones; else nothing."""
    if any(stage.micro_batches != plan.stages[0].micro_batches for stage in plan.stages):
        return []
    rows = [
        [(replica.devices[0], index, span) for span in stage.replica_spans(number)]
        for index, stage in enumerate(plan.stages)
        for number, replica in enumerate(stage.replicas)
    ]
    if any(len(row) != len(plan.stages[0].micro_batches) for row in rows):
        return []
    return list(zip(*rows, strict=True))


def _round_of(plan: Plan, ways: _EmptyPipeline, column: tuple[Node, ...], count: int) -> Round:
    """Return the work of one micro-batch: up the pipeline, and down again."""
    limits = {
        (replica.devices[0], index): replica.in_flight_limit
        for index, stage in enumerate(plan.stages)
        for replica in stage.replicas
    }
    works: list[RoundWork] = []
    forward: dict[Node, int] = {}
    backward: dict[Node, int] = {}
    for node in column:
        before = _messages(works, ways.received(node, Direction.FORWARD), forward)
        forward[node] = len(works)
        works.append(RoundWork(resources=((node[0], 1.0),), seconds=ways.seconds(node)[0], before=before))
    for node in reversed(column):
        own, on_device = forward[node], ((node[0], 1.0),)
        before = ((own, 0.0), *_messages(works, ways.received(node, Direction.BACKWARD), backward))
        _, input_s, weight_s = ways.seconds(node)
        backward[node] = len(works)
        works.append(RoundWork(resources=on_device, seconds=input_s, before=before, chain=(own,)))
        chain = (own, backward[node])
        works.append(RoundWork(resources=on_device, seconds=weight_s, before=((backward[node], 0.0),), chain=chain))
        most = limits[node[:2]] // node[2].size
        works[own] = replace(works[own], room=(backward[node] + 1, most))
    return Round(works=tuple(works), count=count)


def _messages(
    works: list[RoundWork], received: Iterable[tuple[Node, TransferCost]], made_by: Mapping[Node, int]
) -> tuple[tuple[int, float], ...]:
    """Add what a node receives; return that it must be there before."""
    before = []
    for source, way in received:
        before.append((len(works), way.latency_s))
        links = tuple((f"link {name}", part) for name, part in way.uses)
        works.append(RoundWork(resources=links, seconds=way.occupancy_s, before=((made_by[source], 0.0),)))
    return tuple(before)
