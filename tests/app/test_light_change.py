"""Light changes of plan by what they cost until there is a better one: steps, keepers, and the move of state."""

import pytest

from spantrain.app.planning.protection import light_change, protected_step_s, with_keepers
from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.cost.moving import moved
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.present import light_plan
from spantrain.planner.request import JobSpec

JOB = JobSpec(global_batch=48, optimizer="adamw")


@pytest.fixture(scope="module")
def profile():
    return described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


@pytest.fixture(scope="module")
def plan(profile):
    options = PlanOptions(strategies=("spantrain-dp",))
    return with_keepers(make_plan(profile, JOB, options).plan, profile, "adamw", 1)


@pytest.mark.parametrize("lost", ["lab-0", "office-nx", "office-tx2", "home-tx2"])
def test_eight_steps_with_their_change_take_no_longer_than_where_only_steps_count(profile, plan, lost):
    present = frozenset(profile.cluster.device_by_name) - {lost}

    def took_s(after):
        move_s, _ = moved(profile, "adamw", plan, present, after)
        return move_s + 8 * protected_step_s(with_keepers(after, profile, "adamw", 1), profile, "adamw")

    by_steps = light_plan(plan, profile, present, optimizer="adamw").plan
    by_all = light_change(plan, profile, present, optimizer="adamw", losses=1).plan
    assert took_s(by_all) <= 1.005 * took_s(by_steps)
    if lost == "office-tx2":  # by its steps alone the plan has a keeper over a slow link
        assert took_s(by_all) < 0.99 * took_s(by_steps)
