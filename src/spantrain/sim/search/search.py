"""Finds the order of work that `critical-path` follows in a plan, and the micro-batches with it, by simulating many.

Where the plain rule (I, then F, then W) does not reach the lower bound, orders of other rules and of the static
schedules are improved (`improve`) and the best one is put into the plan as hints. It is never slower than any of the
rules and schedules that it started from: those are simulated with the same memory, and the best of all is taken.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from spantrain.core.action import Action, Op
from spantrain.core.plan import Plan
from spantrain.core.planned.hints import DispatchHints, PlannedOrder, PlannedWait
from spantrain.core.records import Record
from spantrain.core.span import Span, tapered_sizes
from spantrain.errors import PlanError, ProfileError
from spantrain.schedule.dispatch.recut import halved
from spantrain.schedule.layout import CutLayout, check_limits
from spantrain.schedule.registry import schedules, static_orders
from spantrain.sim.bounds import pipeline_bound_s, step_bound_s
from spantrain.sim.costs import StepCosts
from spantrain.sim.engine import SimulationOptions, simulate
from spantrain.sim.search.improve import Improver, rank_by_part
from spantrain.sim.search.model import Orders, Outcome, StepModel, model_of, model_within, run_orders, run_ranks

_PLAIN = "the plain rule"
_LEAST_RUNS = 10
"""Simulations; fewer are of no use."""
_WORTH = 1e-4
"""Hints that gain less than this part of the plain rule's seconds are left out."""


class SearchEffort(Record):
    """How long to search; counted, so that the same plan gives the same order on every machine."""

    max_runs: int = 400
    """Simulations at most."""
    max_actions: int = 150_000
    """Actions simulated at most, all runs together: about a second. Larger plans keep the plain rule."""
    below_s: float = math.inf
    """`taper` searches nothing that no order of work brings under so many seconds of a step: what it returns then may
    be far from its best."""

    def runs(self, actions: int) -> int:
        """Return the simulations of so many actions that are allowed; 0 if too few to be of use."""
        runs = min(self.max_runs, self.max_actions // max(actions, 1))
        return runs if runs >= _LEAST_RUNS else 0

    def part(self, fraction: float) -> "SearchEffort":
        """Return an effort that is a part of this one."""
        return replace(self, max_runs=int(self.max_runs * fraction), max_actions=int(self.max_actions * fraction))


def with_hints(plan: Plan, costs: StepCosts, *, effort: SearchEffort | None = None) -> Plan:
    """Return the plan with hints for `critical-path`, or with none where its plain rule is as good.

    In-flight limits are kept. Hints that the plan has already are forgotten. Interleaved plans have been given their
    order with their limits (`sim.search.interleaved`), and keep it.
    """
    if plan.interleaved:
        return plan
    plan = replace(plan, hints=None)
    search = _OrderSearch(plan, costs, effort or SearchEffort())
    if not search.runs:
        return plan
    plain_s = simulated_s(plan, costs)
    best_s, best = plain_s * (1 - _WORTH), plan
    for hints in search.candidates():
        seconds = simulated_s(replace(plan, hints=hints), costs)
        if seconds < best_s:
            best_s, best = seconds, replace(plan, hints=replace(hints, predicted_s=seconds))
        gained_s = search.plain_s - hints.predicted_s
        if abs(plain_s - seconds - gained_s) <= _WORTH * seconds:
            break  # links are shared as the search has it, so what comes first is best
    return best


def simulated_s(plan: Plan, costs: StepCosts) -> float:
    """Return the seconds of a step with `critical-path`."""
    if plan.schedule != "critical-path":
        plan = replace(plan, schedule="critical-path")
    return simulate(plan, costs, steps=1, options=SimulationOptions(trace=False)).step_s


def quick_s(plan: Plan, costs: StepCosts, most_s: float = math.inf) -> float:
    """Return the seconds of the pipeline under the best of some plain rules; infinite where all take over `most_s`."""
    best_s = math.inf
    if (model := model_within(plan, costs, {}, most_s)) is None:
        return best_s
    for rule in _rules(model).values():
        best_s = min(best_s, run_ranks(model, rank_by_part(model, rule), min(best_s, most_s)).seconds)
    return best_s


def _rules(model: StepModel) -> dict[str, list[tuple[int, ...]]]:
    """Return which parts each device prefers, by rule."""
    return {
        "forwards first": [tuple(range(len(parts))) for parts in model.seconds],
        "backwards first": [(1, 0, *range(2, len(parts))) for parts in model.seconds],
        "weights first": [tuple(reversed(range(len(parts)))) for parts in model.seconds],
    }


class _FoundOrder(Record):
    """An order in a model: with halves of backwards or without."""

    name: str
    split: bool
    outcome: Outcome


class _OrderSearch:
    def __init__(self, plan: Plan, costs: StepCosts, effort: SearchEffort) -> None:
        self._plan = plan
        self._costs = costs
        self._layout = CutLayout.of(plan)
        spans = sum(len(own) for row in self._layout.spans for own in row)
        self.runs = effort.runs(3 * spans)
        """Simulations that are allowed; 0: the plan is not one to search for."""
        self.plain_s = 0.0
        """Seconds of the pipeline under the plain rule, as the search has it."""

    def candidates(self) -> Iterator[DispatchHints]:
        """Yield orders, by rising seconds; none where there is nothing to look for."""
        bound_s = pipeline_bound_s(self._plan, self._costs)
        models = {True: model_of(self._plan, self._costs)}
        plain = self._plain(models[True])
        self.plain_s = plain.outcome.seconds
        if self.plain_s <= bound_s * (1 + _WORTH):
            return
        if self._whole_backwards_are_shorter():
            models[False] = model_of(self._plan, self._costs, split=False)
        starts = [plain, *(found for split, model in models.items() for found in self._starts(model, split=split))]
        starts = sorted(
            (found for found in starts if found.outcome.seconds < float("inf")), key=lambda found: found.outcome.seconds
        )
        for found in (self._improve(models, starts, bound_s), *starts):
            yield self._hints(models[found.split], found, plain, bound_s)

    def _plain(self, model: StepModel) -> _FoundOrder:
        """Return what `critical-path` does without hints: backwards first, but on the first stage of several."""
        rules = _rules(model)
        several, first = self._layout.num_stages > 1, len(self._layout.spans[0])
        preference = [
            rules["forwards first" if several and device < first else "backwards first"][device]
            for device in range(len(model.seconds))
        ]
        return _FoundOrder(name=_PLAIN, split=True, outcome=run_ranks(model, rank_by_part(model, preference)))

    def _whole_backwards_are_shorter(self) -> bool:
        """Whether B takes less than I and W somewhere, as it may where halves do some work twice."""
        for index, stage in enumerate(self._plan.stages[1:], start=1):
            for number, replica in enumerate(stage.replicas):
                for span in stage.replica_spans(number)[:1]:
                    seconds = {op: self._costs.action_s(replica.devices[0], Action(index, op, span)) for op in Op}
                    if seconds[Op.BACKWARD] < seconds[Op.BACKWARD_INPUT] + seconds[Op.BACKWARD_WEIGHT]:
                        return True
        return False

    def _starts(self, model: StepModel, *, split: bool) -> list[_FoundOrder]:
        """Return what other rules and the static schedules do."""
        found = [
            _FoundOrder(name=name, split=split, outcome=run_ranks(model, rank_by_part(model, preference)))
            for name, preference in _rules(model).items()
        ]
        for schedule, registered in schedules().items():
            orders = self._static(schedule, model) if registered.is_improved else None
            if orders is not None:
                found.append(_FoundOrder(name=schedule, split=split, outcome=run_orders(model, orders)))
        return found

    def _static(self, schedule: str, model: StepModel) -> Orders | None:
        """Return a static schedule's order in the parts of the model; None where the memory does not allow it."""
        try:
            rows = static_orders(schedule, self._layout)
        except PlanError:
            return None
        orders = [order for row in rows for order in row]
        return [_parts(order, len(parts)) for order, parts in zip(orders, model.seconds, strict=True)]

    def _improve(self, models: dict[bool, StepModel], starts: list[_FoundOrder], bound_s: float) -> _FoundOrder:
        """Return the best of what comes of the best starts, which share the runs."""
        best = starts[0]
        chosen = [found for found in starts if found.outcome.seconds <= 1.1 * best.outcome.seconds][:4]
        left = self.runs
        for number, start in enumerate(chosen):
            share = left // (len(chosen) - number)
            improver = Improver(model=models[start.split], enough_s=bound_s, runs_left=share)
            improved = improver.improve(start.outcome)
            left -= share - max(0, improver.runs_left)
            if improved.seconds < best.outcome.seconds:
                best = replace(start, outcome=improved)
            if improver.done(improved) and improver.runs_left > 0:
                break
        return best

    def _hints(self, model: StepModel, best: _FoundOrder, plain: _FoundOrder, bound_s: float) -> DispatchHints:
        run = run_orders(model, best.outcome.orders)
        letters = {2: "FB", 3: "FIW"}
        planned = [
            PlannedOrder(
                ops="".join(letters[len(model.seconds[device])][part] for part in order),
                waits=_waits(model, run, device),
            )
            for device, order in enumerate(run.orders)
        ]
        counts = [len(row) for row in self._layout.spans]
        firsts = [sum(counts[:stage]) for stage in range(len(counts))]
        return DispatchHints(
            orders=tuple(tuple(planned[first : first + count]) for first, count in zip(firsts, counts, strict=True)),
            predicted_s=run.seconds,
            reason=(
                f"found from {best.name}: {run.seconds:.6g} s, {_PLAIN} takes {plain.outcome.seconds:.6g} s, no order "
                f"less than {bound_s:.6g} s"
            ),
        )


def _parts(order: tuple[Action, ...], num_parts: int) -> list[int]:
    """Return the parts of a device that an order's actions are; a whole backward is I and W where there are both."""
    part = {
        Op.FORWARD: [0],
        Op.BACKWARD: [1] if num_parts == 2 else [1, 2],
        Op.BACKWARD_INPUT: [1],
        Op.BACKWARD_WEIGHT: [] if num_parts == 2 else [2],
    }
    return [number for action in order for number in part[action.op]]


def _waits(model: StepModel, run: Outcome, device: int) -> tuple[PlannedWait, ...]:
    """Return where a device waited although it could have done something else, and for how long."""
    found = []
    counts = [0] * len(model.seconds[device])
    end_s = 0.0
    for position, part in enumerate(run.orders[device]):
        start_s = run.starts[device][part][counts[part]]
        if (device, position) in run.waits:
            found.append(PlannedWait(position=position, seconds=start_s - end_s))
        end_s = start_s + model.seconds[device][part][counts[part]]
        counts[part] += 1
    return tuple(found)


_TURNS = 2
"""Over all stages, when single ones are cut otherwise."""
_KEPT = 2
"""Cuts of the batch for which orders of work are searched."""
_ORDER_MAY_GAIN = 1.05
"""Cuts of the batch are left out that are slower by more than that before orders of work are searched."""
_COARSER = 2
"""How many micro-batches become one at most."""
_MIN_GAIN = 1e-3
"""Other micro-batches must gain more than this part of the step."""


Limited = Callable[[Plan], Plan | None]
"""Gives a plan the in-flight limits that memory allows; None where it does not fit."""


def taper(plan: Plan, costs: StepCosts, *, effort: SearchEffort | None = None, limited: Limited | None = None) -> Plan:
    """Return the plan with the micro-batches, and the hints, that make its step shortest under `critical-path`.

    Candidates are the plan's own micro-batches, finer and coarser equal ones, and equal ones whose first or last is cut
    up into small pieces that fill and drain the pipeline, the same for all stages; then single stages get finer or
    coarser ones as long as that helps. In-flight limits, in samples, are kept unless others are given, so finer
    micro-batches go further with the same memory; what each action costs by itself speaks against them. Sizes not known
    to the costs are left out.
    """
    effort = effort or SearchEffort()
    best_s, best = _better(effort.below_s, plan, plan, costs, effort)
    if plan.interleaved or not effort.runs(_actions(plan, [stage.micro_batches for stage in plan.stages]) // _COARSER):
        return best  # whatever the micro-batches, they are too many to search
    share = effort.part(1 / _KEPT)
    own_s = quick_s(plan, costs)
    others = [(_timed_s(other, costs, _ORDER_MAY_GAIN * own_s), other) for other in recuts(plan, effort, limited)]
    ranked = sorted((entry for entry in others if entry[0] < _ORDER_MAY_GAIN * own_s), key=lambda entry: entry[0])
    for _, candidate in ranked[:_KEPT]:
        best_s, best = _better(best_s, best, candidate, costs, share)
    quicker = [candidate.stages for seconds, candidate in ranked[:1] if seconds < own_s]
    for start in dict.fromkeys([best.stages, *quicker]):
        unlike = _by_stage(replace(plan, stages=start, hints=None), costs, effort, limited)
        if unlike.stages != start:
            best_s, best = _better(best_s, best, unlike, costs, share)
    return best


def _better(best_s: float, best: Plan, other: Plan, costs: StepCosts, effort: SearchEffort) -> tuple[float, Plan]:
    """Return the better of the best so far and another cut with the order found for it, if any order could be."""
    enough_s = best_s * (1 - _MIN_GAIN)
    if math.isfinite(enough_s) and step_bound_s(other, costs) >= enough_s:
        return best_s, best
    ordered = with_hints(other, costs, effort=effort)
    other_s = simulated_s(ordered, costs)
    return (other_s, ordered) if other_s < enough_s else (best_s, best)


def _by_stage(plan: Plan, costs: StepCosts, effort: SearchEffort, limited: Limited | None) -> Plan:
    """Return the plan with finer or coarser micro-batches in single stages, where some plain rule is quicker so."""
    best_s, changed, turns = quick_s(plan, costs), True, 0
    while changed and turns < _TURNS:
        changed, turns = False, turns + 1
        for stage in range(len(plan.stages)):
            for recut in (halved, _pairs):
                spans = recut(plan.stages[stage].micro_batches)
                micro_batches = [spans if k == stage else other.micro_batches for k, other in enumerate(plan.stages)]
                candidate = _recut(plan, micro_batches, effort, limited)
                most_s = best_s * (1 - _MIN_GAIN)
                if candidate is not None and (found_s := _timed_s(candidate, costs, most_s)) < most_s:
                    best_s, plan, changed = found_s, candidate, True
    return plan


def _pairs(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Return each two spans as one."""
    return tuple(Span(spans[k].lo, spans[min(k + 1, len(spans) - 1)].hi) for k in range(0, len(spans), 2))


def _timed_s(plan: Plan, costs: StepCosts, most_s: float) -> float:
    """Return the same as `quick_s`; infinite if a size was not measured, too."""
    try:
        return quick_s(plan, costs, most_s)
    except ProfileError:
        return math.inf


def recuts(plan: Plan, effort: SearchEffort | None = None, limited: Limited | None = None) -> Iterator[Plan]:
    """Yield the plan with other cuts of the batch, the same on all stages: finer and coarser ones that can run.

    With an effort, only those that it allows to search. `limited` as in `taper`.
    """
    for spans in dict.fromkeys(_cuts(plan)):
        candidate = _recut(plan, [spans] * len(plan.stages), effort, limited)
        if candidate is not None and candidate.stages != plan.stages:
            yield candidate


def _actions(plan: Plan, micro_batches: Sequence[tuple[Span, ...]]) -> int:
    """Return the actions of a step with these micro-batches, by stage."""
    return 3 * sum(len(stage.replicas) * len(spans) for stage, spans in zip(plan.stages, micro_batches, strict=True))


def _recut(
    plan: Plan, micro_batches: Sequence[tuple[Span, ...]], effort: SearchEffort | None, limited: Limited | None
) -> Plan | None:
    """Return the plan with other micro-batches, by stage; None if it cannot run, or is too large to search."""
    if effort is not None and not effort.runs(_actions(plan, micro_batches)):
        return None
    stages = zip(plan.stages, micro_batches, strict=True)
    try:
        candidate = replace(
            plan, hints=None, stages=tuple(replace(stage, micro_batches=spans) for stage, spans in stages)
        )
    except ValueError:
        return None  # a replica's limit is under its largest part
    if limited is None:
        return None if check_limits(candidate) else candidate
    fitting = limited(candidate)
    return None if fitting is None or check_limits(fitting) else fitting


def _cuts(plan: Plan) -> Iterator[tuple[Span, ...]]:
    size = max(span.size for span in plan.stages[0].micro_batches)
    total = plan.global_batch
    for denominator, factor in ((1, 1), (1, 2), (2, 1), (4, 1), (8, 1)):
        inner = size * factor // denominator
        small = max(1, inner // 4)
        for first, last in ((False, False), (True, True), (True, False)) if inner > 1 else ((False, False),):
            sizes = tapered_sizes(total, max(1, inner), small=small, first=first, last=last)
            yield tuple(Span(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True))
