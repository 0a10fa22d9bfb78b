"""Advice on another plan: asked for beside training, checked, taken at a barrier; trouble is told once."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from spantrain.core.plan import Plan
from spantrain.core.shares import StateSharding
from spantrain.core.span import Span
from spantrain.errors import PlanError
from spantrain.runtime.coordinator.advice import Advice, Advising, check_change
from testing.patience import PATIENCE_S

SPANS = [[Span(0, 2), Span(2, 6)]] * 2


class Adviser:
    """Answers with what it was made with, when it may."""

    def __init__(self, answer: Callable[[Plan], Advice | None]) -> None:
        self.answer = answer
        self.may = threading.Event()
        self.asked: list[tuple[int, int]] = []

    def advise(self, step: int, plan: Plan, _reports: object) -> Advice | None:
        self.asked.append((step, plan.generation))
        assert self.may.wait(PATIENCE_S)
        return self.answer(plan)


@pytest.fixture
def plan(make_plan, spec_of) -> Plan:
    return make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], SPANS, "1f1b")


def finished(advising: Advising) -> None:
    """Let the adviser's thread come to its end."""
    asked = advising._asked
    assert asked is not None
    asked.exception(PATIENCE_S)


def answered(advising: Advising, step: int) -> Advice | None:
    """What is said of a step, whether it comes at once or later."""
    advice = advising.ask(step, {})
    if advice is None and advising._asked is not None:
        finished(advising)
        advice = advising.take()
    return advice


def test_nobody_waits_and_the_answer_is_taken_later(plan):
    adviser = Adviser(lambda now: Advice(plan=replace(now, schedule="gpipe", generation=99), reason="why not"))
    with Advising(adviser, plan, on_trouble=pytest.fail) as advising:
        assert advising.take() is None
        assert advising.ask(0, {}) is None
        assert advising.take() is None
        assert advising.ask(1, {}) is None  # it still looks at step 0
        adviser.may.set()
        finished(advising)
        advice = advising.take()
        assert advice is not None
        assert (advice.plan.schedule, advice.plan.generation, advice.reason) == ("gpipe", 2, "why not")
        assert answered(advising, 2) is None  # the same again is no change
    assert adviser.asked == [(0, 1), (2, 2)]


def test_what_is_said_at_once_is_taken_at_once(plan, monkeypatch):
    monkeypatch.setattr("spantrain.runtime.coordinator.advice._AT_ONCE_S", PATIENCE_S)
    adviser = Adviser(lambda now: Advice(plan=replace(now, schedule="gpipe"), reason="why not"))
    adviser.may.set()
    with Advising(adviser, plan, on_trouble=pytest.fail) as advising:
        advice = advising.ask(0, {})
    assert advice is not None
    assert advice.plan.schedule == "gpipe"


def test_trouble_is_told_once_and_the_plan_stays(plan):
    told: list[str] = []
    adviser = Adviser(lambda now: Advice(plan=replace(now, global_batch=7), reason="wrong"))
    adviser.may.set()
    with Advising(adviser, plan, on_trouble=told.append) as advising:
        for step in range(3):
            assert answered(advising, step) is None
            adviser.answer = lambda _now: [][1]
    assert len(told) == 1
    assert "ValueError" in told[0]  # a plan whose micro-batches hold other samples is none
    assert len(adviser.asked) == 3


def test_what_cannot_take_over(plan, make_plan, spec_of):
    both = tuple(stage.replicas[0] for stage in plan.stages)
    end = plan.stages[-1].end_unit
    sharded = (replace(plan.stages[0], end_unit=end, replicas=both, state_sharding=StateSharding.ZERO2),)
    smaller = make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [[Span(0, 4)]] * 2, "1f1b")
    fewer = make_plan(spec_of("gpt2"), [0, 5], [[1]], SPANS[:1], "1f1b")
    for wrong, text in (
        (replace(plan, stages=sharded, schedule="compact"), "divided gradients"),
        (replace(plan, dtype="bfloat16"), "dtype is bfloat16 there, float32 now"),
        (smaller, "global_batch is 4 there, 6 now"),
        (fewer, "devices is"),
        (make_plan(spec_of("bert"), [0, 2, 4], [[1], [1]], SPANS, "1f1b"), "model is"),
    ):
        with pytest.raises(PlanError, match=text):
            check_change(plan, wrong)
    check_change(plan, replace(plan, schedule="zb"))
