"""What accelerators' own meters say, from NVIDIA's library to what people see of a run."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import pynvml
import pytest

from spantrain.app.training.outcome import device_figures
from spantrain.core.job import TrainJob
from spantrain.devices.base import CpuDevice
from spantrain.devices.meters import MeterReading, MeterThread, nvml_meters
from spantrain.planner.engine.predict import predict
from testing.patience import PATIENCE_S, until
from testing.runtime.sessions import train_in_threads

JOB = TrainJob(steps=6, seed=3, adapter="off")
SAID = MeterReading(load_ratio=0.9, used_bytes=5, power_w=310.0, energy_j=2_000.0, clock_ratio=0.8, slowed_by="heat")


class NotSupportedError(Exception):
    """In the place of the library's errors."""


def library(**answers: object) -> ModuleType:
    """The library of a machine with one device, which answers these questions and no others."""
    module = ModuleType("pynvml")

    def handle_of(uuid: str) -> str:
        if uuid != "GPU-1":
            raise NotSupportedError
        return "handle"

    def answering(answer: object):
        def asked(handle: str, *_more: object) -> object:
            assert handle == "handle"
            if answer is None:
                raise NotSupportedError
            return answer

        return asked

    known = {
        "NVMLError": NotSupportedError, "NVML_CLOCK_SM": 1, "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": handle_of,
    }  # fmt: skip
    vars(module).update(known | {f"nvmlDeviceGet{name}": answering(answer) for name, answer in answers.items()})
    return module


@pytest.mark.parametrize(
    ("bits", "slowed_by"),
    [(0x01, ""), (0x04, "power cap"), (0x24, "power cap, heat"), (0x40, "heat or power (hardware)")],
)
def test_all_that_the_library_says_is_read_in_our_units(monkeypatch, bits, slowed_by):
    found = library(
        UtilizationRates=SimpleNamespace(gpu=97), MemoryInfo=SimpleNamespace(used=7 * 2**30), PowerUsage=312_500,
        TotalEnergyConsumption=1_234_000, ClockInfo=1_500, MaxClockInfo=2_000, CurrentClocksEventReasons=bits,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", found)
    read = nvml_meters("GPU-1")
    assert read is not None
    assert read() == MeterReading(
        load_ratio=0.97, used_bytes=7 * 2**30, power_w=312.5, energy_j=1_234.0, clock_ratio=0.75, slowed_by=slowed_by
    )


def test_what_a_device_does_not_tell_is_left_out(monkeypatch):
    """Older ones count no energy; old versions of the library do not know of some questions."""
    monkeypatch.setitem(sys.modules, "pynvml", library(PowerUsage=60_000, TotalEnergyConsumption=None))
    read = nvml_meters("GPU-1")
    assert read is not None
    assert read() == MeterReading(power_w=60.0)


def test_there_are_no_meters_where_the_device_or_the_library_is_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", library())
    assert nvml_meters("GPU-2") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_meters("GPU-1") is None


def test_the_library_itself_has_all_that_is_asked():
    questions = ("UtilizationRates", "MemoryInfo", "PowerUsage", "TotalEnergyConsumption", "ClockInfo", "MaxClockInfo")
    for question in (*questions, "CurrentClocksEventReasons", "HandleByUUID"):
        assert callable(getattr(pynvml, f"nvmlDeviceGet{question}"))
    assert pynvml.NVML_CLOCK_SM == 1
    assert nvml_meters("GPU-that-is-nowhere") is None, "no driver here, or no such device"


@pytest.mark.parametrize("wrong", [{"power_w": -1.0}, {"energy_j": float("nan")}, {"slowed_by": "x" * 999}])
def test_figures_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="meters: "):
        MeterReading(**wrong)


def test_meters_are_asked_in_a_thread_that_ends():
    asked = threading.Event()

    def read() -> MeterReading:
        asked.set()
        return SAID

    with MeterThread(read) as meters:
        assert asked.wait(PATIENCE_S)
        until(lambda: meters.latest == SAID)
    until(lambda: all(thread.name != "meters" for thread in threading.enumerate()))
    with MeterThread(None) as none:
        assert none.latest is None


def test_what_meters_say_comes_to_figures(monkeypatch, four, law_profile):
    said = [SAID, MeterReading(power_w=290.0, energy_j=2_500.0)]
    monkeypatch.setattr(CpuDevice, "meters", lambda _device: lambda: said.pop(0) if len(said) > 1 else said[0])
    plan = four([0, 3, 5], [[["a"]], [["b"]]])
    ran = train_in_threads(plan, JOB)
    assert {name for outcome in ran.outcomes for name in outcome.meters} == {"a", "b"}
    profile = law_profile(plan.cluster, plan.model)
    outcomes = ran.outcomes
    figures = device_figures(
        plan, "a", ran.results["a"], predict(plan, profile, optimizer=JOB.optimizer_state), outcomes, profile.graph
    )
    assert figures.power_w is not None
    assert 290.0 <= figures.power_w <= 310.0
    assert figures.energy_j in (0.0, 500.0)
    assert figures.flop_ratio > 0.0
