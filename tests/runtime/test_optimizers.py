"""Torch's optimizers by name: the same updates as torch's own, state of the size that is planned, saved and loaded."""

import inspect
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from spantrain.app.training.requests import check_divided
from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.core.update.optimizers import OPTIMIZERS, STATE_COPIES, optimizer_fields
from spantrain.errors import PlanError
from spantrain.planner.dividing import TensorParallel
from spantrain.planner.request import Constraints, JobSpec, PlanRequest
from spantrain.runtime.checkpoint.manifest import latest_checkpoint
from spantrain.runtime.gradients.optimizer import build_optimizer, learning_rate
from testing.models.graphs import graph_of
from testing.runtime.runs import OneProcess, devices_of, in_groups, load_all, save_all

STEPS, RATE = 6, 0.02
CASES = [
    *((name, {}) for name in OPTIMIZERS),
    ("adamw", {"betas": (0.8, 0.95), "eps": 1e-6, "amsgrad": True, "weight_decay": 0.3}),
    ("adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("rmsprop", {"momentum": 0.5, "centered": True, "alpha": 0.9, "eps": 1e-5}),
    ("adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    ("nadam", {"momentum_decay": 1e-3}),
    ("adafactor", {"beta2_decay": -0.5, "d": 2.0, "weight_decay": 0.1}),
]


def job_of(name: str, options, **more) -> TrainJob:
    fields = {"weight_decay": 0.0, "momentum": 0.0, "learning_rate": RATE, **optimizer_fields(name, options)}
    return TrainJob(steps=STEPS, warmup_steps=2, lr_schedule="cosine", decay_steps=STEPS, **(fields | more))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 1))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_updates_are_those_of_torch(name, options):
    """Beside torch's class with its plain loop, and a scheduler of transformers."""
    ours, theirs = model(), model()
    job = job_of(name, options)
    optimizer = build_optimizer(job, ours.parameters())
    known = {"weight_decay": 0.0, **options, "lr": RATE, "foreach": False}
    reference = getattr(torch.optim, OPTIMIZERS[name].torch_class)(theirs.parameters(), **known)
    scheduler = get_scheduler("cosine", reference, 2, STEPS)
    for step in range(STEPS):
        inputs = torch.randn(5, 3, 2, 2, generator=torch.Generator().manual_seed(step))
        for one in (ours, theirs):
            one.zero_grad()
            one(inputs).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job, step)
        optimizer.step()
        reference.step()
        scheduler.step()
    for own, other, first in zip(ours.parameters(), theirs.parameters(), model().parameters(), strict=True):
        assert torch.allclose(own, other, rtol=1e-5, atol=1e-7)
        assert not torch.equal(own, first)
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    state = sum(v.numel() for values in optimizer.state.values() for v in values.values() if v.dim())
    planned = STATE_COPIES[job.optimizer_state] * parameters
    assert state <= planned if name == "adafactor" else state == planned


def test_options_are_torchs():
    for name, kind in OPTIMIZERS.items():
        defaults = {
            key: p.default for key, p in inspect.signature(getattr(torch.optim, kind.torch_class)).parameters.items()
        }
        assert {key: defaults[key] for key in kind.options} == kind.options, name
        assert ("betas" in defaults) == kind.uses_adam_options


@pytest.mark.parametrize("value", [-1.0, 0.5, 1.5])
@pytest.mark.parametrize(("name", "key"), [(n, k) for n, kind in OPTIMIZERS.items() for k in kind.options])
def test_what_torch_refuses_is_refused_before_any_device_makes_one(name, key, value):
    kind = OPTIMIZERS[name]
    if isinstance(kind.options[key], bool):
        return
    try:
        getattr(torch.optim, kind.torch_class)([torch.zeros(1)], lr=RATE, **{key: value})
    except ValueError:
        with pytest.raises(ValueError, match=f"option {key} of optimizer {name} must be a finite number from"):
            job_of(name, {key: value})


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("adamv", {}, "one of adamw, .* got 'adamv': did you mean adam"),
        ("rprop", {}, "optimizer rprop steps by the sign"),
        ("lion_32bit", {}, "is not in torch. Known: adamw"),
        ("paged_adamw_8bit", {}, "another package's"),
        ("rmsprop", {"alfa": 1}, "did you mean alpha"),
        ("rmsprop", {"alpha": "1"}, "option alpha of optimizer rmsprop must be a finite number from 0 to 1, got '1'"),
        ("rmsprop", {"alpha": 2}, "option alpha of optimizer rmsprop must be a finite number from 0 to 1, got 2"),
        ("rmsprop_bnb", {}, "another package's"),
        ("sgd", {"nesterov": True}, "option nesterov of optimizer sgd needs momentum"),
        ("sgd", {"nesterov": True, "momentum": 0.9, "dampening": 0.5}, "and dampening 0"),
        ("adamw", {"amsgrad": 1}, "must be true or false"),
        ("adamax", {"rho": 1}, "takes no option 'rho'"),
        ("adamw", {"betas": 0.9}, "betas must be two numbers"),
    ],
)
def test_optimizers_that_make_no_sense(name, options, says):
    with pytest.raises(ValueError, match=says):
        job_of(name, options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_another_plan_goes_on_with_the_same_losses(name, make_plan, spec_of, tmp_path):
    """State of any shape: sums of rows and columns, and numbers."""
    torch.set_num_threads(1)
    options = {"momentum": 0.9} if name in ("sgd", "rmsprop") else {}
    job, spec, random = job_of(name, options, seed=5), spec_of("gpt2"), Random(3)
    unbroken = OneProcess(spec, job, 4)
    unbroken.train(0, 3)
    tensors, losses, graph = unbroken.tensors(), unbroken.train(3, 3), graph_of(spec)
    before = make_plan(spec, [0, 2, 5], [[1, 1], [1]], [[Span(0, 4)]] * 2, "gpipe")
    after = make_plan(spec, [0, 3, 5], [[1], [1, 1, 1]], [[Span(0, 4)]] * 2, "gpipe")
    if not OPTIMIZERS[name].needs_whole:
        after = in_groups(after, random)
    devices = devices_of(before, graph, job, random)
    for device in devices:
        device.fill(tensors)
    manifest = save_all(tmp_path / "run", before, job, devices, 3)
    again = devices_of(after, graph, job, random)
    load_all(lambda _: latest_checkpoint(tmp_path / "run"), manifest.content, after, again)
    resumed = OneProcess(spec, replace(job, seed=77), 4)
    resumed.job = job
    empty = {key: {part: torch.full_like(v, 9.0) for part, v in values.items()} for key, values in tensors.items()}
    for device in again:
        device.put_into(empty)
    resumed.take_over(empty)
    assert resumed.train(3, 3) == losses


def test_an_update_that_needs_whole_parameters_is_not_divided(make_plan, spec_of):
    plan = make_plan(spec_of("gpt2"), [0, 5], [[1, 1]], [[Span(0, 4)]], "gpipe")
    one, other = plan.stages[0].replicas
    group = replace(one, devices=(*one.devices, *other.devices), tp_shares=(1.0, 1.0))
    divided = replace(plan, stages=(replace(plan.stages[0], replicas=(group,)),))
    check_divided(plan, job_of("adafactor", {}))
    check_divided(divided, job_of("adamw", {}))
    with pytest.raises(PlanError, match=r"adafactor needs whole parameters, .*tensor parallelism"):
        check_divided(divided, job_of("adafactor", {}))
    with pytest.raises(PlanError, match=r"adafactor needs whole parameters.*--tensor-parallel any"):
        PlanRequest(
            profile=None, job=JobSpec(global_batch=4, optimizer="adafactor"),
            constraints=Constraints(tensor_parallel=TensorParallel.ANY), evaluate=lambda _plan: None,
        )  # fmt: skip
