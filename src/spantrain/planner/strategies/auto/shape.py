"""A plan in the making: parts in order, where they are cut, one micro-batch size; and the plan that it stands for."""

from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from spantrain.core.plan import Plan, Stage
from spantrain.core.records import Record
from spantrain.core.span import Span, apportion, equal_spans
from spantrain.planner.assembly.assemble import draft_stage, with_limits
from spantrain.planner.request import PlanRequest
from spantrain.planner.strategies.auto.allowed import is_short
from spantrain.planner.strategies.auto.hops import PipelinePart
from spantrain.planner.strategies.auto.parts import PartCosts


class PlanShape(Record):
    """What a search changes; in-flight limits follow from memory."""

    size: int
    """Samples of a full micro-batch."""
    parts: tuple[PipelinePart, ...]
    begins: tuple[int, ...]
    """The unit at which each part begins, then the end."""

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """All devices in use."""
        return tuple(name for part in self.parts for name in part.devices)


def shape_of(plan: Plan) -> PlanShape | None:
    """Return the shape of a plan; None if it is more than a shape can say."""
    spans = plan.stages[0].micro_batches
    size = spans[0].size
    if spans != equal_spans(plan.global_batch, size) or any(stage.micro_batches != spans for stage in plan.stages):
        return None
    order = {device.name: index for index, device in enumerate(plan.cluster.devices)}
    parts = []
    for stage in plan.stages:
        if stage.divides_tensors:
            return None
        samples = apportion(size, [replica.sample_share for replica in stage.replicas])
        if min(samples) == 0:
            return None
        names = [replica.devices[0] for replica in stage.replicas]
        pairs = sorted(zip(names, samples, strict=True), key=lambda pair: order[pair[0]])
        parts.append(PipelinePart(tuple(name for name, _ in pairs), tuple(count for _, count in pairs)))
    begins = (*(stage.first_unit for stage in plan.stages), plan.stages[-1].end_unit)
    return PlanShape(size=size, parts=tuple(parts), begins=begins)


class ShapeBuilder:
    """Makes plans of shapes."""

    def __init__(self, request: PlanRequest, costs: PartCosts, strategy: str) -> None:
        self._request = request
        self._costs = costs
        self._strategy = strategy
        self._spans: dict[int, tuple[Span, ...]] = {}

    def plan(self, shape: PlanShape) -> Plan | None:
        """Return the plan of a shape with the in-flight limits that memory allows; None if one span does not fit."""
        stages = []
        for part, first, end in zip(shape.parts, shape.begins[:-1], shape.begins[1:], strict=True):
            stage = self._stage(part, range(first, end), shape.size)
            if stage is None:
                return None
            stages.append(stage)
        for index, (lower, upper) in enumerate(pairwise(shape.parts)):
            form = self._costs.wire_format(lower, upper)
            if form is not stages[index].wire_format:
                stages[index] = replace(stages[index], wire_format=form)
        return self._request.job.plan_of(self._request.profile, stages, strategy=self._strategy)

    def memory_is_short(self, shape: PlanShape) -> bool:
        """Whether some device of a shape cannot hold all its samples at once."""
        plan = self.plan(shape)
        return plan is None or is_short(plan)

    def _stage(self, part: PipelinePart, units: range, size: int) -> Stage | None:
        """Return the stage of a part; None where one span does not fit."""
        spans = self._spans.get(size)
        if spans is None:
            spans = self._spans[size] = equal_spans(self._costs.global_batch, size)
        rows = (((name,), count, (1.0,)) for name, count in zip(part.devices, part.samples, strict=True))
        draft = draft_stage(units, spans, rows, self._costs.division(len(part.devices)).state_sharding)
        return with_limits(draft, self._costs.memory, self._costs.spans.splits)
