"""The small decisions of the use cases: when to stop, which steps count, what a resumed run goes on from."""

from dataclasses import replace

import pytest

from spantrain.app.training.outcome import measured_step_s
from spantrain.app.training.requests import resumed_run
from spantrain.app.training.stop import StopRequest
from spantrain.errors import ConfigError
from spantrain.runtime.coordinator.barrier import StepOutcome

STEP = StepOutcome(
    step=0,
    loss=1.0,
    evaluation_loss=None,
    grad_norm=1.0,
    duration_s=1.0,
    busy_s={},
    peak_held_samples={},
    sent_bytes={},
    closed_s=0.0,
)


def outcomes(*durations_s: float) -> list[StepOutcome]:
    return [replace(STEP, step=number, duration_s=value) for number, value in enumerate(durations_s)]


def test_first_request_stops_after_the_step_and_second_at_once():
    stop = StopRequest()
    stop.begun = True
    assert (stop.wanted, stop.at_once) == (False, False)
    assert not stop.ask()
    assert (stop.wanted, stop.at_once) == (True, False)
    assert stop.ask()
    assert (stop.wanted, stop.at_once) == (True, True)


def test_before_the_first_step_the_first_request_is_one_for_an_end_at_once():
    stop = StopRequest()
    assert stop.ask()
    assert stop.wanted


def test_step_time_leaves_out_warm_up_and_evaluations():
    assert measured_step_s(outcomes(9, 9, 1, 2, 3)) == 2
    steps = outcomes(9, 9, 1, 2, 3)
    steps[4] = replace(steps[4], evaluation_loss=1.0, duration_s=50.0)
    assert measured_step_s(steps) == 1.5
    # The last report is of an evaluation alone.
    assert measured_step_s([*outcomes(9, 9, 1), replace(STEP, loss=None, evaluation_loss=1.0, duration_s=7.0)]) == 1


@pytest.mark.parametrize("durations_s", [(3.0,), (3.0, 3.0)])
def test_step_time_of_a_run_that_ended_in_the_warm_up(durations_s):
    assert measured_step_s(outcomes(*durations_s)) == 3.0


def test_resuming_needs_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        resumed_run(tmp_path, 10, tmp_path, functions=())
