"""`compact` is the order of SpanTrain's figure 6b, as section 3.3.1 puts it in words: 4 stages, 6 micro-batches."""

from dataclasses import replace

import pytest

from spantrain.core.action import Action, Direction, Op
from spantrain.core.messages import Arrived, Finished, StepStarted
from spantrain.core.span import Span, equal_spans
from spantrain.schedule.dispatch.machine import ReplicaTask
from spantrain.schedule.registry import make_policy
from spantrain.sim.costs import TableCosts
from spantrain.sim.engine import SimulationOptions, simulate

STAGES, COUNT = 4, 6


@pytest.fixture(scope="module")
def orders(make_plan) -> list[str]:
    """Slow links, as the figure has them; a backward of inputs is twice a forward; all stages with I and W."""
    plan = make_plan([(equal_spans(COUNT, 1), [1.0], [COUNT])] * STAGES)
    costs = TableCosts(
        sample_s=({Op.FORWARD: 1.0, Op.BACKWARD_INPUT: 2.0, Op.BACKWARD_WEIGHT: 1.0},) * STAGES,
        latency_s=(1.0,) * (STAGES - 1),
        forward_s=(2.0,) * (STAGES - 1),
        backward_s=(2.0,) * (STAGES - 1),
    )
    options = SimulationOptions(split_backward=True, trace=False)
    result = simulate(replace(plan, schedule="compact"), costs, steps=1, options=options)
    return [" ".join(f"{a.op.value}{a.span.lo}" for a in result.orders[f"s{stage}r0"]) for stage in range(STAGES)]


def test_all_six_forwards_are_completed_first(orders) -> None:
    for order in orders[:2]:
        assert order.startswith("F0 F1 F2 F3 F4 F5 I0")


def test_a_forward_that_is_there_goes_before_all_else(orders) -> None:
    assert orders[3].startswith("F0 I0 F1 F2 I1 F3 F4 I2")


def test_after_weights_2_backwards_4_and_5_go_before_the_remaining_weights(orders) -> None:
    """What the paper says of FG2, word for word."""
    assert orders[1].endswith("W2 I4 I5 W3 W4 W5")


def test_weights_fill_the_holes_between_backwards(orders) -> None:
    """FG1 waits for gradients over slow links, and runs what weights there are meanwhile."""
    assert orders[0].endswith("I0 W0 I1 W1 I2 I3 W2 I4 I5 W3 W4 W5")


def test_weights_0_go_between_backward_2_and_forward_5_then_backward_3_at_once() -> None:
    """What the paper says of FG3: weights 1 and 2, ready for long, wait for backward 3."""
    task = ReplicaTask(stage=2, num_stages=STAGES, spans=equal_spans(COUNT, 1), in_flight_limit=COUNT)
    policy = make_policy("compact", task)

    def ran(*events) -> list[str]:
        return [str(command.action) for event in events for command in policy.on_event(0.0, event)]

    def done(text: str) -> Finished:
        return Finished(Action.parse(text))

    ran(StepStarted(0), Arrived(Direction.FORWARD, Span(0, 5)), *(done(f"2F[{k}:{k + 1}]") for k in range(5)))
    ran(Arrived(Direction.BACKWARD, Span(0, 3)), done("2I[0:1]"), done("2I[1:2]"))
    assert ran(done("2I[2:3]")) == ["2W[0:1]"]  # neither forward 5 nor gradient 3 is there
    assert ran(Arrived(Direction.FORWARD, Span(5, 6)), done("2W[0:1]")) == ["2F[5:6]"]
    assert ran(Arrived(Direction.BACKWARD, Span(3, 4)), done("2F[5:6]")) == ["2I[3:4]"]
    assert ran(done("2I[3:4]"), done("2W[1:2]")) == ["2W[1:2]", "2W[2:3]"]
