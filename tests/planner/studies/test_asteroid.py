"""Asteroid's planner: algorithm 1 by hand, algorithm 2 by its equations, memory of K_p, and what it proposes."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.cost.compute import ComputeCost
from spantrain.cost.span_tables import SpanTables
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.request import Constraints, JobSpec, Quota
from spantrain_studies.planners.asteroid.strategy import asteroid, best_pipeline
from spantrain_studies.planners.asteroid.tables import DeviceNetwork, DeviceTables, allocate, balanced, offloaded
from testing.planner_requests import assert_plans_fit, draw_memory_bytes, draw_sites, request_of


def tables_of(profile, job, devices, size):
    spans = SpanTables(profile, job.optimizer, job.dtype)
    return DeviceTables(spans, DeviceNetwork(spans.network, devices, [1.0] * len(devices)), devices, size)


def column(*values):
    return np.array([[value] for value in values])


def test_samples_follow_capacity():
    assert balanced(column(3.0, 1.0), column(8, 8), 8).ravel().tolist() == [6, 2]


def test_what_memory_does_not_hold_goes_to_the_others_by_capacity():
    assert balanced(column(4.0, 2.0, 2.0), column(2, 9, 9), 8).ravel().tolist() == [2, 3, 3]
    assert balanced(column(4.0, 3.0, 1.0), column(1, 2, 9), 8).ravel().tolist() == [1, 2, 5]


def test_too_little_memory_for_all_is_told():
    _, fits = allocate(column(1.0, 1.0), column(2, 3), 6, lambda blocks, _: blocks * 1.0)
    assert not fits[0]


def by_table(*tables):
    """Return seconds of so many blocks, read from a row for each device."""
    return lambda blocks, _: np.array([np.array(row)[own] for row, own in zip(tables, blocks, strict=True)])


def test_the_straggler_gives_blocks_to_the_fastest_until_it_is_no_longer_faster():
    """The first device is slow with many blocks: 4 take it 10 s; a fourth one moved would take the second 4.5 s."""
    seconds = by_table([0, 2, 4, 7, 10], [0, 1, 2, 2.5, 3, 3.5, 4.5])
    assert offloaded(column(4, 2), column(9, 9), seconds).ravel().tolist() == [1, 5]


def test_as_many_blocks_move_as_it_takes():
    def seconds(blocks, _):
        return np.stack([2.0 * blocks[0], 1.0 * blocks[1]])

    assert offloaded(column(24, 0), column(99, 99), seconds).ravel().tolist() == [8, 16]


def test_devices_that_are_as_slow_do_not_move_a_block_round_for_ever():
    seconds = by_table([0, 1, 2, 3], [0, 1, 2, 3])
    assert offloaded(column(2, 1), column(9, 9), seconds).ravel().tolist() == [2, 1]


def test_a_block_goes_only_where_there_is_room():
    seconds = by_table([0, 2, 4, 7, 10], [0, 1, 2, 2.5, 3, 3.5, 4.5])
    assert offloaded(column(4, 2), column(9, 3), seconds).ravel().tolist() == [3, 3]


def test_a_move_that_makes_a_slower_straggler_is_not_made():
    seconds = by_table([0, 1, 2], [0, 5, 9])
    assert offloaded(column(2, 0), column(9, 9), seconds).ravel().tolist() == [2, 0]


def test_two_alike_stragglers_both_give():
    seconds = by_table([0, 3, 6], [0, 3, 6], [0, 1, 2, 3, 4])
    assert offloaded(column(2, 2, 0), column(9, 9, 9), seconds).ravel().tolist() == [1, 1, 2]


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_algorithm_1_keeps_samples_and_memory_and_never_gets_slower(data):
    count, total = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    room = column(*(data.draw(st.integers(0, 12)) for _ in range(count)))
    rows = [sorted(data.draw(st.lists(st.integers(1, 50), min_size=14, max_size=14))) for _ in range(count)]
    seconds = by_table(*([0.0, *row] for row in rows))
    capacity = column(*(1 / row[total - 1] for row in rows))
    blocks, fits = allocate(capacity, room, total, seconds)
    assert bool(fits[0]) == (int(room.sum()) >= total)
    assert (blocks >= 0).all()
    assert (blocks <= room).all()
    if fits[0]:
        assert blocks.sum() == total
        before = balanced(capacity, room, total)
        assert seconds(blocks, None).max() <= seconds(before, None).max()


def latency_by_the_equations(tables, stages, micro_batches):
    """Return equation 4 of a pipeline, with the dominant step found by trying: the one with the largest D."""
    steps = []
    for number, place in enumerate(stages):
        at = (place.units.start, place.units.stop)
        step = tables.step(place.low, place.high, place.held)
        both, backward = float(step.both[at]), float(step.backward[at])
        steps.append((both - backward, backward, both, float(step.sums[at])))
        if number < len(stages) - 1:
            up, down = tables.network.rates(place.low, place.high, stages[number + 1].high)
            there = tables.size * up.busiest * float(tables.edge_up[place.units.stop])
            back = tables.size * down.busiest * float(tables.edge_down[place.units.stop])
            steps.append((there + up.latency_s, back + down.latency_s, there + back, 0.0))
    way = [forward + backward for forward, backward, _, _ in steps]
    execution = max(micro_batches * step[2] + sum(way[:number]) for number, step in enumerate(steps))
    waiting = [sum(step[0] for step in steps[:number]) for number in range(len(steps))]
    return max(waiting[number] + execution - sum(way[:number]) + step[3] for number, step in enumerate(steps))


@settings(deadline=None, max_examples=15)
@given(speeds=st.lists(st.sampled_from([0.002, 0.005, 0.01]), min_size=2, max_size=5), size=st.sampled_from([2, 8, 16]))
def test_algorithm_2_returns_what_equations_4_to_6_say_of_its_stages(
    speeds, size, make_cluster, make_graph, make_profile
):
    names = [f"d{number}" for number in range(len(speeds))]
    profile = make_profile(make_cluster({"lan": dict(zip(names, speeds, strict=True))}), make_graph(6))
    tables = tables_of(profile, JobSpec(global_batch=64), names, size)
    found = best_pipeline(tables, 64 // size)
    assert found is not None
    assert found.latency_s == pytest.approx(latency_by_the_equations(tables, found.stages, 64 // size))
    assert [place.low for place in found.stages] == [0, *(place.high for place in found.stages[:-1])]
    assert found.stages[-1].high == len(names)
    assert all(a.units.stop == b.units.start for a, b in pairwise(found.stages))


def test_of_two_alike_devices_it_takes_the_better_of_the_three_that_there_are(make_cluster, make_graph, make_profile):
    """Data parallelism, or a pipeline with the cut where it is best: by hand, all of them."""
    profile = make_profile(make_cluster({"lan": {"a": 0.002, "b": 0.002}}), make_graph(5))
    tables = tables_of(profile, JobSpec(global_batch=64), ["a", "b"], 4)
    found = best_pipeline(tables, 16)
    together = tables.step(0, 2, 1)
    least = float(16 * together.both[0, 7] + together.sums[0, 7])
    for cut in range(1, 7):
        first, second = float(tables.step(0, 1, 3).both[0, cut]), float(tables.step(1, 2, 1).both[cut, 7])
        up, down = tables.network.rates(0, 1, 2)
        busy = 4 * (up.busiest * float(tables.edge_up[cut]) + down.busiest * float(tables.edge_down[cut]))
        way = busy + up.latency_s + down.latency_s
        least = min(least, max(16 * first, 16 * busy + first, 16 * second + first + way))
    assert found is not None
    assert found.latency_s == pytest.approx(least)


def test_devices_with_most_memory_come_first_and_hold_most(preset_profile):
    profile = preset_profile("asteroid-c-100")
    devices = profile.cluster.device_by_name
    for proposal in asteroid(request_of(profile, JobSpec(global_batch=256))):
        plan = proposal.plan
        assert plan.schedule == "1f1b-asteroid"
        memory = [devices[name].memory_bytes for name in plan.devices]
        assert memory == sorted(memory, reverse=True)
        count = len(plan.stages[0].micro_batches)
        for number, stage in enumerate(plan.stages):
            held = min(2 * (len(plan.stages) - number) - 1, count)
            for index, replica in enumerate(stage.replicas):
                assert replica.in_flight_limit == held * stage.replica_spans(index)[0].size


def test_a_device_with_little_memory_takes_fewer_samples(make_cluster, make_graph, make_profile):
    """Two devices of a kind, one stage: they share evenly, unless that does not fit."""
    cluster = make_cluster({"lan": {"a": 0.002, "b": 0.002}}, memory_bytes=400 * 2**20)
    small = tuple(replace(device, memory_bytes=335 * 2**20) for device in cluster.devices[1:])
    job = JobSpec(global_batch=128)
    even, uneven = (
        tables_of(make_profile(own, make_graph(4)), job, ["a", "b"], 32).samples(0, 2, range(6), held=1)
        for own in (cluster, replace(cluster, devices=(cluster.devices[0], *small)))
    )
    assert even == (16, 16)
    assert uneven[1] < 16
    assert sum(uneven) == 32


def test_where_k_p_micro_batches_do_not_fit_a_step_is_infinite(make_cluster, make_graph, make_profile):
    profile = make_profile(make_cluster({"lan": {"a": 0.002}}, memory_bytes=340 * 2**20), make_graph(4))
    tables = tables_of(profile, JobSpec(global_batch=128), ["a"], 4)
    assert np.isfinite(tables.step(0, 1, 1).both[0, 6])
    assert np.isinf(tables.step(0, 1, 9).both[0, 6])
    assert np.isfinite(tables.step(0, 1, 9).both[0, 2])


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_every_proposal_is_a_plan_that_fits(data, make_cluster, make_graph, make_profile):
    cluster = make_cluster(draw_sites(data, most_devices=3), memory_bytes=draw_memory_bytes(data))
    profile = make_profile(cluster, make_graph(data.draw(st.integers(1, 6))))
    request = request_of(profile, JobSpec(global_batch=data.draw(st.integers(1, 48))))
    try:
        proposals = asteroid(request)
    except InfeasiblePlanError:
        return
    assert_plans_fit(request, proposals)


def test_constraints_on_devices_are_kept(preset_profile):
    profile = preset_profile("laptop")
    constraints = {"leave_out": ("home",), "quotas": (Quota(kind="xavier-nx", count=2),)}
    for proposal in asteroid(request_of(profile, JobSpec(global_batch=32), **constraints)):
        assert Constraints(**constraints).broken_by_devices(profile.cluster, proposal.plan.devices) == []


def test_what_fits_nowhere_is_refused_with_the_bytes(make_cluster, make_graph, make_profile):
    cluster = make_cluster({"lab": {"a": 0.01, "b": 0.01}}, memory_bytes=301 * 2**20)
    with pytest.raises(InfeasiblePlanError, match=r"a needs .* has 301 MiB"):
        asteroid(request_of(make_profile(cluster, make_graph(12)), JobSpec(global_batch=8)))


def test_only_the_sizes_asked_for_are_planned(preset_profile):
    request = request_of(preset_profile("laptop"), JobSpec(global_batch=64, micro_batches=(8,)))
    (proposal,) = asteroid(request)
    assert {span.size for span in proposal.plan.stages[0].micro_batches} == {8}


def test_backward_and_forward_are_those_of_the_slowest_member(make_cluster, make_graph, make_profile):
    profile = make_profile(make_cluster({"lan": {"a": 0.004, "b": 0.001}}), make_graph(4))
    job = JobSpec(global_batch=64)
    tables, compute = tables_of(profile, job, ["a", "b"], 32), ComputeCost(profile)
    units, kinds = range(6), [profile.cluster.device_by_name[name].kind for name in "ab"]
    samples = tables.samples(0, 2, units, held=1)
    assert sum(samples) == 32
    assert samples[0] > samples[1]
    step = tables.step(0, 2, 1)
    slowest = {
        op: max(compute.kind_seconds(units, kind, op, count) for kind, count in zip(kinds, samples, strict=True))
        for op in (Op.FORWARD, Op.BACKWARD)
    }
    assert step.both[0, 6] == pytest.approx(sum(slowest.values()))
    assert step.backward[0, 6] == pytest.approx(slowest[Op.BACKWARD])
