"""Who gives whom what: every element that is wanted has one source, however tensors were and are to be divided."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spantrain.core.shares import TensorPart
from spantrain.core.span import Span
from spantrain.runtime.redistribution.exchange import (
    TensorBlock,
    boxes_of,
    chunks_of,
    missing_text,
    place_of,
    plan_fetch,
)
from testing.runtime.parts import dealt, taken

pytestmark = pytest.mark.checkpoint

shapes = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=4
)


@given(shapes=shapes, before=st.integers(1, 4), after=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_every_element_wanted_has_one_source(shapes, before, after, seed):
    """Carried out by hand with the plain operations: each element comes once, and is the right one."""
    random = Random(seed)
    full = {name: torch.arange(torch.Size(shape).numel()).reshape(shape) for name, shape in shapes.items()}
    held = dealt(shapes, before, random)
    files = [(f"file-{number}", parts) for number, parts in enumerate(held)]
    for wanted in dealt(shapes, after, random):
        sources, missing = plan_fetch(wanted, files)
        assert missing == ()
        times = {name: torch.zeros(part.shape, dtype=torch.int64) for name, part in wanted.items()}
        got = {name: torch.full(part.shape, -1) for name, part in wanted.items()}
        for source, blocks in sources.items():
            parts = dict(files)[source]
            for block in blocks:
                place = place_of(block.box, wanted[block.tensor])
                local = taken(full[block.tensor], parts[block.tensor])
                got[block.tensor][place] = local[place_of(block.box, parts[block.tensor])]
                times[block.tensor][place] += 1
        for name, part in wanted.items():
            assert torch.equal(times[name], torch.ones_like(times[name])), name
            assert torch.equal(got[name], taken(full[name], part)), name


@given(shapes=shapes, members=st.integers(2, 4), seed=st.integers(0, 10**6))
def test_what_nobody_holds_is_told_and_no_more(shapes, members, seed):
    held = dealt(shapes, members, Random(seed))
    lost, kept = held[0], held[1:]
    wanted = {name: TensorPart(full_shape=tuple(shape)) for name, shape in shapes.items()}
    sources, missing = plan_fetch(wanted, [(str(number), parts) for number, parts in enumerate(kept)])
    for name, shape in shapes.items():
        absent = sum(block.elements for block in missing if block.tensor == name)
        there = sum(block.elements for blocks in sources.values() for block in blocks if block.tensor == name)
        assert absent == (0 if lost[name].is_whole else torch.Size(lost[name].shape).numel())
        assert absent + there == torch.Size(shape).numel()


@given(
    box=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=3),
    element_bytes=st.sampled_from([1, 2, 4, 8]),
    max_bytes=st.integers(8, 64),
)
def test_chunks_hold_each_element_once_and_are_small(box, element_bytes, max_bytes):
    spans = tuple(Span(lo, lo + size) for lo, size in box)
    seen = torch.zeros([15] * len(spans), dtype=torch.int64)
    for group in chunks_of([TensorBlock("t", spans), TensorBlock("t", spans)], {"t": element_bytes}, max_bytes):
        assert sum(block.elements for block in group) * element_bytes <= max_bytes
        for block in group:
            seen[tuple(slice(span.lo, span.hi) for span in block.box)] += 1
    inside = seen[tuple(slice(span.lo, span.hi) for span in spans)]
    assert torch.equal(inside, torch.full_like(inside, 2))
    assert seen.sum() == inside.sum()


def test_the_first_source_gives_what_several_hold():
    whole = TensorPart(full_shape=(4,))
    half = TensorPart(full_shape=(4,), ranges=(Span(2, 4),))
    sources, _ = plan_fetch({"a": whole}, [("near", {"a": half}), ("far", {"a": whole}), ("farther", {"a": whole})])
    assert sources == {"near": (TensorBlock("a", (Span(2, 4),)),), "far": (TensorBlock("a", (Span(0, 2),)),)}


def test_an_empty_tensor_needs_no_source():
    assert boxes_of(TensorPart(full_shape=(0, 3))) == ()
    assert plan_fetch({"a": TensorPart(full_shape=(0, 3))}, []) == ({}, ())


def test_missing_tensors_are_named_few():
    blocks = [TensorBlock(name, ()) for name in "edcba"]
    assert missing_text(blocks) == "a, b, c and 2 more"
