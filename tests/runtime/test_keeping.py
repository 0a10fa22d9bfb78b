"""Keepers follow a stage to the bit, whatever runs, in whatever order, and whatever plan takes over."""

from dataclasses import replace
from random import Random

import pytest
import torch

from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.recovery.protection import protected
from testing.runtime.places import BATCH, HALVES, random_places
from testing.runtime.runs import OneProcess
from testing.runtime.sessions import Ran, train_in_threads

pytestmark = pytest.mark.checkpoint

JOB = TrainJob(steps=6, seed=5, learning_rate=0.02, warmup_steps=3, max_grad_norm=0.5, adapter="off")
JOBS = {
    "clipped AdamW": JOB,
    "momentum": replace(JOB, optimizer="sgd", max_grad_norm=None),
    "statistics": replace(JOB, optimizer="sgd", batch_norm="micro-batch"),
}


def kept_by_others(plan: Plan, losses: int = 1) -> Plan:
    return protected(plan, losses, [0] * len(plan.stages), dict.fromkeys(plan.devices, 0))


def copies(ran: Ran, plan: Plan) -> int:
    """The number of copies, each of which is the stage's first device's to the bit."""
    count = 0
    for session in ran.sessions.values():
        for kept in session._keeping.kept:
            ward = ran.sessions[kept.ward]._part
            assert kept.units == plan.stages[plan.place(kept.ward)[0]].units
            for name, own in ward.holding.tensors.items():
                assert torch.equal(own, kept.holding.tensors[name]), name
            for name, own in ward.holding.parameters.items():
                state, copy = ward.optimizer.state[own], kept.optimizer.state[kept.holding.parameters[name]]
                assert state.keys() == copy.keys()
                for key, value in state.items():
                    assert torch.equal(value, copy[key]) if isinstance(value, torch.Tensor) else value == copy[key]
            count += 1
    assert count == sum(len(stage.keepers) for stage in plan.stages)
    return count


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("family", ["gpt2", "resnet"])
def test_a_copy_is_the_stage_to_the_bit(job, family, four):
    plan = kept_by_others(four([0, 2, 3, 5], [[["a"]], [["b"], ["c"]], [["d"]]], family=family), 2)
    ran = train_in_threads(plan, JOBS[job])
    assert copies(ran, plan) == 5
    if job != "statistics":
        assert ran.losses == pytest.approx(OneProcess(plan.model, JOBS[job], BATCH).train(0, JOB.steps), rel=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_copies_go_with_any_change_of_plan(seed, four):
    random = Random(seed)
    family = random.choice(["gpt2", "resnet"])
    first = kept_by_others(four([0, 2, 3, 5], [[["a"]], [["b"], ["c"]], [["d"]]], family=family))
    plans = [kept_by_others(four(*random_places(random), family=family), random.randint(0, 3)) for _ in range(4)]
    ran = train_in_threads(first, JOB, dict(enumerate(plans, start=1)))
    copies(ran, plans[-1])
    assert ran.losses == pytest.approx(OneProcess(first.model, JOB, BATCH).train(0, JOB.steps), rel=1e-4)


def test_a_change_that_moves_nothing_leaves_copies_where_they_are(four):
    groups = [[["a"]], [["b"], ["c"]], [["d"]]]
    first = kept_by_others(four([0, 2, 3, 5], groups))
    second = kept_by_others(four([0, 2, 3, 5], groups, HALVES, "critical-path"))
    ran = train_in_threads(first, JOB, {2: second})
    assert copies(ran, second) == 2
    assert [outcome.switch.moved_bytes for outcome in ran.outcomes if outcome.switch] == [0]


def test_gradients_that_overflow_change_no_copy(four):
    plan = replace(kept_by_others(four([0, 2, 5], [[["a"], ["b"]], [["c"], ["d"]]]), 2), dtype="float16")
    ran = train_in_threads(plan, replace(JOB, loss_scale=2.0**40))
    assert ran.outcomes[0].skipped
    assert copies(ran, plan) == 2
