"""Logs of decisions, made again by fresh policies: the same answers, or the first one that differs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.config.traces.trace_file import read_decisions, write_decisions
from spantrain.core.action import Action, Direction
from spantrain.core.messages import Arrived, Decision, DeviceDecisions, Finished, Run, StepStarted, event_of, event_text
from spantrain.core.span import Span, equal_spans
from spantrain.errors import ConfigError, PlanError
from spantrain.schedule.registry import make_policy, schedule_names
from spantrain.sim.replay import compare_all, replay, simulated_order
from testing.plans import plan_of, task_of

SPANS = equal_spans(12, 2)
PLAN = plan_of([(SPANS, [1.0], [8]), (SPANS, [2.0, 1.0], [8, 4]), (SPANS, [1.0], [8])])


def live_log(device: str, schedule: str, gaps: list[int], *, steps: int = 1) -> DeviceDecisions:
    """A log as a driver writes it: samples arrive after gaps of ticks, actions take theirs, in the order it is told."""
    task = task_of(replace(PLAN, schedule=schedule), device)
    policy = make_policy(schedule, task)
    ticks = iter(gaps * 1000)
    decisions: list[Decision] = []
    now_s = 100.0
    for step in range(steps):
        coming = arrivals(task, now_s, ticks)
        events = [StepStarted(step), *pop_due(coming, now_s)]
        running, ends_s = None, 0.0
        while True:
            for event in events:
                answer = policy.on_event(now_s, event)
                decisions.append(Decision.of(step, now_s, event, answer))
                now_s += 1e-6
                for command in answer:
                    running, ends_s = command.action, now_s + 1 + next(ticks)
            if policy.step_complete:
                break
            now_s = max(now_s, ends_s if running else coming[0][0])
            events = pop_due(coming, now_s)
            if running:
                events.append(Finished(running))
                running = None
    return DeviceDecisions(device=device, trace_shift_s=-100.0, decisions=tuple(decisions))


def arrivals(task, now_s, ticks):
    ways = [d for d, here in ((Direction.FORWARD, task.stage > 0), (Direction.BACKWARD, task.stage < 2)) if here]
    found = []
    for number, direction in enumerate(ways):
        at_s = now_s + 20 * number
        for span in task.spans:
            at_s += next(ticks)
            found.append((at_s, Arrived(direction, span)))
    return sorted(found, key=lambda entry: entry[0])


def pop_due(coming, now_s):
    due = [event for at_s, event in coming if at_s <= now_s]
    del coming[: len(due)]
    return due


GAPS = st.lists(st.integers(0, 9), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(
    device=st.sampled_from(PLAN.devices), schedule=st.sampled_from(schedule_names()), gaps=GAPS, steps=st.integers(1, 2)
)
def test_fresh_policies_and_the_simulated_replica_agree(device, schedule, gaps, steps):
    log = live_log(device, schedule, gaps, steps=steps)
    task = task_of(replace(PLAN, schedule=schedule), device)
    assert replay(schedule, task, log) is None
    assert simulated_order(schedule, task, log) is None


def test_all_devices_of_a_run():
    logs = [live_log(device, "critical-path", [1, 0, 3]) for device in PLAN.devices]
    assert compare_all(replace(PLAN, schedule="critical-path"), logs, replay) == ()
    assert sum(len(log.decisions) for log in logs) > 50


def test_a_changed_answer_is_named_with_what_stood_before():
    log = live_log("s0r0", "critical-path", [1])
    at = next(index for index, decision in enumerate(log.decisions) if index > 4 and decision.run)
    other = replace(log.decisions[at], run=(Action.parse("0F[10:12]"),))
    changed = replace(log, decisions=(*log.decisions[:at], other, *log.decisions[at + 1 :]))
    (difference,) = compare_all(replace(PLAN, schedule="critical-path"), [changed], replay)
    assert (difference.device, difference.index) == ("s0r0", at)
    assert "0F[10:12]" in difference.logged
    assert str(log.decisions[at].run[0]) in difference.replayed
    assert difference.before == tuple(str(decision) for decision in log.decisions[at - 3 : at])
    assert "agreed: step 0" in str(difference)


def test_another_schedule_gives_another_order():
    log = live_log("s1r0", "critical-path", [2, 0, 1])
    plan = replace(PLAN, schedule="gpipe")
    assert compare_all(plan, [log], replay) != ()
    difference = simulated_order("gpipe", task_of(plan, "s1r0"), log)
    assert difference is not None
    assert difference.replayed.startswith("step 0, action ")


def test_an_event_that_a_fresh_policy_refuses_is_a_difference():
    log = live_log("s1r0", "critical-path", [1])
    twice = replace(log, decisions=(*log.decisions[:2], log.decisions[1], *log.decisions[2:]))
    difference = replay("critical-path", task_of(PLAN, "s1r0"), twice)
    assert difference is not None
    assert difference.index == 2
    assert "refused" in difference.replayed


def test_a_device_of_another_plan():
    with pytest.raises(PlanError, match="nowhere is not in the plan, which has s0r0"):
        compare_all(PLAN, [replace(live_log("s1r0", "compact", [1]), device="nowhere")], replay)


@pytest.mark.parametrize(
    "event", [StepStarted(12), Arrived(Direction.BACKWARD, Span(3, 9)), Finished(Action.parse("1W[0:4]"))]
)
def test_events_parse_back(event):
    assert event_of(event_text(event)) == event


@pytest.mark.parametrize(
    "text", ["", "step", "step -1", "step x", "arrived up [0:4]", "arrived forward [4:0]", "finished 1X[0:4]", "run 1"]
)
def test_what_is_no_event(text):
    with pytest.raises(ValueError, match=r"not an event|not a span|not an action|needs 0 <="):
        event_of(text)
    with pytest.raises(ValueError, match=r"not a|needs 0 <="):
        Decision(step=0, now_s=0.0, event=text)


def test_a_decision_gives_its_commands_back():
    action = Action.parse("0F[0:2]")
    decision = Decision.of(3, 1.5, StepStarted(3), [Run(action, "oldest ready F")])
    assert (decision.heard, decision.run, decision.reason) == (StepStarted(3), (action,), "oldest ready F")
    assert str(decision) == "step 3, step 3 -> run 0F[0:2] (oldest ready F)"


def test_the_file_gives_back_what_was_written(tmp_path):
    logs = tuple(live_log(device, "compact", [1, 2]) for device in PLAN.devices)
    path = tmp_path / "decisions.jsonl"
    write_decisions(logs, path)
    assert read_decisions(path) == logs
    assert path.read_text().startswith('{"format": "spantrain-decisions", "version": 2}\n{"device": "s0r0"')


def lines_with(tmp_path, at, text):
    path = tmp_path / "decisions.jsonl"
    write_decisions([live_log("s0r0", "compact", [1])], path)
    lines = path.read_text().splitlines()
    lines[at] = text
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("at", "text", "message"),
    [
        (0, '{"format": "spantrain-decisions", "version": 9}', r"line 1: has format version 9"),
        (0, '{"format": "other"}', r"is not a spantrain-decisions file"),
        (0, "[]", r"line 1: must be an object"),
        (1, '{"step": 0, "now_s": 1, "event": "step 0"}', r"line 2: a decision stands before any line with a device"),
        (1, '{"device": "s0r0"}', r"line 2"),
        (3, '{"step": 0, "now_s": 1, "event": "jump"}', r"line 4: not an event: 'jump'"),
        (3, '{"step": 0, "now_s": 1, "event": "step 0", "x": 1}', r"line 4.*x"),
        (3, "{", r"line 4.*not valid JSON"),
        (4, '{"step": 0, "now_s": 1.0, "event": "step 0"}', r"s0r0: time runs backwards, from step 0, now_s 10"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, at, text, message):
    with pytest.raises(ConfigError, match=message):
        read_decisions(lines_with(tmp_path, at, text))


def test_a_file_that_was_cut_off(tmp_path):
    path = tmp_path / "decisions.jsonl"
    write_decisions([live_log("s0r0", "compact", [1])], path)
    path.write_text(path.read_text()[:-5])
    with pytest.raises(ConfigError, match="cut off"):
        read_decisions(path)
    path.unlink()
    with pytest.raises(ConfigError, match="no such file; train again"):
        read_decisions(path)
