"""Who sends which samples to whom: the same for the runtime and the simulator."""

from bisect import bisect_left, bisect_right

from spantrain.core.action import Direction
from spantrain.core.plan import Plan
from spantrain.core.span import Span

Routes = tuple[tuple[str, Span], ...]


class Router:
    """Cuts what a replica produces, or needs, along the micro-batches of the neighbouring stage's replicas.

    Devices are named by the leader of their replica. A piece is a part of one micro-batch of its receiver, in rising
    order, so that a receiver with finer micro-batches starts before all of a coarse one has come.
    """

    def __init__(self, plan: Plan) -> None:
        self._stage_of = {device: index for index, stage in enumerate(plan.stages) for device in stage.devices}
        self._owned: list[list[tuple[Span, str]]] = [
            sorted(
                (span, replica.devices[0])
                for number, replica in enumerate(stage.replicas)
                for span in stage.replica_spans(number)
            )
            for stage in plan.stages
        ]
        self._starts = [[span.lo for span, _ in owned] for owned in self._owned]
        self._ends = [[span.hi for span, _ in owned] for owned in self._owned]

    def destinations(self, device: str, direction: Direction, span: Span) -> Routes:
        """Return which devices get which samples of a span that a device has finished F (or I or B) on.

        Forward: replicas of the next stage; backward: of the stage before. Empty at the pipeline's ends.
        """
        return self._neighbours(self._stage_of[device] + (1 if direction is Direction.FORWARD else -1), span)

    def sources(self, device: str, direction: Direction, span: Span) -> Routes:
        """Return which devices send which samples of a span to a device, in which pieces at most."""
        return self._neighbours(self._stage_of[device] + (-1 if direction is Direction.FORWARD else 1), span)

    def _neighbours(self, stage: int, span: Span) -> Routes:
        if not 0 <= stage < len(self._owned):
            return ()
        start = bisect_right(self._ends[stage], span.lo)
        end = bisect_left(self._starts[stage], span.hi)
        owned = self._owned[stage]
        own, device = owned[start]
        if own.lo <= span.lo and span.hi <= own.hi:
            return ((device, span),)
        return tuple((device, Span(max(own.lo, span.lo), min(own.hi, span.hi))) for own, device in owned[start:end])


def destinations(plan: Plan, device: str, direction: Direction, span: Span) -> Routes:
    """Return `Router.destinations` for a single question."""
    return Router(plan).destinations(device, direction, span)


def sources(plan: Plan, device: str, direction: Direction, span: Span) -> Routes:
    """Return `Router.sources` for a single question."""
    return Router(plan).sources(device, direction, span)
