"""Devices that are kept from their next action while they send (other frameworks' pipelines)."""

import pytest

from spantrain.core.action import Direction, Op
from spantrain.core.span import equal_spans
from spantrain.errors import UsageError
from spantrain.sim.costs import TableCosts
from spantrain.sim.engine import SimulationOptions, simulate
from testing.plans import plan_of


def step_s(hold_s):
    cuts = equal_spans(4, 1)
    plan = plan_of([(cuts, [1.0], [2]), (cuts, [1.0], [2])], schedule="1f1b")
    seconds = {Op.FORWARD: 1.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}
    costs = TableCosts(sample_s=(seconds, seconds), latency_s=(0.0,), forward_s=(0.0,), backward_s=(0.0,))
    return simulate(plan, costs, steps=1, options=SimulationOptions(send_hold_s=hold_s)).step_s


def test_the_last_stage_is_held_between_its_backwards_and_the_next_forwards():
    assert step_s({}) == pytest.approx(1 + 4 * 3 + 2)
    assert step_s({("s1r0", Direction.BACKWARD): 0.5}) == pytest.approx(1 + 4 * 3 + 3 * 0.5 + 2)


def test_the_first_stage_is_held_between_its_forwards_and_the_next_backward():
    # Its second backward is due at 7 s, half a second after the third forward began to be sent: 7.5 s.
    assert step_s({("s0r0", Direction.FORWARD): 0.5}) == pytest.approx(step_s({}) + 0.5)


def test_devices_that_lead_nothing_are_named():
    with pytest.raises(UsageError, match="send_hold_s: no replica is led by nobody"):
        step_s({("nobody", Direction.FORWARD): 0.5})
