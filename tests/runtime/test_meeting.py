"""Replicas of a stage find each other by the port that the first has opened."""

from concurrent.futures import ThreadPoolExecutor

from patience import PATIENCE_S
from spantrain.runtime.meeting import MeetingPoints

ASKS = {"generation": 1, "stage": 2}


def test_who_asks_first_waits_for_who_opens():
    points = MeetingPoints()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(points.answer, ASKS)
        opened = points.answer({**ASKS, "host": "10.0.0.7", "port": 4711})
        assert asked.result(PATIENCE_S) == opened == {"host": "10.0.0.7", "port": 4711}


def test_each_generation_and_stage_has_its_own_place():
    points = MeetingPoints()
    for stage, generation in ((0, 0), (0, 1), (1, 0)):
        points.answer({"generation": generation, "stage": stage, "host": "here", "port": 10 * stage + generation})
    assert points.answer({"generation": 1, "stage": 0})["port"] == 1
    assert points.answer({"generation": 0, "stage": 1})["port"] == 10
