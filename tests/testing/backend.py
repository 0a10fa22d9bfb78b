"""What the runtime's tests compute on: the processor, or an accelerator that `pytest --backend cuda:0` names."""

from spantrain.devices.base import ComputeDevice
from spantrain.devices.registry import open_device

_chosen = ["cpu"]


def choose(backend: str) -> None:
    """Have tests compute on a backend from now on."""
    _chosen[:] = [backend]


def backend() -> str:
    """Return the backend's name, as a cluster file has it."""
    return _chosen[0]


def compute_device() -> ComputeDevice:
    """Open a device of the backend."""
    return open_device(backend())
