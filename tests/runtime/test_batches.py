"""Batches that a loop gives: every device gets the rows that it asks for, and hears what to do next."""

from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spantrain.runtime.coordinator.batches as module
from spantrain.core.span import Span
from spantrain.errors import ProtocolError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.dataset import open_dataset
from spantrain.models.units import COUNTED, EACH, LABELS, counted_labels
from spantrain.runtime.control.data_requests import AskNextStep, FetchRows
from spantrain.runtime.control.plane import handlers_of
from spantrain.runtime.coordinator.batches import BatchQueue, QueuedFeed
from spantrain.runtime.step.work import SampledFeed
from spantrain.transport.control.protocol import RemoteRefusal
from testing.patience import PATIENCE_S
from testing.runtime.control import MemoryControlPlane


def over_the_wire(batches: BatchQueue):
    """Ask as workers do: what is not plain, or too large for a message, is refused."""
    handlers = handlers_of((AskNextStep, FetchRows), lambda _peer, question: batches.answer(question))
    return QueuedFeed(MemoryControlPlane(handlers, "a"), lambda: None)


@given(
    shares=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dtypes=st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]), min_size=1, max_size=3),
)
def test_readers_get_exactly_their_rows(shares, dtypes):
    total = sum(shares)
    inputs = tuple(torch.arange(total * 6).reshape(total, 2, 3).remainder(7).to(dtype) for dtype in dtypes)
    labels = torch.arange(total)
    batches = BatchQueue(total)
    batches.give(0, inputs, labels)
    feed = over_the_wire(batches)
    spans = [Span(*ends) for ends in pairwise(accumulate(shares, initial=0))]
    for index, tensor in enumerate(inputs):
        assert torch.equal(torch.cat([feed.rows(0, span, (index,))[index] for span in spans]), tensor)
    assert torch.equal(torch.cat([feed.rows(0, span, (LABELS,))[LABELS] for span in spans]), labels)


def test_what_a_whole_step_counts_is_told_with_each_span():
    """By the loop's batches, and by the sampler's."""
    labels = torch.zeros(4, 3, dtype=torch.int64)
    labels[1, 1:] = labels[3, 0] = -100
    batches = BatchQueue(4)
    batches.give(0, (torch.zeros(4, 3),), labels)
    for span in (Span(0, 1), Span(1, 4)):
        assert over_the_wire(batches).rows(0, span, (COUNTED,))[COUNTED].tolist() == [[9 / 4, 6 / 4]] * span.size
        assert torch.equal(over_the_wire(batches).rows(0, span, (EACH,))[EACH], counted_labels(labels, span.size, EACH))
    tokens = SampledFeed(open_dataset(resolve_model("gpt2-tiny")), global_batch=4, seed=0)
    whole = tokens.rows(3, Span(0, 4), (LABELS,))[LABELS]
    for number in (COUNTED, EACH):
        assert torch.equal(tokens.rows(3, Span(1, 3), (number,))[number], counted_labels(whole, 2, number))


def test_large_batches_come_in_pieces():
    batches = BatchQueue(3)
    inputs = torch.randn(3, module._PIECE_BYTES // 4 + 1000)
    batches.give(5, (inputs,), torch.zeros(3))
    assert torch.equal(over_the_wire(batches).rows(5, Span(0, 3), (0,))[0], inputs)


def test_a_device_waits_for_the_loop_saves_and_ends():
    batches, saved = BatchQueue(1), []
    feed = over_the_wire(batches)
    batch = (torch.zeros(1, 2),), torch.zeros(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(feed.next_step, 0, saved.append)
        assert not waiting.done()
        batches.give(0, *batch)
        assert waiting.result(PATIENCE_S) is True
        batches.save_before(1)
        waiting = pool.submit(feed.next_step, 1, saved.append)
        batches.give(1, *batch)
        assert waiting.result(PATIENCE_S) is True
        assert saved == [1]
        waiting = pool.submit(feed.next_step, 2, saved.append)
        batches.stop()
        assert waiting.result(PATIENCE_S) is False


def test_wrong_batches_and_questions_are_refused():
    batches = BatchQueue(4)
    with pytest.raises(ValueError, match=r"labels is \(3,\); wanted one row for each of 4"):
        batches.give(0, (torch.zeros(4, 2),), torch.zeros(3))
    with pytest.raises(ValueError, match="input 1"):
        batches.give(0, (torch.zeros(4), torch.zeros(5)), torch.zeros(4))
    batches.give(0, (torch.zeros(4, 2),), torch.zeros(4))
    for lo, hi, part, step in ((0, 5, "inputs", 0), (2, 2, "inputs", 0), (0, 1, "weights", 0), (0, 1, "inputs", 1)):
        with pytest.raises(ProtocolError):
            batches.answer(FetchRows(step=step, part=part, lo=lo, hi=hi, offset=0))
    handler = handlers_of((FetchRows,), lambda _peer, question: batches.answer(question))["batch_rows"]
    with pytest.raises(RemoteRefusal, match="give"):
        handler("a", {"give": "all"})
