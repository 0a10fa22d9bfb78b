"""Forecasts and reports of links for tests of what adapters decide between steps: without any simulator."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from spantrain.adaptation.boundary import AutoBoundary, AutoSettings, PlanReplacement
from spantrain.adaptation.network_state import LinkState, Pair, Reports
from spantrain.core.plan import Plan
from spantrain.core.span import equal_spans
from spantrain.core.speed import LinkReport, LinkVerdict
from spantrain.formats.registry import WireFormat
from testing import four_sites

RATE = 100.0
SIZE = 8
"""Of the plan's micro-batches."""
STEP_S = 1.0
"""What a step took; believed whatever is simulated, but in the test of that."""
LINKS = tuple((f"s{a}r0", f"s{b}r0") for a, b in four_sites.PAIRS)


@dataclass(kw_only=True)
class TableForecast:
    """A step takes as long as its slowest link, and a little for each micro-batch on slow links, a little for each of
    its samples on calm ones; int8 sends a quarter.
    """

    moving_s: float = 0.0
    asked: list[LinkState] = field(default_factory=list)

    def step_s(self, plan: Plan, state: LinkState) -> float:
        self.asked.append(state)
        parts = {WireFormat.NATIVE: 1.0, WireFormat.INT8: 0.25}
        slowest = max(
            parts[stage.wire_format] / state.speed(stage.devices[0], after.devices[0])
            for stage, after in zip(plan.stages, plan.stages[1:], strict=False)
        )
        if state.calm:
            return slowest + 0.001 * sum(stage.micro_batches[0].size for stage in plan.stages)
        return slowest + 0.01 * sum(len(stage.micro_batches) for stage in plan.stages)

    def adapted_s(self, plan: Plan, state: LinkState) -> float:
        return self.step_s(plan, state)

    def rates(self, plan: Plan, state: LinkState) -> Mapping[Pair, float]:
        names = plan.devices
        return {(names[a], names[b]): RATE * state.speed(names[a], names[b]) for a, b in four_sites.PAIRS}

    def tuned(self, plan: Plan, state: LinkState) -> Plan:
        """Coarser: micro-batches cost, and on slow links nothing else depends on them."""
        spans = equal_spans(plan.global_batch, 2 * SIZE)
        return replace(plan, stages=tuple(replace(stage, micro_batches=spans) for stage in plan.stages))

    def move_s(self, before: Plan, after: Plan, state: LinkState) -> float:
        same = [stage.units for stage in before.stages] == [stage.units for stage in after.stages]
        return 0.0 if same else self.moving_s


def reports(
    plan: Plan,
    part: float,
    *,
    confidence: float = 1.0,
    busy_s: float = 1.0,
    of: Mapping[Pair, float] | None = None,
    newest: Mapping[Pair, float] | None = None,
) -> Reports:
    """All links at a part of their rate, but for those in `of`; the newest messages at 0.9, or as `newest` has them."""
    names, parts = plan.devices, of or {}
    found: dict[str, tuple[LinkReport, ...]] = {}
    for a, b in four_sites.PAIRS:
        link = LinkReport(
            peer=names[b],
            verdict=LinkVerdict.CALM,
            bytes_per_s=RATE * parts.get((names[a], names[b]), part),
            latency_s=None,
            queued_s=0.0,
            busy_s=busy_s,
            messages=12,
            confidence=confidence,
            newest_bytes_per_s=None if newest is None else RATE * newest.get((names[a], names[b]), 0.9),
        )
        found[names[a]] = (*found.get(names[a], ()), link)
    return found


def begun(settings: AutoSettings | None = None) -> tuple[Plan, TableForecast, AutoBoundary]:
    """An adapter that has learned how its links are measured."""
    plan, forecast = four_sites.plan(0.01), TableForecast(moving_s=math.inf)
    boundary = AutoBoundary(plan, forecast, settings or AutoSettings(believed=math.inf))
    for step in range(3):
        assert boundary.advise(step, plan, reports(plan, 0.9), STEP_S) is None
    assert not forecast.asked
    return plan, forecast, boundary


def twice(boundary: AutoBoundary, plan: Plan, part: float) -> PlanReplacement | None:
    """What is proposed after two steps with all links at a part of their rate; nothing after the first."""
    return twice_at(boundary, 3, plan, part)


def twice_at(boundary: AutoBoundary, step: int, plan: Plan, part: float) -> PlanReplacement | None:
    """The same from a step on."""
    assert boundary.advise(step, plan, reports(plan, part), STEP_S) is None
    return boundary.advise(step + 1, plan, reports(plan, part), STEP_S)
