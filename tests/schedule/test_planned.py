"""`critical-path` with a planned order: it follows the order, waits where that pays, and leaves it for what is late."""

from dataclasses import replace

import pytest

from spantrain.config.files.json_codec import from_json, to_json
from spantrain.core.action import Action, Direction
from spantrain.core.messages import Arrived, Finished, StepStarted
from spantrain.core.plan import Plan
from spantrain.core.planned.hints import DispatchHints, PlannedOrder, PlannedWait
from spantrain.core.span import Span, equal_spans
from spantrain.errors import ConfigError, PlanError
from spantrain.schedule.dispatch.machine import DispatchMachine, ReplicaTask
from spantrain.schedule.registry import make_policy, replica_tasks

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def last_stage(ops: str, *waits: tuple[int, float], limit: int = 6) -> DispatchMachine:
    planned = PlannedOrder(ops=ops, waits=tuple(PlannedWait(position=at, seconds=s) for at, s in waits))
    task = ReplicaTask(stage=1, num_stages=2, spans=equal_spans(6, 2), in_flight_limit=limit, planned=planned)
    return make_policy("critical-path", task)


def tell(policy: DispatchMachine, *events: object, now_s: float = 0.0) -> list[str]:
    return [str(command.action) for event in events for command in policy.on_event(now_s, event)]


def done(text: str) -> Finished:
    return Finished(Action.parse(text))


def run_to_end(policy: DispatchMachine, first: str) -> list[str]:
    ran = [first]
    while not policy.step_complete:
        ran += tell(policy, done(ran[-1]))
    return [text[1] for text in ran]


@pytest.mark.parametrize("ops", ["FFFIIIWWW", "FIWFIWFIW", "FFIWIFIWW", "FBFFBB"])
def test_it_follows_the_order_in_every_step(ops) -> None:
    policy = last_stage(ops)
    for step in range(2):
        (first,) = tell(policy, StepStarted(step), Arrived(FORWARD, Span(0, 6)))
        assert "".join(run_to_end(policy, first)) == ops


def test_what_is_late_is_overtaken_by_the_next_planned_action_that_is_ready() -> None:
    policy = last_stage("FFIFIWIWW")
    tell(policy, StepStarted(0), Arrived(FORWARD, Span(0, 2)))
    (command,) = policy.on_event(0.0, done("1F[0:2]"))
    assert str(command.action) == "1I[0:2]"
    assert command.reason == "1F[2:4] is late; the next planned action that is ready"
    tell(policy, Arrived(FORWARD, Span(2, 6)))
    assert tell(policy, done("1I[0:2]")) == ["1F[2:4]"]
    assert tell(policy, done("1F[2:4]"), done("1F[4:6]")) == ["1F[4:6]", "1I[2:4]"]


def test_it_waits_where_the_plan_says_so_but_not_much_longer_than_planned() -> None:
    def policy() -> DispatchMachine:
        machine = last_stage("FIFIWFIWW", (2, 1.0))
        tell(machine, StepStarted(0), Arrived(FORWARD, Span(0, 2)))
        assert tell(machine, done("1F[0:2]")) == ["1I[0:2]"]
        assert tell(machine, done("1I[0:2]"), now_s=5.0) == []  # 1W[0:2] could run
        return machine

    assert tell(policy(), Arrived(FORWARD, Span(2, 4)), now_s=6.0) == ["1F[2:4]"]
    assert tell(policy(), Arrived(FORWARD, Span(4, 5)), now_s=6.9) == []
    assert tell(policy(), Arrived(FORWARD, Span(4, 5)), now_s=7.1) == ["1W[0:2]"]


def test_what_runs_early_never_takes_the_room_of_older_samples() -> None:
    policy = last_stage("FIWFIWFIW", limit=4)
    assert tell(policy, StepStarted(0), Arrived(FORWARD, Span(2, 6))) == ["1F[2:4]"]
    tell(policy, done("1F[2:4]"))  # runs 1I[2:4]; 1F[4:6] would take the room of [0:2]
    assert tell(policy, done("1I[2:4]")) == ["1W[2:4]"]
    assert tell(policy, Arrived(FORWARD, Span(0, 2)), done("1W[2:4]")) == ["1F[0:2]"]


def test_hints_reach_the_replicas_of_this_schedule_only(make_plan) -> None:
    plan = hinted(make_plan, "FFBFBB", "FIFIWFIWW")
    following = replace(plan, schedule="critical-path")
    assert [row[0].planned.ops for row in replica_tasks(following)] == ["FFBFBB", "FIFIWFIWW"]
    assert all(row[0].planned is None for row in replica_tasks(replace(plan, schedule="compact")))
    assert all(row[0].planned is None for row in replica_tasks(following, split_backward=False))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("FFBFBB", "FIFIWFIW", r"\[4:6\] has no backward_weight"),
        ("FFFFBBB", "FIFIWFIWW", "F comes more than 3 times"),
        ("FFBFBB", "IFIWFIWFW", "the order stops"),
        ("FFFBBB", "FIFIWFIWW", "6 samples held, the limit is 4"),
    ],
)
def test_hints_that_do_not_fit_are_refused(make_plan, first, second, message) -> None:
    plan = hinted(make_plan, first, second)
    with pytest.raises(PlanError, match=f"hints do not fit .*{message}"):
        replica_tasks(replace(plan, schedule="critical-path"))


def hinted(make_plan, *orders: str):
    hints = DispatchHints(orders=tuple((PlannedOrder(ops=ops),) for ops in orders), predicted_s=1.0, reason="made up")
    return replace(make_plan([(equal_spans(6, 2), [1.0], [4])] * 2), hints=hints)


def test_hints_of_another_number_of_stages_are_refused(make_plan) -> None:
    with pytest.raises(ValueError, match=r"hints: they have \[1\] replicas by stage, the plan has \[1, 1\]"):
        hinted(make_plan, "FFBFBB")


def test_hints_survive_a_file(make_plan, tmp_path) -> None:
    plan = hinted(make_plan, "FFBFBB", "FIFIWFIWW")
    assert plan.hints is not None
    waits = (PlannedWait(position=2, seconds=0.25),)
    order = replace(plan.hints.orders[1][0], waits=waits)
    plan = replace(plan, hints=replace(plan.hints, orders=(plan.hints.orders[0], (order,))))
    assert from_json(Plan, to_json(plan), "a test") == plan


@pytest.mark.parametrize("wrong", [{"ops": "FXB"}, {"ops": "F", "waits": ({"position": -1, "seconds": 0.0},)}])
def test_orders_that_are_none_are_refused(wrong) -> None:
    with pytest.raises(ConfigError, match="a test"):
        from_json(PlannedOrder, wrong, "a test")
