"""The bounds that auto and exhaustive go by, and exhaustive itself, on small cases."""

import random
from collections.abc import Callable

import pytest

from spantrain.core.profile import Profile
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.request import Constraints, JobSpec, Objective, PlanRequest
from spantrain.planner.strategies.auto.parts import PartCosts
from spantrain.planner.strategies.auto.shape import ShapeBuilder
from spantrain.planner.strategies.score import weights_of
from spantrain_studies.planners.exhaustive import PlanSpace, exhaustive, ordered_partitions, twins

MIB = 2**20


def request_of(profile: Profile, job: JobSpec, **more: object) -> PlanRequest:
    return PlanRequest(profile=profile, job=job, evaluate=Evaluator(profile, job), **more)  # type: ignore[arg-type]


@pytest.fixture
def case(make_cluster: Callable, make_graph: Callable, make_profile: Callable) -> Callable[..., Profile]:
    """Return a maker of profiles: two or three sites of unequal devices, a small model, memory as asked."""

    def build(memory_bytes: int = 8 * 2**30, blocks: int = 3) -> Profile:
        cluster = make_cluster(
            {"a": {"a0": 1.0, "a1": 0.4}, "b": {"b0": 0.7}, "c": {"c0": 0.7}}, bandwidth=20e6, memory_bytes=memory_bytes
        )
        return make_profile(cluster, make_graph(blocks=blocks, hidden=512), noise=0.1, seed=3)

    return build


@pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.ENERGY])
@pytest.mark.parametrize("schedule", ["critical-path", "gpipe"])
@pytest.mark.parametrize("memory_bytes", [8 * 2**30, 400 * MIB])
def test_simulation_is_never_under_the_bound(
    case: Callable[..., Profile], objective: Objective, schedule: str, memory_bytes: int
) -> None:
    profile = case(memory_bytes)
    # A size that does not divide the batch leaves a smaller last micro-batch.
    job = JobSpec(global_batch=8, micro_batches=(2, 3), schedule=schedule)
    request = request_of(profile, job, objective=objective)
    weights = weights_of(profile.cluster, objective, job.global_batch)
    costs = PartCosts(request, weights, range(len(profile.graph.units) + 1), exact_sums=True)
    builder, rng = ShapeBuilder(request, costs, "test"), random.Random(1)
    checked = 0
    for size in job.micro_batch_sizes():
        for group in PlanSpace(costs, profile, request.devices).candidates(size, 1e9):
            for index in rng.sample(range(len(group.where)), min(6, len(group.where))):
                plan = builder.plan(group.shape(index))
                assert plan is not None, "what has a bound fits"
                evaluation = request.evaluate(plan)
                assert evaluation.fits
                assert evaluation.step_s >= group.step_s[index] * (1 - 1e-9)
                assert evaluation.value(objective) >= group.value[index] * (1 - 1e-9)
                checked += 1
    assert checked >= 12


def test_bounds_prune_nothing_that_is_best(case: Callable[..., Profile]) -> None:
    profile = case(blocks=1)
    job = JobSpec(global_batch=4, micro_batches=(2,))
    request = request_of(profile, job, constraints=Constraints(leave_out=("c",)))
    found = exhaustive(request)[0].plan
    weights = weights_of(profile.cluster, request.objective, job.global_batch)
    costs = PartCosts(request, weights, range(len(profile.graph.units) + 1), exact_sums=True)
    builder = ShapeBuilder(request, costs, "test")
    steps = []
    for group in PlanSpace(costs, profile, request.devices).candidates(2):
        for index in range(len(group.where)):
            plan = builder.plan(group.shape(index))
            steps += [request.evaluate(plan).step_s] if plan is not None else []
    assert len(steps) > 20
    assert request.evaluate(found).step_s == pytest.approx(min(steps))


def test_twins_are_used_once(make_cluster: Callable, make_graph: Callable, make_profile: Callable) -> None:
    cluster = make_cluster({"a": {"a0": 1.0, "a1": 1.0, "a2": 1.0}})
    profile = make_profile(cluster, make_graph(blocks=2))
    names = tuple(device.name for device in cluster.devices)
    classes = twins(profile, names)
    assert len(set(classes.values())) == 1
    # Compositions of 1, 2 and 3 alike devices: 1 + 2 + 4.
    assert len(list(ordered_partitions(names, classes, 9))) == 7
    unlike = {name: index for index, name in enumerate(names)}
    assert len(list(ordered_partitions(names, unlike, 9))) == 3 + 3 * 3 + 13


def test_noisy_links_are_no_twins(make_cluster: Callable, make_graph: Callable, make_profile: Callable) -> None:
    cluster = make_cluster({"a": {"a0": 1.0, "a1": 1.0}, "b": {"b0": 1.0}})
    profile = make_profile(cluster, make_graph(blocks=2), noise=0.1)
    assert len(set(twins(profile, ("a0", "a1", "b0")).values())) == 3


def test_refuses_large_cases(preset_profile: Callable[..., Profile]) -> None:
    profile = preset_profile("spantrain-setting-1")
    with pytest.raises(PlanError, match="up to 6 devices"):
        exhaustive(request_of(profile, JobSpec(global_batch=8)))


def test_nothing_fits(case: Callable[..., Profile]) -> None:
    with pytest.raises(InfeasiblePlanError, match="none fits into memory"):
        exhaustive(request_of(case(memory_bytes=301 * MIB), JobSpec(global_batch=4, micro_batches=(1,))))
