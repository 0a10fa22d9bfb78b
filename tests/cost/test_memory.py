from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.plan import Replica
from spantrain.core.shares import ALONE, MemberBytes, MemberShare, StateSharding, TensorPieces, even_share, shares_of
from spantrain.cost.held_sizes import Division, divisions_of
from spantrain.cost.memory import BUFFERED_MICRO_BATCHES, MemoryCost, framework_bytes
from spantrain.formats.registry import WireFormat


@pytest.mark.parametrize(("optimizer", "ratio"), [("sgd", 2), ("momentum", 3), ("adamw", 4)])
def test_state_counts_parameters_gradients_and_optimizer(cost_profile, optimizer, ratio):
    assert MemoryCost(cost_profile, optimizer).state_bytes(range(1, 2)) == 4000 * ratio


DIVIDED = (StateSharding.NONE, StateSharding.ZERO1, StateSharding.ZERO2, StateSharding.ZERO3)


def test_bfloat16_keeps_float32_masters_and_a_copy(cost_profile):
    assert MemoryCost(cost_profile, "sgd", "bfloat16").state_bytes(range(1, 2)) == 4000 * 2.5


def test_shared_parameters_of_one_stage_count_once(cost_profile):
    assert MemoryCost(cost_profile, "sgd").state_bytes(range(3)) == 2 * (12000 - 1000)


def test_need_has_all_its_parts(cost_profile):
    need = MemoryCost(cost_profile, "sgd").need(range(1, 2), "a0", in_flight=6, largest_span=2)
    assert need.activation_bytes == 6 * 5000
    assert need.buffer_bytes == BUFFERED_MICRO_BATCHES * 2 * 4 * 1000
    assert framework_bytes("cuda:0") > need.framework_bytes == framework_bytes("emulated") > framework_bytes("cpu")
    parts = need.state_bytes + need.activation_bytes + need.buffer_bytes + need.working_bytes + need.framework_bytes
    assert need.peak_bytes == parts


def test_ends_of_the_model_have_one_neighbour_or_none(cost_profile):
    cost = MemoryCost(cost_profile)
    assert cost.buffer_bytes_per_sample(range(3)) == 0
    assert cost.buffer_bytes_per_sample(range(1)) == cost.buffer_bytes_per_sample(range(2, 3)) == 2 * 2000


def test_in_flight_is_what_fits_and_no_more_than_the_share(cost_profile):
    cost = MemoryCost(cost_profile, "sgd")
    assert cost.in_flight_limit_for(range(3), "a0", share_samples=8, largest_span=2) == 8
    fits = cost.in_flight_limit_for(range(3), "a0", share_samples=10**9, largest_span=2)
    memory = cost_profile.cluster.device_by_name["a0"].memory_bytes
    assert cost.need(range(3), "a0", fits, 2).peak_bytes <= memory < cost.need(range(3), "a0", fits + 1, 2).peak_bytes


def test_peaks_of_a_plan_name_every_device(cost_profile, make_cost_plan):
    plan = make_cost_plan((2, {"a0": 1, "a1": 1}), (3, {"b0": 1}))
    peaks = MemoryCost(cost_profile).plan_peak_bytes(plan)
    assert set(peaks) == {"a0", "a1", "b0"}
    assert peaks["a0"] == peaks["a1"]


def test_a_cut_inside_a_stage_is_held_once(cost_profile):
    cost = MemoryCost(cost_profile)
    assert [cost.activation_bytes_per_sample(range(end)) for end in (1, 2, 3)] == [5000, 9000, 13000]


def test_recomputed_units_hold_what_enters_them_and_one_of_them_is_run_again(cost_profile):
    cost = MemoryCost(cost_profile, "sgd")
    held = {
        units: cost.activation_bytes_per_sample(range(3), Division(recompute=units))
        for units in ((), (1,), (2,), (1, 2), (0, 1, 2))
    }
    # Unit 1 gives up all but its two cuts, unit 2 all but the one in front, unit 0 everything: nothing enters it.
    assert held == {(): 13000, (1,): 5000 + 5000, (2,): 9000, (1, 2): 6000, (0, 1, 2): 2000}
    need = cost.need(range(3), "a0", 6, 2, Division(recompute=(1, 2)))
    assert need.activation_bytes == 6 * 6000 + 2 * 4000
    assert cost.in_flight_limit_for(range(3), "a0", 10**9, 2, division=Division(recompute=(1, 2))) > 2 * (
        cost.in_flight_limit_for(range(3), "a0", 10**9, 2)
    )


@settings(deadline=None, max_examples=60)
@given(
    recompute=st.sets(st.integers(0, 2)).map(lambda units: tuple(sorted(units))),
    first=st.integers(0, 2),
    count=st.integers(1, 3),
    share=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(lambda shares: shares_of(shares)[0]),
    sums=st.tuples(*[st.integers(0, 2)] * 3),
)
def test_recomputing_never_holds_more_and_while_it_runs_hardly_more_than_before(
    cost_profile, recompute, first, count, share, sums
):
    units = range(first, min(3, first + count))
    inside = tuple(unit for unit in recompute if unit in units)
    cost = MemoryCost(divisible(cost_profile, *sums))
    before, after = Division(tp_share=share), Division(tp_share=share, recompute=inside)
    held, less = (cost.activation_bytes_per_sample(units, division) for division in (before, after))
    assert 0 <= less <= held
    sizes = cost.held_sizes(units, "a0", after)
    assert sizes.deferred_bytes_per_sample <= held
    # While a unit is run again, all in front of it is held as before, and its output may be there twice.
    assert 0 <= less + sizes.again_bytes_per_sample <= held + 1000
    assert sizes.again_split_bytes_per_sample >= sizes.again_bytes_per_sample >= 0


def test_a_plan_says_what_is_recomputed(cost_profile, make_cost_plan):
    plan = make_cost_plan((2, {"a0": 1, "a1": 1}), (3, {"b0": 1}))
    again = replace(plan, stages=(replace(plan.stages[0], recompute=(1,)), plan.stages[1]))
    assert [divisions_of(again)[name].recompute for name in ("a0", "a1", "b0")] == [(1,), (1,), ()]
    cost = MemoryCost(cost_profile)
    assert cost.plan_peak_bytes(again)["a0"] < cost.plan_peak_bytes(plan)["a0"]
    assert cost.plan_peak_bytes(again)["b0"] == cost.plan_peak_bytes(plan)["b0"]


@pytest.mark.parametrize(("recompute", "message"), [((2,), "units \\[2\\]"), ((1, 0), "rising"), ((1, 1), "once")])
def test_a_stage_recomputes_its_own_units_once(make_cost_plan, recompute, message):
    plan = make_cost_plan((2, {"a0": 1}), (3, {"b0": 1}))
    with pytest.raises(ValueError, match=message):
        replace(plan.stages[0], recompute=recompute)


def test_unknown_optimizer_is_refused(cost_profile):
    with pytest.raises(ValueError, match="lion"):
        MemoryCost(cost_profile, "lion")


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_over_time_are_those_of_the_peak(cost_profile, optimizer, dtype):
    cost = MemoryCost(cost_profile, optimizer, dtype)
    for units in (range(1), range(1, 2), range(1, 3), range(3)):
        sizes, need = cost.held_sizes(units, "a0"), cost.need(units, "a0", 1, 1)
        always = sizes.always
        assert always.parameter_bytes + always.gradient_bytes + always.optimizer_bytes == need.state_bytes
        assert (sizes.activation_bytes_per_sample, always.framework_bytes) == (
            need.activation_bytes,
            need.framework_bytes,
        )
        held = replace(always, activation_bytes=need.activation_bytes, received_bytes=7, sending_bytes=8)
        assert held.total_bytes == need.peak_bytes - need.buffer_bytes + 15
    middle = cost.held_sizes(range(1, 2), "a0")
    assert middle.input_bytes_per_sample == middle.output_gradient_bytes_per_sample == 1000


def test_a_lower_limit_than_the_memory(cost_profile):
    cost = MemoryCost(cost_profile, "sgd")
    least = cost.need(range(3), "a0", 0, 2).peak_bytes
    assert cost.in_flight_limit_for(range(3), "a0", 8, 2, limit_bytes=least + 3 * 15000) == 3
    assert cost.in_flight_limit_for(range(3), "a0", 8, 2, limit_bytes=least - 1) == 0
    assert cost.in_flight_limit_for(range(3), "a0", 8, 2, limit_bytes=10**15) == 8


def divisible(profile, *sums):
    units = tuple(replace(unit, tensor_sums=n) for unit, n in zip(profile.graph.units, sums, strict=True))
    return replace(profile, graph=replace(profile.graph, units=units))


@settings(deadline=None, max_examples=40)
@given(
    shares=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    sums=st.tuples(*[st.integers(0, 2)] * 3),
    optimizer=st.sampled_from(["sgd", "adamw"]),
)
def test_a_group_holds_divided_units_once_and_the_others_in_every_member(cost_profile, shares, sums, optimizer):
    cost = MemoryCost(divisible(cost_profile, *sums), optimizer)
    parts = [Division(tp_share=share) for share in shares_of(shares)]
    # Rounding: a byte for each kind of state and unit of every member.
    slack = 12 * len(shares)
    for unit in range(3):
        copies = 1 if sums[unit] else len(shares)
        # The unit's input is in every member, and for each sum what the divided layers read, and the result.
        entering, leaving = 1000 if unit else 0, 1000 if unit < 2 else 0
        everywhere = entering + sums[unit] * (entering + leaving) if sums[unit] else 0
        units = range(unit, unit + 1)
        together = sum(cost.state_bytes(units, part) for part in parts)
        assert together == pytest.approx(copies * cost.state_bytes(units), abs=slack)
        together = sum(cost.activation_bytes_per_sample(units, part) for part in parts)
        assert together == pytest.approx(copies * (5000 - everywhere) + len(shares) * everywhere, abs=slack)
        assert cost.activation_bytes_per_sample(units, Division(tp_share=ALONE)) == 5000
    for part in parts:
        assert cost.buffer_bytes_per_sample(range(1, 2), part) == cost.buffer_bytes_per_sample(range(1, 2))
        assert cost.state_bytes(range(3), part) <= cost.state_bytes(range(3))


def test_state_sharding_divides_what_it_says(cost_profile):
    cost = MemoryCost(cost_profile, "adamw")
    whole = cost.held_sizes(range(3), "a0").always
    one = cost.held_sizes(range(3), "a0", Division(state_sharding=StateSharding.ZERO1, replicas=4)).always
    two = cost.held_sizes(range(3), "a0", Division(state_sharding=StateSharding.ZERO2, replicas=4)).always
    three = cost.held_sizes(range(3), "a0", Division(state_sharding=StateSharding.ZERO3, replicas=4)).always
    assert whole.parameter_bytes == one.parameter_bytes == two.parameter_bytes == 11000
    assert one.gradient_bytes == whole.gradient_bytes == 11000
    assert one.optimizer_bytes == two.optimizer_bytes
    assert two.gradient_bytes == three.gradient_bytes == 11000 / 4 + 2 * 4000
    assert two.optimizer_bytes == three.optimizer_bytes == 2 * 11000 / 4
    # A quarter, and the largest unit twice, one at work, one ahead; and what units 0 and 2 share.
    assert three.parameter_bytes == 11000 / 4 + 2 * 4000 + 1000


def test_weights_of_sixteen_bits_are_gathered_as_such_and_what_autocast_rounds_is_whole(cost_profile):
    division = Division(state_sharding=StateSharding.ZERO3, replicas=4)
    low, rounded = (
        MemoryCost(cost_profile, "sgd", dtype).held_sizes(range(3), "a0", division).always.parameter_bytes
        for dtype in ("bfloat16-weights", "bfloat16")
    )
    assert low == 11000 / 4 + 2 * 2000 + 500
    assert rounded == 11000 / 4 + 11000 / 2 + 2 * 4000 + 1000


@settings(deadline=None, max_examples=40)
@given(replicas=st.integers(1, 64), end=st.integers(1, 3), optimizer=st.sampled_from(["sgd", "momentum", "adamw"]))
def test_sharded_state_is_never_more_than_the_whole_but_for_units_at_work(cost_profile, replicas, end, optimizer):
    cost = MemoryCost(cost_profile, optimizer)
    none, one, two, three = (
        cost.state_bytes(range(end), Division(state_sharding=sharding, replicas=replicas)) for sharding in DIVIDED
    )
    assert one <= none
    assert two <= one + 2 * 4000
    assert three <= two + 2 * 4000 + 1000
    if replicas == 1:
        assert none == one == two == three


def test_a_rounded_cut_is_half_in_the_buffers(cost_profile):
    cost = MemoryCost(cost_profile)
    half = Division(wire_before=WireFormat.BFLOAT16)
    assert cost.buffer_bytes_per_sample(range(1, 2), half) == 0.75 * cost.buffer_bytes_per_sample(range(1, 2))
    sizes = cost.held_sizes(range(1, 2), "a0", half)
    assert (sizes.input_bytes_per_sample, sizes.output_gradient_bytes_per_sample) == (500, 1000)


def test_members_of_a_plan_hold_their_parts(cost_profile, make_cost_plan):
    profile = divisible(cost_profile, 1, 1, 1)
    pair = Replica(devices=("a0", "a1"), sample_share=1.0, in_flight_limit=4, tp_shares=(3.0, 1.0))
    plan = make_cost_plan((3, {"a0": 1}))
    plan = replace(plan, stages=(replace(plan.stages[0], replicas=(pair,)),))
    cost = MemoryCost(profile)
    peaks = cost.plan_peak_bytes(plan)
    assert divisions_of(plan)["a0"].tp_share == MemberShare(shares=(3.0, 1.0))
    # Four samples in flight; of each, the two cuts (inputs of two units, sums of two) are whole in both members, and
    # what the divided layers of those two units read.
    same = framework_bytes("emulated") + 4 * 4 * 1000
    assert peaks["a0"] - same == 3 * (peaks["a1"] - same)
    limits = [cost.in_flight_limit_for(range(3), n, 10**9, 2, division=d) for n, d in divisions_of(plan).items()]
    assert limits[0] < limits[1]


def test_members_hold_whole_pieces_and_all_of_what_has_none(cost_profile):
    """Unit 1 has four heads in 2400 of its 4000 bytes; shares of 2:1 are three heads and one."""
    pieces = (TensorPieces(pieces=4, parameter_bytes=2400, work_share=0.6),)
    held = MemberBytes(whole_bytes=2000, divided_bytes=4000)
    units = list(cost_profile.graph.units)
    units[1] = replace(units[1], tensor_sums=2, tensor_pieces=pieces, member_activation_bytes=held)
    cost = MemoryCost(replace(cost_profile, graph=replace(cost_profile.graph, units=tuple(units))), "sgd")
    assert cost.held_sizes(range(1, 2), "a0").always.parameter_bytes == 4000
    for share, parameter_bytes, activation_bytes in zip(shares_of((2.0, 1.0)), (3400, 2200), (5000, 3000), strict=True):
        sizes = cost.held_sizes(range(1, 2), "a0", Division(tp_share=share))
        assert sizes.always.parameter_bytes == sizes.always.gradient_bytes == parameter_bytes
        assert sizes.activation_bytes_per_sample == activation_bytes
    # Five members cannot have a head each: all have all of it.
    many = Division(tp_share=even_share(5))
    assert cost.held_sizes(range(1, 2), "a0", many).always.parameter_bytes == 4000


def test_shared_parameters_count_once_in_members_too(cost_profile):
    """The first and the last unit share 1000 bytes, of two rows: a member of two has one."""
    rows = (TensorPieces(pieces=2, parameter_bytes=1000, work_share=1.0, shared=("wte",)),)
    units = [replace(unit, tensor_sums=1, tensor_pieces=rows, shared=("wte",)) for unit in cost_profile.graph.units]
    graph = replace(cost_profile.graph, units=tuple(units), shared_bytes={"wte": 1000})
    whole, half = (graph.held_parameter_bytes(range(3), share) for share in (ALONE, even_share(2)))
    assert [size - part for size, part in zip(whole, half, strict=True)] == [500, 0, 0]


def test_a_division_needs_a_replica_and_a_share_its_place():
    with pytest.raises(ValueError, match="replicas must be at least 1"):
        Division(replicas=0)
    for shares, rank in (((1.0, 0.0), 0), ((), 0), ((1.0, 1.0), 2)):
        with pytest.raises(ValueError, match="positive shares and a rank"):
            MemberShare(shares=shares, rank=rank)


def test_what_is_run_again_on_the_first_stage_waits_for_no_w(cost_profile):
    """There is no I there, so that nothing behind the unit at work holds what W needs."""
    units = tuple(replace(unit, deferred_bytes_per_sample=9000) for unit in cost_profile.graph.units)
    cost = MemoryCost(replace(cost_profile, graph=replace(cost_profile.graph, units=units)))
    split, fused = (Division(recompute=(0,), splits=splits) for splits in (True, False))
    assert cost.need(range(2), "a0", 4, 2, split) == cost.need(range(2), "a0", 4, 2, fused)
