"""Orders as text: golden files, reading back, and the checker on broken ones."""

import re
from pathlib import Path

import pytest

from spantrain.app.simulation.schedule import EvenPipeline, show_even
from spantrain.core.span import equal_spans
from spantrain.errors import ScheduleError, UsageError
from spantrain.schedule.layout import CutLayout
from spantrain.schedule.orders import Orders, check_orders
from spantrain.schedule.registry import schedule_names, schedules
from spantrain.schedule.render.text import format_orders, parse_orders

GOLDEN = Path(__file__).parent / "golden"
PIPELINE = EvenPipeline(stages=4, micro_batches=6, transfer_s=1.0, latency_s=0.5)
"""Of the golden files; orders that are decided at run time depend on its times."""
STATIC_SCHEDULES = [name for name, schedule in schedules().items() if schedule.orders and not schedule.shares_devices]
LAYOUT = CutLayout(micro_batches=(equal_spans(6, 1),) * 4, spans=((equal_spans(6, 1),),) * 4, limits=((6,),) * 4)


def golden(schedule: str) -> str:
    return (GOLDEN / f"{schedule}.txt").read_text()


@pytest.mark.parametrize("schedule", [name for name in schedule_names() if not schedules()[name].shares_devices])
def test_golden_orders(schedule: str) -> None:
    orders = show_even(schedule, PIPELINE).orders
    assert format_orders(orders) + "\n" == golden(schedule)
    assert parse_orders(golden(schedule)) == orders
    check_orders(orders, LAYOUT)


def test_replicas_without_work_and_remarks_are_kept_apart() -> None:
    text = "# a remark\n\nstage 0 replica 0: 0F[0:2] 0B[0:2]\nstage 0 replica 1:\nstage 1 replica 0: 1F[0:2] 1B[0:2]\n"
    orders = parse_orders(text)
    assert [[len(own) for own in row] for row in orders] == [[2, 0], [2]]
    assert parse_orders(format_orders(orders)) == orders


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line in it"),
        ("stage 0: 0F[0:2]", r"line 1: got 'stage 0: 0F\[0:2\]', wanted 'stage S replica R"),
        ("\nstage 0 replica 0: 0F[0:2] 0G[0:2]", r"line 2: not an action: '0G\[0:2\]'"),
        ("stage 0 replica 0: 0F[2:2]", r"line 1: a span needs"),
        ("stage 1 replica 0: 1F[0:2]", "line 1: got stage 1 replica 0, wanted stage 0 replica 0"),
        (
            "stage 0 replica 0:\nstage 0 replica 2:",
            "line 2: got stage 0 replica 2, wanted stage 0 replica 1 or stage 1 replica 0",
        ),
    ],
)
def test_text_of_another_form_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_orders(text)


def broken(schedule: str, *changes: tuple[str, str]) -> Orders:
    text = golden(schedule)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return parse_orders(text)


@pytest.mark.parametrize("schedule", STATIC_SCHEDULES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("2F[3:4] ", "")], "stage 2, replica 0: span [3:4] has no forward"),
        ([("1F[2:3]", "1F[2:3] 1F[2:3]")], "1F[2:3]: its forward was done before"),
        ([("0F[4:5]", "0F[4:6]")], "0F[4:6]: the replica's micro-batches are"),
        ([("0F[4:5]", "2F[4:5]")], "2F[4:5] is in the order of stage 0"),
    ],
)
def test_the_checker_names_the_action_that_fails(schedule: str, changes, message: str) -> None:
    with pytest.raises(ScheduleError) as failed:
        check_orders(broken(schedule, *changes), LAYOUT)
    assert message in str(failed.value)


@pytest.mark.parametrize("schedule", STATIC_SCHEDULES)
def test_an_order_that_stops_names_where_each_stage_waits(schedule: str) -> None:
    """The last stage forwards its first micro-batch when all else is done; the stages before it stop behind it."""
    text = golden(schedule).replace("3F[0:1] ", "").rstrip() + " 3F[0:1]"
    back = "3I[0:1]" if schedule.startswith("zb") else "3B[0:1]"
    with pytest.raises(ScheduleError, match="the order stops") as failed:
        check_orders(parse_orders(text), LAYOUT)
    assert f"{back} waits for forward of stage 3" in str(failed.value)
    assert "0B[0:1] waits for output_gradient of stage 1 (has nothing)" in str(failed.value)


def test_weights_before_their_backward_of_inputs_stop_the_order() -> None:
    orders = broken("zb", ("2W[0:1] ", ""), ("2I[0:1]", "2W[0:1] 2I[0:1]"))
    with pytest.raises(ScheduleError, match=re.escape("2W[0:1] waits for backward_input of stage 2 (has nothing)")):
        check_orders(orders, LAYOUT)
