"""What operations need besides while they run: of units alone, and in what a plan needs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from spantrain.core.shares import ALONE, shares_of
from spantrain.models.execution.measure import working_bytes
from spantrain.models.graph import build_graph
from spantrain.models.units import Rows, UnitModule

WIDTH = 64


class Alone(UnitModule):
    def __init__(self, body: nn.Module) -> None:
        super().__init__("alone", prefixes={"body": ""})
        self.body = body

    def forward(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (self.body(tensor),)


class Passing(nn.Module):
    """Makes a tensor eight times as large as its input, which nobody needs afterwards."""

    def forward(self, tensor: Tensor) -> Tensor:
        return tensor.repeat(1, 8).sum(1, keepdim=True).expand_as(tensor) + tensor


def needed(module: nn.Module, samples: int) -> int:
    def batch() -> tuple[tuple[Tensor, ...], Rows]:
        return (torch.zeros(samples, WIDTH, requires_grad=True),), {}

    return working_bytes(Alone(module), batch, None, ends_model=False)


def test_a_tensor_that_passes_is_needed_while_it_does() -> None:
    row = 4 * WIDTH
    assert needed(Passing(), 30) == pytest.approx(30 * 8 * row, rel=0.2)
    assert needed(nn.Identity(), 30) <= 2 * 30 * row


def test_a_new_gradient_of_weights_is_needed_however_few_the_samples() -> None:
    few, many = (needed(nn.Linear(WIDTH, WIDTH, bias=False), samples) for samples in (1, 3))
    assert few == pytest.approx(4 * WIDTH * WIDTH, rel=0.1)
    assert many - few <= 2 * 4 * 4 * WIDTH


def test_the_loss_over_many_classes_needs_more_than_is_held_of_it(small_spec) -> None:
    graph = build_graph(small_spec("gpt2"))
    block, head = graph.units[1], graph.units[-1]
    assert head.working_bytes_per_sample > head.activation_bytes_per_sample
    assert block.working_bytes_per_sample < block.activation_bytes_per_sample
    every = range(len(graph.units))
    assert graph.stage_working_bytes(every)[0] == head.working_bytes_per_sample
    assert graph.stage_working_bytes(every[:-1])[0] < head.working_bytes_per_sample
    (share, _) = shares_of((1.0, 1.0))
    assert graph.stage_working_bytes(every, share)[0] < graph.stage_working_bytes(every, ALONE)[0]
    unknown = replace(
        graph, units=tuple(replace(one, working_bytes_per_sample=0, working_bytes=0) for one in graph.units)
    )
    assert unknown.stage_working_bytes(every) == (0, 0)
