"""Plans that training cannot do yet give way to those that it can, unless they are asked for."""

from dataclasses import replace

import pytest

from spantrain.app.planning.plan_files import write_plans
from spantrain.app.profiling.describe import described_profile
from spantrain.app.training.requests import new_run
from spantrain.config.cluster_file import load_preset
from spantrain.core.job import TrainJob
from spantrain.errors import PlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions, not_trained_yet
from spantrain.planner.request import JobSpec

JOB = JobSpec(global_batch=128)
BOTH = ("spantrain", "spantrain-dp")


@pytest.fixture(scope="module")
def profile():
    return described_profile(load_preset("laptop"), resolve_model("gpt2-small"))


@pytest.fixture(scope="module")
def compared(profile):
    return make_plan(profile, JOB, PlanOptions(strategies=BOTH))


def test_a_plan_that_divides_tensors_can_be_trained_and_is_chosen(compared):
    ours, others = (compared.strategies[name] for name in BOTH)
    assert ours.step_s < others.step_s
    assert not ours.only_to_compare
    assert compared.chosen == "spantrain"
    assert any(len(replica.devices) > 1 for stage in compared.plan.stages for replica in stage.replicas)
    assert not_trained_yet(compared.plan) == ()


def test_a_strategy_asked_for_alone_is_chosen_and_says_so(profile):
    found = make_plan(profile, JOB, PlanOptions(strategies=("fsdp",)))
    assert found.chosen == "fsdp"
    assert any("for comparison" in reason and "state" in reason for reason in found.report.reasons)
    assert "state" in found.strategies["fsdp"].only_to_compare


def test_training_refuses_it_with_the_stages_named(profile, tmp_path):
    out = tmp_path / "plan.json"
    write_plans(
        make_plan(profile, replace(JOB, global_batch=64), PlanOptions(strategies=("zero2",))), profile, None, out
    )
    with pytest.raises(PlanError, match=r"stage 0: its state is sharded \(zero2\)"):
        new_run(out, TrainJob(steps=1), tmp_path / "run", functions=())
