"""Learning rates are those of the transformers library, to the last digit; clipping."""

import pytest
import torch
from transformers import get_scheduler

from spantrain.core.job import TrainJob
from spantrain.core.update.rates import LR_SCHEDULES
from spantrain.runtime.gradients.optimizer import clip_factor, learning_rate

RATE, STEPS = 3.7e-4, 23
OPTIONS = {
    "cosine": [{}, {"num_cycles": 1.5}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "cosine_with_min_lr": [{"min_lr": 1e-5}, {"min_lr_rate": 0.1, "num_cycles": 0.7}],
    "cosine_warmup_with_min_lr": [{"min_lr": 1e-5}, {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2}],
    "polynomial": [{}, {"lr_end": 1e-5, "power": 2.5}],
    "inverse_sqrt": [{}, {"timescale": 40}],
    "warmup_stable_decay": [
        {"num_decay_steps": 8},
        {"num_decay_steps": 6, "min_lr_ratio": 0.1, "warmup_type": "cosine", "decay_type": "1-sqrt"},
        {"num_decay_steps": 5, "num_stable_steps": 3, "warmup_type": "1-sqrt", "decay_type": "linear"},
    ],
}
CASES = [(name, options) for name in LR_SCHEDULES for options in OPTIONS.get(name, [{}])]


@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_rates_are_those_of_transformers(name, options, warmup_steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=RATE)
    scheduler = get_scheduler(name, optimizer, warmup_steps, STEPS, scheduler_specific_kwargs=options)
    job = TrainJob(
        steps=STEPS, learning_rate=RATE, warmup_steps=warmup_steps, lr_schedule=name, lr_schedule_options=options,
        decay_steps=STEPS,
    )  # fmt: skip
    for step in range(STEPS + 1):
        assert learning_rate(job, step) == scheduler.get_last_lr()[0], step
        optimizer.step()
        scheduler.step()


def test_what_has_fallen_stays_there():
    for name in ("cosine", "linear"):
        job = TrainJob(steps=20, learning_rate=1.0, warmup_steps=4, lr_schedule=name, decay_steps=8)
        assert [learning_rate(job, step) for step in (8, 9, 12, 19)] == [0.0] * 4


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("cosin", {}, "lr_schedule must be one of .* got 'cosin': did you mean cosine"),
        ("reduce_lr_on_plateau", {}, "follows measured losses"),
        ("cosine", {"num_cycle": 2}, "num_cycles.* got 'num_cycle': did you mean num_cycles"),
        ("cosine", {"num_cycles": "2"}, "option num_cycles of lr_schedule cosine must be a finite number"),
        ("cosine_with_min_lr", {}, "one of the options min_lr and min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 0.0, "min_lr_rate": 0.1}, "one of the options"),
        ("polynomial", {"lr_end": 1.0}, "must be below learning_rate"),
        ("warmup_stable_decay", {}, "needs the option num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": 2.5}, "must be a whole number"),
        ("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "sine"}, "one of linear, cosine, 1-sqrt"),
        ("inverse_sqrt", {"timescale": 3}, "at least warmup_steps, 10"),
    ],
)
def test_schedules_that_make_no_sense(name, options, says):
    with pytest.raises(ValueError, match=says):
        TrainJob(steps=20, lr_schedule=name, lr_schedule_options=options)


def test_clipping():
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(2.0, 1.0) == pytest.approx(0.5)
    assert clip_factor(1e9, None) == 1.0
