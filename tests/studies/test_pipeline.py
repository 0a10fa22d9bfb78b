"""The order in which DeepSpeed's pipeline goes, and its messages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain_studies.reference.pipeline import CutSeconds, MessageSeconds, StageSeconds, pipeline_ends_s

FREE = MessageSeconds(wire_s=0.0, held_s=0.0, taken_s=0.0)
SECONDS = st.floats(0.01, 10.0)
MESSAGES = st.builds(
    lambda wire_s, part, taken_s: MessageSeconds(wire_s=wire_s, held_s=part * wire_s, taken_s=taken_s),
    st.floats(0.0, 5.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0),
)  # fmt: skip
STAGES = st.lists(
    st.builds(lambda f, b: StageSeconds(forward_s=f, backward_s=b), SECONDS, SECONDS), min_size=1, max_size=5
)


def cuts_of(stages, message=FREE):
    return [CutSeconds(activation=message, gradient=message)] * (len(stages) - 1)


@pytest.mark.parametrize(("count", "micro_batches"), [(1, 1), (1, 5), (2, 1), (2, 7), (4, 2), (4, 9)])
def test_equal_stages_without_messages_take_what_1f1b_takes(count, micro_batches):
    stages = [StageSeconds(forward_s=1.0, backward_s=2.0)] * count
    ends = pipeline_ends_s(stages, cuts_of(stages), micro_batches)
    assert max(ends) == pytest.approx((micro_batches + count - 1) * 3.0)
    # The last stage is done first, the first one last.
    assert list(ends) == sorted(ends, reverse=True)


@given(STAGES, MESSAGES, st.integers(1, 8))
@settings(deadline=None, max_examples=60)
def test_no_order_waits_for_itself_and_nothing_is_faster_than_its_work(stages, message, micro_batches):
    ends = pipeline_ends_s(stages, cuts_of(stages, message), micro_batches)
    for stage, end_s in zip(stages, ends, strict=True):
        assert end_s >= micro_batches * (stage.forward_s + stage.backward_s) - 1e-9
    there_and_back = sum(stage.forward_s + stage.backward_s for stage in stages)
    assert max(ends) >= there_and_back + 2 * (len(stages) - 1) * (message.wire_s + message.taken_s) - 1e-9
    assert max(ends) >= max(pipeline_ends_s(stages, cuts_of(stages), micro_batches)) - 1e-9


def test_a_sender_is_kept_until_its_receiver_comes_unless_buffers_take_the_message():
    stages = [StageSeconds(forward_s=1.0, backward_s=1.0)] * 4
    kept = MessageSeconds(wire_s=1.0, held_s=1.0, taken_s=0.0)
    taken = MessageSeconds(wire_s=1.0, held_s=0.0, taken_s=0.0)
    held, free = (max(pipeline_ends_s(stages, cuts_of(stages, one), 20)) for one in (kept, taken))
    # In the middle a micro-batch is received and sent twice; without buffers all four stand between computations.
    assert held == pytest.approx(20 * (2 + 4), rel=0.2)
    assert free < held - 10
