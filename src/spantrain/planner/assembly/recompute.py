"""Units to compute again where memory is short: which, in which stage, and what that lets in.

A stage that holds fewer samples in flight than it has makes its neighbours wait; one that does not fit cannot run. In
both cases, units whose activations are dropped in F and computed again (`core.plan.Stage.recompute`) make room, for
the seconds of their F. Units are taken in the order of bytes that they free per second, as few as bring one more
micro-batch in flight, and every change is judged by the simulator. (Chen et al., "Training Deep Nets with Sublinear
Memory Cost", 2016: of theirs is the trade of memory for a second forward, not the even spacing.)
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from spantrain.core.action import SPLIT_OPS, Op
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_bytes
from spantrain.cost.held_sizes import Division, divisions_at
from spantrain.cost.span_tables import SpanTables
from spantrain.errors import InfeasiblePlanError, PlanError, ScheduleError
from spantrain.planner.request import Evaluation, PlanRequest, Proposal, Strategy

_MAX_ROUNDS = 12
_MAX_DEVICES = 32
"""Plans of more are not changed one stage at a time: each simulation is slow."""
_PARTS_OF_LIMITS = (1.0, 0.5, 0.25, 0.0)
"""Parts of its in-flight limits at which a plan that does not fit is tried; never under one micro-batch."""
_IMPROVED = 2
"""How many of the plans that fit are tried."""
_MIN_GAIN = 1e-3
"""A change must make the objective's value smaller by this part of it."""


def with_recomputation(request: PlanRequest, proposal: Proposal) -> Proposal | None:
    """Return a proposal that fits, or is better, because some of its units are computed again; None if there is none.

    In-flight limits rise where that makes room, and fall where nothing else lets a plan fit; cuts, devices and
    micro-batches stay. An order of work that was found for other limits is dropped. Interleaved plans stay as they are.
    """
    if proposal.plan.interleaved:
        return None
    search = _RecomputeSearch(request)
    base = search.evaluated(proposal.plan)
    if base is not None and base.fits:
        found = search.improved(proposal.plan, base)
        better = search.is_better(found[1], base)
    else:
        fitted = search.fitted(proposal.plan)
        if fitted is None:
            return None
        found, better = search.improved(*fitted), True
    if not better:
        return None
    reasons = (*proposal.reasons, *recompute_reasons(request, found[0]))
    return replace(proposal, plan=found[0], reasons=reasons)


def proposals_of(
    strategy: Strategy, request: PlanRequest, *, improves: bool = False, lightens: bool = False
) -> tuple[Proposal, ...]:
    """Ask a strategy; add those of its proposals that fit only when units are computed again, where that is allowed.

    A strategy that has none is asked once more as if each unit held only what enters it. `improves`: of the best few
    that fit, what is better with units computed again is added, too. `lightens`: where the best holds fewer samples in
    flight than it has for want of memory, what the strategy proposes for such light units is.

    Raises:
        InfeasiblePlanError: nothing fits.
    """
    try:
        proposals = strategy(request)
    except InfeasiblePlanError as error:
        light = _planned_light(strategy, request) if request.constraints.recompute else ()
        if not light:
            raise error
        return light
    if not request.constraints.recompute:
        return proposals
    search = _RecomputeSearch(request)
    done = [(one, result) for one in proposals if (result := search.evaluated(one.plan)) is not None]
    over = [one for one, result in done if not result.fits]
    fitting = [one for one, result in done if result.fits and not any(stage.offloads for stage in one.plan.stages)]
    tried = (*fitting[: _IMPROVED * improves], *over)
    found = (with_recomputation(request, proposal) for proposal in tried)
    light = _planned_light(strategy, request, _IMPROVED) if lightens and search.lacks_room(fitting[:1]) else ()
    return (*proposals, *(proposal for proposal in found if proposal is not None), *light)


def recomputing_all(strategy: Strategy) -> Strategy:
    """Return a strategy that plans for units that are all computed again."""

    def again(plan: Plan) -> Plan:
        return replace(
            plan, stages=tuple(replace(stage, recompute=tuple(stage.units)) for stage in plan.stages), hints=None
        )

    def propose(request: PlanRequest) -> tuple[Proposal, ...]:
        asked = replace(request, profile=_light(request.profile), evaluate=lambda plan: request.evaluate(again(plan)))
        found = (replace(proposal, plan=again(proposal.plan)) for proposal in strategy(asked))
        return tuple(replace(one, reasons=(*one.reasons, *recompute_reasons(request, one.plan))) for one in found)

    return propose


def _light(profile: Profile) -> Profile:
    """Return the profile as if each unit held only what enters it."""
    graph = profile.graph
    units = tuple(
        replace(
            unit,
            activation_bytes_per_sample=min(unit.activation_bytes_per_sample, graph.entering_bytes(index)),
            deferred_bytes_per_sample=0,
        )
        for index, unit in enumerate(graph.units)
    )
    return replace(profile, graph=replace(graph, units=units))


def _planned_light(strategy: Strategy, request: PlanRequest, most: int | None = None) -> tuple[Proposal, ...]:
    """Return what a strategy proposes (the first few) for light units that fits with units really computed again."""
    search, light = _RecomputeSearch(request), _light(request.profile)
    try:
        proposals = strategy(replace(request, profile=light, evaluate=search.evaluate_fitted))
    except InfeasiblePlanError:
        return ()
    found = (with_recomputation(request, proposal) for proposal in proposals[:most])
    return tuple(proposal for proposal in found if proposal is not None)


def recompute_reasons(request: PlanRequest, plan: Plan) -> tuple[str, ...]:
    """Return what is computed again, what it frees on the stage's first device, and what it costs in work."""
    parts = _Parts(request)
    found = []
    for index, stage in enumerate(plan.stages):
        if stage.recompute:
            less = parts.need_bytes(plan, index, ()) - parts.need_bytes(plan, index, stage.recompute)
            more = parts.more_work(stage)
            found.append(
                f"{_named(stage.recompute)} of stage {index} {'is' if len(stage.recompute) == 1 else 'are'} computed "
                f"again: {format_bytes(less)} less for {100 * more:.1f} % more work."
            )
    return tuple(found)


def _named(units: Sequence[int]) -> str:
    """Return units in words.

    >>> _named((3, 4, 5, 8))
    'Units 3-5, 8'
    """
    runs: list[list[int]] = []
    for unit in units:
        if runs and unit == runs[-1][-1] + 1:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'Unit' if len(units) == 1 else 'Units'} {', '.join(texts)}"


@dataclass(frozen=True)
class _Parts:
    """Bytes and seconds of stages of one request."""

    request: PlanRequest

    @cached_property
    def _spans(self) -> SpanTables:
        return self.request.job.span_tables(self.request.profile)

    def by_worth(self, stage: Stage) -> list[int]:
        """Return a stage's units by the bytes that they free for a second of its slowest replica, most first."""
        graph = self.request.profile.graph
        whole = graph.stage_held_bytes(stage.units)
        freed = {unit: whole - graph.stage_held_bytes(stage.units, recompute=(unit,)) for unit in stage.units}
        alike = self._alike(stage)
        seconds = {unit: self._forward_s(alike, (unit,)) for unit in stage.units}
        useful = [unit for unit in stage.units if freed[unit] > 0]
        return sorted(useful, key=lambda unit: freed[unit] / max(seconds[unit], 1e-12), reverse=True)

    def more_work(self, stage: Stage) -> float:
        """Return the seconds of what is computed again, as a part of the stage's F, I and W."""
        seconds, alike = self._spans.groups.replica_seconds, self._alike(stage)
        whole = max(sum(seconds(stage.units, replica, op, size) for op in SPLIT_OPS) for replica, size in alike)
        return self._forward_s(alike, stage.recompute) / whole if whole else 0.0

    def _alike(self, stage: Stage) -> Collection[tuple[Replica, int]]:
        """Return one replica of each sort with the samples of its largest micro-batch."""
        rows = ((replica, stage.largest_of(number)) for number, replica in enumerate(stage.replicas))
        kinds = self._spans.groups.kinds
        return {(kinds(row[0]), row[0].devices[1:] and row[0], row[1]): row for row in rows}.values()

    def _forward_s(self, alike: Collection[tuple[Replica, int]], units: Sequence[int]) -> float:
        return max(self._spans.groups.units_seconds(units, replica, Op.FORWARD, size) for replica, size in alike)

    def fits(self, plan: Plan, index: int, recompute: tuple[int, ...]) -> bool:
        """Whether all devices of a stage hold its in-flight limits."""
        stage, divisions = plan.stages[index], divisions_at(plan, index, recompute)
        own = plan.cluster.device_by_name
        return all(
            self._need(stage, number, name, divisions[name]) <= own[name].memory_bytes
            for number, replica in enumerate(stage.replicas)
            for name in replica.devices
        )

    def need_bytes(self, plan: Plan, index: int, recompute: tuple[int, ...]) -> int:
        """Return the peak bytes of a stage's first device."""
        name = plan.stages[index].devices[0]
        return self._need(plan.stages[index], 0, name, divisions_at(plan, index, recompute)[name])

    def _need(self, stage: Stage, number: int, name: str, division: Division) -> int:
        limit = min(stage.replicas[number].in_flight_limit, stage.samples_of(number))
        return self._spans.memory.need(stage.units, name, limit, stage.largest_of(number), division).peak_bytes

    def limits(self, plan: Plan, index: int, recompute: tuple[int, ...]) -> list[int]:
        """Return the in-flight limits of a stage's replicas that memory allows then, never lower ones than they are."""
        stage, divisions = plan.stages[index], divisions_at(plan, index, recompute)
        allowed = (self._spans.memory.limit_in(stage, number, divisions) for number in range(len(stage.replicas)))
        return [max(limit, replica.in_flight_limit) for limit, replica in zip(allowed, stage.replicas, strict=True)]


class _RecomputeSearch:
    """Tries out units of stages, each change simulated."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._parts = _Parts(request)

    def evaluated(self, plan: Plan) -> Evaluation | None:
        """Return what a plan would do; None if it cannot run at all."""
        with suppress(PlanError, ScheduleError):
            return self._request.evaluate(plan)
        return None

    def lacks_room(self, proposals: Sequence[Proposal]) -> bool:
        """Whether more samples would be in flight in any of some small plans if units were computed again."""
        small = (proposal.plan for proposal in proposals if len(proposal.plan.devices) <= _MAX_DEVICES)
        return any(self._step(plan, index) is not None for plan in small for index in range(len(plan.stages)))

    def is_better(self, evaluation: Evaluation, than: Evaluation) -> bool:
        """Whether the objective says so."""
        objective = self._request.objective
        return evaluation.fits and evaluation.value(objective) < (1 - _MIN_GAIN) * than.value(objective)

    def evaluate_fitted(self, plan: Plan) -> Evaluation:
        """Return what a plan would do with the units computed again that it needs; if none help, what it does."""
        fitted = self.fitted(plan)
        return self._request.evaluate(plan) if fitted is None else fitted[1]

    def fitted(self, plan: Plan) -> tuple[Plan, Evaluation] | None:
        """Return the plan with as few units computed again as let it fit, at the limits that are best then."""
        trials = [self._fitted_at(_with_part_of_limits(plan, part)) for part in _PARTS_OF_LIMITS]
        found = [(trial, done) for trial in trials if trial is not None and (done := self.evaluated(trial)) is not None]
        fitting = [entry for entry in found if entry[1].fits]
        return min(fitting, key=lambda entry: entry[1].value(self._request.objective), default=None)

    def _fitted_at(self, plan: Plan) -> Plan | None:
        for index, stage in enumerate(plan.stages):
            sets = (tuple(sorted(units)) for units in self._growing(stage))
            found = next((units for units in sets if self._parts.fits(plan, index, units)), None)
            if found is None:
                return None
            plan = _changed(plan, index, found, [replica.in_flight_limit for replica in stage.replicas])
        return plan

    def improved(self, plan: Plan, best: Evaluation) -> tuple[Plan, Evaluation]:
        """Return the plan with room for more samples in flight, as long as that pays."""
        for _ in range(_MAX_ROUNDS):
            tried = [(trial, found) for trial in self._steps(plan) if (found := self.evaluated(trial)) is not None]
            better = [entry for entry in tried if self.is_better(entry[1], best)]
            if not better:
                break
            plan, best = min(better, key=lambda entry: entry[1].value(self._request.objective))
        return plan, best

    def _steps(self, plan: Plan) -> Iterator[Plan]:
        """Yield the plan with one more micro-batch in flight in one stage, and in all that lack room, at once."""
        together, count = plan, 0
        for index in range(len(plan.stages)):
            step = self._step(plan, index)
            if step is not None:
                together, count = _changed(together, index, *step), count + 1
                if len(plan.devices) <= _MAX_DEVICES:
                    yield _changed(plan, index, *step)
        if count > 1 or (count and len(plan.devices) > _MAX_DEVICES):
            yield together

    def _step(self, plan: Plan, index: int) -> tuple[tuple[int, ...], list[int]] | None:
        """Return the fewest more units to compute again that let in a micro-batch more, and the limits then."""
        stage = plan.stages[index]
        before = [replica.in_flight_limit for replica in stage.replicas]
        wanted = [min(stage.samples_of(k), limit + stage.largest_of(k)) for k, limit in enumerate(before)]
        if all(want <= limit for want, limit in zip(wanted, before, strict=True)):
            return None
        for units in self._growing(stage):
            limits = self._parts.limits(plan, index, tuple(sorted(units)))
            if all(limit >= want for limit, want in zip(limits, wanted, strict=True)):
                return tuple(sorted(units)), limits
        return None

    def _growing(self, stage: Stage) -> Iterator[tuple[int, ...]]:
        """Yield what is computed again already, then with one more unit each."""
        chosen = stage.recompute
        yield chosen
        for unit in self._parts.by_worth(stage):
            if unit not in chosen:
                chosen = (*chosen, unit)
                yield chosen


def _with_part_of_limits(plan: Plan, part: float) -> Plan:
    limits = (
        [max(1, stage.largest_of(k), round(part * one.in_flight_limit)) for k, one in enumerate(stage.replicas)]
        for stage in plan.stages
    )
    return replace(plan.with_limits(limits), hints=None)


def _changed(plan: Plan, index: int, recompute: tuple[int, ...], limits: Sequence[int]) -> Plan:
    changed = replace(plan.stages[index].with_limits(limits), recompute=recompute)
    return replace(plan, stages=(*plan.stages[:index], changed, *plan.stages[index + 1 :]), hints=None)
