"""The capacity score."""

import pytest
import torch

from spantrain.core.cluster import DeviceKind
from spantrain.cost.analytic import COMPUTE_EFFICIENCY, AnalyticLaw
from spantrain.devices.base import CpuDevice
from spantrain.devices.emulated import EmulatedDevice
from spantrain.profiler.compute import TASKS, measure_tasks

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


def test_a_real_device_is_scored() -> None:
    torch.set_num_threads(1)
    score = measure_tasks(CpuDevice(), name="here", law=None)
    assert score.device == "here"
    assert score.task_s.keys() == {task.name for task in TASKS}
    assert min(score.task_s.values()) > 0
    assert score.score > 0


class SteadyDevice(CpuDevice):
    """Does the work, and says that it took so long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def run(self, work, seconds):
        result = super().run(work, seconds)
        self.last_s = self.seconds
        return result


def test_the_score_follows_the_seconds_and_nothing_else() -> None:
    torch.set_num_threads(1)
    quick, slow = (measure_tasks(SteadyDevice(seconds), name="steady", law=None) for seconds in (0.5, 2.0))
    assert set(quick.task_s.values()) == {0.5}
    assert set(slow.task_s.values()) == {2.0}
    assert quick.score == pytest.approx(4 * slow.score)
    products_tflop = 0.3 * 2 * 1024**3 / 1e12
    assert quick.score > products_tflop / 0.5, "two products weigh 0.3; the rest has operations, too"


@pytest.mark.parametrize("speed", [0.05, 0.01])
def test_an_emulated_device_scores_what_its_law_says(speed: float) -> None:
    law = AnalyticLaw(kind=KIND, speed=speed, dtype="bfloat16")
    score = measure_tasks(EmulatedDevice(clock=FrozenClock()), name="board-0", law=law)
    low = sum(task.share for task in TASKS if task.dtype == "bfloat16")
    wanted = COMPUTE_EFFICIENCY * speed * ((1 - low) * 1.0 + low * 4.0)
    assert score.score == pytest.approx(wanted, rel=0.02)
    product = score.task_s["product-float32"]
    assert product == pytest.approx(2 * 1024**3 / (COMPUTE_EFFICIENCY * 1e12 * speed), rel=0.02)
