"""What a member of a tensor-parallel group holds for a sample, measured, is what the unit graph says of its share."""

from functools import partial

import pytest
import torch
from torch import Tensor

from spantrain.core.units import UnitGraph
from spantrain.models.build import build_units, example_inputs, example_labels
from spantrain.models.catalog import resolve_model
from spantrain.models.graph import build_graph
from spantrain.models.held import StorageLog
from spantrain.models.segment import Segment
from spantrain.models.tensor.group import TensorGroup, run_members
from spantrain.models.tensor.shard import shard_units
from spantrain.models.units import UnitModule

SHARES = (3.0, 1.0)
MODEL = resolve_model("gpt2-tiny")
NUMBERS = (0, 1, 13)
"""Embedding, a block, the head."""


def held_bytes(unit: UnitModule, inputs: tuple[Tensor, ...], labels: Tensor | None) -> int:
    """Return the bytes that F leaves behind, inputs and outputs included."""
    segment = Segment([unit], ends_model=labels is not None, autocast_dtype=None, torch_device=torch.device("cpu"))
    log = StorageLog([*unit.parameters(), *unit.buffers()])
    with log.watching():
        held, outputs = segment.forward(inputs, labels)
    log.add(*inputs, *outputs, *held.tensors)
    return log.look()


def held_by_member(group: TensorGroup, graph: UnitGraph, samples: int) -> list[int]:
    first, block, head = units = build_units(MODEL, NUMBERS, seed=0)
    shard_units(units, SHARES, group.rank, group)
    shape = (samples, *graph.units[0].outputs[0].shape_per_sample)
    block_input, head_input = (torch.zeros(shape, requires_grad=True) for _ in range(2))
    return [
        held_bytes(first, example_inputs(MODEL, samples), None),
        held_bytes(block, (block_input,), None),
        held_bytes(head, (head_input,), example_labels(MODEL, samples)),
    ]


def test_a_member_holds_its_share_and_what_all_members_hold_whole() -> None:
    graph = build_graph(MODEL)
    assert NUMBERS[-1] == len(graph.units) - 1
    # What does not grow with the samples is not counted.
    one, three = (run_members(2, partial(held_by_member, graph=graph, samples=samples)) for samples in (1, 3))
    for rank, share in enumerate(SHARES):
        for few, many, number in zip(one[rank], three[rank], NUMBERS, strict=True):
            assert graph.held_activation_bytes(number, share / 4) == pytest.approx((many - few) / 2, rel=0.05)
