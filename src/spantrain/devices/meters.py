"""What an accelerator's own meters say of it, read beside the work; NVIDIA's by its management library, NVML.

Meters may take milliseconds to answer, so a thread of its own asks them, about once a second.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

_EVERY_S = 1.0
_MOST_LETTERS = 200
_SLOWED_BY = {0x04: "power cap", 0x08 | 0x40: "heat or power (hardware)", 0x20: "heat", 0x80: "power brake"}
"""NVML's bits of why clocks are below what they could be; an idle device's, and clocks that somebody set, are left."""


@dataclass(frozen=True, kw_only=True)
class MeterReading:
    """What a device's own meters say of it; None: they do not tell that.

    Raises:
        ValueError: a figure cannot be.
    """

    load_ratio: float | None = None
    """Part of the last moments in which it computed anything, however little of it was at work."""
    used_bytes: int | None = None
    """Of its memory, by whomever."""
    power_w: float | None = None
    energy_j: float | None = None
    """Since some time: what counts is the difference of two readings."""
    clock_ratio: float | None = None
    """Of its processors, to the highest that it has."""
    slowed_by: str = ""
    """Why its clocks are lower than they could be; empty: they are not."""

    def __post_init__(self) -> None:
        figures = {name: value for name, value in vars(self).items() if not isinstance(value, str)}
        wrong = [f"{name} is {value}" for name, value in figures.items() if not 0 <= (value or 0) < math.inf]
        if wrong or len(self.slowed_by) > _MOST_LETTERS:
            raise ValueError(f"meters: {'; '.join(wrong) or 'slowed_by is too long'}")


ReadMeters = Callable[[], MeterReading]


def nvml_meters(uuid: str) -> ReadMeters | None:
    """Return what reads the meters of an NVIDIA device; None where its library or the device is not there.

    Args:
        uuid: of the device as CUDA has it, `GPU-...`: numbers differ where some are hidden.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None

    def asked(question: str, *more: Any) -> Any:
        """Return an answer; None where this device has none to that."""
        try:
            return getattr(pynvml, question)(handle, *more)
        except (pynvml.NVMLError, AttributeError):
            return None

    def read() -> MeterReading:
        load, memory = asked("nvmlDeviceGetUtilizationRates"), asked("nvmlDeviceGetMemoryInfo")
        power_mw, energy_mj = asked("nvmlDeviceGetPowerUsage"), asked("nvmlDeviceGetTotalEnergyConsumption")
        clocks = [asked(f"nvmlDeviceGet{which}ClockInfo", pynvml.NVML_CLOCK_SM) for which in ("", "Max")]
        bits = asked("nvmlDeviceGetCurrentClocksEventReasons") or 0
        return MeterReading(
            load_ratio=None if load is None else load.gpu / 100,
            used_bytes=None if memory is None else memory.used,
            power_w=None if power_mw is None else power_mw / 1e3,
            energy_j=None if energy_mj is None else energy_mj / 1e3,
            clock_ratio=None if None in clocks or not clocks[1] else min(1.0, clocks[0] / clocks[1]),
            slowed_by=", ".join(why for bit, why in _SLOWED_BY.items() if bits & bit),
        )

    return read


class MeterThread:
    """Asks a device's meters again and again, if it has any; a context."""

    def __init__(self, read: ReadMeters | None) -> None:
        self._read, self._end = read, threading.Event()
        self.latest: MeterReading | None = None
        """What they said last; None: nothing yet."""

    def __enter__(self) -> Self:
        if self._read is not None:
            threading.Thread(target=self._work, args=(self._read,), name="meters", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def _work(self, read: ReadMeters) -> None:
        self.latest = read()
        while not self._end.wait(_EVERY_S):
            self.latest = read()
