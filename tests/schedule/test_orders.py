"""Static orders and their checker."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.action import Action
from spantrain.core.span import equal_spans
from spantrain.errors import PlanError, ScheduleError, UsageError
from spantrain.schedule.layout import CutLayout, forward_counts, windows
from spantrain.schedule.orders import check_orders, check_replica_order
from spantrain.schedule.registry import check_schedule, schedule_names, schedules, static_orders
from spantrain.schedule.render.text import format_orders

STATIC_SCHEDULES = [name for name, schedule in schedules().items() if schedule.orders]


def layout(*sizes: int, total: int = 8, limits: tuple[int, ...] = ()) -> CutLayout:
    cuts = tuple(equal_spans(total, size) for size in sizes)
    return CutLayout(
        micro_batches=cuts,
        spans=tuple((cut,) for cut in cuts),
        limits=tuple((limit,) for limit in limits or (total,) * len(sizes)),
    )


def short(schedule: str, where: CutLayout) -> list[str]:
    """Return each stage's order as letters with the number of the first sample."""
    return [" ".join(f"{a.op.value}{a.span.lo}" for a in row[0]) for row in static_orders(schedule, where)]


def test_1f1b_warms_up_with_one_forward_for_each_stage_that_follows() -> None:
    assert short("1f1b", layout(2, 2, 2)) == [
        "F0 F2 F4 B0 F6 B2 B4 B6",
        "F0 F2 B0 F4 B2 F6 B4 B6",
        "F0 B0 F2 B2 F4 B4 F6 B6",
    ]


def test_gpipe_runs_all_forwards_or_a_round_of_them() -> None:
    assert short("gpipe", layout(2, 2)) == ["F0 F2 F4 F6 B0 B2 B4 B6"] * 2
    assert short("gpipe", layout(2, 2, limits=(4, 8))) == ["F0 F2 B0 B2 F4 F6 B4 B6"] * 2


def test_1f1b_warms_up_less_where_memory_is_short_and_stages_before_keep_theirs() -> None:
    assert short("1f1b", layout(2, 2, 2, limits=(8, 2, 8))) == [
        "F0 F2 F4 B0 F6 B2 B4 B6",
        "F0 B0 F2 B2 F4 B4 F6 B6",
        "F0 B0 F2 B2 F4 B4 F6 B6",
    ]


def test_asteroid_warms_up_with_twice_the_way() -> None:
    orders = short("1f1b-asteroid", layout(*[1] * 3))
    assert [order.split().index("B0") for order in orders] == [5, 3, 1]  # K_0, K_1, K_2 of Asteroid's figure 4b


def test_zero_bubble_orders_put_weights_at_fixed_places() -> None:
    assert short("zb-h1", layout(1, 1, 1, total=6)) == [
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 F5 I4 W3 I5 W4 W5",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 F5 I5 W3 W4 W5",
    ]
    assert short("zb", layout(1, 1, total=6)) == [
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 F5 I5 W3 W4 W5",
    ]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_what_zero_bubble_orders_hold(stages: int) -> None:
    """No stage of zb-h1 holds more than the first one of 1f1b; zb holds there and back, less one."""
    where = layout(*[1] * stages, total=20)
    assert most_held("zb-h1", where) == [stages] * stages
    assert max(most_held("1f1b", where)) == stages
    assert most_held("zb", where) == [2 * stages - 1] * stages


def most_held(schedule: str, where: CutLayout) -> list[int]:
    change = {"F": 1, "I": 0, "B": -1, "W": -1}
    return [
        max(accumulate(change[action.op.value] * action.span.size for action in row[0]))
        for row in static_orders(schedule, where)
    ]


def test_weights_run_earlier_where_memory_is_short() -> None:
    assert short("zb", layout(1, 1, total=6, limits=(6, 2)))[1] == (
        "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 F4 I4 W3 F5 I5 W4 W5"
    )


def test_zero_bubble_orders_may_run_whole_backwards_and_then_are_1f1b() -> None:
    where = layout(2, 2, 2)
    assert static_orders("zb-h1", where, split=False) == static_orders("1f1b", where)
    assert static_orders("zb", where, split=False) == static_orders("1f1b-asteroid", where)


def test_other_micro_batches_per_stage_are_supplied() -> None:
    where = layout(1, 4, 2)
    assert short("1f1b", where)[0].startswith("F0 F1 F2 F3 F4 F5 F6 F7 B0")
    for schedule in STATIC_SCHEDULES:
        check_orders(static_orders(schedule, where), where)


def test_halves_follow_each_other() -> None:
    orders = static_orders("1f1b", layout(4, 4), split=True)
    assert format_orders(orders[1:]) == "stage 0 replica 0: 1F[0:4] 1I[0:4] 1W[0:4] 1F[4:8] 1I[4:8] 1W[4:8]"


@settings(deadline=None, max_examples=60)
@given(data=st.data(), sizes=st.lists(st.integers(1, 8), min_size=1, max_size=5), total=st.integers(1, 16))
def test_orders_run_or_are_refused(data: st.DataObject, sizes: list[int], total: int) -> None:
    limits = tuple(data.draw(st.integers(min(size, total), total)) for size in sizes)
    where = layout(*sizes, total=total, limits=limits)
    split = data.draw(st.sampled_from([None, True, False]))
    for schedule in STATIC_SCHEDULES:
        if possible(where):
            check_orders(static_orders(schedule, where, split=split), where)
        else:
            with pytest.raises(PlanError, match="in-flight limits"):
                static_orders(schedule, where)


def possible(where: CutLayout) -> bool:
    least = windows(where, forward_counts(where, lambda _stage, span: span.hi))
    return all(need[0] <= limit[0] for need, limit in zip(least, where.limits, strict=True))


def test_a_limit_that_no_order_meets_is_refused_with_the_need() -> None:
    for schedule in STATIC_SCHEDULES:
        with pytest.raises(PlanError, match=r"stage 0: in-flight limits \[2\].*need \[4\]"):
            static_orders(schedule, layout(2, 4, limits=(2, 8)))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("0F[0:4] 0F[0:4] 0B[0:4]", r"action 1, 0F\[0:4\]: its forward was done before"),
        ("0F[0:4] 0B[0:4] 0W[0:4]", r"action 2, 0W\[0:4\]: its backward_weight was done before"),
        ("0F[0:4] 0B[0:4]", r"span \[4:8\] has no forward"),
        ("0F[0:4] 0I[0:4] 0F[4:8] 0W[0:4] 0B[4:8]", r"action 2, 0F\[4:8\]: 8 samples held, the limit is 4"),
        ("0F[0:2]", r"action 0, 0F\[0:2\]: the replica's micro-batches are \[0:4\] \[4:8\]"),
    ],
)
def test_the_checker_names_what_is_wrong(order: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_replica_order([Action.parse(text) for text in order.split()], equal_spans(8, 4), limit=4)


def test_the_checker_finds_orders_that_stop() -> None:
    orders = [
        [[Action.parse("0F[0:8]"), Action.parse("0B[0:8]")]],
        [[Action.parse("1B[0:8]"), Action.parse("1F[0:8]")]],
    ]
    with pytest.raises(
        ScheduleError, match=r"0B\[0:8\] waits for output_gradient of stage 1.*1B\[0:8\] waits for forw"
    ):
        check_orders(orders, layout(8, 8))
    with pytest.raises(ScheduleError, match=r"1F\[0:8\] is in the order of stage 0"):
        check_orders([[[Action.parse("1F[0:8]")]]], layout(8))
    with pytest.raises(ScheduleError, match=r"the order has \[1\] replicas by stage, the plan has \[1, 1\]"):
        check_orders([[[Action.parse("0F[0:8]")]]], layout(8, 8))


def test_names_are_sorted_described_and_checked() -> None:
    assert schedule_names() == (
        "1f1b",
        "1f1b-asteroid",
        "compact",
        "critical-path",
        "gpipe",
        "interleaved",
        "zb",
        "zb-h1",
        "zb-v",
    )
    assert all(schedules()[name].description for name in schedule_names())
    with pytest.raises(UsageError, match="did you mean critical-path"):
        check_schedule("critical_path")
