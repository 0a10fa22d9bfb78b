"""The sampler: every sample once an epoch, no state."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.span import Span, equal_spans
from spantrain.models.sampler import Sampler, derive_seed

sizes = st.integers(1, 40)


@settings(deadline=None, max_examples=50)
@given(dataset_size=sizes, global_batch=sizes, seed=st.integers(-5, 2**40))
def test_sampler_deals_every_sample_once_an_epoch(dataset_size, global_batch, seed):
    sampler = Sampler(dataset_size=dataset_size, global_batch=global_batch, seed=seed)
    dealt = [index for step in range(3 * dataset_size) for index in sampler.indices(step, Span(0, global_batch))]
    for epoch in range(3):
        assert sorted(dealt[epoch * dataset_size :][:dataset_size]) == list(range(dataset_size))


@settings(deadline=None, max_examples=50)
@given(dataset_size=sizes, global_batch=sizes, step=st.integers(0, 1000), size=sizes)
def test_sampler_gives_the_same_samples_in_whatever_pieces_and_order(dataset_size, global_batch, step, size):
    def fresh():
        return Sampler(dataset_size=dataset_size, global_batch=global_batch, seed=1)

    whole = fresh().indices(step, Span(0, global_batch))
    pieces = {span: fresh().indices(step, span) for span in reversed(equal_spans(global_batch, size))}
    assert [index for span in sorted(pieces) for index in pieces[span]] == whole


@settings(deadline=None, max_examples=50)
@given(
    dataset_size=sizes,
    runs=st.lists(
        st.tuples(st.integers(0, 4), st.lists(st.integers(1, 6), min_size=1, max_size=4)), min_size=1, max_size=4
    ),
    seed=st.integers(0, 9),
)
def test_sampler_deals_every_sample_once_an_epoch_through_all_changes_of_plan(dataset_size, runs, seed):
    """Runs of some steps each: every plan has its own readers, whose spans make up its own global batch."""
    dealt: list[int] = []
    step = 0
    for steps, readers in runs:
        sampler = Sampler(
            dataset_size=dataset_size, global_batch=sum(readers), seed=seed, first_step=step, samples_before=len(dealt)
        )
        for _ in range(steps):
            ends = [sum(readers[: index + 1]) for index in range(len(readers))]
            spans = [Span(end - size, end) for end, size in zip(ends, readers, strict=True)]
            dealt += [index for span in spans for index in sampler.indices(step, span)]
            step += 1
        assert sampler.dealt_before(step) == len(dealt)
    whole = Sampler(dataset_size=dataset_size, global_batch=max(1, len(dealt)), seed=seed)
    assert not dealt or dealt == whole.indices(0, Span(0, len(dealt)))
    for start in range(0, len(dealt) - dataset_size + 1, dataset_size):
        assert sorted(dealt[start : start + dataset_size]) == list(range(dataset_size))


def test_sampler_shuffles_by_seed_and_epoch():
    first, second = (Sampler(dataset_size=64, global_batch=64, seed=seed) for seed in (0, 1))
    orders = [first.indices(0, Span(0, 64)), first.indices(1, Span(0, 64)), second.indices(0, Span(0, 64))]
    assert len({tuple(order) for order in orders} | {tuple(range(64))}) == 4


def test_sampler_order_is_pinned_because_machines_must_agree():
    assert Sampler(dataset_size=8, global_batch=8, seed=0).indices(0, Span(0, 8)) == [1, 5, 4, 6, 2, 7, 0, 3]
    assert derive_seed(0, "unit", 1) == 3700654855357271574


def test_sampler_refuses_what_is_not_there():
    with pytest.raises(ValueError, match="at least one sample"):
        Sampler(dataset_size=0, global_batch=1, seed=0)
    with pytest.raises(ValueError, match="below 4"):
        Sampler(dataset_size=8, global_batch=4, seed=0).indices(0, Span(2, 5))
