"""The capacity score."""

import pytest
import torch

from spantrain.core.cluster import DeviceKind
from spantrain.cost.analytic import COMPUTE_EFFICIENCY, AnalyticLaw
from spantrain.models.device import CpuDevice, EmulatedDevice
from spantrain.profiler.tasks import TASKS, measure_tasks

KIND = DeviceKind(
    name="board",
    peak_fp16_flop_per_s=4e12,
    peak_fp32_flop_per_s=1e12,
    memory_bytes=2**32,
    memory_bandwidth_bytes_per_s=50e9,
    power_w=10.0,
    source="made up",
)


class FrozenClock:
    """Time that passes only in waiting."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, deadline_s: float) -> None:
        self.time_s = max(self.time_s, deadline_s)


def test_shares_sum_to_one() -> None:
    assert sum(task.share for task in TASKS) == pytest.approx(1)


def test_a_real_device_scores_the_weighted_mean_of_its_rates() -> None:
    torch.set_num_threads(1)
    score = measure_tasks(CpuDevice(), name="here", law=None)
    assert score.device == "here"
    assert score.task_s.keys() == {task.name for task in TASKS}
    assert min(score.task_s.values()) > 0
    assert 1e-4 < score.score < 1e3


@pytest.mark.parametrize("speed", [0.1, 0.01])
def test_an_emulated_device_scores_what_its_law_says(speed: float) -> None:
    law = AnalyticLaw(kind=KIND, speed=speed, dtype="bfloat16")
    score = measure_tasks(EmulatedDevice(clock=FrozenClock()), name="board-0", law=law)
    low = sum(task.share for task in TASKS if task.dtype == "bfloat16")
    wanted = COMPUTE_EFFICIENCY * speed * ((1 - low) * 1.0 + low * 4.0)
    assert score.score == pytest.approx(wanted, rel=0.02)
    product = score.task_s["product-float32"]
    assert product == pytest.approx(2 * 1024**3 / (COMPUTE_EFFICIENCY * 1e12 * speed), rel=0.02)
