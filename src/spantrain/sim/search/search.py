"""Finds the order of work that `critical-path` follows in a plan, by simulating many with the plan's costs.

Where the plain rule (I, then F, then W) does not reach the lower bound, orders of other rules and of the static
schedules are improved (`search_improve`) and the best one is put into the plan as hints. It is never slower than any of
the rules and schedules that it started from: those are simulated with the same memory, and the best of all is taken.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from spantrain.core.action import Action, Op
from spantrain.core.plan import DispatchHints, Plan, PlannedOrder, PlannedWait
from spantrain.errors import PlanError
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.registry import schedules, static_orders
from spantrain.sim.bounds.bound import pipeline_bound_s
from spantrain.sim.costs import StepCosts
from spantrain.sim.engine import SimulationOptions, simulate
from spantrain.sim.search.improve import Improver, is_alike, rank_by_part, shortest
from spantrain.sim.search.model import Orders, Outcome, StepModel, model_of, run_orders, run_ranks

_PLAIN = "the plain rule"
_SMALL, _NODES_PER_RUN = 200, 10
"""Actions of a step that branch and bound is tried on, and its nodes for a simulation that is allowed."""
_WORTH = 1e-4
"""Hints that gain less than this part of the plain rule's seconds are left out."""


@dataclass(frozen=True, kw_only=True)
class SearchEffort:
    """How long to search; counted, so that the same plan gives the same order on every machine."""

    most_runs: int = 400
    """Simulations at most."""
    most_actions: int = 150_000
    """Actions simulated at most, all runs together: about a second. Larger plans keep the plain rule."""
    least_runs: int = 10

    def runs(self, actions: int) -> int:
        """Return the simulations of so many actions that are allowed; 0 if too few to be of use."""
        runs = min(self.most_runs, self.most_actions // max(actions, 1))
        return runs if runs >= self.least_runs else 0

    def part(self, fraction: float) -> "SearchEffort":
        """Return an effort that is a part of this one."""
        return replace(self, most_runs=int(self.most_runs * fraction), most_actions=int(self.most_actions * fraction))


def with_hints(plan: Plan, costs: StepCosts, *, effort: SearchEffort | None = None) -> Plan:
    """Return the plan with hints for `critical-path`, or with none where its plain rule is as good.

    In-flight limits are kept. Hints that the plan has already are forgotten.
    """
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
    return simulate(plan, costs, steps=1, schedule="critical-path", options=SimulationOptions(trace=False)).step_s


def quick_s(plan: Plan, costs: StepCosts) -> float:
    """Return the seconds of the pipeline under the best of some plain rules."""
    model = model_of(plan, costs)
    return min(run_ranks(model, rank_by_part(model, rule)).seconds for rule in _rules(model).values())


def _rules(model: StepModel) -> dict[str, list[tuple[int, ...]]]:
    """Return which parts each device prefers, by rule."""
    return {
        "forwards first": [tuple(range(len(parts))) for parts in model.seconds],
        "backwards first": [(1, 0, *range(2, len(parts))) for parts in model.seconds],
        "weights first": [tuple(reversed(range(len(parts)))) for parts in model.seconds],
    }


@dataclass(frozen=True, kw_only=True)
class _FoundOrder:
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
                return best
        return self._exhaust(models, best, bound_s)

    def _exhaust(self, models: dict[bool, StepModel], best: _FoundOrder, bound_s: float) -> _FoundOrder:
        """Return the best order of all, or the best that branch and bound finds in time, if the step is small."""
        for split, model in models.items():
            if sum(len(row) for parts in model.seconds for row in parts) > _SMALL or not is_alike(model):
                continue
            most = self.runs * _NODES_PER_RUN
            found = shortest(model, beat_s=best.outcome.seconds, enough_s=bound_s, most_nodes=most)
            if found.orders is not None:
                outcome = run_orders(model, found.orders)
                best = _FoundOrder(name="branch and bound", split=split, outcome=outcome)
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
