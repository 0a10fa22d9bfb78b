"""A part taken out of a tensor and put back lands where it came from; all members' parts together are the whole."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spantrain.core.shares import TensorPart, divide_pieces
from spantrain.core.span import Span
from spantrain.models.tensor_parallel.division import part_of, put, take, whole_of

pytestmark = pytest.mark.tensor_parallel


@given(
    shares=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    pieces=st.integers(4, 6),
    length=st.integers(1, 3),
    blocks=st.integers(1, 3),
    dim=st.integers(0, 1),
)
def test_the_members_parts_together_are_the_whole(
    shares: list[int], pieces: int, length: int, blocks: int, dim: int
) -> None:
    shape = [2, 2]
    shape[dim] = blocks * pieces * length
    whole = torch.arange(4 * shape[dim], dtype=torch.float32)[: shape[0] * shape[1]].reshape(shape)
    parts = [part_of(whole, dim, own, pieces, blocks) for own in divide_pieces(pieces, shares)]
    again = torch.full_like(whole, torch.nan)
    for part in parts:
        local = take(whole, part)
        assert tuple(local.shape) == part.shape
        put(again, part, local)
    assert torch.equal(again, whole)


def test_a_fused_layer_is_taken_block_by_block() -> None:
    whole = torch.arange(12.0)
    part = part_of(whole, 0, Span(1, 2), 2, blocks=3)
    assert part.ranges == (Span(2, 4), Span(6, 8), Span(10, 12))
    assert take(whole, part).tolist() == [2, 3, 6, 7, 10, 11]


def test_a_whole_part_is_a_copy() -> None:
    whole = torch.ones(2, requires_grad=True)
    taken = take(whole, whole_of(whole))
    taken[0] = 5.0
    assert whole.tolist() == [1, 1]
    assert not taken.requires_grad


def test_shapes_that_do_not_fit_are_refused() -> None:
    part = TensorPart(full_shape=(4, 2), dim=0, ranges=(Span(0, 1),))
    with pytest.raises(ValueError, match=r"whole tensor: shape \(2, 4\), wanted \(4, 2\)"):
        take(torch.zeros(2, 4), part)
    with pytest.raises(ValueError, match=r"part: shape \(2, 2\), wanted \(1, 2\)"):
        put(torch.zeros(4, 2), part, torch.zeros(2, 2))
