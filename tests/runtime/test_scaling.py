"""Float16 on devices: the same scale, skips and updates as torch's own scaler in one process."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.models.build import build_units, unit_count
from spantrain.models.data.dataset import open_dataset
from spantrain.models.execution.stage import StageExecutor
from spantrain.runtime.control.requests import DeviceReport
from spantrain.runtime.coordinator.barrier import StepBarrier, StepOutcome
from spantrain.runtime.gradients.optimizer import GradientScaling, build_optimizer
from testing.models.rows import rows_of

JOB = TrainJob(steps=10, loss_scale=2.0**10)


@given(overflows=st.lists(st.booleans(), min_size=1, max_size=12))
def test_scale_and_parameters_are_those_of_torchs_scaler(overflows):
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizers = [build_optimizer(JOB, [parameter]) for parameter in (ours, theirs)]
    scaling = GradientScaling(JOB, "float16", {})
    scaler = torch.amp.GradScaler("cpu", init_scale=JOB.loss_scale)
    scaler.scale(torch.ones(()))  # it makes its scale at the first use
    for overflow in overflows:
        scale = scaling.scalars["loss_scale"]
        for parameter in (ours, theirs):
            parameter.grad = torch.full((3,), float("inf") if overflow else scale)
        skipped = scaling.unscale([ours])
        assert skipped == overflow
        scaling.settle(skipped=skipped)
        if not skipped:
            optimizers[0].step()
        scaler.step(optimizers[1])
        scaler.update()
        assert scaling.scalars["loss_scale"] == scaler.get_scale()
        assert torch.equal(ours, theirs)


def test_other_precisions_know_no_scale():
    scaling = GradientScaling(JOB, "bfloat16", {})
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), float("inf"))
    assert not scaling.unscale([parameter])
    scaling.settle(skipped=False)
    assert scaling.scalars == {}


def test_parameters_of_no_numbers_overflow_nothing():
    parameter = nn.Parameter(torch.ones(0, 3))
    parameter.grad = torch.zeros(0, 3)
    assert not GradientScaling(JOB, "float16", {}).unscale([parameter])


def test_a_checkpoint_goes_on_with_its_scale():
    scaling = GradientScaling(JOB, "float16", {})
    scaling.settle(skipped=True)
    scaling.settle(skipped=False)
    again = GradientScaling(JOB, "float16", scaling.scalars)
    assert again.scalars == scaling.scalars == {"loss_scale": 512.0, "loss_scale_good_steps": 1}


def test_gradients_of_a_scaled_loss_come_out_as_of_the_plain_one(spec_of):
    """Float32, and a power of two as scale: not a bit may differ."""
    spec = spec_of("gpt2")
    found = []
    for scale in (None, 2.0**10):
        executor = StageExecutor(build_units(spec, seed=0), is_last=True, global_batch=3)
        scaling = GradientScaling(TrainJob(steps=1, loss_scale=scale or 1.0), "float16", {})
        scaling.begin([executor])
        tokens = torch.arange(3 * 8).reshape(3, 8)
        executor.forward(Span(0, 3), (), rows_of((tokens,), tokens))
        executor.backward(Span(0, 3), ())
        parameters = executor.named_parameters()
        assert not scaling.unscale(parameters.values())
        found.append({name: parameter.grad for name, parameter in parameters.items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("family", ["gpt2", "resnet"])
def test_autocast_to_float16_runs_in_halves(spec_of, family):
    """F, I and W of two stages; the gradients are near those of float32."""
    spec = spec_of(family)
    near = [_two_stages(spec, dtype) for dtype in ("float32", "float16")]
    for name, gradient in near[0].items():
        if gradient.norm() > 1e-3:
            assert (near[1][name] - gradient).norm() < 0.05 * gradient.norm(), name


def _two_stages(spec, dtype):
    heads, tails = (build_units(spec, indices, seed=0) for indices in (range(2), range(2, unit_count(spec))))
    scale = 2.0**10 if dtype == "float16" else 1.0
    first = StageExecutor(heads, is_last=False, global_batch=4, dtype=dtype)
    last = StageExecutor(tails, is_last=True, global_batch=4, dtype=dtype)
    scaling = GradientScaling(TrainJob(steps=1, loss_scale=scale), "float16", {})
    data, span = open_dataset(spec), Span(0, 4)
    for executor in (first, last):
        scaling.begin([executor])
    rows = rows_of(data.inputs(range(4)), data.labels(range(4)))
    last.forward(span, first.forward(span, (), rows), rows)
    first.backward_input(span, last.backward_input(span, ()))
    last.backward_weight(span)
    first.backward_weight(span)
    named = [*first.named_parameters().items(), *last.named_parameters().items()]
    assert not scaling.unscale([parameter for _, parameter in named])
    return {(position, name): parameter.grad for position, (name, parameter) in enumerate(named)}


@pytest.mark.parametrize("overflow", [False, True])
def test_one_devices_overflow_makes_all_skip(overflow, make_plan, spec_of):
    outcomes: list[StepOutcome] = []
    barrier = StepBarrier(
        plan=make_plan(spec_of("gpt2"), [0, 5], [[1]], [[Span(0, 4)]], "gpipe"),
        job=JOB,
        stop_requested=lambda: False,
        on_step=outcomes.append,
        can_checkpoint=True,
    )
    report = DeviceReport(
        generation=1, step=0, loss_sum=4.0, grad_square=9.0, busy_s=0.1, peak_held_samples=1, overflow=overflow
    )
    verdict = barrier.report("s0r0", report)
    assert verdict.skip_update == outcomes[0].skipped == overflow
    assert outcomes[0].loss == 1.0
