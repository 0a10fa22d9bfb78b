"""A plan for the devices that are there, once some have gone or come: a light change at once, or the planner's answer.

The light change begins with the stages that are left, their devices and their order. Samples of a replica that is gone
go to the others of its stage, by capacity; units of a stage that is gone go to the others, by cuts chosen anew; devices
that are new, or of little use where they are, change stages. Of an interleaved pipeline that has lost some, each device
gets one stage. What moves least is taken where it is nearly as good: nothing, units, devices. Bounds, costs and memory
limits are those of `auto`, and so is the search, for a short while; what is proposed is simulated. It looks around the
plan that was: where another site altogether would be better now, or several stages for a device, only the planner finds
out.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from spantrain.core.action import SPLIT_OPS
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.core.span import apportion
from spantrain.cost.span_tables import SpanTables
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.formats.registry import WireFormat
from spantrain.planner.assembly.assemble import ReplicaDevices, infeasible, with_limits
from spantrain.planner.assembly.recompute import proposals_of
from spantrain.planner.assembly.tuning import slicing
from spantrain.planner.dividing import TensorParallel
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.engine.predict import with_best_order, with_best_spans
from spantrain.planner.request import Constraints, JobSpec, Objective, PlanRequest, Proposal
from spantrain.planner.strategies.auto.allowed import fewest_bytes, rounded_between_sites
from spantrain.planner.strategies.auto.cuts import Cutter
from spantrain.planner.strategies.auto.moves import Moves, grid_of
from spantrain.planner.strategies.auto.parts import PartCosts
from spantrain.planner.strategies.auto.search import Searcher
from spantrain.planner.strategies.auto.shape import ShapeBuilder
from spantrain.planner.strategies.auto.tensor import TensorSearch
from spantrain.planner.strategies.score import Scorer, weights_of
from spantrain.sim.search.search import SearchEffort

_ACTIONS, _ACTIONS_MOVED, _MOVED_UP_TO, _ROUNDS = 2_500, 5_000, 24, 12
"""Actions that may be simulated where devices keep their stages, and where they need not; devices up to which those are
looked for; and changes, one after the other, on the way to the first."""
_EFFORT = SearchEffort(max_runs=12, max_actions=12_000)
"""What the order of work is searched with."""
_FEW = 4
"""Devices up to which each gradient sum is reckoned by itself, and other micro-batches are tried with the order."""
_NEAR = 1.03
"""A plan that moves less is taken if its step is at most so many times the shortest, where moving costs nothing."""
_ALIKE = 1.005
"""The same where what is moved counts already: by less than that no plan is better than another (docs/planner.md)."""
_LOOKED_AT, _PROPOSED, _SHOWN = 12, 3, 3
"""Plans of a sort that are looked at and proposed, and devices that are named in a phrase."""
Besides = Callable[[Plan], float]
"""Gives the seconds that each step under a plan costs besides."""
NOTHING_BESIDES: Besides = lambda _plan: 0.0  # noqa: E731 - a value of that type
_CUT, _MOVED = _MOVING = "stages cut anew", "devices change stages"
_NOTHING = "nothing changes"


class NewPlan(Record):
    """A plan for other devices than before, and what became of the plan before it."""

    plan: Plan
    how: str
    """One phrase for people, e.g. "samples of lab-1 go to lab-2"."""


def job_of(plan: Plan, optimizer: str) -> JobSpec:
    """Return the job that a plan is for; `optimizer` is named by the state that a parameter has."""
    return JobSpec(global_batch=plan.global_batch, optimizer=optimizer, dtype=plan.dtype, schedule=plan.schedule)


def constraints_of(plan: Plan, profile: Profile, present: Collection[str]) -> Constraints:
    """Return what another plan on these devices must keep to: it does nothing by name that this one does not."""
    stages = plan.stages
    return Constraints(
        leave_out=tuple(name for name in profile.cluster.device_by_name if name not in present),
        wire_formats=tuple(dict.fromkeys((WireFormat.NATIVE, *(stage.wire_format for stage in stages)))),
        tensor_parallel=TensorParallel.ANY if plan.divides_tensors else TensorParallel.AUTO,
        sequence_parallel=any(stage.sequence_parallel for stage in stages),
        sharded_state=any(stage.state_sharding.divides_gradients for stage in stages),
        divided_updates=any(stage.divides_state for stage in stages),
        interleaving=plan.interleaved,
    )


def full_plan(plan: Plan, profile: Profile, present: Collection[str], *, optimizer: str) -> NewPlan:
    """Return what the planner makes of the devices that are present, or the light change where that is better.

    Some devices may stay unused. `optimizer` has the name that `cost.memory` gives it. The generation stays.

    Raises:
        PlanError: the model does not fit on them, with what each would need; or none of them is the profile's.
        ProfileError: the profile lacks the times of a kind of device, or a link.
    """
    plan = plan.unprotected
    changed, evaluate = _changed(plan, profile, present, optimizer), Evaluator(profile, job_of(plan, optimizer))
    try:
        planned = _planned(plan, profile, present, optimizer)
    except PlanError:
        if changed is None:
            raise
        return changed
    better = changed is not None and evaluate(changed.plan).step_s < evaluate(planned.plan).step_s
    return changed if changed is not None and better else planned


def light_plan(
    plan: Plan, profile: Profile, present: Collection[str], *, optimizer: str, besides: Besides = NOTHING_BESIDES
) -> NewPlan:
    """Return the plan on the devices that are present, changed as little as serves; quickly.

    Where nothing of the kind fits, it is `full_plan`'s answer. `optimizer` has the name that `cost.memory` gives it.
    The generation stays. What plans cost `besides` counts as if their steps were so much longer.

    Raises:
        PlanError: as `full_plan`.
        ProfileError: as `full_plan`.
    """
    plan = plan.unprotected
    return _changed(plan, profile, present, optimizer, besides) or _planned(plan, profile, present, optimizer)


def _planned(plan: Plan, profile: Profile, present: Collection[str], optimizer: str) -> NewPlan:
    options = PlanOptions(constraints=constraints_of(plan, profile, present))
    try:
        found = make_plan(profile, job_of(plan, optimizer), options).plan
    except InfeasiblePlanError as error:
        raise PlanError(str(error)) from error
    made = replace(plan, stages=found.stages, hints=found.hints, strategy=found.strategy)
    return NewPlan(plan=made, how=f"planned anew on {_devices(made)}")


def _changed(
    plan: Plan, profile: Profile, present: Collection[str], optimizer: str, besides: Besides = NOTHING_BESIDES
) -> NewPlan | None:
    """Return the light change; None where there is none that fits."""
    constraints, job = constraints_of(plan, profile, present), job_of(plan, optimizer)
    change, evaluator = _LightChange(plan, present, besides), Evaluator(profile, job)
    if constraints.sharded_state:
        return None
    request = PlanRequest(profile=profile, job=job, constraints=constraints, evaluate=evaluator)
    propose = slicing(change.proposals) if constraints.sequence_parallel else change.proposals
    with suppress(InfeasiblePlanError):
        found = _best(proposals_of(propose, request), evaluator, besides)
        return None if found is None else change.made(found, profile, evaluator)
    return None


def _best(proposals: Sequence[Proposal], evaluator: Evaluator, besides: Besides) -> Proposal | None:
    """Return, of the proposals that fit and whose steps are near the shortest, the one in which least moves."""
    fitting = [
        (evaluator(proposal.plan).step_s + besides(proposal.plan), proposal)
        for proposal in proposals
        if evaluator(proposal.plan).fits
    ]
    near = _NEAR if besides is NOTHING_BESIDES else _ALIKE
    most_s = near * min((step_s for step_s, _ in fitting), default=0.0)
    least = [entry for entry in fitting if entry[0] <= most_s]
    return min(least, key=lambda entry: (_moves(entry[1]), entry[0]))[1] if least else None


def _moves(proposal: Proposal) -> int:
    """Return how much a proposal moves: nothing, units, or devices."""
    return 1 + _MOVING.index(proposal.reasons[0]) if proposal.reasons[0] in _MOVING else 0


class _LightChange:
    """A plan without what is gone; each proposal's first reason says what becomes of it."""

    def __init__(self, plan: Plan, present: Collection[str], besides: Besides) -> None:
        self._plan, self._besides = plan, besides
        self._left = tuple(left for crew in plan.crews if (left := _left_of(crew.first, present)))
        self._all_left = set(plan.devices) <= set(present)

    def proposals(self, request: PlanRequest) -> tuple[Proposal, ...]:
        """Return what could be done, whether it fits or not.

        Raises:
            InfeasiblePlanError: nothing can be done.
        """
        groups = any(len(one.devices) > 1 for own in self._left for one in own)
        kept = self._kept(request)
        found = [] if kept is None else [kept]
        if self._left:
            found += self._cut_groups(request) if groups else self._cut(request)
        if not found:
            raise infeasible(request.profile, request.job, request.devices)
        return tuple(found)

    def made(self, proposal: Proposal, profile: Profile, evaluator: Evaluator) -> NewPlan:
        """Return the answer of a proposal, with an order of work."""
        plan, how = evaluator.bucketed(proposal.plan), proposal.reasons[0]
        if how == _NOTHING:
            how = _eased(self._plan, plan) or how
        ordered = plan
        if plan.hints is None and len(plan.devices) <= _FEW:
            ordered = with_best_spans(plan, profile, effort=_EFFORT, limited=evaluator.limited)
        elif plan.hints is None:
            ordered = with_best_order(plan, profile, effort=_EFFORT)
        if evaluator(ordered).fits and evaluator(ordered).step_s < evaluator(plan).step_s:
            plan = evaluator.bucketed(ordered)
        if how in _MOVING:
            added = [name for name in plan.devices if name not in self._plan.devices]
            how = f"{how} on {_devices(plan)}" + (f", {_named(added)} among them" if added else "")
        return NewPlan(plan=replace(self._plan, stages=plan.stages, hints=plan.hints), how=how)

    def _kept(self, request: PlanRequest) -> Proposal | None:
        """Return the plan with its own cuts; None where a stage is gone, or one lacks room for its samples."""
        if self._all_left:
            return Proposal(plan=self._plan, own_estimate_s=None, reasons=(_NOTHING,))
        if len(self._left) < len(self._plan.stages):
            return None
        spans, moved = request.job.span_tables(request.profile), list[str]()
        stages = []
        for stage, replicas in zip(self._plan.stages, self._left, strict=True):
            if len(replicas) == len(stage.replicas) and replicas == stage.replicas:
                stages.append(stage)
                continue
            made = with_limits(_shared(stage, replicas, spans), spans.memory, spans.splits)
            if made is None:
                return None
            stages.append(made)
            gone = [name for name in stage.devices if name not in made.devices]
            moved.append(f"samples of {_named(gone)} go to {_named([one.devices[0] for one in made.replicas])}")
        plan = replace(self._plan, stages=tuple(stages), hints=None)
        return Proposal(plan=plan, own_estimate_s=None, reasons=("; ".join(moved),))

    def _cut(self, request: PlanRequest) -> Iterator[Proposal]:
        """Yield plans of the stages that are left, with cuts chosen anew; then such in which devices move, too."""
        names = request.devices
        costs = PartCosts(
            request,
            weights_of(request.profile.cluster, Objective.THROUGHPUT, request.job.global_batch),
            grid_of(len(request.profile.graph.units)),
            exact_sums=len(names) <= _FEW,
            wire_format=fewest_bytes(request.constraints.wire_formats),
        )
        sets = [frozenset(names.index(one.devices[0]) for one in own) for own in self._left]
        sizes, cutter, builder = request.job.micro_batch_sizes(), Cutter(costs), ShapeBuilder(request, costs, "")
        classes = [(*costs.devices[name].make, costs.devices[name].site) for name in names]
        for how, actions in ((_CUT, _ACTIONS), (_MOVED, _ACTIONS_MOVED)):
            if how == _CUT or len(names) <= _MOVED_UP_TO:
                moves = Moves(costs, [(name,) for name in names], classes, sizes, named=True, stay=how == _CUT)
                search = Searcher(cutter, moves, builder, Scorer(request), actions)
                rows = [(size, parts) for size in sizes if (parts := moves.parts(sets, size)) is not None]
                starts = [entry for size, parts in rows for entry in search.pool.add(cutter.solved(size, [parts]))]
                for _, shape in sorted(starts, key=lambda entry: entry[0])[:1]:
                    search.descend(shape, _ROUNDS)
                search.simulate_promising()
                best = sorted(search.simulated, key=lambda found: found.score)[:_LOOKED_AT]
                for found in sorted(best, key=lambda one: one.evaluation.step_s + self._besides(one.plan))[:_PROPOSED]:
                    yield Proposal(plan=found.plan, own_estimate_s=None, reasons=(how,))

    def _cut_groups(self, request: PlanRequest) -> Iterator[Proposal]:
        """Yield plans of the stages that are left, with cuts chosen anew, where replicas divide tensors."""
        search, form = TensorSearch(request), fewest_bytes(request.constraints.wire_formats)
        row = tuple(tuple(ReplicaDevices(one.devices, one.tp_shares) for one in own) for own in self._left)
        made = [found for size in request.job.micro_batch_sizes() if (found := search.plan(row, size)) is not None]
        for plan, _ in sorted(made, key=lambda entry: entry[1])[:_PROPOSED]:
            yield Proposal(plan=rounded_between_sites(plan, form), own_estimate_s=None, reasons=(_CUT,))


def _left_of(stage: Stage, present: Collection[str]) -> tuple[Replica, ...]:
    """Return a stage's replicas with the devices that are present; a group goes on without a member."""
    found = []
    for replica in stage.replicas:
        pairs = [pair for pair in zip(replica.devices, replica.tp_shares, strict=True) if pair[0] in present]
        if pairs:
            devices, shares = zip(*pairs, strict=True)
            found.append(replace(replica, devices=devices, tp_shares=shares))
    return tuple(found)


def _shared(stage: Stage, replicas: tuple[Replica, ...], spans: SpanTables) -> Stage:
    """Return a stage whose samples are divided by capacity among some replicas; one too slow for any is left out."""
    size = max(span.size for span in stage.micro_batches)
    even = max(1, size // len(replicas))
    if all(len(one.devices) == 1 for one in replicas):
        counts = spans.shares([one.devices[0] for one in replicas], stage.units, size)
    else:
        seconds = [
            sum(spans.groups.replica_seconds(stage.units, one, op, even) for op in SPLIT_OPS) for one in replicas
        ]
        counts = apportion(size, [1 / max(own_s, 1e-12) for own_s in seconds])
    return replace(
        stage,
        replicas=tuple(
            replace(one, sample_share=float(count), in_flight_limit=stage.micro_batches[-1].hi)
            for one, count in zip(replicas, counts, strict=True)
            if count
        ),
        sequence_parallel=stage.sequence_parallel and any(len(one.devices) > 1 for one in replicas),
    )


def _eased(before: Plan, after: Plan) -> str:
    """Return how stages with the same units on the same devices need less memory; empty: they do not."""
    found = []
    for old, new in zip(before.stages, after.stages, strict=True):
        limits = [
            (one.in_flight_limit, two.in_flight_limit) for one, two in zip(old.replicas, new.replicas, strict=True)
        ]
        fewer = [(one, two) for one, two in limits if two < one]
        if fewer:
            found.append(f"at most {fewer[0][1]} samples at once on {_named(new.devices)}, {fewer[0][0]} before")
        if more := set(new.recompute) - set(old.recompute):
            found.append(f"{len(more)} unit{'s' * (len(more) > 1)} computed again on {_named(new.devices)}")
    return "; ".join(found)


def _named(names: Sequence[str]) -> str:
    """Return names as people write them.

    >>> _named(("a",)), _named(("a", "b", "c")), _named(("a", "b", "c", "d", "e"))
    ('a', 'a, b and c', 'a, b and 3 more')
    """
    shown = list(names) if len(names) <= _SHOWN else [*names[: _SHOWN - 1], f"{len(names) - _SHOWN + 1} more"]
    return " and ".join((", ".join(shown[:-1]), shown[-1])) if len(shown) > 1 else shown[0]


def _devices(plan: Plan) -> str:
    count = len(plan.devices)
    return f"{count} device{'s' if count > 1 else ''}"
