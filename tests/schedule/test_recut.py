"""Re-cuts that are refused, and the form in which one stands in the log."""

import pytest

from spantrain.core.action import Action
from spantrain.core.messages import Decision, Finished, Recut, StepStarted, event_of, event_text
from spantrain.core.span import Span, equal_spans
from spantrain.errors import ScheduleError
from spantrain.schedule.dispatch.machine import ReplicaTask
from spantrain.schedule.registry import make_policy, replica_tasks
from testing.plans import plan_of


def policy_of(schedule: str = "compact"):
    plan = plan_of([(equal_spans(16, 4), [1.0], [16])] * 2, schedule)
    policy = make_policy(schedule, replica_tasks(plan)[0][0])
    (command,) = policy.on_event(0.0, StepStarted(0))
    assert command.action == Action.parse("0F[0:4]")
    return policy


def recut(*spans: str) -> Recut:
    return Recut(tuple(map(Span.parse, spans)), "a test says so")


def test_what_has_not_begun_may_be_cut_finer_and_put_together_again():
    policy = policy_of()
    assert policy.unbegun == equal_spans(16, 4)[1:]
    assert policy.on_event(0.1, recut("[4:5]", "[5:8]", "[8:10]", "[10:12]")) == []
    assert " ".join(map(str, policy.unbegun)) == "[4:5] [5:8] [8:10] [10:12] [12:16]"
    policy.on_event(0.2, recut("[8:12]"))
    (command,) = policy.on_event(0.3, Finished(Action.parse("0F[0:4]")))
    assert str(command.action) == "0F[4:5]"
    assert " ".join(map(str, policy.unbegun)) == "[5:8] [8:12] [12:16]"


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        (("[0:2]", "[2:4]"), "does not hold the samples of whole micro-batches that have not begun"),
        (("[4:6]",), "does not hold the samples of whole micro-batches"),
        (("[4:6]", "[5:8]"), "does not hold the samples of whole micro-batches"),
        (("[4:12]",), "coarser than planned"),
        (("[16:18]",), "does not hold the samples"),
    ],
)
@pytest.mark.parametrize("schedule", ["compact", "1f1b"])
def test_other_recuts_are_refused(schedule, spans, why):
    with pytest.raises(ScheduleError, match=why):
        policy_of(schedule).on_event(0.1, recut(*spans))


def test_the_next_step_begins_with_the_plans_own_micro_batches():
    task = ReplicaTask(stage=0, num_stages=1, spans=equal_spans(4, 4), in_flight_limit=4)
    policy = make_policy("compact", task)
    ran = []
    for step in range(2):
        commands = policy.on_event(0.0, StepStarted(step))
        while commands:
            ran.append(str(commands[0].action))
            commands = policy.on_event(0.0, Finished(commands[0].action))
        assert policy.step_complete
    assert ran[: len(ran) // 2] == ran[len(ran) // 2 :]


def test_a_recut_in_the_log_parses_back():
    event = recut("[4:6]", "[6:8]")
    text = event_text(event)
    assert text == "recut [4:6] [6:8] because a test says so"
    assert event_of(text) == event
    assert Decision.of(3, 1.5, event, []).heard == event
    for wrong in ("recut because x", "recut [4:6]", "recut [4:6]  because ", "step 4 because x"):
        with pytest.raises(ValueError, match=r"recut|span"):
            event_of(wrong)
