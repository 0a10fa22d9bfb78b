"""Devices of a stage find each other by the port that the first has opened; nobody else has a say in it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from spantrain.core.outer.stages import StageOrder, StageReport
from spantrain.runtime.control.requests import FindMeetingPoint, MeetingPoint
from spantrain.runtime.coordinator.meetings import StageMeetings
from spantrain.runtime.coordinator.worker_service import MeetingPoints
from spantrain.transport.control.protocol import RemoteRefusal
from testing.patience import PATIENCE_S

STAGES = [("a",), ("b", "c")]
ASKS = FindMeetingPoint(generation=1, stage=1)
PLACE = MeetingPoint(host="10.0.0.7", port=4711)


def points(generation: int = 1, hold_s: float = PATIENCE_S) -> MeetingPoints:
    return MeetingPoints(lambda: (generation, STAGES), hold_s=hold_s)


def test_who_asks_first_waits_for_who_opens():
    found = points()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(found.answer, "c", ASKS)
        opened = found.answer("b", replace(ASKS, opened=PLACE))
        assert asked.result(PATIENCE_S) == opened == PLACE


def test_who_waits_for_long_is_told_to_ask_again():
    assert points(hold_s=0.0).answer("c", ASKS) is None


def test_an_order_that_is_over_holds_nobody():
    found = points()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(found.answer, "c", ASKS)
        found.close()
        assert asked.result(PATIENCE_S) is None


@pytest.mark.parametrize(
    ("device", "request_", "says"),
    [
        ("a", ASKS, "a has no meeting point at stage 1"),
        ("c", replace(ASKS, opened=PLACE), "c has no meeting point to open at stage 1"),
        ("b", replace(ASKS, generation=0), "generation 0 does not run"),
        ("b", replace(ASKS, stage=7), "no meeting point at stage 7"),
        ("b", replace(ASKS, stage=-1), "no meeting point at stage -1"),
    ],
)
def test_others_have_no_say(device, request_, says):
    found = points(hold_s=0.0)
    with pytest.raises(RemoteRefusal, match=says):
        found.answer(device, request_)


def test_stages_of_an_outer_cluster_meet_one_after_another():
    meetings = StageMeetings(frozenset("ab"), hold_s=0.0)
    leads = StageReport(order=StageOrder())
    for stranger, number in (("c", 0), ("a", 1), ("a", -1)):
        with pytest.raises(RemoteRefusal, match="the next one is 0"):
            meetings.meet(stranger, number, None)
    assert meetings.meet("a", 0, leads) is None
    with pytest.raises(RemoteRefusal, match="as a has done"):
        meetings.meet("b", 0, leads)
    held = meetings.meet("b", 0, None)
    assert held == meetings.meet("a", 0, None)
    assert held.reports == {"a": leads}
