"""Decisions of one replica, event by event."""

import pytest

from spantrain.core.action import Action, Direction, Op
from spantrain.core.messages import Arrived, Finished, StepStarted
from spantrain.core.span import Span, equal_spans
from spantrain.errors import ScheduleError, UsageError
from spantrain.schedule.dispatch.machine import DispatchMachine, ReplicaTask
from spantrain.schedule.registry import make_policy, replica_tasks
from testing.plans import plan_of

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def middle(schedule: str, *, limit: int = 8, split_backward: bool | None = None) -> DispatchMachine:
    """Stage 1 of 3 with micro-batches of two samples."""
    plan = plan_of([(equal_spans(8, 2), [1.0], [limit])] * 3, schedule)
    return make_policy(schedule, replica_tasks(plan, split_backward=split_backward)[1][0])


def tell(policy: DispatchMachine, *events: object) -> list[str]:
    """Give events; return the actions that were commanded."""
    return [str(command.action) for event in events for command in policy.on_event(0.0, event)]


def done(text: str) -> Finished:
    return Finished(Action.parse(text))


def test_nothing_runs_before_its_samples_are_there_and_pieces_may_cut_across_micro_batches() -> None:
    policy = middle("compact")
    assert tell(policy, StepStarted(0), Arrived(FORWARD, Span(0, 1))) == []
    assert tell(policy, Arrived(FORWARD, Span(1, 3))) == ["1F[0:2]"]
    assert tell(policy, Arrived(FORWARD, Span(3, 8))) == []
    assert tell(policy, done("1F[0:2]")) == ["1F[2:4]"]


@pytest.mark.parametrize(
    ("schedule", "order"),
    [
        ("compact", ["1F[4:6]", "1I[0:2]", "1I[2:4]", "1W[0:2]"]),
        ("critical-path", ["1I[0:2]", "1I[2:4]", "1F[4:6]", "1W[0:2]"]),
    ],
)
def test_what_is_preferred(schedule: str, order: list[str]) -> None:
    policy = middle(schedule)
    tell(policy, StepStarted(0), Arrived(FORWARD, Span(0, 6)), done("1F[0:2]"))
    tell(policy, Arrived(BACKWARD, Span(0, 4)))
    ran, last = [], "1F[2:4]"
    for _ in order:
        (last,) = tell(policy, done(last))
        ran.append(last)
    assert ran == order


def test_weights_run_early_only_where_the_limit_blocks_a_forward() -> None:
    policy = middle("critical-path", limit=4)
    tell(policy, StepStarted(0), Arrived(FORWARD, Span(0, 8)), done("1F[0:2]"))
    tell(policy, Arrived(BACKWARD, Span(0, 2)))
    assert tell(policy, done("1F[2:4]")) == ["1I[0:2]"]
    (command,) = policy.on_event(0.0, done("1I[0:2]"))
    assert str(command.action) == "1W[0:2]"
    assert "a forward waits for room, 4 of 4 held" in command.reason
    assert tell(policy, done("1W[0:2]")) == ["1F[4:6]"]


def test_a_forward_that_overtakes_leaves_room_for_the_older_ones() -> None:
    policy = middle("critical-path", limit=4)
    assert tell(policy, StepStarted(0), Arrived(FORWARD, Span(2, 8))) == ["1F[2:4]"]
    assert tell(policy, done("1F[2:4]")) == []  # [4:6] would take the room of [0:2]
    assert "room for 1F[4:6]" in policy.waiting_for()
    assert tell(policy, Arrived(FORWARD, Span(0, 2))) == ["1F[0:2]"]


def test_stage_0_goes_back_whole_and_sends_forwards_first() -> None:
    task = ReplicaTask(stage=0, num_stages=2, spans=equal_spans(4, 2), in_flight_limit=4)
    policy = make_policy("critical-path", task)
    assert tell(policy, StepStarted(0), Arrived(BACKWARD, Span(0, 2)), done("0F[0:2]")) == ["0F[0:2]", "0F[2:4]"]
    assert tell(policy, done("0F[2:4]")) == ["0B[0:2]"]


def test_a_pipeline_of_one_stage_holds_one_micro_batch() -> None:
    policy = make_policy(
        "critical-path", ReplicaTask(stage=0, num_stages=1, spans=equal_spans(4, 2), in_flight_limit=4)
    )
    ran = tell(policy, StepStarted(0), done("0F[0:2]"), done("0B[0:2]"), done("0F[2:4]"), done("0B[2:4]"))
    assert ran == ["0F[0:2]", "0B[0:2]", "0F[2:4]", "0B[2:4]"]
    assert policy.step_complete


def test_halves_may_be_switched_off() -> None:
    policy = middle("critical-path", split_backward=False)
    tell(policy, StepStarted(0), Arrived(FORWARD, Span(0, 2)), Arrived(BACKWARD, Span(0, 2)))
    assert tell(policy, done("1F[0:2]")) == ["1B[0:2]"]


def test_a_static_order_waits_for_its_next_action_though_others_could_run() -> None:
    policy = middle("1f1b")
    tell(policy, StepStarted(0), Arrived(FORWARD, Span(0, 8)), done("1F[0:2]"))
    assert tell(policy, done("1F[2:4]")) == []
    assert "gradients of [0:2]" in policy.waiting_for()
    assert tell(policy, Arrived(BACKWARD, Span(0, 2))) == ["1B[0:2]"]


def test_a_zero_bubble_order_leaves_weights_until_their_place() -> None:
    policy = middle("zb-h1")  # F0 F1 I0 F2 I1 W0 F3 ...
    tell(policy, StepStarted(0), Arrived(FORWARD, Span(0, 4)), done("1F[0:2]"))
    assert tell(policy, Arrived(BACKWARD, Span(0, 2))) == []
    assert tell(policy, done("1F[2:4]")) == ["1I[0:2]"]
    assert tell(policy, done("1I[0:2]")) == []  # 1W[0:2] could run, its place is behind 1I[2:4]
    assert "activations of [4:6]" in policy.waiting_for()
    assert tell(policy, Arrived(FORWARD, Span(4, 8)), Arrived(BACKWARD, Span(2, 4))) == ["1F[4:6]"]
    assert tell(policy, done("1F[4:6]"), done("1I[2:4]"), done("1W[0:2]")) == ["1I[2:4]", "1W[0:2]", "1F[6:8]"]


def test_a_second_step_begins_anew() -> None:
    for schedule in ("compact", "1f1b"):
        policy = make_policy(schedule, replica_tasks(plan_of([((Span(0, 2),), [1.0], [2])], schedule))[0][0])
        assert not policy.step_complete
        for step in range(2):
            assert tell(policy, StepStarted(step), done("0F[0:2]"), done("0B[0:2]")) == ["0F[0:2]", "0B[0:2]"]
            assert policy.step_complete


def test_what_must_not_happen_is_refused() -> None:
    policy = middle("compact")
    tell(policy, StepStarted(0), Arrived(FORWARD, Span(0, 2)))
    with pytest.raises(ValueError, match="there already"):
        tell(policy, Arrived(FORWARD, Span(1, 3)))
    with pytest.raises(ScheduleError, match=r"samples \[6:9\] arrived"):
        tell(policy, Arrived(FORWARD, Span(6, 9)))
    with pytest.raises(ScheduleError, match=r"1F\[2:4\] ended, but 1F\[0:2\] was running"):
        tell(policy, done("1F[2:4]"))
    with pytest.raises(ScheduleError, match="before step 0 is complete"):
        tell(policy, StepStarted(1))


def test_an_unknown_schedule_gets_a_hint() -> None:
    with pytest.raises(UsageError, match=r"one of 1f1b, 1f1b-asteroid, compact, .*gpipe.* did you mean 1f1b"):
        middle("1fb1")


def test_the_same_events_give_the_same_commands_at_any_time() -> None:
    events = [StepStarted(0), Arrived(FORWARD, Span(0, 8)), done("1F[0:2]"), Arrived(BACKWARD, Span(0, 2))]
    runs = []
    for offset_s in (0.0, 1e6):
        policy = middle("critical-path")
        runs.append([policy.on_event(offset_s + number, event) for number, event in enumerate(events)])
    assert runs[0] == runs[1]
    assert Op.FORWARD is runs[0][1][0].action.op
