"""Seconds that no order of work can beat, for a plan's own spans (DESIGN section 5).

Every device and every link must do all its work; before its first piece the samples must come from the first stage, and
after its last piece results must still go back there. The ways there and back are taken as if nothing else were in the
way, so what is returned holds for any order, static or decided at run time, with backwards whole or in halves.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import cache

from spantrain.core.action import Action, Direction, Op
from spantrain.core.plan import Plan
from spantrain.core.spans import Span
from spantrain.policy.routing import Router
from spantrain.sim.costs import StepCosts
from spantrain.sim.network import Transfer

__all__ = ["pipeline_bound_s", "step_bound_s"]

Node = tuple[str, int, Span]
"""Device, stage and one of its own spans."""


def pipeline_bound_s(plan: Plan, costs: StepCosts) -> float:
    """Return the least seconds from a step's first start to the end of its last action."""
    ways = _Ways(plan, costs)
    return max(*_device_bounds(plan, ways), *_link_bounds(ways))


def step_bound_s(plan: Plan, costs: StepCosts) -> float:
    """Return the least seconds of a whole step, for devices and links at their normal speed.

    No device starts before the first update ends; the stage whose last action ends last has its gradient sum before
    it; the exchange of shared parameters and the barrier follow. So the least update, the pipeline's bound, the least
    gradient sum, and both of the latter add up.
    """
    leaders = [replica.devices[0] for stage in plan.stages for replica in stage.replicas]
    return (
        min(costs.optimizer_s(leader) for leader in leaders)
        + pipeline_bound_s(plan, costs)
        + min(costs.gradient_sum_s(stage) for stage in range(len(plan.stages)))
        + costs.tied_exchange_s
        + costs.commit_s
    )


class _Ways:
    """Times of a sample's way through an empty pipeline."""

    def __init__(self, plan: Plan, costs: StepCosts) -> None:
        self._plan = plan
        self._costs = costs
        self._router = Router(plan)
        self._last = len(plan.stages) - 1
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
        self._by_device: dict[str, list[Node]] = {}
        for node in sorted(self.nodes, key=lambda node: node[2]):
            self._by_device.setdefault(node[0], []).append(node)

    def _seconds(self, node: Node) -> tuple[float, float, float]:
        """Return the least seconds of F, of I, and of W behind I, whether the backward is whole or in halves."""
        device, stage, span = node
        of = {op: self._costs.action_s(device, Action(stage, op, span)) for op in Op}
        backward_s = min(of[Op.BACKWARD], of[Op.BACKWARD_INPUT] + of[Op.BACKWARD_WEIGHT])
        input_s = min(of[Op.BACKWARD], of[Op.BACKWARD_INPUT])
        return of[Op.FORWARD], input_s, backward_s - input_s

    def received(self, node: Node, direction: Direction) -> Iterable[tuple[Node, Transfer]]:
        """Return who sends what to a node."""
        device, stage, span = node
        neighbour = stage - 1 if direction is Direction.FORWARD else stage + 1
        for source, piece in self._router.sources(device, direction, span):
            yield (
                self._node(source, piece),
                self._costs.transfer(source, device, direction, neighbour, piece),
            )

    def sent(self, node: Node, direction: Direction) -> Iterable[tuple[Node, Transfer]]:
        """Return what a node sends to whom."""
        device, stage, span = node
        for target, piece in self._router.destinations(device, direction, span):
            yield self._node(target, piece), self._costs.transfer(device, target, direction, stage, piece)

    def _node(self, device: str, piece: Span) -> Node:
        """Return the node of a device whose span holds a piece."""
        nodes = self._by_device[device]
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
        return max([*ways, self.seconds(node)[2]])


def _alone_s(way: Transfer) -> float:
    return way.latency_s + way.occupancy_s


def _device_bounds(plan: Plan, ways: _Ways) -> list[float]:
    """Return what the work of each device allows."""
    bounds = [0.0]
    for leader in (replica.devices[0] for stage in plan.stages for replica in stage.replicas):
        nodes = [node for node in ways.nodes if node[0] == leader]
        if not nodes:
            continue
        forward_s, input_s, weight_s = (sum(ways.seconds(node)[part] for node in nodes) for part in range(3))
        arrival_s = min(map(ways.forward_ready_s, nodes))
        way_up_s = min(map(ways.after_input_s, nodes))
        bounds += [
            arrival_s + forward_s + input_s + weight_s,
            arrival_s + forward_s + input_s + way_up_s,
            arrival_s + forward_s + min(map(ways.after_forward_s, nodes)),
            min(map(ways.gradient_ready_s, nodes)) + input_s + way_up_s,
        ]
    return bounds


def _link_bounds(ways: _Ways) -> list[float]:
    """Return what the traffic of each link allows."""
    ready_s: dict[str, list[float]] = {}
    busy_s: dict[str, float] = {}
    after_s: dict[str, list[float]] = {}
    for direction, ready, part, after in _directions(ways):
        for node in ways.nodes:
            for target, way in ways.sent(node, direction):
                ready_s.setdefault(way.link, []).append(ready(node) + ways.seconds(node)[part])
                busy_s[way.link] = busy_s.get(way.link, 0.0) + way.occupancy_s
                after_s.setdefault(way.link, []).append(way.latency_s + ways.seconds(target)[part] + after(target))
    return [min(ready_s[link]) + busy_s[link] + min(after_s[link]) for link in busy_s]


def _directions(
    ways: _Ways,
) -> tuple[tuple[Direction, Callable[[Node], float], int, Callable[[Node], float]], ...]:
    """Return each direction with: when a result can be sent, of which part, and what follows its arrival."""
    return (
        (Direction.FORWARD, ways.forward_ready_s, 0, ways.after_forward_s),
        (Direction.BACKWARD, ways.gradient_ready_s, 1, ways.after_input_s),
    )
