"""Work on tensor-parallel groups: as measured, or reckoned from shares and sums."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.plan import Replica
from spantrain.core.shares import TensorPieces
from spantrain.cost.compute import GroupCost
from spantrain.errors import ProfileError

OPS = tuple(Op)


def group(*devices, shares=None):
    return Replica(
        devices=devices, sample_share=1.0, in_flight_limit=8, tp_shares=shares or (1 / len(devices),) * len(devices)
    )


def seconds_of(cost: GroupCost, units, devices, shares, op, samples):
    return cost.replica_seconds(units, group(*devices, shares=shares), op, samples)


def divisible(profile, *sums):
    """The profile with so many sums in each unit."""
    units = tuple(replace(unit, tensor_sums=n) for unit, n in zip(profile.graph.units, sums, strict=True))
    return replace(profile, graph=replace(profile.graph, units=units))


def measured_together(profile, ratio=0.6):
    """The profile with timings of two `fast` devices together, which take a part of the time of one."""
    more = tuple(
        replace(
            timing,
            tp_degree=2,
            forward_s=ratio * timing.forward_s,
            backward_input_s=ratio * timing.backward_input_s,
            backward_weight_s=ratio * timing.backward_weight_s,
        )
        for timing in profile.timings
        if timing.kind == "fast"
    )
    return replace(profile, timings=profile.timings + more)


def test_an_even_group_takes_what_was_measured_at_its_degree(cost_profile):
    cost = GroupCost(measured_together(divisible(cost_profile, 1, 2, 1)))
    one = cost.replica_seconds(range(3), group("a0"), Op.BACKWARD, 6)
    assert one == pytest.approx(cost.compute.kind_seconds(range(3), "fast", Op.BACKWARD, 6))
    assert cost.replica_seconds(range(3), group("a0", "a1"), Op.BACKWARD, 6) == pytest.approx(0.6 * one)
    assert cost.replica_seconds(range(3), group("a0", "a1", shares=(1, 1)), Op.BACKWARD, 6) == pytest.approx(0.6 * one)


def test_what_was_not_measured_is_shares_and_sums(cost_profile):
    cost = GroupCost(divisible(cost_profile, 1, 2, 1))
    pair = group("a0", "a1")

    def sums(count, size_bytes):
        return count * cost.network.collectives.fastest(("a0", "a1"), size_bytes)[1]

    def alone(unit, op):
        return cost.compute.unit_seconds(unit, "fast", op, 4)

    assert cost.replica_seconds(range(1, 2), pair, Op.FORWARD, 4) == pytest.approx(
        alone(1, Op.FORWARD) / 2 + sums(2, 4000)
    )
    for op in (Op.BACKWARD_INPUT, Op.BACKWARD):
        assert cost.replica_seconds(range(1, 2), pair, op, 4) == pytest.approx(alone(1, op) / 2 + sums(2, 4000))
    assert cost.replica_seconds(range(1, 2), pair, Op.BACKWARD_WEIGHT, 4) == pytest.approx(
        alone(1, Op.BACKWARD_WEIGHT) / 2
    )
    # The model's input has no gradient; its last unit puts out a number for each sample.
    assert cost.replica_seconds(range(1), pair, Op.BACKWARD_INPUT, 4) == pytest.approx(alone(0, Op.BACKWARD_INPUT) / 2)
    assert cost.replica_seconds(range(2, 3), pair, Op.FORWARD, 4) == pytest.approx(
        alone(2, Op.FORWARD) / 2 + sums(1, 0)
    )


def test_the_slowest_member_rules(cost_profile):
    cost = GroupCost(divisible(cost_profile, 0, 1, 1))
    fast, slow = (cost.compute.unit_seconds(1, kind, Op.BACKWARD_WEIGHT, 4) for kind in ("fast", "slow"))
    mixed = ("a0", "b0")
    for shares in ((1.0, 1.0), (2.0, 1.0), (9.0, 1.0)):
        wanted = max(shares[0] * fast, shares[1] * slow) / sum(shares)
        assert seconds_of(cost, range(1, 2), mixed, shares, Op.BACKWARD_WEIGHT, 4) == pytest.approx(wanted)
    # All members compute the whole of a unit that cannot be divided.
    whole = cost.compute.unit_seconds(0, "slow", Op.FORWARD, 4)
    assert seconds_of(cost, range(1), mixed, (9.0, 1.0), Op.FORWARD, 4) == pytest.approx(whole)


@pytest.mark.parametrize(("shares", "parts"), [((2.0, 1.0), (3, 1)), ((9.0, 1.0), (3, 1)), ((1.0, 1.0), (2, 2))])
def test_heads_are_whole(cost_profile, shares, parts):
    """Four heads are half of the unit's work, and a fourth of it every member does whole."""
    heads = TensorPieces(pieces=4, parameter_bytes=100, work_share=0.5)
    columns = TensorPieces(pieces=1000, parameter_bytes=50, work_share=0.25)
    first, block, last = divisible(cost_profile, 0, 1, 0).graph.units
    units = (first, replace(block, tensor_pieces=(heads, columns)), last)
    profile = replace(cost_profile, graph=replace(cost_profile.graph, units=units))
    alone = [GroupCost(profile).compute.unit_seconds(1, kind, Op.BACKWARD_WEIGHT, 4) for kind in ("fast", "slow")]
    own = [
        part / 4 * 0.5 + round(1000 * share / sum(shares)) / 1000 * 0.25 + 0.25
        for part, share in zip(parts, shares, strict=True)
    ]
    wanted = max(part * seconds for part, seconds in zip(own, alone, strict=True))
    found = seconds_of(GroupCost(profile), range(1, 2), ("a0", "b0"), shares, Op.BACKWARD_WEIGHT, 4)
    assert found == pytest.approx(wanted)


def test_what_has_fewer_pieces_than_members_is_computed_whole(cost_profile):
    heads = TensorPieces(pieces=1, parameter_bytes=100, work_share=1.0)
    first, block, last = divisible(cost_profile, 0, 1, 0).graph.units
    units = (first, replace(block, tensor_pieces=(heads,)), last)
    cost = GroupCost(replace(cost_profile, graph=replace(cost_profile.graph, units=units)))
    whole = cost.compute.unit_seconds(1, "fast", Op.BACKWARD_WEIGHT, 4)
    assert seconds_of(cost, range(1, 2), ("a0", "a1"), (1.0, 1.0), Op.BACKWARD_WEIGHT, 4) == pytest.approx(whole)


def test_uneven_shares_are_reckoned_though_even_ones_were_measured(cost_profile):
    cost = GroupCost(measured_together(divisible(cost_profile, 1, 1, 1), ratio=0.1))
    even, uneven = (
        seconds_of(cost, range(3), ("a0", "a1"), shares, Op.BACKWARD_WEIGHT, 4) for shares in ((1.0, 1.0), (2.0, 1.0))
    )
    alone = cost.compute.kind_seconds(range(3), "fast", Op.BACKWARD_WEIGHT, 4)
    assert (even, uneven) == (pytest.approx(0.1 * alone), pytest.approx(alone * 2 / 3))


def test_a_kind_that_was_not_measured_is_named(cost_profile):
    only_fast = replace(cost_profile, timings=tuple(t for t in cost_profile.timings if t.kind == "fast"))
    with pytest.raises(ProfileError, match="kind 'slow'"):
        GroupCost(only_fast).replica_seconds(range(3), group("a0", "b0"), Op.FORWARD, 2)


@settings(deadline=None, max_examples=40)
@given(
    shares=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    scale=st.floats(0.01, 100),
    op=st.sampled_from(OPS),
    samples=st.integers(1, 20),
    sums=st.tuples(*[st.integers(0, 2)] * 3),
)
def test_shares_count_by_their_ratio_and_a_group_never_beats_its_parts(cost_profile, shares, scale, op, samples, sums):
    profile = divisible(cost_profile, *sums)
    cost = GroupCost(profile)
    devices = ("a0", "a1")
    seconds = seconds_of(cost, range(3), devices, tuple(map(float, shares)), op, samples)
    scaled = tuple(scale * share for share in shares)
    assert seconds_of(cost, range(3), devices, scaled, op, samples) == pytest.approx(seconds)
    alone = seconds_of(cost, range(3), ("a0",), (1.0,), op, samples)
    assert alone == pytest.approx(cost.compute.kind_seconds(range(3), "fast", op, samples))
    assert seconds >= alone * max(shares) / sum(shares) * (1 - 1e-9)
    if not any(sums):
        assert seconds == pytest.approx(alone)
    prefix = cost.prefix_seconds(devices, tuple(map(float, shares)), op, samples)
    assert list(prefix) == sorted(prefix)


def test_no_samples_take_no_time(cost_profile):
    cost = GroupCost(divisible(cost_profile, 1, 2, 1))
    assert seconds_of(cost, range(3), ("a0", "a1"), (1.0, 1.0), Op.FORWARD, 0) == 0.0


def test_bytes_that_a_group_sums(cost_profile):
    cost = GroupCost(divisible(cost_profile, 1, 2, 1))
    # Outputs of units 0 and 1 (twice), and gradients of the inputs of units 1 (twice) and 2.
    assert cost.sent_bytes_per_sample(range(3)) == 1000 + 2 * 1000 + 2 * 1000 + 1000
