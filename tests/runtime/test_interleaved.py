"""Devices with several stages each: losses of one device, whatever moves; what stages share is there once."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.core.job import TrainJob
from spantrain.core.messages import MessageKey
from spantrain.core.plan import Plan
from spantrain.core.span import Span, equal_spans
from spantrain.errors import ProtocolError
from spantrain.models.build import unit_count
from spantrain.runtime.checkpoint.tensor_file import step_folder
from spantrain.transport.mailbox.interface import Message
from testing.plans import interleaved
from testing.runtime.places import HALVES, random_places
from testing.runtime.runs import one_process_losses
from testing.runtime.sessions import Ran, train_in_threads

pytestmark = pytest.mark.checkpoint

JOB = TrainJob(steps=6, seed=5, learning_rate=0.02, warmup_steps=3, max_grad_norm=0.5)
TWO = [[["a"]], [["b"]], [["a"]], [["b"]]]
BACK = [[["a"], ["c"]], [["b"], ["d"]], [["b"], ["d"]], [["a"], ["c"]]]
CLOSED = [[["a"]], [["b"]], [["c"]], [["a"]]]


@pytest.fixture(scope="module")
def alone(four) -> Callable[[str], Ran]:
    """What one device does in numbers of a type."""

    @cache
    def ran(dtype: str) -> Ran:
        return train_in_threads(replace(four([0, 5], [[["a"]]]), dtype=dtype), held_out_job(dtype))

    return ran


def held_out_job(dtype: str) -> TrainJob:
    return replace(JOB, evaluate_every=2, loss_scale=2.0**8 if dtype == "float16" else 1.0)


@pytest.mark.parametrize(
    ("edges", "places", "schedule", "dtype"),
    [
        ([0, 1, 2, 3, 5], TWO, "interleaved", "float32"),
        ([0, 1, 2, 3, 5], TWO, "interleaved", "bfloat16-weights"),
        ([0, 1, 2, 3, 5], TWO, "compact", "float32"),
        ([0, 1, 2, 3, 5], TWO, "compact", "float16"),
        ([0, 2, 3, 4, 5], BACK, "zb-v", "float32"),
        ([0, 2, 3, 4, 5], BACK, "zb-v", "float16"),
        ([0, 2, 3, 4, 5], BACK, "critical-path", "float32"),
        ([0, 2, 3, 4, 5], BACK, "critical-path", "bfloat16-weights"),
        ([0, 2, 3, 4, 5], CLOSED, "critical-path", "float32"),
        ([0, 2, 3, 4, 5], CLOSED, "critical-path", "float16"),
        ([0, 2, 3, 4, 5], CLOSED, "critical-path", "bfloat16-weights"),
    ],
)
def test_losses_are_those_of_one_device(edges, places, schedule, dtype, four, alone):
    """Sums over replicas beside the last backward, tied embeddings in one place or two, clipping, held-out batches."""
    plan = replace(four(edges, places), schedule=schedule, dtype=dtype)
    assert plan.interleaved
    job = held_out_job(dtype)
    ran, whole = train_in_threads(plan, job), alone(dtype)
    assert ran.losses == pytest.approx(whole.losses, rel=1e-5 if dtype == "float32" else 2e-2)
    assert ran.held_out == pytest.approx(whole.held_out, rel=1e-5 if dtype == "float32" else 2e-2)
    if dtype == "float32":
        assert ran.losses == pytest.approx(one_process_losses(plan, job), rel=1e-5)


def test_what_two_stages_of_a_device_share_is_there_once(four):
    ran = train_in_threads(four([0, 2, 3, 5], [[["a"]], [["b"]], [["a"]]], schedule="compact"), JOB)
    part = ran.sessions["a"]._part
    assert part.tied_sums.tied == ()
    first, last = part.member.chunks
    shared = set(map(id, first.named_parameters().values())) & set(map(id, last.named_parameters().values()))
    assert len(shared) == 1
    apart = train_in_threads(four([0, 2, 5], [[["a"]], [["b"]]]), JOB)
    assert ran.losses == pytest.approx(apart.losses, rel=1e-5)
    elements = sum(one.numel() for one in part.holding.parameters.values())
    assert sum(one.numel() for group in part.optimizer.param_groups for one in group["params"]) == elements


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_family_and_optimizer(data, make_plan, spec_of):
    spec = spec_of(data.draw(st.sampled_from(["gpt2", "bert", "resnet", "efficientnet"]), "family"))
    count = unit_count(spec)
    inner = data.draw(st.sets(st.integers(1, count - 1), min_size=3, max_size=3), "cuts")
    edges = [0, *sorted(inner), count]
    shares = data.draw(st.sampled_from([[1], [1, 1], [2, 1]]), "shares")
    schedule = data.draw(st.sampled_from(["compact", "critical-path"]), "schedule")
    plan = make_plan(spec, edges, [shares] * 4, [list(equal_spans(6, 3))] * 4, schedule)
    plan = interleaved(plan, there_and_back=data.draw(st.booleans(), "back"))
    job = replace(JOB, optimizer=data.draw(st.sampled_from(["adamw", "sgd", "adagrad"])), steps=3)
    assert train_in_threads(plan, job).losses == pytest.approx(one_process_losses(plan, job), rel=1e-5)


FOUR = [0, 1, 2, 3, 5], [[["c"], ["a"]], [["d"], ["b"]]] * 2
SEVERAL = [([0, 1, 2, 3, 5], TWO), ([0, 2, 3, 4, 5], BACK), ([0, 2, 3, 4, 5], CLOSED)]


@pytest.mark.parametrize("seed", range(4))
def test_any_plan_after_any_other(seed, four):
    random = Random(seed)
    first = four(*FOUR, schedule="critical-path")
    plans: list[Plan] = []
    for number in range(4):
        edges, places = random_places(random)[:2] if number % 2 else random.choice([FOUR, ([0, 2, 3, 4, 5], BACK)])
        plans.append(four(edges, places, schedule="critical-path"))
    ran = train_in_threads(first, JOB, dict(enumerate(plans, start=1)))
    assert ran.losses == pytest.approx(one_process_losses(first, JOB), rel=1e-4)


@pytest.mark.parametrize(
    ("several", "first"), [(SEVERAL[0], True), (SEVERAL[1], True), (SEVERAL[1], False), (SEVERAL[2], False)]
)
def test_a_checkpoint_goes_on_under_another_plan(several, first, four, tmp_path):
    plain = four([0, 3, 5], [[["a"], ["b"], ["c"]], [["d"]]], HALVES)
    shared = replace(four(*several), schedule="critical-path")
    before, after = (shared, plain) if first else (plain, shared)
    ran = train_in_threads(before, replace(JOB, checkpoint_every=3), out=tmp_path)
    (manifest,) = (manifest for manifest in ran.manifests if manifest.step == 3)
    folder = step_folder(tmp_path / "checkpoint", 3)
    again = train_in_threads(replace(after, generation=9), JOB, content=manifest.content, folder=folder)
    assert again.losses == pytest.approx(ran.losses[3:], rel=1e-5)
    names = [name for file in manifest.files.values() for name in file.tensors if not name.startswith("random/")]
    assert len(names) == len(set(names)), "each tensor is in one file"


def test_a_wrong_cut_from_a_peer_is_named(four):
    """Where samples belong is said by their cut: of none of a device's stages, they are refused."""
    ran = train_in_threads(four([0, 1, 2, 3, 5], TWO, schedule="critical-path"), JOB)
    driver = ran.sessions["a"]._part.actions.driver
    assert driver is not None
    key = MessageKey(0, 0, "forward", 3, Span(0, 1))
    message = Message(source="b", key=key, tensors=(), size_bytes=0, sent_s=0.0, received_s=0.0)
    with pytest.raises(ProtocolError, match=r"b sends g0/s0/forward/cut3\[0:1\], which is for no stage of a"):
        driver._accept(message)
