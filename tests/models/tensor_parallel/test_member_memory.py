"""What a member of a tensor-parallel group holds for a sample, measured, is what the unit graph says of its share."""

from functools import partial

import pytest
import torch
from torch import Tensor

from spantrain.core.shares import shares_of
from spantrain.core.span import Span
from spantrain.core.units import UnitGraph
from spantrain.models.build import build_units, example_rows
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.execution.held import StorageLog
from spantrain.models.execution.segment import segments_of
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.graph import build_graph
from spantrain.models.tensor_parallel.group import TensorGroup
from spantrain.models.tensor_parallel.shard import shard_units
from spantrain.models.units import LABELS, Rows, UnitModule, rows_read
from testing.models.thread_group import run_members

SHARES = (3.0, 1.0)
MODEL = resolve_model("gpt2-tiny")
NUMBERS = (0, 1, 13)
"""Embedding, a block, the head."""
BLOCKS = range(1, 5)


@pytest.fixture(scope="module")
def graph() -> UnitGraph:
    return build_graph(MODEL)


def held_bytes(units: list[UnitModule], inputs: tuple[Tensor, ...], rows: Rows, recompute: tuple[int, ...] = ()) -> int:
    """Return the bytes that F leaves behind, inputs and outputs included."""
    cpu, last = torch.device("cpu"), LABELS in rows_read(units)
    log = StorageLog([tensor for unit in units for tensor in (*unit.parameters(), *unit.buffers())])
    found, tensors = [], inputs
    with log.watching():
        for segment in segments_of(units, recompute, is_last=last, dtype="float32", torch_device=cpu):
            held, tensors = segment.forward(tensors, rows)
            found += held.tensors
            log.add(*held.tensors)
    log.add(*inputs, *(rows[number] for number in rows_read(units)), *tensors)
    return log.look()


def hidden_of(graph: UnitGraph, samples: int) -> Tensor:
    return torch.zeros((samples, *graph.units[0].outputs[0].shape_per_sample), requires_grad=True)


def held_by_member(group: TensorGroup, graph: UnitGraph, samples: int, *, slices: bool) -> list[int]:
    first, block, head = units = build_units(MODEL, NUMBERS, seed=0)
    shard_units(units, SHARES, group.rank, group, sequence_parallel=slices)
    rows = example_rows(MODEL, samples)
    return [
        held_bytes([first], (), rows),
        held_bytes([block], (hidden_of(graph, samples),), rows),
        held_bytes([head], (hidden_of(graph, samples),), rows),
    ]


@pytest.mark.parametrize("slices", [False, True], ids=["whole", "slices"])
def test_a_member_holds_its_share_and_what_all_members_hold_whole(slices: bool, graph: UnitGraph) -> None:
    assert NUMBERS[-1] == len(graph.units) - 1
    # What does not grow with the samples is not counted.
    one, three = (
        run_members(2, partial(held_by_member, graph=graph, samples=samples, slices=slices)) for samples in (1, 3)
    )
    for share in shares_of(SHARES, slices_sequence=slices):
        for few, many, number in zip(one[share.rank], three[share.rank], NUMBERS, strict=True):
            assert graph.held_activation_bytes(number, share) == pytest.approx((many - few) / 2, rel=0.05)


def stage_held_by_member(group: TensorGroup, graph: UnitGraph, samples: int, *, slices: bool) -> int:
    units = build_units(MODEL, BLOCKS, seed=0)
    shard_units(units, SHARES, group.rank, group, sequence_parallel=slices)
    return held_bytes(units, (hidden_of(graph, samples),), {})


def test_a_stage_holds_slices_between_its_blocks_and_so_less(graph: UnitGraph) -> None:
    held = {}
    for slices in (False, True):
        one, three = (
            run_members(2, partial(stage_held_by_member, graph=graph, samples=samples, slices=slices))
            for samples in (1, 3)
        )
        for share in shares_of(SHARES, slices_sequence=slices):
            held[share.rank, slices] = (three[share.rank] - one[share.rank]) / 2
            assert graph.stage_held_bytes(BLOCKS, share) == pytest.approx(held[share.rank, slices], rel=0.02)
    assert held[0, True] < held[0, False]
    assert held[1, True] < 0.85 * held[1, False]


def recomputed_by_member(group: TensorGroup, graph: UnitGraph, samples: int) -> int:
    units = build_units(MODEL, BLOCKS, seed=0)
    shard_units(units, SHARES, group.rank, group, sequence_parallel=True)
    stage = StageExecutor(units, is_last=False, global_batch=samples, recompute=[1, 2])
    stage.forward(Span(0, samples), (hidden_of(graph, samples),), {})
    return stage.meter.peak_bytes


def test_recomputed_blocks_hold_the_slice_that_enters_them(graph: UnitGraph) -> None:
    one, three = (run_members(2, partial(recomputed_by_member, graph=graph, samples=samples)) for samples in (1, 3))
    recompute = (BLOCKS[1], BLOCKS[2])
    for share in shares_of(SHARES, slices_sequence=True):
        held = (three[share.rank] - one[share.rank]) / 2
        assert graph.stage_held_bytes(BLOCKS, share, recompute) == pytest.approx(held, rel=0.02)
