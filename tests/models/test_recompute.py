"""Units that are run again in the backward pass: the same gradients, fewer bytes held."""

import gc
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.test_stage import (
    VOCABULARY,
    WIDTH,
    Pipeline,
    assert_same_gradients,
    cut_into_stages,
    gradients_of,
    real_case,
    single_process,
    tied_names,
    toy_batch,
    toy_units,
)
from spantrain.core.shares import ALONE
from spantrain.core.span import Span
from spantrain.core.units import UnitGraph
from spantrain.models.build import build_units, unit_count
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.graph import build_graph
from spantrain.models.units import UnitModule
from testing.models.rows import rows_of


class Recomputing(Pipeline):
    """Stages of which some units, by index in the model, are recomputed."""

    def __init__(self, stages, batch, span_size, recompute) -> None:
        super().__init__(stages, batch, span_size)
        samples, last = self.labels.shape[0], len(stages) - 1
        starts = [0, *itertools.accumulate(map(len, stages))]
        self.stages = [
            StageExecutor(
                units,
                is_last=index == last,
                global_batch=samples,
                recompute=[unit - start for unit in sorted(recompute) if start <= unit < start + len(units)],
            )
            for index, (units, start) in enumerate(zip(stages, starts, strict=False))
        ]


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 6), max_size=3),
    recompute=st.sets(st.integers(0, 6), min_size=1),
    span_size=st.integers(1, 6),
    order=st.integers(0, 2**16),
    fused=st.booleans(),
)
def test_any_units_recomputed_give_the_single_process_gradients(cuts, recompute, span_size, order, fused) -> None:
    torch.set_num_threads(1)
    reference, batch = toy_units(), toy_batch(6)
    loss = single_process(reference, *batch)
    stages = [list(stage) for stage in cut_into_stages(toy_units(), cuts)]
    if len(stages) > 1:
        stages[-1][-1].out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        with torch.no_grad():
            stages[-1][-1].out.weight.copy_(reference[-1].out.weight)
    pipeline = Recomputing(stages, batch, span_size, recompute)
    pipeline.run_all(random.Random(order), fused=fused)
    assert pipeline.loss == pytest.approx(loss, rel=1e-5)
    assert all(executor.held_samples == 0 for executor in pipeline.stages)
    whole = StageExecutor(reference, is_last=True, global_batch=6)
    assert_same_gradients(pipeline.gradient_by_name(), gradients_of([whole], tied_names(reference)))


@pytest.mark.parametrize("model", ["gpt2-tiny", "bert-small-tiny", "resnet-tiny", "efficientnet-tiny"])
def test_real_models_recompute_every_second_unit_exactly(model) -> None:
    torch.set_num_threads(1)
    spec, batch, loss, wanted = real_case(model)
    count = unit_count(spec)
    bounds = [0, count // 3, 2 * count // 3, count]
    stages = [build_units(spec, range(lo, hi), seed=5) for lo, hi in itertools.pairwise(bounds)]
    pipeline = Recomputing(stages, batch, 2, set(range(0, count, 2)))
    pipeline.run_all(random.Random(0))
    assert pipeline.loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(pipeline.gradient_by_name(), wanted)


def test_bfloat16_recomputes_to_the_same_gradients() -> None:
    spec, (inputs, labels), _, _ = real_case("gpt2-tiny")
    found = []
    for recompute in ((), (0, 2, 3, 13)):
        executor = StageExecutor(
            build_units(spec, seed=5), is_last=True, global_batch=4, dtype="bfloat16", recompute=recompute
        )
        executor.forward(Span(0, 4), (), rows_of((inputs,), labels))
        executor.backward_input(Span(0, 4), ())
        executor.backward_weight(Span(0, 4))
        found.append(gradients_of([executor], {}))
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient), name


class Alive(TorchDispatchMode):
    """Notes every storage that any operation makes: what the meter is checked by."""

    def __init__(self, besides: list[UnitModule]) -> None:
        super().__init__()
        self.seen = {}
        self.own = {t.untyped_storage().data_ptr() for u in besides for t in (*u.parameters(), *u.buffers())}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def bytes(self) -> int:
        gc.collect()
        return sum(n for address, (ref, n) in self.seen.items() if address not in self.own and not ref.expired())


def middle_of(model: str, recompute: tuple[int, ...]) -> tuple[StageExecutor, list[UnitModule]]:
    """Units 3 to 6 of a model as a stage, some of them recomputed."""
    modules = build_units(resolve_model(model), range(3, 7), seed=5)
    again = [unit - 3 for unit in recompute]
    return StageExecutor(modules, is_last=False, global_batch=8, recompute=again), modules


def random_cut(graph: UnitGraph, behind: int) -> tuple[Tensor, ...]:
    """Two samples of what crosses the cut behind a unit."""
    return tuple(torch.randn(2, *tensor.shape_per_sample) for tensor in graph.units[behind].outputs)


@pytest.mark.parametrize("recompute", [(), (4, 5), (3, 6), (3, 4, 5, 6)])
@pytest.mark.parametrize("model", ["gpt2-tiny", "bert-small-tiny", "resnet-tiny", "efficientnet-tiny"])
def test_held_bytes_are_what_is_alive_and_what_the_graph_says(model, recompute) -> None:
    torch.set_num_threads(1)
    executor, modules = middle_of(model, recompute)
    graph, units = build_graph(resolve_model(model)), range(3, 7)
    with Alive(modules) as alive:
        executor.forward(Span(0, 2), random_cut(graph, 2), {})
        held = alive.bytes()
        assert held == pytest.approx(2 * graph.stage_held_bytes(units, ALONE, recompute), rel=0.01)
        # An output that no unit holds is a message to be sent, and nobody sends it here.
        message = 2 * graph.units[6].cut_bytes_per_sample if 6 in recompute else 0
        assert executor.meter.peak_bytes == pytest.approx(held + message, rel=0.01)
        executor.backward_input(Span(0, 2), random_cut(graph, 6))
        done = [parameter.grad for parameter in executor.named_parameters().values() if parameter.grad is not None]
        left = alive.bytes() - sum(gradient.nbytes for gradient in done)
        assert left == pytest.approx(2 * graph.stage_deferred_bytes(units, ALONE, recompute), rel=0.01)
    executor.backward_weight(Span(0, 2))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("recompute", [(3, 4, 5, 6), (3, 6), (4, 5), (3,), (6,)])
@pytest.mark.parametrize("model", ["gpt2-tiny", "resnet-tiny", "efficientnet-tiny"])
def test_the_peak_has_a_recomputed_unit_besides(model, recompute, fused) -> None:
    torch.set_num_threads(1)
    executor, _ = middle_of(model, recompute)
    graph, units = build_graph(resolve_model(model)), range(3, 7)
    for span in (Span(0, 2), Span(2, 4)):
        executor.forward(span, random_cut(graph, 2), {})
    (executor.backward if fused else executor.backward_input)(Span(0, 2), random_cut(graph, 6))
    held = graph.stage_held_bytes(units, ALONE, recompute)
    again = graph.stage_again_bytes(units, ALONE, recompute, splits=not fused)
    carried = graph.units[2].gradient_bytes_per_sample + graph.units[6].gradient_bytes_per_sample
    made = graph.units[6].cut_bytes_per_sample * (6 in recompute)
    left = 0 if fused else graph.stage_deferred_bytes(units, ALONE, recompute)
    # Behind F; while units are run again; behind the backward pass of one of the two spans.
    most = 2 * max(2 * held + made, 2 * held + again + carried, held + left + carried)
    assert executor.meter.peak_bytes == pytest.approx(most, rel=0.01)
    if recompute == (3, 4, 5, 6):
        assert executor.meter.peak_bytes < 0.7 * 4 * graph.stage_held_bytes(units)


def test_work_is_left_for_w_by_units_that_are_held_only() -> None:
    executor = StageExecutor(toy_units()[1:4], is_last=False, global_batch=2, recompute=(1,))
    outputs = executor.forward(Span(0, 2), (torch.randn(2, 5, WIDTH),), {})
    executor.backward_input(Span(0, 2), tuple(torch.ones_like(output) for output in outputs))
    went = {name for name, parameter in executor.named_parameters().items() if parameter.grad is not None}
    left = {name for name in executor.named_parameters() if name not in went}
    assert left == {f"{unit}.layer.1.{kind}" for unit in "ab" for kind in ("weight", "bias")}
    executor.backward_weight(Span(0, 2))
    assert all(parameter.grad is not None for parameter in executor.named_parameters().values())
