import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.action import Op
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
    assert cost.kind_seconds(range(1, 3), "fast", Op.FORWARD, 4) == pytest.approx(0.01)
    assert cost.kind_seconds(range(3), "slow", Op.FORWARD, 2) == pytest.approx(0.03)


def test_a_missing_kind_is_named(cost_profile):
    with pytest.raises(ProfileError, match=r"unit class 'first'.*kind 'odd'.*fast, slow"):
        ComputeCost(cost_profile).unit_seconds(0, "odd", Op.FORWARD, 1)


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
            unit_class="u", kind="k", dtype="float32", samples=n, forward_s=s, backward_input_s=s, backward_weight_s=s
        )

    points = (timing(4, 1.0), timing(8, 4.0), timing(16, 5.0))
    assert 0 < _interpolate(points, op, samples) <= _interpolate(points, op, samples + 1)
