"""Stages whose state is in their hosts' memory: losses of one device, less memory, checkpoints, changes of plan."""

from dataclasses import replace

import pytest
import torch

from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.shares import StateSharding
from spantrain.models.build import unit_count
from spantrain.recovery.protection import is_whole
from spantrain.runtime.checkpoint.tensor_file import step_folder
from testing.runtime.places import HALVES
from testing.runtime.runs import one_process_losses
from testing.runtime.sessions import train_in_threads, whole_bytes

pytestmark = pytest.mark.checkpoint

JOB = TrainJob(steps=6, seed=5, learning_rate=0.02, warmup_steps=3, max_grad_norm=0.5)
ONE = [[["a"]]]
TWO = [[["a"]], [["b"]]]
MIXED = [[["a"]], [["b"], ["c"]]]


def offloaded(plan: Plan) -> Plan:
    """The plan with the state of all stages of one device offloaded."""
    stages = (
        replace(stage, state_sharding=StateSharding.OFFLOAD) if len(stage.devices) == 1 else stage
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb", "critical-path", "compact"])
@pytest.mark.parametrize(("edges", "groups"), [([0, 5], ONE), ([0, 3, 5], TWO), ([0, 3, 5], MIXED)])
def test_losses_are_one_devices(edges, groups, schedule, four):
    plan = offloaded(four(edges, groups, schedule=schedule))
    ran = train_in_threads(plan, JOB)
    assert ran.losses == pytest.approx(one_process_losses(plan, JOB), rel=1e-5)
    assert whole_bytes(ran, "a") == 0


@pytest.mark.parametrize("family", ["bert", "resnet"])
def test_other_models(family, spec_of, make_plan):
    spec = spec_of(family)
    plan = offloaded(make_plan(spec, [0, unit_count(spec)], [[1]], [list(HALVES)], "1f1b"))
    job = replace(JOB, steps=3)
    assert train_in_threads(plan, job).losses == pytest.approx(one_process_losses(plan, job), rel=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16-weights", "bfloat16", "float16"])
def test_what_is_rounded_is_rounded_as_before(dtype, four):
    plan = replace(four([0, 3, 5], TWO), dtype=dtype)
    assert train_in_threads(offloaded(plan), JOB).losses == pytest.approx(train_in_threads(plan, JOB).losses, rel=1e-3)


def test_units_that_are_run_again_hold_little(four):
    plan = offloaded(four([0, 5], ONE))
    again = replace(plan, stages=(replace(plan.stages[0], recompute=tuple(range(5))),))
    ran, held = train_in_threads(again, JOB), train_in_threads(plan, JOB)
    assert ran.losses == pytest.approx(held.losses, rel=1e-6)
    whole = train_in_threads(four([0, 5], ONE), JOB)
    assert ran.results["a"].peak_bytes < held.results["a"].peak_bytes < whole.results["a"].peak_bytes


@pytest.mark.parametrize("ways", [(True, False), (False, True), (True, True)])
def test_a_checkpoint_goes_on_under_another_plan(ways, four, tmp_path):
    plans = [
        offloaded(plan) if way else plan
        for plan, way in zip((four([0, 2, 5], TWO), four([0, 3, 5], MIXED)), ways, strict=True)
    ]
    ran = train_in_threads(plans[0], replace(JOB, checkpoint_every=3), out=tmp_path)
    (manifest,) = (manifest for manifest in ran.manifests if manifest.step == 3)
    folder = step_folder(tmp_path / "checkpoint", 3)
    again = train_in_threads(replace(plans[1], generation=9), JOB, content=manifest.content, folder=folder)
    assert again.losses == pytest.approx(ran.losses[3:], rel=1e-5)
    for file in manifest.files.values():
        for name, stored in file.tensors.items():
            assert stored.part.is_whole, name


@pytest.mark.parametrize("ways", [(True, False, True), (False, True, False)])
def test_plans_take_over(ways, four):
    first, second, third = four([0, 2, 5], MIXED), four([0, 3, 5], [[["c"], ["a"]], [["b"]]]), four([0, 1, 5], MIXED)
    plans = [offloaded(plan) if way else plan for plan, way in zip((first, second, third), ways, strict=True)]
    ran = train_in_threads(plans[0], JOB, {2: plans[1], 4: plans[2]})
    assert ran.losses == pytest.approx(one_process_losses(first, JOB), rel=1e-5)


def test_it_needs_one_device(four):
    (stage,) = four([0, 5], [[["a"], ["b"]]]).stages
    with pytest.raises(ValueError, match="offload needs a stage of one device"):
        replace(stage, state_sharding=StateSharding.OFFLOAD)
    assert not is_whole(offloaded(four([0, 5], ONE)).stages[0])


def test_what_lies_in_the_hosts_memory_is_the_optimizers(four):
    ran = train_in_threads(offloaded(four([0, 5], ONE)), JOB)
    part = ran.sessions["a"]._part
    listed = [one for group in part.optimizer.param_groups for one in group["params"]]
    assert {id(one) for one in listed} == {id(one) for one in part.holding.parameters.values()}
    assert all(one.device == torch.device("cpu") for one in listed)
