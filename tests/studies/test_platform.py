from dataclasses import replace

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain_studies.reference.network import curve_bandwidth_bytes_per_s
from spantrain_studies.reference.platform import device_bound_s, load_platform, measured_s, running_s
from spantrain_studies.reference.types import LinkCurve
from spantrain_studies.reference.validate import PLATFORM
from testing.reference import PLAIN

POINTS = st.dictionaries(st.sampled_from([1, 2, 4, 8, 16]), st.floats(0.01, 10.0), min_size=1)


def test_the_platform_that_ships_says_what_each_constant_means():
    from importlib import resources

    text = (resources.files("spantrain_studies.reference") / "platforms" / f"{PLATFORM}.yaml").read_text(
        encoding="utf-8"
    )
    document = yaml.safe_load(text)
    assert document["calibrated"]["date"]
    for name, row in document["constants"].items():
        assert {"value", "unit", "fitted", "meaning"} <= set(row), name
    assert load_platform(PLATFORM).base_bytes_of("a kind that is not listed") > 0


@given(POINTS, st.integers(1, 16), st.floats(0.0, 1.0))
@settings(deadline=None, max_examples=50)
def test_a_running_layer_takes_from_its_device_bound_to_what_it_took_alone(points, samples, exposure):
    alone_s = measured_s(points, samples)
    bound_s = device_bound_s({**points, samples: alone_s}, samples)
    assert bound_s <= alone_s * (1 + 1e-12)
    assert bound_s * (1 - 1e-9) <= running_s(points, samples, exposure) <= alone_s * (1 + 1e-9)


def test_sends_hold_for_what_the_transport_does_not_take_at_once():
    platform = replace(PLAIN, buffer_bytes=25.0)
    assert platform.send_hold_s(2.0, 100.0) == pytest.approx(1.5)
    assert platform.send_hold_s(2.0, 20.0) == 0.0
    assert platform.send_hold_s(0.0, 0.0) == 0.0


@pytest.mark.parametrize("change", [{"launch_exposure": -0.1}, {"base_bytes": {"fast": 1.0}}])
def test_constants_that_mean_nothing_are_refused(change):
    with pytest.raises(ValueError, match="platform plain"):
        replace(PLAIN, **change)


def test_bandwidth_stays_within_what_was_measured():
    curve = LinkCurve(coefficients=(-0.5, 4.0, 10.0), max_bandwidth_bytes_per_s=17e9)
    assert curve_bandwidth_bytes_per_s(curve, 1.0) == pytest.approx(10e9)
    assert curve_bandwidth_bytes_per_s(curve, 4e6) == pytest.approx(16e9)
    assert curve_bandwidth_bytes_per_s(curve, 1e12) == pytest.approx(17e9)
