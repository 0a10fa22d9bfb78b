"""The loss scale of float16: halved and grown as torch's own scaler does it, but by an agreed verdict."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.errors import WorkerError
from spantrain.runtime.gradients.optimizer import LossScale


@given(overflows=st.lists(st.booleans(), max_size=40), interval=st.integers(1, 5))
def test_it_halves_on_overflow_and_doubles_after_so_many_good_steps(overflows, interval):
    scale = LossScale(scale=1024.0, growth_interval=interval)
    expected, good = 1024.0, 0
    for overflow in overflows:
        if overflow:
            expected, good = expected / 2, 0
        else:
            good += 1
            if good == interval:
                expected, good = expected * 2, 0
        if scale.scale <= 2.0**-24 and overflow:
            with pytest.raises(WorkerError):
                scale.after(overflow=True)
            return
        scale = scale.after(overflow=overflow)
        assert (scale.scale, scale.good_steps) == (expected, good)


def test_gradients_that_overflow_at_any_scale_are_a_divergence():
    scale = LossScale(scale=2.0**-23).after(overflow=True)
    with pytest.raises(WorkerError, match="not finite even at a loss scale"):
        scale.after(overflow=True)


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"growth_interval": 0}, {"good_steps": 2000}, {"good_steps": -1}])
def test_states_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match=r"scale|good_steps"):
        LossScale(**wrong)
