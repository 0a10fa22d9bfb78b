from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.plan import Replica
from spantrain.cost.compute import ComputeCost
from spantrain.errors import ProfileError


def test_measured_points_are_kept(cost_profile):
    cost = ComputeCost(cost_profile)
    assert cost.unit_seconds(0, "fast", Op.FORWARD, 4) == 0.005
    assert cost.unit_seconds(0, "fast", Op.BACKWARD, 4) == pytest.approx(0.015)


@pytest.mark.parametrize(("samples", "seconds"), [(0, 0.0), (1, 0.002), (3, 0.004), (6, 0.009), (10, 0.017)])
def test_lines_between_and_beyond_the_points(cost_profile, samples, seconds):
    assert ComputeCost(cost_profile).unit_seconds(1, "fast", Op.FORWARD, samples) == pytest.approx(seconds)


def test_one_point_scales_in_proportion(cost_profile):
    assert ComputeCost(cost_profile).unit_seconds(0, "slow", Op.BACKWARD_INPUT, 3) == pytest.approx(0.03)


def test_a_stage_is_the_sum_of_its_units(cost_profile):
    cost = ComputeCost(cost_profile)
    assert cost.stage_seconds(range(1, 3), "a0", Op.FORWARD, 4) == pytest.approx(0.01)
    assert cost.stage_seconds(range(3), "b0", Op.FORWARD, 2) == pytest.approx(0.03)


def test_a_missing_kind_is_named(cost_profile):
    with pytest.raises(ProfileError, match=r"unit class 'first'.*kind 'odd'.*fast, slow"):
        ComputeCost(cost_profile).unit_seconds(0, "odd", Op.FORWARD, 1)


def tensor_parallel(profile):
    """The profile with timings of two `fast` devices together, which take 0.6 of the time of one."""
    more = tuple(
        replace(
            timing,
            tp_degree=2,
            forward_s=0.6 * timing.forward_s,
            backward_input_s=0.6 * timing.backward_input_s,
            backward_weight_s=0.6 * timing.backward_weight_s,
        )
        for timing in profile.timings
        if timing.kind == "fast"
    )
    return replace(profile, timings=profile.timings + more)


def replica(*devices, shares=None):
    return Replica(
        devices=devices, sample_share=1.0, in_flight_limit=8, tp_shares=shares or (1 / len(devices),) * len(devices)
    )


def test_a_replica_of_two_devices_takes_the_time_of_that_degree(cost_profile):
    cost = ComputeCost(tensor_parallel(cost_profile))
    one = cost.replica_seconds(range(3), replica("a0"), Op.BACKWARD, 6)
    assert one == pytest.approx(cost.stage_seconds(range(3), "a0", Op.BACKWARD, 6))
    assert cost.replica_seconds(range(3), replica("a0", "a1"), Op.BACKWARD, 6) == pytest.approx(0.6 * one)


def test_a_degree_that_was_not_measured_is_named(cost_profile):
    says = r"'first' \(u0\) on 2 tensor-parallel devices of kind 'fast'; it has tensor-parallel degree 1;"
    with pytest.raises(ProfileError, match=says):
        ComputeCost(cost_profile).replica_seconds(range(3), replica("a0", "a1"), Op.FORWARD, 2)
    with pytest.raises(ProfileError, match=r"3 tensor-parallel devices of kind 'fast'; .* degree 1, 2;"):
        ComputeCost(tensor_parallel(cost_profile)).unit_seconds(0, "fast", Op.FORWARD, 2, tp_degree=3)
    # The group is as slow as its slowest kind, which was measured alone only.
    with pytest.raises(ProfileError, match="kind 'slow'"):
        ComputeCost(tensor_parallel(cost_profile)).replica_seconds(range(3), replica("a0", "b0"), Op.FORWARD, 2)


def test_uneven_tensor_shares_are_refused(cost_profile):
    with pytest.raises(ProfileError, match="give its devices equal shares"):
        ComputeCost(tensor_parallel(cost_profile)).replica_seconds(
            range(3), replica("a0", "a1", shares=(0.7, 0.3)), Op.FORWARD, 2
        )


def test_a_missing_dtype_is_named(cost_profile):
    with pytest.raises(ProfileError, match="dtype bfloat16, only for float32"):
        ComputeCost(cost_profile, "bfloat16")


def test_negative_samples_are_refused(cost_profile):
    with pytest.raises(ValueError, match="-1"):
        ComputeCost(cost_profile).unit_seconds(0, "fast", Op.FORWARD, -1)


@settings(deadline=None, max_examples=30)
@given(samples=st.integers(1, 64), op=st.sampled_from(list(Op)))
def test_more_samples_never_take_less_time(samples, op):
    from spantrain.core.profile import UnitTiming
    from spantrain.cost.compute import _interpolate

    def timing(n, s):
        return UnitTiming(
            unit_class="u",
            kind="k",
            dtype="float32",
            samples=n,
            forward_s=s,
            backward_input_s=s,
            backward_weight_s=s,
        )

    points = (timing(4, 1.0), timing(8, 4.0), timing(16, 5.0))
    assert 0 < _interpolate(points, op, samples) <= _interpolate(points, op, samples + 1)
