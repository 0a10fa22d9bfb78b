"""The English SpanTrain paper's planner: ways inside a group, algorithm 1, equation 1, and what it proposes."""

from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import ReplicaDevices
from spantrain.planner.groups import DeviceGroup
from spantrain.planner.request import JobSpec
from spantrain.planner.strategies.spantrain.strategy import build_plan, spantrain, spantrain_paper
from spantrain.planner.strategies.spantrain.tables import WayTables
from spantrain.planner.strategies.spantrain.ways import Beam, Slot, symmetric_ways, ways_of
from testing.planner_requests import assert_plans_fit, draw_memory_bytes, draw_sites, request_of


def divisible(graph):
    """The same graph with blocks that a tensor-parallel group can divide."""
    units = (replace(unit, tensor_sums=2) if unit.unit_class == "block" else unit for unit in graph.units)
    return replace(graph, units=tuple(units))


def alone(*names):
    return tuple(ReplicaDevices(devices=(name,), tp_shares=(1.0,)) for name in names)


def group_of(*parts):
    devices = tuple(name for part in parts for name in part)
    subgroups = tuple(DeviceGroup(name=f"g.{number}", devices=part) for number, part in enumerate(parts))
    return DeviceGroup(name="g", devices=devices, subgroups=subgroups)


def ways_in(make_cluster, make_graph, make_profile, speeds, *parts, **options):
    profile = make_profile(make_cluster({"here": speeds}), make_graph(4))
    return ways_of(group_of(*parts), profile, lambda name: speeds[name], **options)


def test_a_second_level_group_is_divided_symmetrically():
    grids = symmetric_ways(("a", "b", "c", "d"), pipelines=True, tensors=True)
    shapes = [(len(way), len(way[0].members), len(way[0].members[0].devices)) for way in grids]
    assert sorted(shapes) == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
    assert all(set(member.tp_shares) == {1.0} for way in grids for slot in way for member in slot.members)


def test_figure_7a_second_level_groups_follow_each_other(make_cluster, make_graph, make_profile):
    speeds = {"fast-0": 0.03, "fast-1": 0.03, "slow-0": 0.02, "slow-1": 0.02}
    found = ways_in(make_cluster, make_graph, make_profile, speeds, ("fast-0", "fast-1"), ("slow-0", "slow-1"))
    assert (
        Slot(members=alone("fast-0", "fast-1"), even=True),
        Slot(members=alone("slow-0", "slow-1"), even=True),
    ) in found


def test_kinds_of_nearly_one_speed_are_divided_as_one_group_too(make_cluster, make_graph, make_profile):
    pairs = (Slot(members=alone("a", "b"), even=True), Slot(members=alone("c", "d"), even=True))
    for fast, alike in ((0.022, True), (0.03, False)):
        speeds = {"a": fast, "b": 0.02, "c": 0.02, "d": 0.02}
        assert (pairs in ways_in(make_cluster, make_graph, make_profile, speeds, ("a",), ("b", "c", "d"))) == alike


def test_figure_7b_weak_devices_share_a_stage(make_cluster, make_graph, make_profile):
    speeds = {"fast-0": 0.03, "fast-1": 0.03, "weak-1": 0.01, "weak-2": 0.02}
    found = ways_in(make_cluster, make_graph, make_profile, speeds, ("fast-0", "fast-1"), ("weak-2",), ("weak-1",))
    together = Slot(members=alone("weak-2", "weak-1"), even=False)
    assert (Slot(members=alone("fast-0", "fast-1"), even=True), together) in found


def test_figure_7c_capacities_of_1_2_2_4_make_a_grid(make_cluster, make_graph, make_profile):
    speeds = {"one": 0.01, "two": 0.02, "too": 0.02, "four": 0.04}
    found = ways_in(make_cluster, make_graph, make_profile, speeds, ("four",), ("two", "too"), ("one",))
    rows = (
        ReplicaDevices(devices=("four", "two"), tp_shares=(2.0, 1.0)),
        ReplicaDevices(devices=("too", "one"), tp_shares=(2.0, 1.0)),
    )
    assert (Slot(members=rows, even=False),) in found
    without = ways_in(
        make_cluster, make_graph, make_profile, speeds, ("four",), ("two", "too"), ("one",), tensors=False
    )
    assert all(len(member.devices) == 1 for way in without for slot in way for member in slot.members)


def test_the_second_level_can_be_switched_off(make_cluster, make_graph, make_profile):
    speeds = {"fast": 0.03, "slow": 0.01}
    found = ways_in(make_cluster, make_graph, make_profile, speeds, ("fast",), ("slow",), second_level=False)
    assert all(len(way) == 1 and way[0].even for way in found)


def test_a_grid_halves_what_figure_7c_divides(make_cluster, make_graph, make_profile):
    """Rows take samples 2:1, columns tensors 2:1: every device then works as long as the others."""
    speeds = {"one": 0.001, "two": 0.002, "too": 0.002, "four": 0.004}
    profile = make_profile(make_cluster({"here": speeds}, latency_s=0.0), divisible(make_graph(6)))
    tables = WayTables(profile, JobSpec(global_batch=48))
    rows = tuple(ReplicaDevices(devices=devices, tp_shares=(2.0, 1.0)) for devices in (("four", "two"), ("too", "one")))
    counts = tables.counts(Slot(members=rows, even=False), range(1, 7), 24)
    assert counts == pytest.approx((16, 8), abs=1)


def test_cuts_between_second_level_groups_follow_capacity(make_cluster, make_graph, make_profile):
    """Figure 7a: with a network that costs nothing, 3 : 2 of ten equal blocks."""
    profile = make_profile(
        make_cluster({"here": {"a": 0.003, "b": 0.002}}), replace(make_graph(10), shared_bytes={"wte": 1})
    )
    tables = WayTables(profile, JobSpec(global_batch=256))
    found = tables.way((Slot(members=alone("a"), even=True), Slot(members=alone("b"), even=True)), 4)
    assert found is not None
    first, cut, end = found.cuts(1, 11)
    assert (first, end) == (1, 11)
    assert cut - first == 6


def test_equation_1_of_two_slots_by_hand(make_cluster, make_graph, make_profile):
    profile = make_profile(make_cluster({"here": {"a": 0.002, "b": 0.002}}), make_graph(8))
    job = JobSpec(global_batch=32)
    tables = WayTables(profile, job)
    found = tables.way((Slot(members=alone("a"), even=True), Slot(members=alone("b"), even=True)), 4)
    assert found is not None
    _, cut, _ = found.cuts(0, 10)

    def work(units, *ops):
        kind = profile.cluster.device_by_name["a"].kind
        return sum(tables.groups.compute.kind_seconds(units, kind, op, 4) for op in ops)

    link = profile.link("a", "b")
    back = profile.link("b", "a")
    size = 4 * profile.graph.units[cut - 1].cut_bytes_per_sample
    hop = link.latency_s + back.latency_s + size / link.bandwidth_bytes_per_s + size / back.bandwidth_bytes_per_s
    halves = (Op.FORWARD, Op.BACKWARD_INPUT)
    first, second = (8 * work(units, *halves, Op.BACKWARD_WEIGHT) for units in (range(cut), range(cut, 10)))
    fill = work(range(cut), *halves) + hop
    assert found.drained[0, 10] == pytest.approx(max(first, fill + second))
    assert found.tail[0, 10] == pytest.approx(0.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_beam_finds_the_best_of_all_arrangements(seed):
    """Against every order and every cut; a group without units is left out."""
    speeds, work, units = (3.0, 1.0, 2.0), tuple(1.0 + (seed * unit) % 3 for unit in range(7)), 7

    def value(arrangement):
        first, total, largest = 0, 0.0, 0.0
        for place, (group, count) in enumerate(arrangement):
            largest = max(largest, sum(work[first : first + count]) / speeds[group])
            total += 0.05 * (seed + place + 1) * bool(count)
            first += count
        return largest + total

    every = [
        value(tuple((group, end - begin) for group, begin, end in zip(order, (0, *cuts), (*cuts, units), strict=True)))
        for order in permutations(range(3))
        for cuts in ((a, b) for a, b in combinations([point for point in range(units + 1) for _ in (0, 1)], 2))
    ]
    found = Beam(units=units, capacities=speeds, work=work).run(value)
    assert found[0][0] == pytest.approx(min(every))
    assert sum(count for _, count in found[0][1]) == units
    assert found == Beam(units=units, capacities=speeds, work=work).run(value)


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_every_proposal_is_a_plan_that_fits(data, make_cluster, make_graph, make_profile):
    cluster = make_cluster(draw_sites(data, most_devices=4), memory_bytes=draw_memory_bytes(data))
    graph = make_graph(data.draw(st.integers(1, 6)))
    profile = make_profile(cluster, divisible(graph) if data.draw(st.booleans()) else graph)
    job = JobSpec(global_batch=data.draw(st.integers(1, 24)))
    request = request_of(profile, job, second_level=data.draw(st.booleans()))
    try:
        proposals = spantrain(request)
    except InfeasiblePlanError:
        return
    assert_plans_fit(request, proposals)


def test_plans_divide_tensors_only_where_that_is_allowed(make_cluster, make_graph, make_profile):
    """Where all its best plans divide them, those that do not are still found."""
    cluster = make_cluster({"here": dict.fromkeys("abcd", 0.0001)}, bandwidth=1e12, latency_s=0.0)
    request = request_of(make_profile(cluster, divisible(make_graph(2))), JobSpec(global_batch=1))
    assert all(proposal.plan.divides_tensors for proposal in spantrain(request)[:2])
    asked: list[tuple[str, ...]] = []
    found = spantrain(request, lambda devices: bool(asked.append(tuple(devices))))
    assert found
    assert not any(proposal.plan.divides_tensors for proposal in found)
    assert {name for devices in asked for name in devices} == {"a", "b", "c", "d"}


def test_where_micro_batches_are_many_the_simulator_agrees(preset_profile):
    profile = preset_profile("laptop")
    request = request_of(profile, JobSpec(global_batch=128, micro_batches=(2, 4)))
    for proposal in spantrain(request):
        assert request.evaluate(proposal.plan).step_s == pytest.approx(proposal.own_estimate_s, rel=0.15)


def test_the_second_level_pays_where_devices_differ(make_cluster, make_graph, make_profile):
    cluster = make_cluster({"here": {"fast": 0.01, "slow-0": 0.004, "slow-1": 0.004}})
    profile, job = make_profile(cluster, make_graph(12)), JobSpec(global_batch=96)
    whole, without = (request_of(profile, job, second_level=split) for split in (True, False))
    found = [
        min(request.evaluate(proposal.plan).step_s for proposal in spantrain(request)) for request in (whole, without)
    ]
    assert found[0] < 0.9 * found[1]
    for proposal in spantrain(without):
        (stage,) = proposal.plan.stages
        shares = [replica.sample_share for replica in stage.replicas]
        assert max(shares) - min(shares) <= 1


def test_sites_of_one_device_are_searched_once(make_cluster, make_graph, make_profile):
    cluster = make_cluster({name: {name: 0.01 * (number + 2)} for number, name in enumerate("abcd")})
    profile, job = make_profile(cluster, make_graph(8)), JobSpec(global_batch=16)
    for second_level in (True, False):  # there is none: both ways of searching are the same
        plans = [proposal.plan for proposal in spantrain(request_of(profile, job, second_level=second_level))]
        assert all(plan not in plans[:number] for number, plan in enumerate(plans))


def test_a_far_site_is_left_out_unless_it_is_to_be_kept(make_cluster, make_graph, make_profile):
    cluster = make_cluster({"lab": {"a": 0.02, "b": 0.02}, "far": {"c": 0.01}}, bandwidth=1e5, latency_s=0.1)
    profile, job = make_profile(cluster, make_graph(6)), JobSpec(global_batch=16)
    best = spantrain(request_of(profile, job))[0]
    assert set(best.plan.devices) <= {"a", "b"}
    assert any(reason.startswith("Group far is left out") for reason in best.reasons)
    for name in ("far", "c"):
        for proposal in spantrain(request_of(profile, job, keep=(name,))):
            assert "c" in proposal.plan.devices
    assert all("a" not in p.plan.devices for p in spantrain(request_of(profile, job, leave_out=("a",))))


def test_as_printed_all_devices_are_at_work_in_its_own_order(make_cluster, make_graph, make_profile):
    cluster = make_cluster({"lab": {"a": 0.02, "b": 0.02}, "far": {"c": 0.01}}, bandwidth=1e5, latency_s=0.1)
    request = request_of(make_profile(cluster, make_graph(6)), JobSpec(global_batch=16))
    for proposal in spantrain_paper(request):
        assert set(proposal.plan.devices) == {"a", "b", "c"}
        assert proposal.plan.schedule == "compact"
        assert proposal.plan.hints is None


def test_asking_twice_gives_the_same(preset_profile):
    request = request_of(preset_profile("spantrain-setting-2"), JobSpec(global_batch=64))
    assert spantrain(request) == spantrain(request)


def test_what_fits_nowhere_is_refused_with_the_bytes(make_cluster, make_graph, make_profile):
    cluster = make_cluster({"lab": {"a": 0.01, "b": 0.01}}, memory_bytes=301 * 2**20)
    with pytest.raises(InfeasiblePlanError, match=r"a needs .* has 301 MiB"):
        spantrain(request_of(make_profile(cluster, make_graph(12)), JobSpec(global_batch=8)))


def test_a_stage_whose_samples_do_not_fit_is_no_plan(make_cluster, make_graph, make_profile):
    cluster = make_cluster({"lab": {"a": 0.01}}, memory_bytes=320 * 2**20)
    tables = WayTables(make_profile(cluster, make_graph(4)), JobSpec(global_batch=64))
    slots = (Slot(members=alone("a"), even=True),)
    assert build_plan(tables, slots, (0, 6), 1) is not None
    assert build_plan(tables, slots, (0, 6), 64) is None
