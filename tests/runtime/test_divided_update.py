"""Replicas that divide the optimizer's state (zero1): losses of one device, whatever moves, and a part of the state."""

import math
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.app.training.requests import check_divided
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.shares import StateSharding
from spantrain.core.span import equal_spans
from spantrain.errors import PlanError
from spantrain.models.build import unit_count
from spantrain.recovery.policy import holds_all
from spantrain.recovery.protection import is_whole, protected, survived
from spantrain.runtime.checkpoint.holding import PARAMETER
from spantrain.runtime.checkpoint.tensor_file import step_folder
from spantrain.runtime.control.orders import KeptState
from spantrain.runtime.redistribution.exchange import TensorBlock, boxes_of
from spantrain.runtime.worker.keeping import copying
from spantrain.runtime.worker.switch import LocalTensorSource
from spantrain.schedule.registry import schedule_names
from testing.runtime.places import HALVES, random_places
from testing.runtime.runs import one_process_losses
from testing.runtime.sessions import Ran, train_in_threads

pytestmark = pytest.mark.checkpoint

JOB = TrainJob(steps=6, seed=5, learning_rate=0.02, warmup_steps=3, max_grad_norm=0.5)
THREE = [[["a"], ["b"], ["c"]], [["d"]]]


def divided(plan: Plan) -> Plan:
    """The plan with all state divided that can be."""
    stages = (
        stage if stage.divides_tensors else replace(stage, state_sharding=StateSharding.ZERO1) for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def state_elements(ran: Ran, device: str) -> int:
    """Elements of what is kept of parameters by element."""
    state = ran.sessions[device]._part.optimizer.state
    return sum(value.numel() for one in state.values() for key, value in one.items() if key.startswith("exp_avg"))


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "adagrad", "rmsprop"])
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_plan_and_optimizer(optimizer, data, make_plan, spec_of):
    spec = spec_of(data.draw(st.sampled_from(["gpt2", "bert", "resnet"]), "family"))
    count = unit_count(spec)
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=2), "cuts")), count]
    shares = [data.draw(st.sampled_from([[1], [1, 1], [2, 1], [1, 1, 2]]), "shares") for _ in edges[1:]]
    spans = list(equal_spans(6, data.draw(st.integers(3, 6), "size")))
    plan = make_plan(spec, edges, shares, [spans] * len(shares), data.draw(st.sampled_from(schedule_names())))
    plan = divided(plan)
    job = replace(JOB, optimizer=optimizer, steps=3)
    assert train_in_threads(plan, job).losses == pytest.approx(one_process_losses(plan, job), rel=1e-5)


def test_each_has_its_part_of_the_state(four):
    whole = train_in_threads(four([0, 3, 5], THREE, HALVES), JOB)
    ran = train_in_threads(divided(four([0, 3, 5], THREE, HALVES)), JOB)
    assert ran.losses == pytest.approx(whole.losses, rel=1e-6)
    parts = [state_elements(ran, name) for name in "abc"]
    assert sum(parts) == state_elements(whole, "a")
    named = whole.sessions["a"]._part.holding.parameters
    most = sum(2 * math.ceil(own.shape[0] / 3) * own[0].numel() for own in named.values())
    assert max(parts) <= most, "no more than a third of each parameter's rows, rounded up"
    assert state_elements(ran, "d") == state_elements(whole, "d")
    peaks = {name: ran.results[name].peak_bytes for name in "abc"}
    assert all(peaks[name] < whole.results[name].peak_bytes for name in peaks)


@pytest.mark.parametrize("size", [600, 5000])
def test_large_gradients_are_summed_and_gathered_in_turns(size, four):
    plan = divided(four([0, 3, 5], THREE, HALVES))
    small = [replace(stage, sums=replace(stage.sums, bucket_bytes=size)) for stage in plan.stages]
    ran = train_in_threads(replace(plan, stages=tuple(small)), JOB)
    assert ran.losses == pytest.approx(one_process_losses(plan, JOB), rel=1e-5)


def test_who_has_not_taken_others_rows_holds_its_own(four):
    """A device of another stage is lost when all have updated their rows, and not yet taken the others'."""
    ran = train_in_threads(divided(four([0, 3, 5], THREE, HALVES)), JOB)
    wanted = {name: own.detach().clone() for name, own in ran.sessions["a"]._part.holding.parameters.items()}
    found = {name: torch.full_like(own, torch.nan) for name, own in wanted.items()}
    for device in "abc":
        session = ran.sessions[device]
        for name, own in session._part.holding.own_rows.items():
            rows = own.rows.detach().clone()
            session._part.holding.parameters[name].detach().zero_()
            own.rows.detach().copy_(rows)
        session._lacks_rows = True
        left = session.leave(KeptState(verdict=None), JOB.steps)
        source = LocalTensorSource.of(device, left.held)
        for name, stored in source.held.tensors.items():
            if name.startswith(PARAMETER):
                for box in boxes_of(stored.part):
                    (piece,) = source.read(device, [TensorBlock(name, box)])
                    found[name.removeprefix(PARAMETER)][tuple(slice(one.lo, one.hi) for one in box)] = piece
    for name, own in wanted.items():
        assert torch.equal(found[name], own), name


@pytest.mark.parametrize("seed", range(4))
def test_any_plan_after_any_other(seed, four):
    random = Random(seed)
    first = divided(four([0, 2, 3, 5], [[["a"]], [["b"], ["c"]], [["d"]]]))
    plans = [four(*random_places(random)) for _ in range(4)]
    plans = [divided(plan) if random.random() < 0.6 else plan for plan in plans]
    ran = train_in_threads(first, JOB, dict(enumerate(plans, start=1)))
    assert ran.losses == pytest.approx(one_process_losses(first, JOB), rel=1e-4)


@pytest.mark.parametrize(
    ("before", "after", "ways"),
    [
        (THREE, [[["c"]], [["b"], ["a"]]], (True, False)),
        (THREE, [[["c"]], [["b"], ["a"]]], (True, True)),
        ([[["a"]], [["d"], ["b"]]], THREE, (False, True)),
        ([[["a"]], [["d"], ["b"]]], THREE, (True, True)),
        (THREE, THREE, (True, False)),
        (THREE, THREE, (False, True)),
    ],
)
def test_a_checkpoint_goes_on_under_another_plan(before, after, ways, four, tmp_path):
    plans = [
        divided(plan) if way else plan
        for plan, way in zip((four([0, 2, 5], before), four([0, 3, 5], after, HALVES)), ways, strict=True)
    ]
    ran = train_in_threads(plans[0], replace(JOB, checkpoint_every=3), out=tmp_path)
    (manifest,) = (manifest for manifest in ran.manifests if manifest.step == 3)
    folder = step_folder(tmp_path / "checkpoint", 3)
    again = train_in_threads(replace(plans[1], generation=9), JOB, content=manifest.content, folder=folder)
    assert again.losses == pytest.approx(ran.losses[3:], rel=1e-5)
    names = [name for file in manifest.files.values() for name in file.tensors]
    parts = {}
    for file in manifest.files.values():
        for name, stored in file.tensors.items():
            parts.setdefault(name, []).append(stored.part.shape[0] if stored.part.shape else 1)
    if ways[0]:
        assert len(names) > len(set(names)), "rows of one parameter's state lie in several files"
    stored = {name: one.part.full_shape for file in manifest.files.values() for name, one in file.tensors.items()}
    for name, rows in parts.items():
        if not name.startswith("random"):
            assert sum(rows) == (stored[name][0] if stored[name] else 1), name


def test_a_copy_for_another_stage_takes_nothing_of_which_state_is_lacking(four):
    """Of a parameter that stages share, whose keeper has it whole, and a part of its state."""
    for plan, is_owner in ((four([0, 3, 5], THREE), True), (divided(four([0, 3, 5], THREE)), False)):
        part = train_in_threads(plan, replace(JOB, steps=1)).sessions["a"]._part
        owner = copying._owner("transformer.wte.weight", (part,))
        assert (owner is part) == is_owner


def test_no_keeper_follows_what_no_replica_has(four):
    plan = divided(four([0, 3, 5], THREE))
    with pytest.raises(ValueError, match="none of one that divides state"):
        plan.with_keepers((("d",), ()))


def test_what_a_loss_costs_is_known(four):
    plan = divided(four([0, 3, 5], THREE))
    assert [survived(stage) for stage in plan.stages] == [0, 0]
    assert [is_whole(stage) for stage in plan.stages] == [False, True]
    kept = protected(plan, 1, [0, 0], dict.fromkeys("abcd", 1e9))
    assert [stage.keepers for stage in kept.stages] == [(), (kept.stages[1].keepers[0],)]
    assert holds_all(plan, "abcd")
    assert not holds_all(plan, "acd")
    assert holds_all(four([0, 3, 5], THREE), "ad")


def test_it_is_refused_where_an_update_needs_whole_parameters(four):
    check_divided(divided(four([0, 3, 5], THREE)), JOB)
    with pytest.raises(
        PlanError, match=r"adafactor needs whole parameters, and a, b, c of this plan .* without divided state"
    ):
        check_divided(divided(four([0, 3, 5], THREE)), replace(JOB, optimizer="adafactor"))


def test_groups_that_divide_tensors_have_none(four):
    stage = four([0, 5], [[["a", "b"], ["c", "d"]]]).stages[0]
    with pytest.raises(ValueError, match="zero1 needs replicas of one device each"):
        replace(stage, state_sharding=StateSharding.ZERO1)
