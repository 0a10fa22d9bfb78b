"""A plan for the devices that are there, once some have gone or come: a light change at once, or the planner's answer.

The light change keeps the stages that are left, their devices and their order. Samples of a replica that is gone go to
the others of its stage, by capacity; units of a stage that is gone go to the others by cuts chosen anew, and either may
move the other cuts where that pays. Bounds, costs and memory limits are those of `auto`, whose search here never takes
a device out of its stage; whatever is proposed is simulated.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from spantrain.core.plan import Plan, Replica, Stage, StateSharding
from spantrain.core.profile import Profile
from spantrain.core.span import apportion
from spantrain.cost.compute import SPLIT_OPS
from spantrain.cost.span_tables import SpanTables
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.formats.registry import WireFormat
from spantrain.planner.assembly.assemble import infeasible, with_limits
from spantrain.planner.assembly.recompute import proposals_of
from spantrain.planner.assembly.tuning import slicing
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.engine.predict import with_best_order
from spantrain.planner.request import Constraints, JobSpec, Objective, PlanRequest, Proposal
from spantrain.planner.strategies.auto.allowed import fewest_bytes
from spantrain.planner.strategies.auto.cuts import Cutter, Parts
from spantrain.planner.strategies.auto.moves import Moves, grid_of
from spantrain.planner.strategies.auto.parts import PartCosts
from spantrain.planner.strategies.auto.search import Searcher
from spantrain.planner.strategies.auto.shape import ShapeBuilder
from spantrain.planner.strategies.auto.tensor import HostGroup, TensorSearch
from spantrain.planner.strategies.score import Scorer, weights_of
from spantrain.sim.search.search import SearchEffort

_ACTIONS = 6_000
"""Actions that may be simulated for a light change."""
_EFFORT = SearchEffort(max_runs=12, max_actions=12_000)
"""What its order of work is searched with."""
_NEAR = 1.03
"""A plan that moves nothing is taken if its step is at most so many times the shortest."""
_PROPOSED = 3
_CUT = "stages cut anew"
_EXACT_UP_TO = 4
"""Devices up to which each gradient sum is reckoned by itself."""


@dataclass(frozen=True, kw_only=True)
class NewPlan:
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
        tensor_parallel=any(len(replica.devices) > 1 for stage in stages for replica in stage.replicas),
        sequence_parallel=any(stage.sequence_parallel for stage in stages),
        sharded_state=any(stage.state_sharding is not StateSharding.NONE for stage in stages),
    )


def full_plan(plan: Plan, profile: Profile, present: Collection[str], *, optimizer: str) -> NewPlan:
    """Return what the planner makes of the devices that are present; some may stay unused.

    `optimizer` has the name that `cost.memory` gives it. The generation stays.

    Raises:
        PlanError: the model does not fit on them, with what each would need; or none of them is the profile's.
        ProfileError: the profile lacks the times of a kind of device, or a link.
    """
    options = PlanOptions(constraints=constraints_of(plan, profile, present))
    try:
        found = make_plan(profile, job_of(plan, optimizer), options).plan
    except InfeasiblePlanError as error:
        raise PlanError(str(error)) from error
    made = replace(plan, stages=found.stages, hints=found.hints, strategy=found.strategy)
    return NewPlan(plan=made, how=f"planned anew on {_devices(len(made.devices))}")


def light_plan(plan: Plan, profile: Profile, present: Collection[str], *, optimizer: str) -> NewPlan:
    """Return the plan without the devices that are gone, changed as little as serves; quickly.

    Where nothing of the kind fits, it is `full_plan`'s answer. `optimizer` has the name that `cost.memory` gives it.
    The generation stays.

    Raises:
        PlanError: as `full_plan`.
        ProfileError: as `full_plan`.
    """
    constraints = constraints_of(plan, profile, [name for name in present if name in plan.devices])
    job = job_of(plan, optimizer)
    evaluator = Evaluator(profile, job)
    request = PlanRequest(profile=profile, job=job, constraints=constraints, evaluate=evaluator)
    change = _LightChange(plan, present)
    with suppress(InfeasiblePlanError):
        propose = slicing(change.proposals) if constraints.sequence_parallel else change.proposals
        found = _best(proposals_of(propose, request), evaluator)
        if found is not None:
            return change.made(found, profile, evaluator)
    return full_plan(plan, profile, present, optimizer=optimizer)


def _best(proposals: Sequence[Proposal], evaluator: Evaluator) -> Proposal | None:
    """Return the proposal that fits with the shortest step, or one near it in which nothing moves."""
    fitting = [(evaluator(proposal.plan).step_s, proposal) for proposal in proposals if evaluator(proposal.plan).fits]
    if not fitting:
        return None
    least_s, best = min(fitting, key=lambda entry: entry[0])
    still = [entry for entry in fitting if entry[0] <= _NEAR * least_s and entry[1].reasons[0] != _CUT]
    return min(still, key=lambda entry: entry[0])[1] if still else best


class _KeptStages(Moves):
    """Changes of a pipeline in which no device leaves its stage."""

    def structures(self, parts: Parts, size: int) -> list[Parts]:
        """Return none: what is left are cuts, samples of replicas and sizes of micro-batches."""
        del parts, size
        return []


class _LightChange:
    """A plan without what is gone; each proposal's first reason says what becomes of it."""

    def __init__(self, plan: Plan, present: Collection[str]) -> None:
        self._plan = plan
        self._left = tuple(left for stage in plan.stages if (left := _left_of(stage, present)))

    def proposals(self, request: PlanRequest) -> tuple[Proposal, ...]:
        """Return what could be done, whether it fits or not."""
        found = [] if (kept := self._kept(request)) is None else [kept]
        rows = [Proposal(plan=plan, own_estimate_s=None, reasons=(_CUT,)) for plan in self._cut(request)]
        if not found and not rows:
            raise infeasible(request.profile, request.job, request.devices)
        return (*found, *rows)

    def made(self, proposal: Proposal, profile: Profile, evaluator: Evaluator) -> NewPlan:
        """Return the answer of a proposal, with an order of work."""
        plan = evaluator.bucketed(proposal.plan)
        ordered = with_best_order(plan, profile, effort=_EFFORT)
        if evaluator(ordered).step_s < evaluator(plan).step_s:
            plan = ordered
        how = proposal.reasons[0]
        if how == _CUT:
            how += f" on {_devices(len(plan.devices))}"
        return NewPlan(plan=replace(self._plan, stages=plan.stages, hints=plan.hints), how=how)

    def _kept(self, request: PlanRequest) -> Proposal | None:
        """Return the plan with its own cuts; None where a stage is gone, or one lacks room for its samples."""
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
        return Proposal(plan=plan, own_estimate_s=None, reasons=("; ".join(moved) or "nothing changes",))

    def _cut(self, request: PlanRequest) -> Iterator[Plan]:
        """Yield plans with cuts chosen anew, likely ones first."""
        if not self._left:
            return
        if any(len(one.devices) > 1 for own in self._left for one in own):
            yield from self._cut_groups(request)
            return
        weights = weights_of(request.profile.cluster, Objective.THROUGHPUT, request.job.global_batch)
        names = tuple(one.devices[0] for own in self._left for one in own)
        costs = PartCosts(
            request,
            weights,
            grid_of(len(request.profile.graph.units)),
            exact_sums=len(names) <= _EXACT_UP_TO,
            wire_format=fewest_bytes(request.constraints.wire_formats),
        )
        sizes = request.job.micro_batch_sizes()
        moves, cutter = _KeptStages(costs, [(name,) for name in names], names, sizes), Cutter(costs)
        search = Searcher(cutter, moves, ShapeBuilder(request, costs, ""), Scorer(request), _ACTIONS)
        sets = [frozenset(names.index(one.devices[0]) for one in own) for own in self._left]
        for size in sizes:
            parts = moves.parts(sets, size)
            if parts is not None:
                search.pool.add(cutter.solved(size, [parts]))
        search.simulate_promising()
        yield from (found.plan for found in sorted(search.simulated, key=lambda found: found.score)[:_PROPOSED])

    def _cut_groups(self, request: PlanRequest) -> Iterator[Plan]:
        """Yield the same where replicas divide tensors."""
        search = TensorSearch(request)
        row = tuple(tuple(HostGroup(one.devices, one.tp_shares) for one in own) for own in self._left)
        made = [found for size in request.job.micro_batch_sizes() if (found := search.plan(row, size)) is not None]
        yield from (plan for plan, _ in sorted(made, key=lambda entry: entry[1])[:_PROPOSED])


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


def _named(names: Sequence[str]) -> str:
    """Return names as people write them.

    >>> _named(("a", "b", "c"))
    'a, b and c'
    """
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def _devices(count: int) -> str:
    return f"{count} device{'s' if count > 1 else ''}"
