"""Coverage against a plain set of samples."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.span import Coverage, Span


@settings(deadline=None, max_examples=200)
@given(pieces=st.lists(st.tuples(st.integers(0, 24), st.integers(1, 6)), max_size=12), asked=st.integers(0, 24))
def test_it_is_a_set_of_samples(pieces, asked) -> None:
    coverage, samples = Coverage(), set()
    for lo, size in pieces:
        span, more = Span(lo, lo + size), set(range(lo, lo + size))
        if samples & more:
            with pytest.raises(ValueError, match="there already"):
                coverage.add(span)
        else:
            coverage.add(span)
            samples |= more
        assert coverage.total == len(samples)
        for length in (1, 3):
            wanted = set(range(asked, asked + length)) <= samples
            assert coverage.contains(Span(asked, asked + length)) is wanted
    parts = [] if str(coverage) == "nothing" else [Span.parse(text) for text in str(coverage).split(",")]
    assert {sample for part in parts for sample in range(part.lo, part.hi)} == samples
    assert all(before.hi < after.lo for before, after in pairwise(parts))
