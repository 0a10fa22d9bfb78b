"""Learning rates and clipping."""

import pytest

from spantrain.core.job import TrainJob
from spantrain.runtime.gradients.optimizer import clip_factor, learning_rate


def test_learning_rates():
    job = TrainJob(steps=10, learning_rate=1.0, warmup_steps=4, lr_schedule="cosine", decay_steps=8)
    rates = [learning_rate(job, step) for step in range(10)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[6] == pytest.approx(0.5)
    assert rates[8:] == [0.0, 0.0]


def test_clipping():
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(2.0, 1.0) == pytest.approx(0.5)
    assert clip_factor(1e9, None) == 1.0
