"""Devices and links that change while they work, and clocks that differ; times that can be reckoned by hand."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.span import equal_spans
from spantrain.core.speed import SpeedTrace
from spantrain.errors import UsageError
from spantrain.schedule.registry import make_policy, replica_tasks, schedule_names
from spantrain.sim.engine import SimulationOptions, simulate
from spantrain.sim.network import Network
from spantrain.sim.record import TraceRecorder
from spantrain.sim.replica import SimulatedReplica, World
from spantrain.sim.transfers import TransferCost, VirtualClock
from testing.made_up_costs import MadeUpCosts

OPS = {Op.FORWARD: 1.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}


def trace(*changes: tuple[float, float]) -> SpeedTrace:
    return SpeedTrace(changes=changes)


def two_stages(occupancy_s: float = 0.0) -> MadeUpCosts:
    return MadeUpCosts(
        sample_s=(OPS, OPS), latency_s=(0.0,), forward_s=(occupancy_s,), backward_s=(occupancy_s,), update_s=1.0
    )


@pytest.mark.parametrize(
    ("changes", "start_s", "work_s", "end_s"),
    [
        (((0.0, 0.5),), 0.0, 2.0, 4.0),
        (((2.0, 0.5),), 1.0, 2.0, 4.0),
        (((2.0, 0.5), (3.0, 1.0)), 1.0, 2.0, 3.5),
        (((2.0, 0.0), (7.0, 1.0)), 1.0, 2.0, 8.0),
        (((2.0, 0.0), (7.0, 1.0)), 1.0, 1.0, 2.0),
        (((2.0, 0.0), (7.0, 1.0)), 3.0, 1.0, 8.0),
        (((1.0, 4.0),), 5.0, 8.0, 7.0),
        (((9.0, 0.1),), 1.0, 2.0, 3.0),
        (((2.0, 0.0), (7.0, 1.0)), 3.0, 0.0, 3.0),
    ],
)
def test_when_work_ends(changes, start_s, work_s, end_s) -> None:
    speed = SpeedTrace(changes=changes)
    assert speed.end_s(start_s, work_s) == end_s
    assert speed.work_s(start_s, end_s) == pytest.approx(work_s)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_work_until_the_end_is_the_work_that_was_asked_for(data) -> None:
    times = sorted(data.draw(st.sets(st.integers(0, 40), min_size=1, max_size=6)))
    speeds = [data.draw(st.sampled_from([0.0, 0.25, 1.0, 3.0])) for _ in times[1:]]
    speed = SpeedTrace(changes=tuple(zip(map(float, times), [*speeds, 0.5], strict=True)))
    start_s, work_s = data.draw(st.floats(0, 50)), data.draw(st.floats(0, 50))
    end_s = speed.end_s(start_s, work_s)
    assert end_s >= start_s
    assert speed.work_s(start_s, end_s) == pytest.approx(work_s, abs=1e-9)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ((), "at least one"),
        (((1.0, 1.0), (1.0, 2.0)), "change 1: its time 1.0 s must be after 1.0 s"),
        (((2.0, 1.0), (1.0, 2.0)), "must be after 2.0 s"),
        (((0.0, -1.0),), "1e-06 or more"),
        (((0.0, float("nan")),), "1e-06 or more"),
        (((0.0, 1.0), (3.0, 0.0)), "0 from 3.0 s on"),
    ],
)
def test_traces_that_cannot_be(changes, says) -> None:
    with pytest.raises(UsageError, match=says):
        SpeedTrace(changes=changes)


def test_a_device_that_slows_down_in_an_action(make_plan) -> None:
    plan = make_plan([(equal_spans(1, 1), [1.0], [1])])
    alone = MadeUpCosts(sample_s=(OPS,), update_s=1.0)
    result = simulate(plan, alone, steps=1, options=SimulationOptions(device_speed={"s0r0": trace((2.0, 0.5))}))
    # F and half of B at full speed, the other half in twice its time, so too the update.
    assert result.trace.of("s0r0")[0].end_s == 1.0
    assert result.pipeline_s == 2.0 + 2.0
    assert result.trace.of("s0r0")[-1].duration_s == 2.0


def test_a_slow_stage_holds_up_the_other(make_plan) -> None:
    plan = make_plan([(equal_spans(2, 1), [1.0], [2])] * 2)
    options = SimulationOptions(device_speed={"s1r0": trace((0.0, 0.5))})
    result = simulate(replace(plan, schedule="gpipe"), two_stages(), steps=1, options=options)
    # Stage 1: F from 1 to 5, then B to 9 and 13; stage 0 takes its last B from 13 to 15.
    assert result.pipeline_s == 15.0
    assert result.utilisation["s1r0"] > result.utilisation["s0r0"]


def test_a_link_that_loses_its_bandwidth(make_plan) -> None:
    plan = make_plan([(equal_spans(1, 1), [1.0], [1])] * 2)
    options = SimulationOptions(link_speed={"0->1": trace((2.0, 0.0), (10.0, 1.0))})
    result = simulate(replace(plan, schedule="gpipe"), two_stages(occupancy_s=2.0), steps=1, options=options)
    # Sent from 1 s on; a second is left when the link stops at 2 s, so it is there at 11 s: F, B, 2 s back, B.
    assert result.trace.flows[0].received_s == 11.0
    assert result.pipeline_s == 11.0 + 3.0 + 2.0 + 2.0


def test_shared_links_slow_down_for_all() -> None:
    clock, arrived = VirtualClock(), {}
    network = Network(clock, speeds={"up": trace((1.0, 0.5))})
    for target, occupancy_s in (("b", 1.0), ("c", 2.0)):
        transfer = TransferCost(size_bytes=1, latency_s=1.0, occupancy_s=occupancy_s, links=("up",))
        network.send("a", target, transfer, lambda start_s, sent_s, to=target: arrived.update({to: sent_s}))
    clock.run()
    # Half of b is through at 1 s, the rest at a quarter of the speed; then a second and a half of c are left.
    assert arrived == {"b": 3.0, "c": 5.0}


def test_a_trace_of_something_that_is_not_used_is_refused(make_plan) -> None:
    plan = make_plan([(equal_spans(1, 1), [1.0], [1])] * 2)
    for options, says in (
        (
            SimulationOptions(device_speed={"s9": trace((0.0, 1.0))}),
            "device_speed: no replica is led by s9; s0r0, s1r0",
        ),
        (SimulationOptions(clock_offset_s={"s9": 1.0}), "clock_offset_s: no replica is led by s9"),
        (SimulationOptions(link_speed={"0->2": trace((0.0, 1.0))}), "sends nothing over 0->2; it uses 0->1, 1->0"),
    ):
        with pytest.raises(UsageError, match=says):
            simulate(plan, two_stages(), options=options)


def test_every_policy_hears_its_own_devices_clock(make_plan) -> None:
    """A policy that compared clocks of two devices would decide by these offsets."""
    plan = make_plan([(equal_spans(1, 1), [1.0], [1])])
    heard: list[float] = []

    class Listening:
        def __init__(self) -> None:
            self.inner = make_policy("critical-path", replica_tasks(replace(plan, schedule="critical-path"))[0][0])

        def on_event(self, now_s, event):
            heard.append(now_s)
            return self.inner.on_event(now_s, event)

        step_complete = property(lambda self: self.inner.step_complete)

        def waiting_for(self) -> str:
            return self.inner.waiting_for()

    clock = VirtualClock()
    world = World(
        clock=clock, recorder=TraceRecorder(on=False), memory=None, deliver=lambda source, action, step, made_s: None
    )
    replica = SimulatedReplica(("s0r0",), Listening(), lambda device, action: 2.0, 0.0, clock_offset_s=-100.0)
    replica.begin(0, world)
    clock.run()
    assert heard[:2] == [-100.0, -98.0]
    assert replica.ended_s == clock.now_s == 2.0 * len(replica.order)


@pytest.mark.parametrize("schedule", schedule_names())
def test_clocks_that_differ_change_nothing(schedule, make_plan) -> None:
    plan = make_plan([(equal_spans(4, 1), [1.0], [4])] * 2)
    true = simulate(replace(plan, schedule=schedule), two_stages(0.5))
    wrong = simulate(
        replace(plan, schedule=schedule),
        two_stages(0.5),
        options=SimulationOptions(clock_offset_s={"s0r0": 50.0, "s1r0": -3.0}),
    )
    assert true == wrong
