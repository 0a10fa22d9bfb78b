"""Buckets of gradient sums: as many as leave least behind the last backward."""

from dataclasses import replace

import pytest

from spantrain.app.describe import described_profile
from spantrain.app.evaluate import Evaluator
from spantrain.config.presets import load_preset
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.cost.replicas import ReplicaCost
from spantrain.models.catalog import resolve_model
from spantrain.planner.job import JobSpec
from spantrain.planner.request import PlanRequest
from spantrain.planner.strategies.registry import STRATEGIES
from spantrain.planner.sum_buckets import with_sum_buckets
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import simulate

JOB = JobSpec(global_batch=32)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


@pytest.fixture(scope="module")
def plans(profile) -> list[Plan]:
    request = PlanRequest(profile=profile, job=JOB, evaluate=Evaluator(profile, JOB))
    return [p.plan for name in ("ddp", "spantrain-dp", "gpipe") for p in STRATEGIES[name].propose(request)]


def test_no_other_number_makes_a_step_of_one_stage_shorter(profile, plans):
    costs, several = ReplicaCost(profile), 0
    for plan in plans:
        chosen = with_sum_buckets(plan, costs)
        step_s = simulate(chosen, ProfileCosts(profile, chosen)).step_s
        for count in (1, 2, 4, 8, 16) if len(plan.stages) == 1 else (1,):
            other = replace(plan, stages=tuple(replace(stage, sum_buckets=count) for stage in plan.stages))
            assert step_s <= simulate(other, ProfileCosts(profile, other)).step_s + 1e-9
        several += any(stage.sum_buckets > 1 for stage in chosen.stages)
        assert [stage.sum_buckets for stage in chosen.stages if len(stage.replicas) == 1].count(1) == sum(
            len(stage.replicas) == 1 for stage in chosen.stages
        )
    assert several


def test_only_buckets_change_and_choosing_again_changes_nothing(profile, plans):
    costs = ReplicaCost(profile)
    for plan in plans:
        chosen = with_sum_buckets(plan, costs)
        assert with_sum_buckets(chosen, costs) is chosen
        plain = tuple(replace(stage, sum_buckets=1) for stage in chosen.stages)
        assert replace(chosen, stages=plain) == plan


def test_a_plan_is_evaluated_with_its_buckets(profile, plans):
    evaluator = Evaluator(profile, JOB)
    for plan in plans:
        bucketed = evaluator.bucketed(plan)
        assert bucketed == with_sum_buckets(plan, ReplicaCost(profile))
        assert evaluator(plan).step_s == pytest.approx(simulate(bucketed, ProfileCosts(profile, bucketed)).step_s)
