"""A job's numbers are finite and in range; all that is wrong is told at once."""

import math

import pytest

from spantrain.core.job import TrainJob

WHOLE = (
    "steps",
    "seed",
    "warmup_steps",
    "decay_steps",
    "checkpoint_every",
    "evaluate_every",
    "trace_steps",
    "staleness",
)
REAL = (
    "learning_rate", "weight_decay", "momentum", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
    "loss_scale",
)  # fmt: skip


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, "1", True, None])
def test_numbers_that_are_none_or_make_no_sense(name, value):
    if (name, value) == ("max_grad_norm", None):
        assert TrainJob(steps=1, max_grad_norm=None).max_grad_norm is None
        return
    with pytest.raises(ValueError, match=rf"^{name} must (be|not be) [^;]*, got {value!r}$"):
        TrainJob(**{"steps": 1, name: value})


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("value", [math.nan, 1.5, 1.0, "1", None, True, 2**60])
def test_whole_numbers_that_are_none(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be a whole number"):
        TrainJob(**{"steps": 1, name: value})


@pytest.mark.parametrize("name", [name for name in WHOLE if name not in ("seed", "staleness")])
def test_whole_numbers_that_are_too_small(name):
    with pytest.raises(ValueError, match=rf"^{name} must be (at least [01]|from 0 to 50), got -1$"):
        TrainJob(**{"steps": 1, name: -1})


def test_all_that_is_wrong_is_told():
    with pytest.raises(ValueError, match="learning_rate") as caught:
        TrainJob(steps=0, optimizer="adamm", learning_rate=-1.0, lr_schedule="cosine", decay_steps=5, warmup_steps=9)
    assert [part.split()[0] for part in str(caught.value).split("; ")] == [
        "optimizer", "steps", "learning_rate", "decay_steps"
    ]  # fmt: skip


def test_the_edges_of_what_makes_sense():
    TrainJob(
        steps=1, seed=-3, learning_rate=1e-30, weight_decay=0, momentum=0, adam_beta1=0, adam_beta2=0.999999,
        max_grad_norm=1, warmup_steps=0, trace_steps=0,
    )  # fmt: skip
