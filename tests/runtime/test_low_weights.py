"""Weights of 16 bits that are computed with: as many bytes as that, and what one device computes with them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.formats.precision import LOW_WEIGHTS
from spantrain.formats.registry import WireFormat
from spantrain.models.build import build_units, unit_count
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.dataset import open_dataset
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.graph import build_graph
from spantrain.models.low_weights import full_weight
from spantrain.models.tracing.source import load_model
from testing.models.rows import rows_of
from testing.models.zoo.trial import FOLDER
from testing.runtime.sessions import train_in_threads

THIRDS = [Span(0, 2), Span(2, 4), Span(4, 6)]
JOB = TrainJob(steps=6, seed=5, learning_rate=0.01, warmup_steps=2, max_grad_norm=0.5, adapter="off")


def executed(spec, dtype: str = LOW_WEIGHTS, *, halves: bool = False, spans: Sequence[Span] = THIRDS) -> StageExecutor:
    executor = StageExecutor(build_units(spec, seed=0), is_last=True, global_batch=6, dtype=dtype)
    data = open_dataset(spec)
    for span in spans:
        rows = rows_of(data.inputs(range(span.lo, span.hi)), data.labels(range(span.lo, span.hi)))
        executor.forward(span, (), rows)
        if halves:
            executor.backward_input(span, ())
            executor.backward_weight(span)
        else:
            executor.backward(span, ())
    return executor


def distance(found: StageExecutor, wanted: StageExecutor) -> float:
    """How far gradients are from others, over these."""
    pairs = [(found.named_parameters()[name].grad, own.grad) for name, own in wanted.named_parameters().items()]
    off = torch.cat([(one - other).flatten() for one, other in pairs]).norm()
    return float(off / torch.cat([other.flatten() for _, other in pairs]).norm())


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "resnet"])
def test_gradients_are_summed_in_float32_and_as_near_to_those_of_float32_as_autocasts(family, halves, spec_of) -> None:
    """Weights are rounded once in either case; what goes from layer to layer is rounded besides."""
    spec = spec_of(family)
    found, exact = executed(spec, halves=halves), executed(spec, "float32")
    parameters = found.named_parameters().values()
    assert {one.dtype for own in parameters for one in (own, own.grad)} == {torch.float32}
    assert distance(found, exact) < 2 * distance(executed(spec, "bfloat16"), exact)


def test_what_is_computed_with_is_rounded_anew_before_each_step(spec_of) -> None:
    executor = executed(spec_of("gpt2"), spans=())
    with torch.no_grad():
        for own in executor.named_parameters().values():
            own.add_(1.0)
    executor.low_weights.refresh()
    for copy in executor.low_weights.copies:
        assert copy.dtype is torch.bfloat16
        assert torch.equal(copy.detach(), full_weight(copy).detach().bfloat16())


def test_units_that_stay_keep_their_float32_weights(spec_of) -> None:
    units = build_units(spec_of("gpt2"), seed=0)
    first = StageExecutor(units, is_last=True, global_batch=6, dtype=LOW_WEIGHTS).named_parameters()
    again = StageExecutor(units, is_last=True, global_batch=6, dtype=LOW_WEIGHTS).named_parameters()
    assert first.keys() == again.keys()
    assert all(first[name] is again[name] for name in first)


def test_a_parameter_that_two_units_share_stays_one(spec_of) -> None:
    executor = StageExecutor(build_units(spec_of("gpt2"), seed=0), is_last=True, global_batch=6, dtype=LOW_WEIGHTS)
    assert len(executor.low_weights.copies) == sum(".ln_" not in name for name in executor.named_parameters())
    plain = StageExecutor(build_units(spec_of("gpt2"), seed=0), is_last=True, global_batch=6)
    assert plain.low_weights.copies == ()


@pytest.mark.parametrize(
    "name", ["decoders.llama", "encoders.deberta_v2", "pairs.t5", "pairs.whisper", "pictures.detr", "plain.lstm"]
)
def test_models_as_people_bring_them_compute_what_they_do_under_autocast(name) -> None:
    family, _, function = name.partition(".")
    spec, losses = resolve_model(f"{FOLDER / family}.py:{function}"), []
    batch = load_model(spec, seed=0).batch
    for dtype in ("bfloat16", LOW_WEIGHTS):
        executor = StageExecutor(build_units(spec, seed=0), is_last=True, global_batch=4, dtype=dtype)
        rows = {number: batch.rows[number][:4] for number in executor.reads}
        losses.append(float(executor.forward(Span(0, 4), (), rows)[0]))
        executor.backward(Span(0, 4), ())
        gradients = [own.grad for own in executor.named_parameters().values() if own.grad is not None]
        assert gradients
        assert all(one.dtype is torch.float32 and one.isfinite().all() for one in gradients)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_less_is_held_and_less_crosses_cuts(spec_of) -> None:
    spec = spec_of("gpt2")
    plain, low, lower = (build_graph(spec, dtype=dtype) for dtype in ("float32", "bfloat16", LOW_WEIGHTS))
    for mine, cast, full in zip(lower.units, low.units, plain.units, strict=True):
        assert (mine.parameter_bytes, mine.frozen_bytes) == (full.parameter_bytes, full.frozen_bytes)
        assert mine.activation_bytes_per_sample <= cast.activation_bytes_per_sample
    block, cast = lower.units[1], low.units[1]
    assert block.forward_bytes(WireFormat.NATIVE) == cast.forward_bytes(WireFormat.NATIVE) / 2
    assert block.activation_bytes_per_sample < cast.activation_bytes_per_sample


def in_low_weights(plan: Plan) -> Plan:
    return replace(plan, dtype=LOW_WEIGHTS)


def test_any_devices_train_as_one_does_and_plans_may_change(make_plan, spec_of) -> None:
    """Sums of gradients come in other orders, and weights are rounded to 8 bits: no more than that apart."""
    spec = spec_of("gpt2")
    alone = in_low_weights(make_plan(spec, [0, 5], [[1]], [THIRDS], "1f1b"))
    several = in_low_weights(make_plan(spec, [0, 2, 5], [[2, 1], [1, 1]], [THIRDS] * 2, "zb-h1"))
    moved = in_low_weights(make_plan(spec, [0, 3, 5], [[2, 1], [1, 1]], [THIRDS] * 2, "1f1b"))
    wanted = train_in_threads(alone, JOB).losses
    for changes in ({}, {2: replace(moved, generation=2)}):
        found = train_in_threads(several, JOB, changes)
        assert found.losses == pytest.approx(wanted, abs=5e-3)
    assert wanted[-1] < wanted[0]
    assert unit_count(spec) == 5
