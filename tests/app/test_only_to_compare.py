"""Plans that training cannot do give way to those that it can, unless they are asked for."""

from dataclasses import replace

import pytest

from spantrain.app.planning.plan_files import write_plans
from spantrain.app.profiling.describe import described_profile
from spantrain.app.training.requests import new_run
from spantrain.config.cluster_file import load_preset
from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.errors import PlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import JobSpec
from spantrain.schedule.joint import joint_refusal

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
    assert joint_refusal(compared.plan) == ""


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_replicas_that_divide_state_do_every_micro_batch_together(profile, strategy):
    found = make_plan(profile, JOB, PlanOptions(strategies=(strategy,)))
    assert found.chosen == strategy
    assert not found.strategies[strategy].only_to_compare
    assert joint_refusal(found.plan) == ""


def waiting_for_ever(plan):
    """A plan of which one replica has no part of most micro-batches."""
    spans = tuple(Span(number, number + 1) for number in range(plan.global_batch))
    return replace(plan, stages=(replace(plan.stages[0], micro_batches=spans),))


def test_training_refuses_those_that_would_wait_for_each_other(profile, tmp_path):
    found = make_plan(profile, replace(JOB, global_batch=64), PlanOptions(strategies=("zero2",)))
    out = tmp_path / "plan.json"
    write_plans(replace(found, plan=waiting_for_ever(found.plan)), profile, None, out)
    with pytest.raises(PlanError, match=r"for comparison by simulation only.* has no samples in \d+ of the 64 micro-b"):
        new_run(out, TrainJob(steps=1), tmp_path / "run", functions=())
