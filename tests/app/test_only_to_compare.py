"""Plans that training cannot do yet give way to those that it can, unless they are asked for."""

from dataclasses import replace

import pytest

from spantrain.app.describe import described_profile
from spantrain.app.plan import PlanWishes, make_plan, plan_file
from spantrain.app.requests import new_run
from spantrain.app.trainable import not_trained_yet, only_to_compare
from spantrain.config.presets import load_preset
from spantrain.core.job import TrainJob
from spantrain.errors import PlanError
from spantrain.models.catalog import resolve_model
from spantrain.planner.job import JobSpec
from spantrain.planner.request import Constraints

JOB = JobSpec(global_batch=128)
BOTH = ("spantrain", "spantrain-dp")


@pytest.fixture(scope="module")
def profile():
    return described_profile(load_preset("laptop"), resolve_model("gpt2-small"))


@pytest.fixture(scope="module")
def compared(profile):
    return make_plan(profile, JOB, PlanWishes(strategies=BOTH))


def test_a_faster_plan_that_divides_tensors_is_shown_and_not_chosen(compared):
    ours, others = (compared.strategies[name] for name in BOTH)
    assert ours.step_s < others.step_s
    assert "--allow-tensor-parallel" in ours.only_to_compare
    assert not others.only_to_compare
    assert compared.chosen == "spantrain-dp"
    assert not_trained_yet(compared.plan) == ()


def test_it_is_chosen_where_that_is_allowed(profile, compared):
    wishes = PlanWishes(strategies=BOTH, constraints=Constraints(tensor_parallel=True))
    allowed = make_plan(profile, JOB, wishes)
    assert allowed.chosen == "spantrain"
    assert allowed.step_s_predicted < compared.step_s_predicted
    assert any("divides tensors" in line for line in not_trained_yet(allowed.plan))


def test_a_strategy_asked_for_alone_is_chosen_and_says_so(profile):
    found = make_plan(profile, JOB, PlanWishes(strategies=("fsdp",)))
    assert found.chosen == "fsdp"
    assert any("for comparison" in reason and "state" in reason for reason in found.reasons)
    assert "state" in only_to_compare(found.plan, Constraints(tensor_parallel=True))


def test_training_refuses_it_with_the_stages_named(profile, tmp_path):
    out = tmp_path / "plan.json"
    plan_file(profile, None, replace(JOB, global_batch=64), PlanWishes(strategies=("zero2",)), out)
    with pytest.raises(PlanError, match=r"stage 0: its state is sharded \(zero2\)"):
        new_run(out, TrainJob(steps=1), schedule=None, out=tmp_path / "run")
