"""The law of emulated devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.cluster import DeviceKind
from spantrain.core.units import Unit
from spantrain.cost.analytic import (
    COMPUTE_EFFICIENCY,
    HALF_RATE_SAMPLES,
    HELD_PASSES,
    LAUNCH_S,
    SATURATION_S,
    AnalyticLaw,
)

KIND = DeviceKind(
    name="board",
    peak_fp16_flop_per_s=2e12,
    peak_fp32_flop_per_s=1e12,
    memory_bytes=2**32,
    memory_bandwidth_bytes_per_s=50e9,
    power_w=10.0,
    source="made up",
)


LOST = SATURATION_S * COMPUTE_EFFICIENCY * 1e12 / 1e9
"""Samples of 1e9 operations that fill the device: what it computes in `SATURATION_S`."""


def make_unit(flop: float = 1e9, held: int = 2**20, parameters: int = 2**20) -> Unit:
    return Unit(
        name="block",
        unit_class="block",
        parameter_bytes=parameters,
        forward_flop_per_sample=flop,
        outputs=(),
        activation_bytes_per_sample=held,
    )


def law(speed: float = 1.0, dtype: str = "float32") -> AnalyticLaw:
    return AnalyticLaw(kind=KIND, speed=speed, dtype=dtype)


def test_dense_work_runs_at_the_peak_rate_but_for_the_fixed_cost() -> None:
    seconds = law().seconds(make_unit(held=0, parameters=0), Op.FORWARD, 16)
    assert seconds == pytest.approx(1e9 * (16 + LOST) / (COMPUTE_EFFICIENCY * 1e12) + LAUNCH_S)


def test_small_samples_lose_half_of_one_and_large_ones_what_fills_the_device() -> None:
    small = law().seconds(make_unit(flop=1e6, held=0, parameters=0), Op.FORWARD, 4)
    assert small == pytest.approx(1e6 * (4 + HALF_RATE_SAMPLES) / (COMPUTE_EFFICIENCY * 1e12) + LAUNCH_S)
    large = law().seconds(make_unit(flop=1e12, held=0, parameters=0), Op.FORWARD, 1)
    assert large == pytest.approx(1e12 / (COMPUTE_EFFICIENCY * 1e12) + SATURATION_S + LAUNCH_S)


def test_work_of_little_arithmetic_runs_at_the_memory_bandwidth() -> None:
    unit = make_unit(flop=1.0, held=10**8, parameters=0)
    assert law().seconds(unit, Op.FORWARD, 10) == pytest.approx(HELD_PASSES * 1e9 / (0.75 * 50e9) + LAUNCH_S)


def test_what_is_moved_comes_on_top_of_what_is_computed() -> None:
    both, computed, moved = (
        law().seconds(make_unit(flop=flop, held=held, parameters=0), Op.FORWARD, 8)
        for flop, held in ((1e9, 10**7), (1e9, 0), (0.0, 10**7))
    )
    assert both == pytest.approx(computed + moved - LAUNCH_S)


def test_low_precision_runs_at_the_16_bit_peak() -> None:
    unit = make_unit(flop=1e7, held=0, parameters=0)
    full, low = law().seconds(unit, Op.FORWARD, 64), law(dtype="bfloat16").seconds(unit, Op.FORWARD, 64)
    assert (full - LAUNCH_S) / (low - LAUNCH_S) == pytest.approx(2)


@given(samples=st.integers(1, 256), speed=st.floats(1e-3, 10), flop=st.floats(0, 1e12), op=st.sampled_from(list(Op)))
def test_time_scales_with_speed_grows_with_samples_and_wastes_small_batches(samples, speed, flop, op) -> None:
    unit = make_unit(flop=flop)
    seconds = law(speed).seconds(unit, op, samples)
    launches = {Op.BACKWARD: 2}.get(op, 1) * LAUNCH_S
    # Without the host's launches, all of it is the device's, and scales.
    if flop > 0:
        assert seconds - launches == pytest.approx((law().seconds(unit, op, samples) - launches) / speed)
    assert law(speed).seconds(unit, op, samples + 1) >= seconds
    assert law(speed).seconds(unit, op, 2 * samples) <= 2 * seconds


def test_backward_is_two_halves_each_like_a_forward() -> None:
    unit = make_unit()
    forward, half_i, half_w, full = (
        law().seconds(unit, op, 4) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD)
    )
    assert half_i == half_w == forward
    assert full == half_i + half_w


def test_a_lookup_has_no_backward_of_inputs() -> None:
    unit = make_unit(flop=0.0)
    assert law().seconds(unit, Op.BACKWARD_INPUT, 4) == 0.0
    assert law().seconds(unit, Op.BACKWARD, 4) == law().seconds(unit, Op.BACKWARD_WEIGHT, 4) > 0


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="speed"):
        law(speed=0)
    with pytest.raises(ValueError, match="int8"):
        law(dtype="int8")
    with pytest.raises(ValueError, match="samples"):
        law().seconds(make_unit(), Op.FORWARD, 0)
