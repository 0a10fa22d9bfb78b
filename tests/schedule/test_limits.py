"""In-flight limits that would stop the pipeline are found before it runs."""

import pytest

from spantrain.core.span import Span, equal_spans
from spantrain.schedule.layout import CutLayout, check_limits, minimum_in_flight


def test_a_coarse_neighbour_needs_room_before_it_but_not_behind_it(make_plan) -> None:
    plan = make_plan([(equal_spans(8, size), [1.0], [8]) for size in (1, 4, 2)])
    assert minimum_in_flight(CutLayout.of(plan)) == ((4,), (4,), (2,))


def test_needs_pass_through_stages_whose_cuts_do_not_meet(make_plan) -> None:
    cuts = [equal_spans(9, 3), (Span(0, 4), Span(4, 8), Span(8, 9)), (Span(0, 6), Span(6, 9))]
    plan = make_plan([(cut, [1.0], [9]) for cut in cuts])
    # [0:3] goes back after [0:4], that after [0:6], which needs [4:8] of stage 1 and so [6:9] of stage 0.
    assert minimum_in_flight(CutLayout.of(plan)) == ((9,), (8,), (6,))


def test_replicas_need_room_for_their_own_part(make_plan) -> None:
    plan = make_plan([(equal_spans(8, 2), [1.0, 1.0], [4, 4]), (equal_spans(8, 4), [1.0], [8])])
    assert minimum_in_flight(CutLayout.of(plan)) == ((2, 2), (4,))


def test_messages_name_the_replica_and_the_need(make_plan) -> None:
    plan = make_plan([(equal_spans(8, 2), [1.0], [3]), (equal_spans(8, 4), [1.0], [8])])
    (message,) = check_limits(plan)
    assert "stage 0, replica s0r0: in-flight limit 3 samples" in message
    assert "hold 4" in message


def test_order_must_rise(make_plan) -> None:
    with pytest.raises(ValueError, match="stage 0: micro-batches must stand in the order of their samples"):
        make_plan([((Span(2, 4), Span(0, 2)), [1.0], [4])])
