"""What replicas take together: rings of members, sharded state, gathers beside compute."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.action import Op
from spantrain.core.plan import OWN_SUMS, GradientSums, Replica, Stage
from spantrain.core.shares import ALONE, StateSharding, shares_of
from spantrain.core.span import equal_spans
from spantrain.cost.replicas import ReplicaCost, Ring, rings_of
from spantrain.cost.sums import SumOptions, Words, fill_buckets
from spantrain.models.catalog.catalog import resolve_model

GLOO = SumOptions(words=Words.EACH)


def stage_of(*groups, end=3, sharding=StateSharding.NONE, micro_batches=4, sums=OWN_SUMS):
    """A stage with a replica for each mapping of device to tensor share."""
    return Stage(
        first_unit=0,
        end_unit=end,
        replicas=tuple(
            Replica(devices=tuple(group), sample_share=1.0, in_flight_limit=8, tp_shares=tuple(group.values()))
            for group in groups
        ),
        micro_batches=equal_spans(8, 8 // micro_batches),
        state_sharding=sharding,
        sums=sums,
    )


def slow_links(profile, bandwidth_bytes_per_s):
    links = tuple(replace(link, bandwidth_bytes_per_s=bandwidth_bytes_per_s) for link in profile.links)
    return replace(profile, links=links)


@pytest.fixture(scope="module")
def divided(cost_profile):
    units = tuple(replace(unit, tensor_sums=1) for unit in cost_profile.graph.units)
    return replace(cost_profile, graph=replace(cost_profile.graph, units=units))


@pytest.fixture(scope="module")
def laptop():
    return described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


def test_one_replica_sums_nothing(cost_profile):
    cost = ReplicaCost(cost_profile)
    for sharding in (StateSharding.NONE, StateSharding.ZERO1, StateSharding.ZERO2, StateSharding.ZERO3):
        alone = stage_of({"a0": 1.0}, sharding=sharding)
        assert rings_of(alone) == ()
        assert cost.end_of_step_s(alone) == ()
        assert not cost.sent_bytes(alone)
        plain = cost.groups.compute.kind_seconds(range(3), "fast", Op.FORWARD, 2)
        assert cost.action_s(alone, alone.replicas[0], Op.FORWARD, 2) == pytest.approx(plain)


def test_members_sum_with_those_that_hold_the_same():
    alike = stage_of({"a": 2.0, "b": 1.0}, {"c": 4.0, "d": 2.0})
    assert [ring.devices for ring in rings_of(alike)] == [("a", "c"), ("b", "d")]
    assert [ring.tp_share for ring in rings_of(alike)] == list(shares_of((2.0, 1.0)))
    # Where parts differ, the leaders stand for their groups.
    other = stage_of({"a": 2.0, "b": 1.0}, {"c": 1.0, "d": 1.0})
    assert rings_of(other) == (Ring(devices=("a", "c"), tp_share=ALONE),)


def test_devices_alone_take_a_ring_sum_whatever_their_single_shares(divided):
    cost, stage = ReplicaCost(divided), stage_of({"a0": 3.0}, {"a1": 1.0})
    (whole_s,) = cost.end_of_step_s(stage)
    assert whole_s == pytest.approx(cost.groups.network.collectives.seconds(("a0", "a1"), 11000, options=GLOO))
    assert cost.sent_bytes(stage) == {("a0", "a1"): 11000, ("a1", "a0"): 11000}


@pytest.mark.parametrize("sharding", [StateSharding.ZERO1, StateSharding.ZERO2])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_divided_updates_take_the_bytes_of_the_sum_and_zero2_more_for_more_micro_batches(
    cost_profile, micro_batches, sharding
):
    cost = ReplicaCost(cost_profile)
    plain, sharded = (
        stage_of({"a0": 1.0}, {"a1": 1.0}, sharding=own, micro_batches=micro_batches)
        for own in (StateSharding.NONE, sharding)
    )
    summed = 11000 if sharding is StateSharding.ZERO1 else 4000  # all, or the first unit's: the rest is done before
    assert cost.end_of_step_s(sharded) == tuple(
        cost.groups.network.collectives.gather_s(("a0", "a1"), size) for size in (summed, 11000)
    )
    halves = 2 if sharding is StateSharding.ZERO1 else micro_batches + 1
    assert cost.sent_bytes(sharded) == {pair: size * halves // 2 for pair, size in cost.sent_bytes(plain).items()}
    for op in Op:
        assert cost.action_s(sharded, sharded.replicas[0], op, 2) == cost.action_s(plain, plain.replicas[0], op, 2)


def test_zero3_takes_the_longer_of_compute_and_gathers(cost_profile):
    narrow = slow_links(cost_profile, 1e5)
    fast, slow = ReplicaCost(cost_profile), ReplicaCost(narrow)
    stage = stage_of({"a0": 1.0}, {"a1": 1.0}, sharding=StateSharding.ZERO3)
    replica = stage.replicas[0]
    compute_s = fast.groups.replica_seconds(stage.units, replica, Op.FORWARD, 4)
    assert fast.action_s(stage, replica, Op.FORWARD, 4) == compute_s
    # Unit by unit; the parameter that units 0 and 2 share is gathered once.
    gather_s = sum(slow.groups.network.collectives.gather_s(("a0", "a1"), size) for size in (4000, 4000, 3000))
    assert slow.action_s(stage, replica, Op.FORWARD, 4) == pytest.approx(gather_s)
    assert gather_s > compute_s
    assert slow.action_s(stage, replica, Op.BACKWARD_INPUT, 4) == pytest.approx(gather_s)
    # Of four micro-batches' gradients all are summed beside the work, but for the last one's of the first unit.
    first_s = slow.groups.network.collectives.gather_s(("a0", "a1"), 4000)
    assert slow.action_s(stage, replica, Op.BACKWARD_WEIGHT, 4) == pytest.approx(2 * gather_s - first_s / 4)
    assert slow.action_s(stage, replica, Op.BACKWARD, 4) == pytest.approx(2 * gather_s - first_s / 4)
    assert slow.end_of_step_s(stage) == pytest.approx((first_s, first_s))
    # Two gathers and a sum for each micro-batch, each to and from one other device.
    assert slow.sent_bytes(stage) == dict.fromkeys((("a0", "a1"), ("a1", "a0")), 4 * 3 * 11000 // 2)


@pytest.mark.parametrize("shares", [(1.0, 1.0), (2.0, 1.0), (9.0, 1.0)])
def test_members_sum_their_parts_at_once_and_every_byte_once(laptop, shares):
    cost = ReplicaCost(laptop)
    units = len(laptop.graph.units)
    first, second = ({"lab-0": shares[0], "lab-1": shares[1]}, {"home-tx2": shares[0], "home-nano": shares[1]})
    grouped = stage_of(first, second, end=units)
    plain = stage_of({"lab-0": 1.0}, {"home-tx2": 1.0}, end=units)
    pairs = {("lab-0", "home-tx2"), ("home-tx2", "lab-0"), ("lab-1", "home-nano"), ("home-nano", "lab-1")}
    around = {pair: size for pair, size in cost.sent_bytes(grouped).items() if pair in pairs}
    assert set(around) == pairs
    assert all(unit.tensor_sums for unit in laptop.graph.units)
    held = [sum(laptop.graph.held_parameter_bytes(range(units), share)) for share in shares_of(shares)]
    # What all members hold whole is summed in each ring.
    assert laptop.graph.parameter_bytes < sum(held) < 1.05 * laptop.graph.parameter_bytes
    ratio = sum(held) / laptop.graph.parameter_bytes
    assert sum(around.values()) == pytest.approx(ratio * sum(cost.sent_bytes(plain).values()), abs=100)
    assert around["lab-0", "home-tx2"] == pytest.approx(around["lab-1", "home-nano"] * held[0] / held[1], rel=1e-4)
    # Both rings cross the same line between the sites, so together they are not faster than one of the whole.
    whole_s, parts_s = (sum(cost.end_of_step_s(stage)) for stage in (plain, grouped))
    assert whole_s * 0.9 < parts_s
    # What is sent inside the groups is theirs alone.
    inside = cost.sent_bytes(grouped)["lab-0", "lab-1"]
    assert inside == 2 * 4 * cost.groups.sent_bytes_per_sample(grouped.units) // 2


def test_buckets_are_whole_when_the_last_backward_is_through_their_units(cost_profile):
    """Units have 4000 bytes each, of which units 0 and 2 share 1000, counted at unit 0; W takes 1/4 of F + I + W."""
    cost = ReplicaCost(cost_profile)
    stage = stage_of({"a0": 1.0}, {"a1": 1.0}, sums=GradientSums(bucket_bytes=2750))
    replica = stage.replicas[0]
    sizes = fill_buckets((4000, 4000, 3000), stage.sums)
    assert [bucket.last_unit for bucket in sizes] == [2, 1, 0, 0]
    times = [cost.groups.units_seconds((unit,), replica, Op.BACKWARD, 2) for unit in range(3)]
    ends = [times[2] / sum(times), (times[2] + times[1]) / sum(times), 1.0, 1.0]
    buckets = cost.buckets_beside(stage)
    assert cost.parts_until_whole(buckets, stage, replica, Op.BACKWARD, 2) == pytest.approx(ends)
    assert len(cost.end_of_step_s(stage)) == 4
    # Units that are computed again have nothing left to do in W.
    again = replace(stage, recompute=(2,))
    assert cost.parts_until_whole(buckets, again, replica, Op.BACKWARD_WEIGHT, 2)[0] == 0.0


def test_sums_come_behind_the_work_where_parts_do_not_meet_or_the_framework_waits(cost_profile):
    cost, small = ReplicaCost(cost_profile), GradientSums(bucket_bytes=4000)
    stages = (
        stage_of({"a0": 1.0, "a1": 1.0}, {"b0": 1.0}, sums=small),
        stage_of({"a0": 1.0}, {"a1": 1.0}, sums=replace(small, beside_backward=False)),
    )
    for stage in stages:
        assert cost.buckets_beside(stage) is None
        assert cost.behind_s(stage) == pytest.approx(sum(cost.end_of_step_s(stage)))


def test_of_divided_updates_sums_go_beside_the_backward_and_the_gather_behind_it(cost_profile):
    cost = ReplicaCost(cost_profile)
    settings = GradientSums(bucket_bytes=3000)
    stage = stage_of({"a0": 1.0}, {"a1": 1.0}, sharding=StateSharding.ZERO1, sums=settings)
    parts = cost.parts_until_whole(cost.buckets_beside(stage), stage, stage.replicas[0], Op.BACKWARD, 2)
    *sums, gather = cost.end_of_step_s(stage)
    # The last two buckets are whole with the first unit; then comes the gather.
    assert parts[0] < parts[1] < parts[2] == parts[3] == parts[4] == 1.0
    assert len(sums) == 4
    assert gather + sums[-1] <= cost.behind_s(stage) + 1e-12 < sum(sums) + gather


def test_what_is_left_behind_the_last_backward_is_between_the_last_bucket_and_all(cost_profile):
    for bandwidth in (1e4, 1e6, 1e8):
        cost = ReplicaCost(slow_links(cost_profile, bandwidth))
        for size in (11000, 5500, 1375):
            stage = stage_of({"a0": 1.0}, {"a1": 1.0}, sums=GradientSums(bucket_bytes=size))
            seconds = cost.end_of_step_s(stage)
            assert seconds[-1] <= cost.behind_s(stage) + 1e-12
            assert cost.behind_s(stage) <= sum(seconds) + 1e-12


def test_bytes_inside_a_tensor_parallel_group(divided):
    pair = stage_of({"a0": 1.0, "a1": 1.0})
    # A sum of the outputs of units 0 and 1, and of the gradients of the inputs of 1 and 2, of 8 samples of 1000 bytes.
    assert ReplicaCost(divided).sent_bytes(pair) == dict.fromkeys((("a0", "a1"), ("a1", "a0")), 8 * 4 * 1000)


@settings(deadline=None, max_examples=30)
@given(size_bytes=st.integers(1, 10**7), count=st.integers(2, 3))
def test_a_gather_is_half_of_a_ring_between_equals(cost_profile, size_bytes, count):
    collectives = ReplicaCost(cost_profile).groups.network.collectives
    devices = ("a0", "a1", "b0")[:count]
    whole_s, half_s = collectives.seconds(devices, size_bytes), collectives.gather_s(devices, size_bytes)
    if count == 2:
        assert half_s == pytest.approx(whole_s / 2)
    assert whole_s / 2 * (1 - 1e-9) <= half_s < whole_s
    assert collectives.gather_s(devices[:1], size_bytes) == 0.0


def test_a_recomputed_unit_goes_forward_twice_and_back_at_once(cost_profile):
    cost = ReplicaCost(cost_profile)
    plain = stage_of({"a0": 1.0})
    again = replace(plain, recompute=(1,))
    seconds = {
        name: {op: cost.action_s(stage, stage.replicas[0], op, 2) for op in Op}
        for name, stage in (("plain", plain), ("again", again))
    }
    of_unit = {op: cost.groups.compute.unit_seconds(1, "fast", op, 2) for op in Op}
    forward, back, left = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT
    more = {op: seconds["again"][op] - seconds["plain"][op] for op in Op}
    assert more[forward] == pytest.approx(0)
    assert more[back] == pytest.approx(of_unit[forward] + of_unit[left])
    assert more[left] == pytest.approx(-of_unit[left])
    assert more[Op.BACKWARD] == pytest.approx(of_unit[forward])
    # Whether in halves or at once, a step's work is one more F.
    assert sum(more[op] for op in (forward, back, left)) == pytest.approx(of_unit[forward])


def test_a_group_sums_again_in_what_it_computes_again(divided):
    cost = ReplicaCost(divided)
    pair = stage_of({"a0": 1.0, "a1": 1.0})
    before, after = (sum(cost.sent_bytes(stage).values()) for stage in (pair, replace(pair, recompute=(0, 1))))
    # Eight samples, two units with an output of a thousand bytes, around a ring of two.
    assert after - before == 2 * 8 * 2 * 1000
