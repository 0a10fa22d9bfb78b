"""Forwards to warm up, then one full backward and one forward in turn; as many as are left, or Asteroid's."""

from collections.abc import Callable
from functools import partial

from spantrain.schedule.dispatch.registered import RegisteredSchedule
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.orders import Orders, each_in_turn, in_turn, twice_the_way, warm_up_counts


def _orders(warm_up: Callable[[int], int], layout: CutLayout, split: bool | None) -> Orders:
    return in_turn(layout, warm_up_counts(layout, warm_up), split=bool(split))


SCHEDULES = (
    RegisteredSchedule(
        name="1f1b",
        description="static: P - p forwards warm up stage p, then one full backward and one forward in turn",
        splits_backward=False,
        orders=partial(_orders, each_in_turn),
        is_improved=True,
    ),
    RegisteredSchedule(
        name="1f1b-asteroid",
        description="static: 1f1b with 2 (P - p) - 1 forwards to warm up (Asteroid)",
        splits_backward=False,
        orders=partial(_orders, twice_the_way),
        is_improved=True,
    ),
)
