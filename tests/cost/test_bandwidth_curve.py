"""Bandwidth against the size of a message."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.config.artefacts import read_profile, write_profile
from spantrain.core.profile import BandwidthCurve, BandwidthPoint, LinkMeasurement
from spantrain.errors import ProfileError


def points(*pairs: tuple[int, float]) -> BandwidthCurve:
    return BandwidthCurve(
        points=tuple(BandwidthPoint(size_bytes=size, bandwidth_bytes_per_s=rate) for size, rate in pairs)
    )


@settings(deadline=None, max_examples=40)
@given(fixed=st.floats(1e-6, 1.0), rate=st.floats(1e3, 1e9), size=st.integers(100, 10**8))
def test_points_of_a_fixed_cost_and_a_rate_give_it_back(fixed, rate, size):
    def seconds(n):
        return fixed + n / rate

    curve = points(*((n, n / seconds(n)) for n in (100, 10**4, 10**6, 10**8)))
    assert curve.seconds(size) == pytest.approx(seconds(size))


def test_ends_hold_outside_what_was_measured():
    curve = points((1000, 10.0), (2000, 20.0))
    assert [curve.bandwidth_bytes_per_s(n) for n in (0, 1, 1000, 2000, 10**9)] == [10.0, 10.0, 10.0, 20.0, 20.0]
    assert curve.seconds(0) == 0.0


def test_a_polynomial_is_in_the_logarithm_of_megabytes():
    curve = BandwidthCurve(coefficients_bytes_per_s=(2e6, 3e6, 5e6), least_bytes=1e6, most_bytes=64e6)
    x = math.log2(8)
    assert curve.bandwidth_bytes_per_s(8e6) == pytest.approx(2e6 * x * x + 3e6 * x + 5e6)
    assert curve.bandwidth_bytes_per_s(1.0) == curve.bandwidth_bytes_per_s(1e6) == pytest.approx(5e6)
    assert curve.bandwidth_bytes_per_s(1e12) == curve.bandwidth_bytes_per_s(64e6)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "either points or"),
        ({"points": (BandwidthPoint(size_bytes=1, bandwidth_bytes_per_s=1.0),) * 2}, "rising size"),
        ({"coefficients_bytes_per_s": (1.0,)}, "least_bytes <= most_bytes"),
        ({"coefficients_bytes_per_s": (1.0, 1.0), "least_bytes": 1e3, "most_bytes": 1e9}, "must be positive"),
    ],
)
def test_curves_that_say_nothing_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        BandwidthCurve(**fields)


@pytest.mark.parametrize(("size", "rate"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, math.inf)])
def test_points_that_say_nothing_are_refused(size, rate):
    with pytest.raises(ValueError, match="a point of a bandwidth curve: "):
        BandwidthPoint(size_bytes=size, bandwidth_bytes_per_s=rate)


@pytest.mark.parametrize(("rate", "latency"), [(0.0, 0.0), (-1.0, 0.0), (math.inf, 0.0), (1.0, -1.0)])
def test_a_link_without_bandwidth_is_refused(rate, latency):
    with pytest.raises(ValueError, match=r"link a -> b: (bandwidth_bytes_per_s|latency_s) must"):
        LinkMeasurement(
            source="a", target="b", latency_s=latency, bandwidth_bytes_per_s=rate, payload_bytes=1, rounds=1
        )


def test_curves_are_kept_in_profile_json(cost_profile, tmp_path):
    fitted = BandwidthCurve(coefficients_bytes_per_s=(1e5, 1e7), least_bytes=1e5, most_bytes=1e9)
    first, second, *rest = cost_profile.links
    links = (replace(first, curve=points((10, 5.0), (20, 7.5))), replace(second, curve=fitted), *rest)
    profile = replace(cost_profile, links=links)
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    assert read_profile(path) == profile
    path.write_text(path.read_text().replace('"bandwidth_bytes_per_s": 7.5', '"bandwidth_bytes_per_s": -7.5'))
    with pytest.raises(ProfileError, match=r"links\[0\]\.curve\.points\[1\]: .*must be more than 0"):
        read_profile(path)
