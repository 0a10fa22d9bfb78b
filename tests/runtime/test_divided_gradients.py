"""Replicas that divide gradients (zero2), or parameters too (zero3): losses of one device, whatever moves."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.shares import StateSharding
from spantrain.core.span import Span, equal_spans
from spantrain.errors import PlanError
from spantrain.models.build import unit_count
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.tensor_parallel.division import take
from spantrain.runtime.checkpoint.tensor_file import step_folder
from spantrain.schedule.joint import check_joint, has_fixed_order, joint_refusal
from spantrain.schedule.registry import schedule_names
from testing.models import frozen_models
from testing.models.graphs import graph_of
from testing.runtime.places import HALVES, random_places
from testing.runtime.runs import one_process_losses
from testing.runtime.sessions import Ran, train_in_threads, whole_bytes

pytestmark = pytest.mark.checkpoint

JOB = TrainJob(steps=6, seed=5, learning_rate=0.02, warmup_steps=3, max_grad_norm=0.5)
WAYS = (StateSharding.ZERO2, StateSharding.ZERO3)
THREE = [[["a"], ["b"], ["c"]], [["d"]]]
FIXED = [name for name in schedule_names() if has_fixed_order(name)]


def divided(plan: Plan, *ways: StateSharding) -> Plan:
    """The plan with the state of each stage divided in the next of some ways, where that can be."""
    for index, stage in enumerate(plan.stages):
        other = replace(stage, state_sharding=ways[index % len(ways)]) if not stage.divides_tensors else stage
        changed = replace(plan, stages=(*plan.stages[:index], other, *plan.stages[index + 1 :]))
        if any(one.divides_gradients for one in changed.stages) and not has_fixed_order(plan.schedule):
            changed = replace(changed, schedule="1f1b")
        plan = plan if joint_refusal(changed) else changed
    return plan


@pytest.fixture(scope="module")
def undivided() -> Callable[[str, Plan, TrainJob], Ran]:
    """Trains a plan as it is, once for all ways to divide its state."""
    known: dict[str, Ran] = {}

    def train(name: str, plan: Plan, job: TrainJob) -> Ran:
        if name not in known:
            known[name] = train_in_threads(plan, job)
        return known[name]

    return train


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_plan(way, data, make_plan, spec_of):
    spec = spec_of(data.draw(st.sampled_from(["gpt2", "bert", "resnet"]), "family"))
    count = unit_count(spec)
    edges = [0, *sorted(data.draw(st.sets(st.integers(1, count - 1), max_size=1), "cuts")), count]
    shares = [data.draw(st.sampled_from([[1], [1, 1], [2, 1], [1, 1, 2]]), "shares") for _ in edges[1:]]
    spans = list(equal_spans(12, data.draw(st.sampled_from([4, 5, 6, 12]), "size")))
    plan = make_plan(spec, edges, shares, [spans] * len(shares), data.draw(st.sampled_from(FIXED), "schedule"))
    again = data.draw(st.sets(st.integers(0, count - 1), max_size=2), "recompute")
    stages = [
        replace(stage, state_sharding=way, recompute=tuple(sorted(again & set(stage.units)))) for stage in plan.stages
    ]
    plan = replace(plan, stages=tuple(stages))
    assert joint_refusal(plan) == ""
    job = replace(JOB, steps=3, optimizer=data.draw(st.sampled_from(["adamw", "sgd", "rmsprop"]), "optimizer"))
    assert train_in_threads(plan, job).losses == pytest.approx(one_process_losses(plan, job), rel=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_each_has_its_part(way, four, undivided):
    job = replace(JOB, adam_epsilon=1e-3)  # what rounding leaves of gradients that are nothing moves nothing
    whole = undivided("three", four([0, 3, 5], THREE, HALVES), job)
    ran = train_in_threads(divided(four([0, 3, 5], THREE, HALVES), way), job)
    assert ran.losses == pytest.approx(whole.losses, rel=1e-6)
    everything = whole.sessions["a"]._part.holding
    for name, parameter in everything.parameters.items():
        rows = [own for device in "abc" if (own := ran.sessions[device]._part.holding.updated(name))]
        assert sum(own.rows.numel() for own in rows) == parameter.numel(), name
        found = torch.cat([own.rows.detach().reshape(-1) for own in rows])
        torch.testing.assert_close(found, parameter.detach().reshape(-1), rtol=1e-4, atol=1e-6)
    held = sum(own.nbytes for own in everything.parameters.values())
    assert [whole_bytes(ran, device) for device in "abc"] == [held if way is StateSharding.ZERO2 else 0] * 3
    assert whole_bytes(ran, "d") == whole_bytes(whole, "d"), "alone in its stage"


@pytest.mark.parametrize(
    ("way", "dtype"),
    [*product(WAYS, ["bfloat16-weights"]), (StateSharding.ZERO2, "float16"), (StateSharding.ZERO3, "bfloat16")],
)
def test_what_is_rounded_is_rounded_as_before(way, dtype, four, undivided):
    plan = replace(four([0, 3, 5], [[["a"], ["b"]], [["c"], ["d"]]]), dtype=dtype)
    job = replace(JOB, steps=3)
    assert train_in_threads(divided(plan, way), job).losses == pytest.approx(
        undivided(dtype, plan, job).losses, rel=1e-3
    )


@pytest.mark.parametrize("name", ["upper_blocks", "last_block", "biases", "adapters_on_bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_trained_is_divided_with_the_parameters(way, name, make_plan, undivided):
    model = resolve_model(f"{frozen_models.__file__}:{name}")
    whole = make_plan(model, [0, len(graph_of(model).units)], [[1, 1]], [[Span(0, 3), Span(3, 6)]], "1f1b")
    job = replace(JOB, steps=3, adam_epsilon=1e-3)
    before, ran = undivided(name, whole, job), train_in_threads(divided(whole, way), job)
    assert ran.losses == pytest.approx(before.losses, rel=1e-5)
    there = before.sessions["s0r0"]._part.holding.parameters
    for session in ran.sessions.values():
        holding = session._part.holding
        for key, parameter in holding.parameters.items():
            own = take(there[key].detach(), holding.parts[key])
            torch.testing.assert_close(parameter.detach(), own, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_any_plan_after_any_other(seed, four):
    random = Random(seed)
    first = divided(four([0, 2, 3, 5], [[["a"]], [["b"], ["c"]], [["d"]]]), StateSharding.ZERO3)
    plans = [four(*random_places(random)) for _ in range(4)]
    plans = [divided(plan, *random.sample([StateSharding.NONE, StateSharding.ZERO1, *WAYS], 2)) for plan in plans]
    ran = train_in_threads(first, JOB, dict(enumerate(plans, start=1)))
    assert ran.losses == pytest.approx(one_process_losses(first, JOB), rel=1e-4)


@pytest.mark.parametrize(
    ("before", "after", "places"),
    [
        (StateSharding.ZERO3, StateSharding.ZERO3, (THREE, [[["c"], ["b"]], [["a"], ["d"]]])),
        (StateSharding.ZERO3, StateSharding.ZERO3, (THREE, THREE)),
        (StateSharding.ZERO3, StateSharding.NONE, (THREE, THREE)),
        (StateSharding.NONE, StateSharding.ZERO3, (THREE, [[["c"], ["b"]], [["a"], ["d"]]])),
        (StateSharding.ZERO2, StateSharding.ZERO3, (THREE, [[["c"], ["b"]], [["a"], ["d"]]])),
        (StateSharding.ZERO3, StateSharding.ZERO1, (THREE, THREE)),
    ],
)
def test_a_checkpoint_goes_on_under_another_plan(before, after, places, four, tmp_path):
    plans = [
        divided(four(edges, groups, HALVES), way)
        for edges, groups, way in zip(([0, 2, 5], [0, 3, 5]), places, (before, after), strict=True)
    ]
    ran = train_in_threads(plans[0], replace(JOB, checkpoint_every=3), out=tmp_path)
    (manifest,) = (manifest for manifest in ran.manifests if manifest.step == 3)
    folder = step_folder(tmp_path / "checkpoint", 3)
    again = train_in_threads(replace(plans[1], generation=9), JOB, content=manifest.content, folder=folder)
    assert again.losses == pytest.approx(ran.losses[3:], rel=1e-5)
    sizes: dict[str, int] = {}
    for file in manifest.files.values():
        for name, stored in file.tensors.items():
            sizes[name] = sizes.get(name, 0) + torch.Size(stored.part.shape).numel()
    for file in manifest.files.values():
        for name, stored in file.tensors.items():
            assert name.startswith("random") or sizes[name] == torch.Size(stored.part.full_shape).numel(), name


def test_a_held_out_batch_is_evaluated(four):
    job = replace(JOB, evaluate_every=2)
    plan = four([0, 3, 5], [[["a"], ["b"]], [["c"], ["d"]]])
    assert train_in_threads(divided(plan, StateSharding.ZERO3), job).held_out == pytest.approx(
        train_in_threads(plan, job).held_out, rel=1e-5
    )


def test_who_would_wait_for_ever_is_refused(four):
    plan = four([0, 5], [[["a"], ["b"]]])
    sharded = replace(plan, stages=(replace(plan.stages[0], state_sharding=StateSharding.ZERO3),))
    check_joint(sharded, graph_of(plan.model))
    with pytest.raises(
        PlanError, match=r"divided gradients: schedule critical-path decides at run time .* give --sche"
    ):
        check_joint(replace(sharded, schedule="critical-path"), graph_of(plan.model))
    lone = replace(sharded.stages[0], micro_batches=equal_spans(6, 1))
    assert "a has no samples in 6 of the 6 micro-batches of stage 0" in joint_refusal(replace(plan, stages=(lone,)))
    groups = four([0, 5], [[["a", "b"], ["c", "d"]]])
    tensors = replace(groups.stages[0], state_sharding=StateSharding.ZERO2)
    assert "stage 0 divides gradients among groups" in joint_refusal(replace(groups, stages=(tensors,)))
