"""Running statistics are state: they have the unsplit model's names, and members of a group hold parts of them."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.errors import ConfigError
from spantrain.models.build import build_units, unit_count, unit_source, whole_model
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.graph import build_graph
from spantrain.models.statistics import BatchStatistics, OneBatchNorm, named_statistics, statistics_parts
from spantrain.models.tensor_parallel.shard import shard_units
from spantrain.models.tracing.model import OWN_FORWARD, WAY
from spantrain.models.units import LABELS, keeps_statistics, loss_of
from testing.models.thread_group import ThreadGroup
from testing.runtime.parts import put

FILE = """
import torch
from torch import nn
from torch.nn import functional


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, hidden):
        return functional.batch_norm(hidden, self.mean, self.variance, training=self.training)


def made(*norms, side=8):
    torch.manual_seed(1)
    sizes = [3, *[6] * len(norms)]
    blocks = [nn.Sequential(nn.Conv2d(a, 6, 3, padding=1), norm, nn.ReLU()) for a, norm in zip(sizes, norms)]
    model = nn.Sequential(*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)))
    return model, (2 * torch.randn(8, 3, side, side) + 1, torch.randint(0, 4, (8,))), functional.cross_entropy


def kinds():
    return made(nn.BatchNorm2d(6), nn.BatchNorm2d(6, momentum=None), nn.BatchNorm2d(6, affine=False, momentum=0.3),
                nn.InstanceNorm2d(6, track_running_stats=True), nn.SyncBatchNorm(6))


def one_frozen():
    model, batch, loss = made(nn.BatchNorm2d(6), nn.BatchNorm2d(6))
    model[1][1].eval()
    return model, batch, loss


def functional_one():
    return made(OwnNorm(), nn.BatchNorm2d(6))


def shared():
    norm = nn.BatchNorm2d(6)
    return made(norm, norm)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, hidden):
        return self.last(self.norm(hidden.view(hidden.shape[0], 6, -1).permute(0, 2, 1)).tanh().mean(dim=1))


def tokens():
    model, batch, loss = made(nn.BatchNorm2d(6), nn.BatchNorm2d(6))
    return nn.Sequential(*model[:1], model[1][:2], Tokens()).eval(), batch, loss


def small():
    return made(nn.BatchNorm2d(6), nn.BatchNorm2d(6), side=1)
"""


@pytest.fixture
def spec_of(tmp_path):
    path = tmp_path / "norms.py"
    path.write_text(FILE)
    return lambda name: resolve_model(f"{path}:{name}")


@pytest.mark.parametrize("family", ["resnet", "efficientnet"])
def test_names_are_the_unsplit_models(family, small_spec):
    spec = small_spec(family)
    buffers = dict(whole_model(spec, seed=0).module.named_buffers())
    found = named_statistics(build_units(spec, seed=0))
    assert found.keys() == {name for name in buffers if not name.endswith("position_ids")}
    assert all(tensor.shape == buffers[name].shape for name, tensor in found.items())


@pytest.mark.parametrize("family", ["resnet", "efficientnet"])
def test_members_hold_parts_of_what_they_divide(family, small_spec):
    spec = small_spec(family)
    whole = named_statistics(build_units(spec, seed=0))
    values = {name: torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in whole.items()}
    found = {name: torch.zeros_like(value) for name, value in values.items()}
    divided = 0
    for rank, group in enumerate(ThreadGroup.together(2)):
        units = build_units(spec, range(unit_count(spec)), seed=0)
        for name, tensor in named_statistics(units).items():
            tensor.copy_(values[name])
        shard_units(units, (1.0, 2.0), rank, group)
        parts = statistics_parts(units)
        held = named_statistics(units)
        assert parts.keys() == held.keys() == whole.keys()
        for name, tensor in held.items():
            put(found[name], parts[name], tensor)
        divided += sum(not part.is_whole for part in parts.values())
    assert divided
    assert all(torch.equal(found[name], value) for name, value in values.items() if value.dim())


@pytest.mark.parametrize("order", ["FB", "FIW"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("way", [{}, {WAY: OWN_FORWARD}], ids=["tape", "own forward"])
def test_all_kinds_of_normalizations_train_as_in_plain_pytorch(way, order, recompute, spec_of):
    """Two stages, spans of unlike sizes in an order of their own; evaluation in between goes by running statistics."""
    spec = spec_of("kinds")
    spec = replace(spec, config={**spec.config, **way})
    model, batch = unit_source(spec).unsplit(seed=0)
    inputs, labels = batch.inputs[0], batch.labels
    spans = (Span(0, 3), Span(3, 5), Span(5, 8))
    units = build_units(spec, seed=0)
    edges = (0, len(units) // 2, len(units))
    stages = [
        StageExecutor(
            units[lo:hi],
            is_last=hi == edges[-1],
            global_batch=8,
            statistics=BatchStatistics(units[lo:hi]),
            recompute=(0,) * recompute,
        )
        for lo, hi in pairwise(edges)
    ]
    model.train()
    for span in spans:
        loss = functional.cross_entropy(model(inputs[span.lo : span.hi]), labels[span.lo : span.hi])
        (loss * span.size / 8).backward()
    sent = {}
    for span in (spans[1], spans[0], spans[2]):
        rows = {0: inputs[span.lo : span.hi], LABELS: labels[span.lo : span.hi]}
        sent[span] = stages[0].forward(span, (), {0: rows[0]})
        stages[1].forward(span, sent[span], {LABELS: rows[LABELS]})
        stages[1].evaluate(span, sent[span], {LABELS: rows[LABELS]})
    for span in spans:
        gradients: tuple[torch.Tensor, ...] = ()
        for stage in reversed(stages):
            gradients = (stage.backward if order == "FB" else stage.backward_input)(span, gradients)
    for span in spans if order == "FIW" else ():
        for stage in stages:
            stage.backward_weight(span)
    for stage in stages:
        stage.statistics.commit(spans, lambda _sums: None, leads=True)
        for name, parameter in stage.named_parameters().items():
            assert torch.allclose(parameter.grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6), name
    found = named_statistics(units)
    assert found.keys() == dict(model.named_buffers()).keys()
    for name, tensor in found.items():
        assert torch.allclose(tensor, model.get_buffer(name), rtol=1e-5, atol=1e-6), name
    model.eval()
    whole = Span(0, len(inputs))
    with torch.no_grad():
        want = functional.cross_entropy(model(inputs), labels, reduction="sum")
        (got,) = stages[1].evaluate(whole, stages[0].evaluate(whole, (), {0: inputs}), {LABELS: labels})
    assert torch.allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("way", [{}, {WAY: OWN_FORWARD}], ids=["tape", "own forward"])
def test_a_gradient_of_one_sample_is_read_in_its_order(way, spec_of):
    """Behind a normalization with its channels last, torch 2.13 itself computes other gradients of one than of two."""
    spec = spec_of("tokens")
    units = build_units(replace(spec, config={**spec.config, **way}), seed=0)
    rows = unit_source(spec).batch().rows
    found = []
    for spans in ([Span(0, 8)], [Span(row, row + 1) for row in range(8)]):
        for unit in units:
            unit.zero_grad()
        for span in spans:
            loss_of(units, {number: tensor[span.lo : span.hi] for number, tensor in rows.items()}).backward()
        found.append([parameter.grad.clone() for unit in units for parameter in unit.parameters()])
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(*found, strict=True))


def test_lines_say_what_statistics_are_taken(spec_of):
    def line(name: str, batch_norm: str) -> str:
        return TrainJob(steps=1, batch_norm=batch_norm).about_statistics(spec_of(name), graphs[name])

    graphs = {name: build_graph(spec_of(name)) for name in ("one_frozen", "functional_one", "shared", "kinds")}
    assert "each micro-batch's, of the samples that a device runs at once, in 1 module (0.1)" in line(
        "one_frozen", "auto"
    )
    assert line("one_frozen", "frozen") == (
        "batch statistics are frozen, at what the model begins with, in 1 module (0.1)"
    )
    assert graphs["one_frozen"].left_out == ()
    assert "in 5 modules (0.1 and 4 more)" in line("kinds", "micro-batch")
    assert "SyncBatchNorm is BatchNorm in 1 modules" in graphs["kinds"].left_out[0]
    (frozen,) = graphs["functional_one"].left_out
    assert "batch statistics are frozen" in frozen
    assert "0.1 (OwnNorm)" in frozen
    assert "in 1 module (1.1)" in line("functional_one", "auto")
    with pytest.raises(ConfigError, match=r"0\.1 is used by two units"):
        line("shared", "auto")
    assert "frozen" in line("shared", "frozen")
    catalogue = resolve_model("resnet-tiny")
    assert "frozen" in TrainJob(steps=1).about_statistics(catalogue, build_graph(catalogue))
    assert "of the samples on all replicas of a stage together, in 5 modules" in line("kinds", "replicas")
    with pytest.raises(ValueError, match=r"batch_norm replicas needs steps one after the other"):
        TrainJob(steps=1, batch_norm="replicas", staleness=1)


def test_one_sample_of_one_number_is_refused_by_name(spec_of):
    units = build_units(spec_of("small"), seed=0)
    executor = StageExecutor(units, is_last=True, global_batch=4, statistics=BatchStatistics(units))
    rows = {0: torch.randn(4, 3, 1, 1), LABELS: torch.zeros(4, dtype=torch.int64)}
    executor.forward(Span(0, 3), (), {key: tensor[:3] for key, tensor in rows.items()})
    with pytest.raises(
        ConfigError, match=r"samples \[3:4\].*0\.1.*larger --global-batch, say, or give --batch-norm frozen"
    ):
        executor.forward(Span(3, 4), (), {key: tensor[3:] for key, tensor in rows.items()})
    assert not any(module.training for module in executor.units[0].modules() if keeps_statistics(module))


def test_shapes_that_are_taken():
    norm = nn.SyncBatchNorm(4)
    norm.__class__ = OneBatchNorm
    assert norm(torch.randn(3, 4, 2, 2, 2)).shape == (3, 4, 2, 2, 2)
    with pytest.raises(ValueError, match="at least 2D"):
        norm(torch.randn(4))
    assert not BatchStatistics(())
