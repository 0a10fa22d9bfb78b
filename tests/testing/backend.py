"""What the runtime's tests compute on: the processor, or what `pytest --backend` names.

That is an accelerator such as `cuda:0`, or `late`: a device on the processor whose results come later, where tests have
devices in their own process.
"""

from spantrain.devices.base import ComputeDevice
from spantrain.devices.registry import open_device
from testing.late_device import LateDevice

_LATE = "late"
_chosen = ["cpu"]


def choose(backend: str) -> None:
    """Have tests compute on a backend from now on."""
    _chosen[:] = [backend]


def backend() -> str:
    """Return the backend's name, as a cluster file has it."""
    return "cpu" if _chosen == [_LATE] else _chosen[0]


def compute_device() -> ComputeDevice:
    """Open a device of the backend."""
    return LateDevice() if _chosen == [_LATE] else open_device(backend())
