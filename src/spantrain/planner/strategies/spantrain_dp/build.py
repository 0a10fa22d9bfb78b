"""A candidate as a Plan: whole-sample shares, spans, in-flight limits from memory, prediction."""

from dataclasses import replace

from spantrain.core.plan import Plan, Prediction, Replica, Stage
from spantrain.core.span import Span, equal_spans
from spantrain.cost.memory import Division
from spantrain.cost.step import StepEstimate
from spantrain.planner.assembly.tables import Tables
from spantrain.planner.strategies.spantrain_dp.search import Candidate

STRATEGY = "spantrain-dp"
METHOD = "closed-form estimate (equations 1-5 on stages with I and W apart)"


def build_plan(tables: Tables, candidate: Candidate) -> tuple[Plan, StepEstimate] | None:
    """Return the plan of a solved candidate with its estimate, or None if a replica's samples do not fit."""
    stages = []
    for slot, first, end in zip(candidate.slots, candidate.begins[:-1], candidate.begins[1:], strict=True):
        units = range(first, end)
        stage = _stage(tables, slot, units, candidate.size, tables.shares(slot, units, candidate.size))
        if stage is None:
            # Shares over the whole model were checked for memory by the dynamic programme.
            whole = tables.shares(slot, range(tables.units), candidate.size)
            stage = _stage(tables, slot, units, candidate.size, whole)
        if stage is None:
            return None
        stages.append(stage)
    plan = Plan(
        cluster=tables.profile.cluster,
        model=tables.profile.model,
        global_batch=tables.job.global_batch,
        dtype=tables.step_cost.compute.dtype,
        stages=tuple(stages),
        schedule=tables.job.schedule,
        strategy=STRATEGY,
    )
    return plan, tables.step_cost.estimate(plan)


def with_prediction(tables: Tables, plan: Plan, estimate: StepEstimate) -> Plan:
    """Return the plan with what the estimate and the memory model say of it."""
    prediction = Prediction(
        step_s=estimate.step_s,
        samples_per_s=plan.global_batch / estimate.step_s,
        peak_bytes=tables.memory.plan_peak_bytes(plan),
        method=METHOD,
    )
    return replace(plan, prediction=prediction)


def improve_cuts(tables: Tables, candidate: Candidate, built: tuple[Plan, StepEstimate]) -> tuple[Plan, StepEstimate]:
    """Move one cut by one unit as long as the estimate falls: it knows more than the dynamic programme."""
    best = built
    moved = True
    while moved:
        moved = False
        for index in range(1, len(candidate.begins) - 1):
            for by in (-1, 1):
                begins = list(candidate.begins)
                begins[index] += by
                if not begins[index - 1] < begins[index] < begins[index + 1]:
                    continue
                tried = replace(candidate, begins=tuple(begins))
                other = build_plan(tables, tried)
                if other is not None and other[1].step_s < best[1].step_s * (1 - 1e-6):
                    best, candidate, moved = other, tried, True
    return best


def _stage(tables: Tables, devices: tuple[str, ...], units: range, size: int, shares: tuple[int, ...]) -> Stage | None:
    if min(shares) == 0:
        return None
    spans = equal_spans(tables.job.global_batch, size)
    # Limits are known only after the spans are: the first stage object is a draft that gives the spans.
    draft = _with_limits(units, spans, devices, shares, (tables.job.global_batch,) * len(devices))
    limits = []
    for index, device in enumerate(devices):
        sizes = [span.size for span in draft.replica_spans(index)]
        division = Division(splits=tables.job.splits_backward)
        limit = tables.memory.in_flight_limit_for(units, device, sum(sizes), max(sizes), division=division)
        if limit < max(sizes):
            return None
        limits.append(limit)
    return _with_limits(units, spans, devices, shares, tuple(limits))


def _with_limits(
    units: range, spans: tuple[Span, ...], devices: tuple[str, ...], shares: tuple[int, ...], limits: tuple[int, ...]
) -> Stage:
    return Stage(
        first_unit=units.start,
        end_unit=units.stop,
        micro_batches=spans,
        replicas=tuple(
            Replica(devices=(device,), sample_share=float(share), in_flight_limit=limit)
            for device, share, limit in zip(devices, shares, limits, strict=True)
        ),
    )
