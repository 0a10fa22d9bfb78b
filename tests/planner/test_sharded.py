"""State divided among replicas: only where it is allowed, never worse than `zero2` and `fsdp`; its bounds hold."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from spantrain.core.profile import Profile
from spantrain.core.shares import StateSharding
from spantrain.devices.registry import BACKENDS
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.request import Constraints, JobSpec, Objective, PlanRequest, Proposal
from spantrain.planner.strategies.auto import strategy
from spantrain.planner.strategies.auto.cuts import Cutter
from spantrain.planner.strategies.auto.hops import PipelinePart
from spantrain.planner.strategies.auto.parts import PartCosts
from spantrain.planner.strategies.auto.shape import PlanShape, ShapeBuilder
from spantrain.planner.strategies.auto.strategy import auto
from spantrain.planner.strategies.baselines import FSDP, ZERO1, ZERO2
from spantrain.planner.strategies.score import weights_of

JOB = JobSpec(global_batch=8, micro_batches=(1, 2, 4, 8))
ALLOWED = Constraints(sharded_state=True)


def request_of(profile: Profile, constraints: Constraints) -> PlanRequest:
    return PlanRequest(profile=profile, job=JOB, constraints=constraints, evaluate=Evaluator(profile, JOB))


def divides(proposal: Proposal) -> bool:
    return any(stage.state_sharding is not StateSharding.NONE for stage in proposal.plan.stages)


@pytest.fixture
def profile(make_cluster: Callable, make_graph: Callable, make_profile: Callable) -> Callable[[float], Profile]:
    """Three unlike devices of one site, each with room for some part of the model's state."""

    def build(room: float) -> Profile:
        graph = make_graph(blocks=2, hidden=512)
        memory_bytes = BACKENDS["emulated"].framework_bytes + int(room * 4 * graph.parameter_bytes)
        cluster = make_cluster({"a": {"a0": 1.0, "a1": 0.6, "a2": 0.6}}, memory_bytes=memory_bytes)
        return make_profile(cluster, graph)

    return build


def test_state_is_divided_only_where_allowed(profile: Callable[[float], Profile]) -> None:
    assert not any(divides(proposal) for proposal in auto(request_of(profile(4.0), Constraints())))


@pytest.mark.parametrize(("worth", "is_divided"), [(1.05, True), (1.5, False)])
def test_the_optimizers_state_is_divided_only_where_that_is_worth_a_dearer_loss(
    make_cluster: Callable, make_graph: Callable, make_profile: Callable, monkeypatch, worth: float, is_divided: bool
) -> None:
    """Plain replicas lack room, and pipelines, which fit, are slower by a fifth."""
    graph = make_graph(blocks=3, hidden=512, sequence=256)
    held = max(unit.activation_bytes_per_sample for unit in graph.units)
    memory_bytes = BACKENDS["emulated"].framework_bytes + 3 * graph.parameter_bytes + 6 * held
    cluster = make_cluster({"a": {f"a{number}": 0.02 for number in range(4)}}, memory_bytes=memory_bytes)
    request = request_of(make_profile(cluster, graph), Constraints())
    monkeypatch.setattr(strategy, "_WORTH_DIVIDING", worth)
    found = auto(request)
    plain_s = min(request.evaluate(one.plan).step_s for one in found if not divides(one))
    divided_s = min(request.evaluate(one.plan).step_s for one in ZERO1(request))
    assert 1.05 < plain_s / divided_s < 1.5
    assert any(divides(one) for one in found) == is_divided
    assert divides(found[0]) == is_divided


@pytest.mark.parametrize("room", [0.8, 1.2, 4.0])
def test_never_worse_than_strategies_that_divide_state(profile: Callable[[float], Profile], room: float) -> None:
    request = request_of(profile(room), ALLOWED)

    def best_s(proposals: tuple[Proposal, ...]) -> float:
        found = (request.evaluate(proposal.plan) for proposal in proposals)
        return min(entry.step_s for entry in found if entry.fits)

    ours = best_s(auto(request))
    for other in (ZERO2, FSDP):
        try:
            proposals = other(request)
        except InfeasiblePlanError:
            continue
        assert ours <= best_s(proposals) * (1 + 1e-9)
    assert ours <= best_s(auto(request_of(profile(room), Constraints()))) * (1 + 1e-9)


def test_a_model_that_fits_only_divided_is_divided(
    make_cluster: Callable, make_graph: Callable, make_profile: Callable
) -> None:
    """Of AdamW's four numbers for each parameter four replicas hold 2.5 with zero1."""
    graph = make_graph(blocks=1, hidden=1024)
    memory_bytes = BACKENDS["emulated"].framework_bytes + int(3.2 * max(unit.parameter_bytes for unit in graph.units))
    cluster = make_cluster({"a": {f"a{k}": 1.0 for k in range(4)}}, memory_bytes=memory_bytes)
    profile = make_profile(cluster, graph)
    assert divides(auto(request_of(profile, Constraints()))[0])
    for job, limits in (
        (replace(JOB, optimizer="adafactor"), Constraints()),
        (JOB, Constraints(divided_updates=False)),
    ):
        asked = PlanRequest(profile=profile, job=job, constraints=limits, evaluate=Evaluator(profile, job))
        with pytest.raises(InfeasiblePlanError):
            auto(asked)
        if job != JOB:
            with pytest.raises(InfeasiblePlanError, match="adafactor needs whole parameters"):
                ZERO1(asked)
    request = request_of(profile, ALLOWED)
    (found,) = auto(request)
    assert divides(found)
    assert request.evaluate(found.plan).fits
    assert any("its replicas divide" in reason for reason in found.reasons)


@pytest.mark.parametrize("sharding", [one for one in StateSharding if one is not StateSharding.OFFLOAD])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_no_simulation_is_under_the_bound(
    profile: Callable[[float], Profile], sharding: StateSharding, size: int
) -> None:
    request = request_of(profile(4.0), Constraints())
    weights = weights_of(request.profile.cluster, Objective.THROUGHPUT, JOB.global_batch)
    units = len(request.profile.graph.units)
    costs = PartCosts(request, weights, range(units + 1), exact_sums=True, state_sharding=sharding)
    cutter, builder = Cutter(costs), ShapeBuilder(request, costs, "auto")
    wide = PipelinePart(("a0", "a1", "a2"), (size - 2 * (size // 3 or 1), *(size // 3 or 1,) * 2))
    two = PipelinePart(("a1", "a2"), (size // 2, size - size // 2))
    shapes = [
        PlanShape(size=size, parts=(PipelinePart(("a0",), (size,)), two), begins=(0, cut, units))
        for cut in range(1, units)
    ]
    if min(wide.samples) > 0:
        shapes.append(PlanShape(size=size, parts=(wide,), begins=(0, units)))
    for shape in shapes:
        (found,) = cutter.bounded([shape])
        plan = builder.plan(shape)
        assert plan is not None
        assert found.step_s <= request.evaluate(plan).step_s * (1 + 1e-9)
        assert found.step_s <= found.expected_s * (1 + 1e-9)


def test_of_few_cuts_the_best_is_taken(profile: Callable[[float], Profile]) -> None:
    request = request_of(profile(4.0), Constraints())
    weights = weights_of(request.profile.cluster, Objective.THROUGHPUT, JOB.global_batch)
    units = len(request.profile.graph.units)
    cutter = Cutter(PartCosts(request, weights, range(units + 1), exact_sums=True))
    parts = (PipelinePart(("a0",), (4,)), PipelinePart(("a1", "a2"), (2, 2)))
    (found,) = cutter.solved(4, [parts])
    others = cutter.bounded([PlanShape(size=4, parts=parts, begins=(0, cut, units)) for cut in range(1, units)])
    assert found.expected_s == pytest.approx(min(other.expected_s for other in others))
