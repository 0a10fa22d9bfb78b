"""Bytes over time: a case by hand, and that they agree with the planner's formula."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.span import equal_spans
from spantrain.cost.held_sizes import HeldBytes, HeldSizes
from spantrain.errors import UsageError
from spantrain.schedule.registry import schedule_names
from spantrain.sim.costs import TableCosts
from spantrain.sim.engine import SimulationOptions, simulate

OPS = {Op.FORWARD: 1.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}


def sizes(*, first: bool = False, last: bool = False, activation: int = 100) -> HeldSizes:
    """Messages of a sample are one byte, as in TableCosts."""
    return HeldSizes(
        always=HeldBytes(parameter_bytes=1000, gradient_bytes=1000, optimizer_bytes=2000, framework_bytes=500),
        activation_bytes_per_sample=activation,
        input_bytes_per_sample=0 if first else 1,
        output_gradient_bytes_per_sample=0 if last else 1,
    )


def costs(stages: int, transfer_s: float = 0.5, latency_s: float = 1.0) -> TableCosts:
    cut = (transfer_s,) * (stages - 1)
    return TableCosts(sample_s=(OPS,) * stages, latency_s=(latency_s,) * (stages - 1), forward_s=cut, backward_s=cut)


def test_one_micro_batch_by_hand(make_plan) -> None:
    plan = make_plan([(equal_spans(2, 2), [1.0], [2])] * 2)
    options = SimulationOptions(held_sizes={"s0r0": sizes(first=True), "s1r0": sizes(last=True)})
    memory = simulate(replace(plan, schedule="critical-path"), costs(2), steps=1, options=options).memory
    base = 4500
    # F 0-2 makes a message that is sent from 2 to 3 and is there from 3 to 4; stage 1: F 4-6, I 6-8, W 8-10. Its
    # gradient is sent from 8 to 9, is there from 9 to 10, and is used up by B from 10 to 14.
    assert memory["s0r0"].timeline == (
        (0.0, base + 202), (3.0, base + 200), (9.0, base + 202), (14.0, base)
    )  # fmt: skip
    assert memory["s1r0"].timeline == (
        (0.0, base), (3.0, base + 2), (4.0, base + 202), (9.0, base + 200), (10.0, base)
    )  # fmt: skip
    peak = memory["s1r0"].peak
    assert memory["s1r0"].peak_bytes == base + 202
    assert (peak.activation_bytes, peak.received_bytes, peak.sending_bytes) == (200, 2, 0)
    assert (peak.parameter_bytes, peak.gradient_bytes, peak.optimizer_bytes, peak.framework_bytes) == (
        1000, 1000, 2000, 500,
    )  # fmt: skip


def test_what_operations_need_counts_while_an_action_runs(make_plan) -> None:
    plan = replace(make_plan([(equal_spans(2, 2), [1.0], [2])] * 2), schedule="critical-path")
    needs = {"working_bytes_per_sample": 30, "working_bytes": 7}
    held = {"s0r0": replace(sizes(first=True), **needs), "s1r0": replace(sizes(last=True), **needs)}
    memory = simulate(plan, costs(2), steps=1, options=SimulationOptions(held_sizes=held)).memory["s1r0"]
    base = 4500
    assert (memory.peak.working_bytes, memory.peak_bytes) == (67, base + 202 + 67)
    assert memory.held_bytes == base + 202 - 500
    assert memory.counted_bytes("emulated") == memory.held_bytes
    assert memory.counted_bytes("cuda:1") == memory.allocated_bytes == base + 202 + 67 - 500


def test_activations_are_held_until_the_weights_have_their_gradients(make_plan) -> None:
    """Stage 1 of the split backward does both I first: W is what frees."""
    plan = make_plan([(equal_spans(2, 1), [1.0], [2])] * 2)
    held = {"s0r0": sizes(first=True), "s1r0": sizes(last=True)}
    result = simulate(
        replace(plan, schedule="critical-path"), costs(2), steps=2, options=SimulationOptions(held_sizes=held)
    )
    assert [a.op.value for a in result.orders["s1r0"]] in (list("FIFIWW"), list("FIWFIW"), list("FIFWIW"))
    assert result.memory["s1r0"].peak.activation_bytes == 100 * result.peak_in_flight["s1r0"]


def test_nothing_is_counted_without_sizes_and_none_may_be_missing(make_plan) -> None:
    plan = make_plan([(equal_spans(2, 1), [1.0], [2])] * 2)
    result = simulate(plan, costs(2))
    assert result.memory == result.peak_bytes == {}
    with pytest.raises(UsageError, match="nothing is said of s1r0"):
        simulate(plan, costs(2), options=SimulationOptions(held_sizes={"s0r0": sizes()}))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_all_that_is_held_is_freed_and_activations_are_the_samples_in_flight(data, plans, table_costs) -> None:
    plan = data.draw(plans)
    table = data.draw(table_costs(plan))
    last = len(plan.stages) - 1
    held = {
        device: sizes(first=index == 0, last=index == last)
        for index, stage in enumerate(plan.stages)
        for device in stage.devices
    }
    for schedule in schedule_names():
        options = SimulationOptions(held_sizes=held, trace=False)
        result = simulate(replace(plan, schedule=schedule), table, steps=2, options=options)
        for device, memory in result.memory.items():
            levels = [size for _, size in memory.timeline]
            assert levels[-1] == 4500
            assert memory.peak_bytes == max(levels) == memory.peak.total_bytes
            # Messages are a byte, activations a hundred.
            assert memory.peak.activation_bytes <= 100 * result.peak_in_flight[device]
            if all(seconds > 0 for stage in table.sample_s for seconds in stage.values()):
                assert min(levels) == 4500
                assert memory.peak_bytes >= 4500 + 100 * result.peak_in_flight[device]


def test_what_w_needs_and_what_is_run_again_by_hand(make_plan) -> None:
    """Stage 1 does F 4-6, I 6-8, W 8-10 of two samples: 40 a sample from I on, 30 more while I runs."""
    plan = make_plan([(equal_spans(2, 2), [1.0], [2])] * 2)
    split = replace(sizes(last=True), deferred_bytes_per_sample=40, again_bytes_per_sample=30, keeps_input=True)
    options = SimulationOptions(held_sizes={"s0r0": replace(sizes(first=True), keeps_output=True), "s1r0": split})
    memory = simulate(replace(plan, schedule="critical-path"), costs(2), steps=1, options=options).memory
    base = 4500
    # The message forward is part of the activations at both ends; the gradient's counts at the sender from I on.
    assert memory["s0r0"].timeline == ((0.0, base + 200), (9.0, base + 202), (14.0, base))
    assert memory["s1r0"].timeline == (
        (0.0, base), (3.0, base + 2), (4.0, base + 200), (6.0, base + 262), (8.0, base + 82), (9.0, base + 80),
        (10.0, base),
    )  # fmt: skip
    assert memory["s1r0"].allocated_bytes == base + 262 - 500
