"""Changes of plan that are known before a device is lost."""

import threading
from functools import partial

import pytest

from spantrain.app.training.recovery import carry_on
from spantrain.app.training.recovery.carry_on import PreparedChanges
from spantrain.core.span import Span
from spantrain.errors import ProfileError
from spantrain.planner.present import light_plan
from testing.patience import no_threads_left, until


@pytest.fixture
def plan(make_plan, spec_of):
    return make_plan(spec_of("gpt2"), [0, 2, 5], [[2, 1], [1]], [[Span(0, 2), Span(2, 4)]] * 2, "1f1b")


@pytest.fixture
def light(plan, law_profile):
    return partial(light_plan, profile=law_profile(plan.cluster, plan.model), optimizer="adamw")


@pytest.fixture
def asked():
    """Who asked for a light change, by the name of the thread, and for which devices."""
    return []


@pytest.fixture
def changes(light, asked):
    def heard(plan, present):
        answer = light(plan, present=present)
        asked.append((threading.current_thread().name, present))
        return answer

    return PreparedChanges(heard)


def test_each_loss_is_planned_for_beside_the_steps(plan, light, changes, asked, monkeypatch):
    monkeypatch.setattr(carry_on, "_REST", 0)
    here = frozenset(plan.devices)
    with changes:
        changes.prepare(plan, here)
        changes.prepare(plan, here)
        until(lambda: len(asked) == len(plan.devices))
        found = {name: changes.light_plan(plan, here - {name}) for name in plan.devices}
    assert {thread for thread, _ in asked} == {"prepared changes"}
    assert asked[0][1] == here - {"s1r0"}, "the only one that has its stage is not the first"
    for name, change in found.items():
        assert change == light(plan, present=here - {name})


def test_what_is_not_known_is_planned_at_once(plan, light, changes, asked):
    here = frozenset(plan.devices)
    with changes:
        left = frozenset({"s0r0"})
        assert changes.light_plan(plan, left) == light(plan, present=left)
        changes.prepare(plan, here)
        until(lambda: len(asked) > 1)
    own = [thread for thread, _ in asked]
    assert own[:2] == ["MainThread", "prepared changes"]


def test_what_cannot_be_planned_is_told_when_it_is_asked_for(plan, monkeypatch):
    monkeypatch.setattr(carry_on, "_REST", 0)
    here, tried = frozenset(plan.devices), []

    def refuses(plan, present):
        tried.append(present)
        raise ProfileError("no such times")

    with PreparedChanges(refuses) as changes:
        changes.prepare(plan, here)
        until(lambda: len(tried) == len(plan.devices))
        with pytest.raises(ProfileError, match="no such times"):
            changes.light_plan(plan, here - {"s0r0"})


def test_no_thread_is_left(plan, changes, asked, monkeypatch):
    monkeypatch.setattr(carry_on, "_REST", 1e6)  # It would rest for days, were it not told to end.
    with no_threads_left(), changes:
        changes.prepare(plan, frozenset(plan.devices))
        until(lambda: asked)
