"""A stage's actions in any allowed order give the gradients of the unsplit model."""

import functools
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from spantrain.core.span import Span, equal_spans
from spantrain.errors import ProtocolError, ScheduleError
from spantrain.models.build import build_units, example_rows, unit_count
from spantrain.models.catalog.catalog import is_text, resolve_model
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.units import LABELS, UnitModule, parameter_names, tie_parameters
from testing.models.rows import rows_of

VOCABULARY, WIDTH, TOKENS = 11, 8, 5


class Embed(UnitModule):
    """Tokens to vectors; sends the tokens on too (an integer tensor that crosses cuts)."""

    def __init__(self, name: str) -> None:
        super().__init__(name, prefixes={"table": f"{name}.table"}, shared={"table": "table.weight"})
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.reads = (0,)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return self.table(tokens), tokens


class Dense(UnitModule):
    def __init__(self, name: str) -> None:
        super().__init__(name, prefixes={"layer": f"{name}.layer"})
        self.layer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, hidden: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return hidden + self.layer(hidden), *others


class Fork(UnitModule):
    """Opens a skip connection: two tensors with gradients cross the cut behind it, one of them a view."""

    def __init__(self, name: str) -> None:
        super().__init__(name, prefixes={"conv": f"{name}.conv"})
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, hidden: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return self.conv(hidden.transpose(1, 2)).transpose(1, 2), hidden, *others


class Join(UnitModule):
    def __init__(self, name: str) -> None:
        super().__init__(name, prefixes={"gate": f"{name}.gate"})
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, skipped: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return torch.tanh(self.gate(hidden)) + skipped, *others


class Head(UnitModule):
    """Output layer tied to the embedding, and the loss."""

    def __init__(self, name: str) -> None:
        super().__init__(name, prefixes={"out": f"{name}.out"}, shared={"table": "out.weight"})
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.reads = (LABELS,)

    def forward(self, hidden: Tensor, tokens: Tensor, labels: Tensor) -> Tensor:
        weight = 1 + 0.1 * tokens.float().mean(dim=1)
        losses = functional.cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten(), reduction="none")
        return (losses.reshape(labels.shape).mean(dim=1) * weight).sum()


def toy_units() -> list[UnitModule]:
    """Embedding, blocks, a skip connection over one unit, head; the same weights each time, embeddings tied."""
    torch.manual_seed(0)
    units = [Embed("embed"), Dense("a"), Fork("fork"), Dense("b"), Join("join"), Dense("c"), Head("head")]
    tie_parameters(units)
    return units


def toy_batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (samples, TOKENS), generator=generator)
    return tokens, torch.randint(0, VOCABULARY, (samples, TOKENS), generator=generator)


def single_process(units: list[UnitModule], inputs: Tensor, labels: Tensor) -> float:
    """Run the unsplit model; leave gradients in its parameters."""
    tensors: tuple[Tensor, ...] = (inputs,)
    for unit in units[:-1]:
        tensors = unit(*tensors)
    loss = units[-1](*tensors, labels) / labels.shape[0]
    loss.backward()
    return loss.item()


class Pipeline:
    """Stages in one process; runs any action whose needs are met, and keeps what stages send each other."""

    def __init__(self, stages: list[list[UnitModule]], batch: tuple[Tensor, Tensor], span_size: int) -> None:
        self.inputs, self.labels = batch
        samples = self.labels.shape[0]
        last = len(stages) - 1
        self.tied_names = tied_names([unit for units in stages for unit in units])
        self.stages = [
            StageExecutor(units, is_last=index == last, global_batch=samples) for index, units in enumerate(stages)
        ]
        self.spans = equal_spans(samples, span_size)
        self.activations: dict[tuple[int, Span], tuple[Tensor, ...]] = {}
        self.gradients: dict[tuple[int, Span], tuple[Tensor, ...]] = {}
        self.done: set[tuple[int, str, Span]] = set()
        self.loss = 0.0

    def ready(self, fused: bool) -> list[tuple[int, str, Span]]:
        found = []
        for stage in range(len(self.stages)):
            for span in self.spans:
                found += [(stage, op, span) for op in ("FB" if fused else "FIW") if self._may_run(stage, op, span)]
        return found

    def _may_run(self, stage: int, op: str, span: Span) -> bool:
        if (stage, op, span) in self.done:
            return False
        if op == "F":
            return stage == 0 or (stage - 1, "F", span) in self.done
        if op == "W":
            return (stage, "I", span) in self.done
        last = stage == len(self.stages) - 1
        return (stage, "F", span) in self.done and (last or (stage + 1, op, span) in self.done)

    def run(self, stage: int, op: str, span: Span) -> None:
        executor, last = self.stages[stage], stage == len(self.stages) - 1
        if op == "F":
            received = () if stage == 0 else self.activations[stage - 1, span]
            outputs = executor.forward(span, received, rows_of((self.inputs,), self.labels, span))
            assert not any(output.requires_grad for output in outputs)
            self.activations[stage, span] = outputs
            self.loss += outputs[0].item() / self.labels.shape[0] if last else 0.0
        elif op == "W":
            executor.backward_weight(span)
        else:
            gradients = () if last else self.gradients[stage + 1, span]
            run = executor.backward if op == "B" else executor.backward_input
            self.gradients[stage, span] = run(span, gradients)
        self.done.add((stage, op, span))

    def run_all(self, chooser: random.Random, *, fused: bool = False) -> None:
        while choices := self.ready(fused):
            self.run(*chooser.choice(choices))

    def gradient_by_name(self) -> dict[str, Tensor]:
        return gradients_of(self.stages, self.tied_names)


def tied_names(units: list[UnitModule]) -> dict[str, str]:
    """Full name of each member of a group of shared parameters -> one name for all of the group."""
    return {parameter_names(unit)[local]: group for unit in units for group, local in unit.shared.items()}


def gradients_of(stages: list[StageExecutor], tied: dict[str, str]) -> dict[str, Tensor]:
    """Return gradients by name, those of a tied parameter's copies summed over stages."""
    found: dict[str, Tensor] = {}
    for executor in stages:
        for full, parameter in executor.named_parameters().items():
            name = tied.get(full, full)
            found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found


def cut_into_stages(units: list[UnitModule], cuts: list[int]) -> list[list[UnitModule]]:
    bounds = [0, *sorted(set(cuts)), len(units)]
    return [units[lo:hi] for lo, hi in itertools.pairwise(bounds)]


def assert_same_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Compare to 1e-5; a gradient that is zero but for rounding (a key's bias) has the largest as its measure."""
    assert found.keys() == wanted.keys()
    floor = 1e-4 * max(gradient.norm() for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm().clamp(min=floor), name


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 6), max_size=4),
    span_size=st.integers(1, 6),
    order=st.integers(0, 2**16),
    fused=st.booleans(),
)
def test_random_cuts_spans_and_orders_give_the_single_process_gradients(cuts, span_size, order, fused) -> None:
    torch.set_num_threads(1)
    reference, batch = toy_units(), toy_batch(6)
    loss = single_process(reference, *batch)
    stages = [list(stage) for stage in cut_into_stages(toy_units(), cuts)]
    if len(stages) > 1:
        stages[-1][-1].out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        with torch.no_grad():
            stages[-1][-1].out.weight.copy_(reference[-1].out.weight)
    pipeline = Pipeline(stages, batch, span_size)
    pipeline.run_all(random.Random(order), fused=fused)
    assert pipeline.loss == pytest.approx(loss, rel=1e-5)
    assert all(executor.held_samples == 0 for executor in pipeline.stages)
    whole = StageExecutor(reference, is_last=True, global_batch=6)
    assert_same_gradients(pipeline.gradient_by_name(), gradients_of([whole], tied_names(reference)))


@functools.cache
def real_case(model: str):
    spec = resolve_model(model)
    generator = torch.Generator().manual_seed(2)
    if is_text(spec):
        inputs = torch.randint(0, 256, (4, spec.sequence_length), generator=generator)
        labels = torch.randint(0, 256, (4, spec.sequence_length), generator=generator)
    else:
        inputs, labels = torch.randn(4, 3, 32, 32, generator=generator), example_rows(spec, 4)[LABELS] + 3
    reference = build_units(spec, seed=5)
    loss = single_process(reference, inputs, labels)
    executor = StageExecutor(reference, is_last=True, global_batch=4)
    return spec, (inputs, labels), loss, gradients_of([executor], tied_names(reference))


@pytest.mark.parametrize("model", ["gpt2-tiny", "bert-small-tiny", "resnet-tiny", "efficientnet-tiny"])
def test_real_models_split_into_halves_exactly(model, caplog) -> None:
    torch.set_num_threads(1)
    spec, batch, loss, wanted = real_case(model)
    count = unit_count(spec)
    bounds = [0, count // 3, 2 * count // 3, count]
    stages = [build_units(spec, range(lo, hi), seed=5) for lo, hi in itertools.pairwise(bounds)]
    pipeline = Pipeline(stages, batch, 2)
    pipeline.run_all(random.Random(0))
    assert not caplog.records, "a stage could not be split"
    assert pipeline.loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(pipeline.gradient_by_name(), wanted)


def middle_stage() -> tuple[StageExecutor, Tensor]:
    return StageExecutor(toy_units()[1:2], is_last=False, global_batch=4), torch.randn(2, TOKENS, WIDTH)


def test_samples_are_in_flight_until_w() -> None:
    executor, hidden = middle_stage()
    (output,) = executor.forward(Span(0, 2), (hidden,), {})
    executor.forward(Span(2, 4), (hidden,), {})
    assert executor.held_samples == 4
    executor.backward_input(Span(0, 2), (torch.ones_like(output),))
    assert executor.held_samples == 4
    executor.backward_weight(Span(0, 2))
    assert executor.held_samples == 2
    executor.backward(Span(2, 4), (torch.ones_like(output),))
    assert executor.held_samples == 0


def test_discard_forgets_and_the_same_samples_can_come_again() -> None:
    executor, hidden = middle_stage()
    executor.forward(Span(0, 2), (hidden,), {})
    executor.discard()
    assert executor.held_samples == 0
    executor.forward(Span(0, 2), (hidden,), {})


def test_evaluate_holds_nothing_and_agrees_with_forward() -> None:
    executor, hidden = middle_stage()
    (evaluated,) = executor.evaluate(Span(0, len(hidden)), (hidden,), {})
    assert executor.held_samples == 0
    assert torch.equal(evaluated, executor.forward(Span(0, 2), (hidden,), {})[0])


def test_first_stage_sends_no_gradient_and_does_its_backward_at_w() -> None:
    executor = StageExecutor(toy_units()[:2], is_last=False, global_batch=2)
    hidden, tokens = executor.forward(Span(0, 2), (), {0: toy_batch(2)[0]})
    assert tokens.dtype == torch.int64
    assert executor.backward_input(Span(0, 2), (torch.ones_like(hidden),)) == ()
    assert all(parameter.grad is None for parameter in executor.named_parameters().values())
    executor.backward_weight(Span(0, 2))
    assert all(parameter.grad is not None for parameter in executor.named_parameters().values())


def test_bfloat16_autocast_keeps_float32_parameters_loss_and_gradients() -> None:
    units = toy_units()
    executor = StageExecutor(units[4:], is_last=True, global_batch=2, dtype="bfloat16")
    tokens, labels = toy_batch(2)
    hidden = torch.randn(2, TOKENS, WIDTH)
    (loss_sum,) = executor.forward(Span(0, 2), (hidden, hidden.bfloat16(), tokens), {LABELS: labels})
    assert loss_sum.dtype == torch.float32
    gradients = executor.backward_input(Span(0, 2), ())
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.bfloat16]
    executor.backward_weight(Span(0, 2))
    assert {parameter.grad.dtype for parameter in executor.named_parameters().values()} == {torch.float32}


@pytest.mark.parametrize("order", ["W0", "I0", "B0", "F0 W0", "F0 F0", "F0 I0 I0", "F0 I0 B0", "F0 I0 W0 W0"])
def test_work_out_of_order_is_refused(order: str) -> None:
    executor, hidden = middle_stage()
    gradients = (torch.ones_like(hidden),)
    actions = {
        "F0": lambda: executor.forward(Span(0, 2), (hidden,), {}),
        "I0": lambda: executor.backward_input(Span(0, 2), gradients),
        "W0": lambda: executor.backward_weight(Span(0, 2)),
        "B0": lambda: executor.backward(Span(0, 2), gradients),
    }
    *before, last = order.split()
    for word in before:
        actions[word]()
    with pytest.raises(ScheduleError, match=rf"{last[0]}\[0:2\]"):
        actions[last]()


def test_tensors_of_wrong_shape_are_refused() -> None:
    executor, hidden = middle_stage()
    with pytest.raises(ProtocolError, match="3 rows"):
        executor.forward(Span(0, 3), (hidden,), {})
    executor.forward(Span(0, 2), (hidden,), {})
    with pytest.raises(ProtocolError, match="wanted 1"):
        executor.backward_input(Span(0, 2), ())
    with pytest.raises(ProtocolError, match="output gradient"):
        executor.backward_input(Span(0, 2), (hidden[:, :1],))
