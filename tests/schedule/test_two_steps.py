"""Two steps of one replica at once: the older one's work first, one in-flight limit for both."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.action import Action, Direction, Op
from spantrain.core.messages import Arrived, Finished, StepStarted
from spantrain.core.span import Span, equal_spans
from spantrain.errors import ScheduleError
from spantrain.schedule.dispatch.policies import TwoSteps
from spantrain.schedule.registry import make_policy, replica_tasks
from testing.plans import plan_of

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def middle(schedule: str = "critical-path", *, limit: int = 16) -> TwoSteps:
    """Stage 1 of 3 with four micro-batches of two samples."""
    plan = plan_of([(equal_spans(8, 2), [1.0], [limit])] * 3, schedule)
    task = replica_tasks(plan)[1][0]
    return TwoSteps((make_policy(schedule, task), make_policy(schedule, task)))


def tell(policy: TwoSteps, *events: tuple[int, object]) -> list[str]:
    """Give events with their steps; return the actions that were commanded, with theirs."""
    chosen = [policy.on_event(0.0, step, event) for step, event in events]
    return [f"{found[0]}:{found[1].action}" for found in chosen if found is not None]


def done(text: str) -> tuple[int, Finished]:
    step, action = text.split(":", 1)
    return int(step), Finished(Action.parse(action))


def test_the_next_step_runs_where_the_older_one_waits() -> None:
    policy = middle()
    assert tell(policy, (0, StepStarted(0)), (1, StepStarted(1)), (1, Arrived(FORWARD, Span(0, 4)))) == ["1:1F[0:2]"]
    assert tell(policy, (0, Arrived(FORWARD, Span(0, 2)))) == []  # one thing at a time
    assert tell(policy, done("1:1F[0:2]")) == ["0:1F[0:2]"]
    assert tell(policy, (0, Arrived(BACKWARD, Span(0, 2)))) == []
    assert tell(policy, done("0:1F[0:2]"), done("0:1I[0:2]"), done("0:1W[0:2]")) == [
        "0:1I[0:2]",
        "0:1W[0:2]",
        "1:1F[2:4]",
    ]
    assert "in step 0 for activations of [2:4]" in policy.waiting_for()


def test_a_forward_leaves_room_for_all_that_the_older_step_has_left() -> None:
    policy = middle(limit=10)
    tell(policy, (0, StepStarted(0)), (1, StepStarted(1)), (1, Arrived(FORWARD, Span(0, 8))))
    assert tell(policy, done("1:1F[0:2]")) == []  # 8 of step 0 and 2 of step 1 are all that fits
    tell(policy, (0, Arrived(FORWARD, Span(0, 2))), (0, Arrived(BACKWARD, Span(0, 2))))
    ran = tell(policy, done("0:1F[0:2]"), done("0:1I[0:2]"), done("0:1W[0:2]"))
    assert ran == ["0:1I[0:2]", "0:1W[0:2]", "1:1F[2:4]"]


def test_steps_begin_one_after_another_and_end_so() -> None:
    policy = middle()
    tell(policy, (0, StepStarted(0)), (1, StepStarted(1)))
    with pytest.raises(ScheduleError, match=r"step 2 begins while \[0, 1\] are open"):
        tell(policy, (2, StepStarted(2)))
    with pytest.raises(ScheduleError, match=r"of step 5, open are \[0, 1\]"):
        tell(policy, (5, Arrived(FORWARD, Span(0, 2))))
    assert policy.close() is None
    assert policy.open_steps == (0, 1)


@settings(max_examples=200, deadline=None)
@given(
    schedule=st.sampled_from(["critical-path", "compact", "1f1b", "zb-h1", "gpipe"]),
    limit=st.integers(8, 20),
    seed=st.integers(0, 10**6),
)
def test_whatever_comes_when_every_sample_runs_once_a_step_within_the_limit(schedule, limit, seed) -> None:
    random, policy, steps = Random(seed), middle(schedule, limit=limit), 5
    ran: list[tuple[int, Action]] = []
    closed: list[int] = []
    running: tuple[int, Action] | None = None
    to_come = {step: [Arrived(FORWARD, span) for span in equal_spans(8, 2)] for step in range(steps)}

    def give(step: int, event: object) -> None:
        nonlocal running
        chosen = policy.on_event(0.0, step, event)
        if chosen is not None:
            assert running is None
            running = chosen[0], chosen[1].action
            ran.append(running)
        while (over := policy.close()) is not None:
            closed.append(over)
            if over + 2 < steps:
                give(over + 2, StepStarted(over + 2))

    give(0, StepStarted(0))
    give(1, StepStarted(1))
    while len(closed) < steps:
        choices = [(step, event) for step in policy.open_steps for event in to_come[step]]
        assert choices or running, policy.waiting_for()
        if running and (not choices or random.random() < 0.5):
            (step, action), running = running, None
            if action.op is Op.FORWARD:
                to_come[step].append(Arrived(BACKWARD, action.span))
            give(step, Finished(action))
        else:
            step, event = random.choice(choices)
            to_come[step].remove(event)
            give(step, event)
    assert closed == list(range(steps))
    check(ran, steps, limit)


def check(ran: list[tuple[int, Action]], steps: int, limit: int) -> None:
    """Every sample is forwarded and released once in each step, and no more are held than may be."""
    held = 0
    for step in range(steps):
        for ops in ((Op.FORWARD,), (Op.BACKWARD, Op.BACKWARD_WEIGHT)):
            spans = sorted(action.span for at, action in ran if at == step and action.op in ops)
            assert spans == list(equal_spans(8, 2))
    for _, action in ran:
        if action.op is Op.FORWARD:
            held += action.span.size
        assert held <= limit
        if action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            held -= action.span.size
