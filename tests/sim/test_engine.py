"""Times that can be reckoned by hand."""

from dataclasses import replace

import pytest

from spantrain.core.action import Op
from spantrain.core.span import equal_spans
from spantrain.errors import ScheduleError, UsageError
from spantrain.schedule.render.text import render_trace
from spantrain.sim.engine import SimulationOptions, simulate
from spantrain.sim.network import Network
from spantrain.sim.transfers import TransferCost, VirtualClock
from testing.made_up_costs import MadeUpCosts

OPS = {Op.FORWARD: 1.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}


def costs(stages: int, **more: object) -> MadeUpCosts:
    cut = (0.0,) * (stages - 1)
    return MadeUpCosts(**{"sample_s": (OPS,) * stages, "latency_s": cut, "forward_s": cut, "backward_s": cut, **more})


def test_two_stages_side_by_side(make_plan) -> None:
    plan = make_plan([(equal_spans(3, 1), [1.0], [3])] * 2)
    result = simulate(replace(plan, schedule="critical-path"), costs(2), steps=1)
    assert render_trace(result.trace, width=10).splitlines()[:2] == ["s0r0  FFFBBBBBB.", "s1r0  .FIFIFIWWW"]
    assert result.pipeline_s == 10.0
    assert result.utilisation == {"s0r0": 0.9, "s1r0": 0.9}
    assert result.bubble_ratio["s0r0"] == pytest.approx(0.1)
    assert result.samples_per_s == pytest.approx(0.3)
    assert result.link_bytes == {("s0r0", "s1r0"): 3, ("s1r0", "s0r0"): 3}


def test_the_end_of_a_step_counts(make_plan) -> None:
    plan = make_plan([(equal_spans(2, 1), [1.0], [2])])
    end = costs(1, sum_s=0.5, tied_exchange_s=0.25, commit_s=0.125, update_s=2.0)
    for steps in (1, 3):
        result = simulate(plan, end, steps=steps)
        assert result.step_s == pytest.approx(6.0 + 0.5 + 0.25 + 0.125 + 2.0)
        assert result.utilisation["s0r0"] == pytest.approx(8.0 / result.step_s)


def test_overhead_comes_before_each_action(make_plan) -> None:
    plan = make_plan([(equal_spans(2, 1), [1.0], [2])])
    assert simulate(plan, costs(1, action_overhead_s=0.5)).pipeline_s == pytest.approx(6.0 + 4 * 0.5)


def test_the_trace_has_all_lanes_of_all_steps(make_plan) -> None:
    plan = make_plan([(equal_spans(2, 1), [1.0], [2])] * 2)
    trace = simulate(plan, costs(2, latency_s=(0.5,), forward_s=(0.25,), update_s=1.0), steps=2).trace
    first = trace.of("s1r0", "receive", step=0)[0]
    assert (first.name, first.start_s, first.end_s) == ("forward [0:1] from s0r0", 1.5, 1.75)
    assert trace.of("s0r0", "send")[0].name == "forward [0:1] to s1r0"
    assert [i.name for i in trace.of("s0r0", step=1)][-1] == "update"
    assert {flow.step for flow in trace.flows} == {0, 1}
    assert str(trace.flows[0].name) == "g0/s0/forward/cut0[0:1]"
    assert simulate(plan, costs(2), options=SimulationOptions(trace=False)).trace.intervals == ()


def test_a_faster_stage_may_begin_the_next_step_before_the_others_have_updated(make_plan) -> None:
    plan = make_plan([(equal_spans(1, 1), [1.0], [1])] * 2)

    class SlowSecondUpdate(MadeUpCosts):
        def optimizer_s(self, device: str) -> float:
            return {"s0r0": 0.0, "s1r0": 5.0}[device]

    cut = (0.0,)
    slow = SlowSecondUpdate(sample_s=(OPS,) * 2, latency_s=cut, forward_s=cut, backward_s=cut)
    result = simulate(plan, slow, steps=2)
    # F of stage 0 is hidden behind stage 1's update: 5 + F + I, then B of stage 0.
    assert result.step_s == pytest.approx(5.0 + 2.0 + 2.0)


def test_a_pipeline_that_stops_says_what_each_device_waits_for(make_plan) -> None:
    plan = make_plan([(equal_spans(4, 2), [1.0], [2]), (equal_spans(4, 4), [1.0], [4])])
    with pytest.raises(
        ScheduleError, match=r"s0r0 waits for room for 0F\[2:4\].*s1r0 waits for activations of \[0:4\]"
    ):
        simulate(plan, costs(2))


def test_bad_questions_are_refused(make_plan) -> None:
    plan = make_plan([(equal_spans(1, 1), [1.0], [1])])
    with pytest.raises(UsageError, match=r"schedule must be one of .*, got 'zz'"):
        simulate(replace(plan, schedule="zz"), costs(1))
    with pytest.raises(ValueError, match="at least 1"):
        simulate(plan, costs(1), steps=0)


def test_links_are_shared() -> None:
    clock = VirtualClock()
    network = Network(clock)
    arrived: dict[str, float] = {}

    def carry(target: str, occupancy_s: float) -> None:
        transfer = TransferCost(size_bytes=1, latency_s=1.0, occupancy_s=occupancy_s, links=("up",))
        network.send("a", target, transfer, lambda start_s, sent_s: arrived.update({target: clock.now_s}))

    carry("b", 1.0)
    carry("c", 2.0)
    clock.run()
    assert arrived == {"b": 3.0, "c": 4.0}


def test_one_pair_sends_one_after_the_other() -> None:
    clock, times = VirtualClock(), []
    network = Network(clock)
    for _ in range(3):
        transfer = TransferCost(size_bytes=1, latency_s=5.0, occupancy_s=1.0, links=("up",))
        network.send("a", "b", transfer, lambda start_s, sent_s: times.append((start_s, sent_s, clock.now_s)))
    clock.run()
    assert times == [(0.0, 1.0, 6.0), (1.0, 2.0, 7.0), (2.0, 3.0, 8.0)]
