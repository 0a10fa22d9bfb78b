"""Pieces in, whole spans out."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from spantrain.core.span import Span
from spantrain.runtime.step.work import SampleInbox


@given(data=st.data())
def test_any_pieces_make_any_spans(data):
    total = data.draw(st.integers(1, 24))
    values = torch.arange(total)

    def cut(name: str) -> list[Span]:
        edges = sorted({0, total, *data.draw(st.lists(st.integers(0, total), max_size=6), label=name)})
        return [Span(lo, hi) for lo, hi in itertools.pairwise(edges)]

    inbox = SampleInbox()
    for piece in data.draw(st.permutations(cut("pieces"))):
        inbox.add(0, "forward", piece, (values[piece.lo : piece.hi], 2 * values[piece.lo : piece.hi]))
    for span in data.draw(st.permutations(cut("spans"))):
        first, second = inbox.take(0, "forward", span)
        assert first.tolist() == list(range(span.lo, span.hi))
        assert second.tolist() == [2 * value for value in range(span.lo, span.hi)]
    assert inbox.spans(0, "forward") == ()


def test_steps_and_lanes_are_kept_apart():
    inbox = SampleInbox()
    inbox.add(0, "forward", Span(0, 1), (torch.zeros(1),))
    inbox.add(1, "forward", Span(0, 1), (torch.ones(1),))
    inbox.add(1, "backward", Span(0, 1), (torch.full((1,), 2.0),))
    assert inbox.forget_before(1) == 1
    assert inbox.take(1, "forward", Span(0, 1))[0].item() == 1.0
    assert inbox.take(1, "backward", Span(0, 1))[0].item() == 2.0
