"""Devices with several stages: static orders for them, machines that follow orders and rules, and what is refused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.app.simulation.schedule import EvenPipeline, check_order_file, even_plan, show_even
from spantrain.core.action import SPLIT_OPS, Action, Direction, Op
from spantrain.core.messages import Arrived, StepStarted, event_of, event_text
from spantrain.core.plan import Plan
from spantrain.core.planned.hints import DispatchHints, PlannedOrder
from spantrain.core.shares import StateSharding
from spantrain.core.span import Span
from spantrain.errors import ConfigError, PlanError, ScheduleError, UsageError
from spantrain.schedule.dispatch.policies import known_order
from spantrain.schedule.dispatch.several import SeveralStages, SharedTask
from spantrain.schedule.layout import CutLayout, check_limits
from spantrain.schedule.orders import check_orders, held_samples
from spantrain.schedule.registry import make_machine, replica_tasks, schedule_names, static_orders
from spantrain.schedule.render.text import format_orders, parse_orders
from spantrain.sim.bounds import pipeline_bound_s
from spantrain.sim.costs import TableCosts
from spantrain.sim.engine import simulate
from spantrain.sim.search.interleaved import _rising, quick_step_s, with_interleaved_order
from spantrain.sim.search.model import Room

GOLDEN = Path(__file__).parent / "golden"
TWICE = EvenPipeline(stages=3, chunks=2, micro_batches=4, transfer_s=0.5, latency_s=0.5)
WAYS = {"interleaved": TWICE, "zb-v": replace(TWICE, back=True)}


def even(devices: int, chunks: int, count: int, *, back: bool = False, schedule: str = "critical-path") -> Plan:
    return even_plan(schedule, EvenPipeline(stages=devices, chunks=chunks, back=back, micro_batches=count))


def costs_of(plan: Plan, seconds: Sequence[float] = (1.0, 1.0, 1.0), message_s: float = 0.25) -> TableCosts:
    stages, cuts = len(plan.stages), len(plan.stages) - 1
    return TableCosts(
        sample_s=(dict(zip(SPLIT_OPS, seconds, strict=True)),) * stages,
        latency_s=(message_s,) * cuts,
        forward_s=(message_s,) * cuts,
        backward_s=(message_s,) * cuts,
    )


def rooms(plan: Plan, samples: float) -> dict[str, Room]:
    return {
        name: Room(size_bytes=samples, sample_bytes=dict.fromkeys(plan.crew_of(name).numbers, 1.0))
        for name in plan.leaders
    }


@pytest.mark.parametrize("schedule", list(WAYS))
def test_golden_orders(schedule: str, tmp_path: Path) -> None:
    orders = show_even(schedule, WAYS[schedule]).orders
    text = format_orders(orders) + "\n"
    assert text == (GOLDEN / f"{schedule}.txt").read_text()
    assert parse_orders(text) == orders
    (tmp_path / "order.txt").write_text(text)
    assert check_order_file(tmp_path / "order.txt") == orders
    (tmp_path / "order.txt").write_text(text.replace("5", "7"))
    with pytest.raises(UsageError, match="wanted all from 0 on"):
        check_order_file(tmp_path / "order.txt")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16, 17])
@pytest.mark.parametrize("devices", range(1, 8))
def test_static_orders_run_whatever_the_sizes(devices: int, count: int) -> None:
    for chunks in range(1, 5):
        plan = even(devices, chunks, count)
        for split in (None, True):
            layout = CutLayout.of(plan)
            check_orders(static_orders("interleaved", layout, split=split), layout)
    layout = CutLayout.of(even(devices, 2, count, back=True))
    check_orders(static_orders("zb-v", layout), layout)


def test_interleaving_shortens_the_ends_and_zb_v_keeps_the_memory() -> None:
    """Known figures: (P - 1) / v of a micro-batch's time for the ends of interleaved 1F1B; as much as 1F1B of ZB-V."""
    devices, count = 4, 8
    plain = simulate(even(devices, 1, count, schedule="1f1b"), costs_of(even(devices, 1, count), (2, 2, 2), 0.0))
    assert plain.pipeline_s == 6.0 * (count + devices - 1)
    twice = even(devices, 2, count, schedule="interleaved")
    assert simulate(twice, costs_of(twice, message_s=0.0)).pipeline_s == 6.0 * count + 3.0 * (devices - 1)
    back = even(devices, 2, count, back=True, schedule="zb-v")
    result = simulate(back, costs_of(back, message_s=0.0))
    assert result.pipeline_s == pipeline_bound_s(back, costs_of(back, message_s=0.0))
    assert max(result.peak_in_flight.values()) == 2 * max(plain.peak_in_flight.values())


cases = st.tuples(
    st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(1, 7), st.tuples(*[st.integers(1, 4)] * 3)
)


@settings(max_examples=60, deadline=None)
@given(case=cases, message_s=st.integers(0, 3).map(lambda value: value / 2), samples=st.integers(3, 16))
def test_what_is_found_fits_keeps_its_order_and_no_bound_is_broken(case, message_s, samples) -> None:
    devices, chunks, back, count, seconds = case
    plan = even(devices, 2 if back else chunks, count, back=back)
    costs = costs_of(plan, [float(value) for value in seconds], message_s)
    found = with_interleaved_order(plan, costs, rooms(plan, samples)) if plan.interleaved else None
    for one in (plan, *([found] if found else [])):
        result = simulate(one, costs, steps=1)
        assert result.pipeline_s >= pipeline_bound_s(one, costs) * (1 - 1e-9)
        assert check_limits(one) == []
    if found is None:
        return
    layout = CutLayout.of(found)
    check_orders([[known_order(task) for task in row] for row in replica_tasks(found)], layout)
    assert max(result.peak_in_flight.values()) <= samples
    held = {name: [held_samples(order, k) for k in range(layout.num_stages)] for name, order in result.orders.items()}
    for crew in found.crews:
        for stage, number in zip(crew.stages, crew.numbers, strict=True):
            assert held[crew.devices[0]][number] <= stage.replicas[0].in_flight_limit
    assert found.hints is not None
    if message_s:
        assert result.pipeline_s <= found.hints.predicted_s * (1 + 1e-6)
        assert found.hints.predicted_s <= quick_step_s(plan, costs, rooms(plan, samples)) * (1 + 1e-6)


@dataclass(frozen=True, kw_only=True)
class SummedCosts(TableCosts):
    """With gradient sums that take longer in some stages than in others."""

    sums_s: tuple[float, ...]

    def gradient_bucket_s(self, stage: int) -> tuple[float, ...]:
        return (self.sums_s[stage],)


def test_a_quick_rule_lets_a_device_with_one_stage_hold_no_more_than_it_has_room_for() -> None:
    """It begins and ends on the first device; the other has room for one micro-batch, or for all."""
    plan = even(2, 2, 6)
    plan = replace(plan, stages=plan.stages[:3])
    costs, room = costs_of(plan, message_s=1.0), rooms(plan, 16)
    (alone,) = plan.stages[1].devices
    little = {**room, alone: replace(room[alone], size_bytes=1.0)}
    assert quick_step_s(plan, costs, little) > 1.2 * quick_step_s(plan, costs, room)
    found = with_interleaved_order(plan, costs, little)
    assert found is not None
    assert found.hints is not None
    assert quick_step_s(plan, costs, little) == pytest.approx(found.hints.predicted_s, rel=0.05)


@settings(max_examples=60, deadline=None)
@given(case=cases, sums=st.lists(st.integers(0, 9), min_size=12, max_size=12), part=st.sampled_from([0.5, 0.9, 1.0]))
def test_what_is_not_certain_to_take_too_long_is_judged_as_without_a_limit(case, sums, part) -> None:
    devices, chunks, back, count, seconds = case
    plan = even(devices, 2 if back else chunks, count, back=back)
    costs = SummedCosts(**vars(costs_of(plan, [float(value) for value in seconds])), sums_s=tuple(map(float, sums)))
    free_s = quick_step_s(plan, costs, rooms(plan, 16))
    limited_s = quick_step_s(plan, costs, rooms(plan, 16), part * free_s * (1 + 1e-9))
    assert limited_s == free_s or (part < 1.0 and limited_s == math.inf)


def test_the_best_is_never_worse_than_static_orders_in_their_memory() -> None:
    for schedule, back in (("interleaved", False), ("zb-v", True)):
        for count in (3, 4, 8):
            static = even(4, 2, count, back=back, schedule=schedule)
            costs = costs_of(static, message_s=0.1)
            theirs = simulate(static, costs, steps=1)
            plan = replace(static, schedule="critical-path")
            ours = with_interleaved_order(plan, costs, rooms(plan, max(theirs.peak_in_flight.values())))
            assert ours is not None
            assert simulate(ours, costs, steps=1).step_s <= theirs.step_s * (1 + 1e-6)


def test_without_room_there_is_no_order() -> None:
    plan = even(2, 2, 4)
    assert with_interleaved_order(plan, costs_of(plan), rooms(plan, 1)) is None


def machine_of(order: str, *, planned: bool) -> SeveralStages:
    """Device 0 of two, with stages 0 and 2 of four, and two micro-batches of one sample."""
    plan = even(2, 2, 2)
    task = replica_tasks(plan)[0][0]
    assert isinstance(task, SharedTask)
    actions = tuple(Action.parse(word) for word in order.split())
    if planned:
        ops = "".join(action.op.value for action in actions)
        task = replace(task, planned=PlannedOrder(ops=ops, stages=tuple(action.stage for action in actions)))
    else:
        task = replace(task, order=actions)
    machine = make_machine("critical-path" if planned else "interleaved", task)
    assert isinstance(machine, SeveralStages)
    return machine


ORDER = "0F[0:1] 2F[0:1] 2B[0:1] 0F[1:2] 0B[0:1] 2F[1:2] 2B[1:2] 0B[1:2]"


def test_a_static_order_waits_and_a_planned_one_goes_on_with_what_takes_no_memory() -> None:
    for planned in (False, True):
        machine = machine_of(ORDER, planned=planned)
        (first,) = machine.on_event(0.0, StepStarted(0))
        assert str(first.action) == "0F[0:1]"
        assert machine.on_event(1.0, event_of(f"finished {first.action}")) == []  # 2F[0:1] comes next, in its own time
        assert "at stage 2" in machine.waiting_for()
        (second,) = machine.on_event(2.0, Arrived(Direction.FORWARD, Span(0, 1), 2))
        assert str(second.action) == "2F[0:1]"
        machine.on_event(3.0, Arrived(Direction.BACKWARD, Span(0, 1), 0))  # before the gradients of stage 2
        ran = machine.on_event(4.0, event_of(f"finished {second.action}"))
        assert [str(run.action) for run in ran] == (["0B[0:1]"] if planned else [])
        # A forward would overtake the end of a backward.
        again = machine.on_event(5.0, event_of("finished 0B[0:1]")) if planned else []
        assert again == []


def test_plain_schedules_and_other_shapes_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"1f1b has no order for devices with several stages; give .*critical-path"):
        replica_tasks(even(2, 2, 4, schedule="1f1b"))
    with pytest.raises(PlanError, match=r"interleaved: devices must have as many stages each, in turn; they have 0\+3"):
        replica_tasks(even(2, 2, 4, back=True, schedule="interleaved"))
    with pytest.raises(PlanError, match=r"zb-v: devices must have two stages each, there and back; they have 0\+2"):
        replica_tasks(even(2, 2, 4, schedule="zb-v"))
    tight = even(4, 2, 8, schedule="interleaved").with_limits([[1]] * 8)
    with pytest.raises(PlanError, match=r"stage 0: an in-flight limit of 1 samples is too small, interleaved needs 8"):
        replica_tasks(tight)
    with pytest.raises(ConfigError, match="give --chunks 2"):
        EvenPipeline(stages=2, chunks=3, back=True, micro_batches=4)
    with pytest.raises(ScheduleError, match="not for a device with several stages"):
        machine_of(ORDER, planned=True).on_event(0.0, event_of("recut [0:1] because it is slow"))


def test_orders_of_one_stage_each_are_the_known_ones() -> None:
    plain = CutLayout.of(even(4, 1, 6))
    assert static_orders("interleaved", plain) == static_orders("1f1b", plain)
    assert static_orders("zb-v", plain) == static_orders("zb-h1", plain)
    assert {"interleaved", "zb-v"} < set(schedule_names())


def test_plans_say_what_devices_may_share() -> None:
    plan = even(2, 2, 4)
    assert [crew.numbers for crew in plan.crews] == [(0, 2), (1, 3)]
    assert plan.devices == plan.leaders == ("d0", "d1")
    assert plan.crew_of("d1").units == (1, 3)
    first, *rest = plan.stages
    shares = replace(rest[1].replicas[0], sample_share=2.0)
    for wrong, why in (
        (replace(rest[1], replicas=(shares,)), "stages 0 and 2 share d0: their replicas must be the same"),
        (replace(rest[1], replicas=rest[1].replicas + rest[0].replicas), "several stages that have the same replicas"),
        (replace(rest[1], keepers=("d1",)), "stages 0 and 2 share d0: sums and keepers must be the same"),
        (replace(rest[1], state_sharding=StateSharding.OFFLOAD), "neither tensors nor state can be divided there"),
    ):
        with pytest.raises(ValueError, match=why):
            replace(plan, stages=(first, rest[0], wrong, rest[2]))
    with pytest.raises(ValueError, match="2 actions, but stages of 1"):
        PlannedOrder(ops="FB", stages=(0,))
    hints = DispatchHints(orders=((PlannedOrder(ops="FFBB", stages=(0, 2, 2, 0)),),), predicted_s=1.0, reason="a test")
    with pytest.raises(ValueError, match=r"hints: they have \[1\] replicas by stage, the plan has \[1, 1\]"):
        replace(plan, hints=hints)
    wrong = replace(plan, hints=replace(hints, orders=hints.orders * 2))
    with pytest.raises(PlanError, match="the plan's hints do not fit"):
        replica_tasks(wrong)
    untold = replace(hints, orders=((PlannedOrder(ops="FFBB"),),) * 2)
    with pytest.raises(PlanError, match="says of 0 actions which stage they are of"):
        replica_tasks(replace(plan, hints=untold))
    plain = even(2, 1, 4)
    with pytest.raises(PlanError, match=r"stage 0: its order has actions of stages \[0, 2\]"):
        replica_tasks(replace(plain, hints=replace(hints, orders=hints.orders * 2)))


def test_arrivals_for_a_stage_read_back() -> None:
    event = Arrived(Direction.BACKWARD, Span(4, 8), 6)
    assert event_text(event) == "arrived backward [4:8] at 6"
    assert event_of("arrived backward [4:8] at 6") == event
    assert Op("F") is Op.FORWARD


def test_an_order_in_which_small_micro_batches_came_first_is_planned_as_it_is_replayed():
    """A plan says of each kind of work how often: the sizes are those of rising samples, and so is what is held."""

    def read(text: str) -> tuple[Action, ...]:
        return tuple(map(Action.parse, text.split()))

    planned = read("0F[0:4] 0F[4:6] 3F[0:4] 0F[6:8] 3B[4:6] 3F[4:6] 0B[4:6] 0B[6:8]")
    assert _rising(read("0F[4:6] 0F[6:8] 3F[4:6] 0F[0:4] 3B[4:6] 3F[0:4] 0B[4:6] 0B[6:8]")) == planned
    assert held_samples(planned, 3) == 4
