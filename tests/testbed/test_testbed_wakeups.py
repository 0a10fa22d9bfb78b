import os
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.testbed.router import Lead, wait_until


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-6, 150e-6), st.integers(0, 2**31))
def test_the_lead_covers_most_wake_ups_and_no_rare_pause(usual_s, seed):
    lead = Lead()
    for number in range(4000):
        rare = (number + seed) % 50 == 0
        lead.learn(5e-3 if rare else usual_s * (0.5 + (number * 7919 % 100) / 200))
    assert 0.5 * usual_s <= lead.seconds <= usual_s + 20e-6


def test_no_wait_ends_before_its_time_and_what_can_be_read_ends_it():
    reading, writing = os.pipe()
    lead = Lead()
    for _ in range(5):
        due_s = time.monotonic() + 1e-3
        assert wait_until(due_s, [reading], lead) == []
        assert time.monotonic() >= due_s
    os.write(writing, b"x")
    assert wait_until(time.monotonic() + 60, [reading], lead) == [reading]
    for fd in (reading, writing):
        os.close(fd)
