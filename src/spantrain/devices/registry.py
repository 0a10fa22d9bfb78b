"""The backends by name: what planning must know of each, and which class computes; it is imported when opened."""

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from spantrain.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from spantrain.devices.base import ComputeDevice


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What computes, as a cluster file names it."""

    name: str
    device: str
    """`module:class` of its `devices.base.ComputeDevice`."""
    torch_type: str
    """What torch calls such a device."""
    numbered: bool = False
    """Whether a host may have several, called `name:0`, `name:1`, ..."""
    framework_bytes: int = 0
    """What the framework takes of the device's memory before the first tensor."""
    counts_allocations: bool = False
    """Whether its allocator tells what was allocated at most; else the tensors that are held are counted."""
    carrier: str = "gloo"
    """What `torch.distributed` carries tensors by between several of them."""


CONTEXT_BYTES = 300 * 2**20
"""What a context with its libraries takes of a small accelerator's memory; stands for those of emulated ones."""
CUDA_CONTEXT_BYTES = 832 * 2**20
"""The same of CUDA 13 on an H100, with what torch's products keep for themselves: measured, 767 and 64 MiB."""

BACKENDS = {
    row.name: row
    for row in (
        # It stands for the accelerator of its kind, so it is charged like one.
        Backend(
            name="emulated", device="spantrain.devices.emulated:EmulatedDevice", torch_type="cpu",
            framework_bytes=CONTEXT_BYTES,
        ),
        # Its memory is the host's free memory, counted with the framework already in it.
        Backend(name="cpu", device="spantrain.devices.base:CpuDevice", torch_type="cpu"),
        Backend(
            name="cuda", device="spantrain.devices.accelerators:CudaDevice", torch_type="cuda", numbered=True,
            framework_bytes=CUDA_CONTEXT_BYTES, counts_allocations=True, carrier="nccl",
        ),
        Backend(
            name="xpu", device="spantrain.devices.accelerators:XpuDevice", torch_type="xpu", numbered=True,
            framework_bytes=CUDA_CONTEXT_BYTES, counts_allocations=True, carrier="xccl",
        ),
    )
}  # fmt: skip


def backend_names() -> str:
    """Return the names for a message.

    >>> backend_names()
    'emulated, cpu, cuda, cuda:N, xpu or xpu:N'
    """
    names = [text for row in BACKENDS.values() for text in (row.name, *([f"{row.name}:N"] if row.numbered else []))]
    return f"{', '.join(names[:-1])} or {names[-1]}"


@cache
def find_backend(text: str) -> Backend | None:
    """Return the backend that a text like `cpu` or `cuda:1` names; None if there is none.

    >>> find_backend("cuda:1").name, find_backend("cpu:1")
    ('cuda', None)
    """
    name, colon, index = text.partition(":")
    row = BACKENDS.get(name)
    return row if row is not None and (not colon or (row.numbered and re.fullmatch("[0-9]{1,4}", index))) else None


def open_device(text: str) -> "ComputeDevice":
    """Return the device that a text names.

    Raises:
        ConfigError: there is no such backend, or this machine has no such device.
    """
    row = find_backend(text)
    if row is None:
        raise ConfigError(f"backend {text!r}: there is no such thing; use {backend_names()}")
    opened: Callable[..., ComputeDevice] = _class_of(row)
    return opened(int(text.partition(":")[2] or 0)) if row.numbered else opened()


def default_backend(index: int) -> str:
    """Return what this machine computes with where nobody says so: an accelerator, number `index`, if there is one."""
    rows = (row for row in BACKENDS.values() if row.numbered and _class_of(row).is_available())
    return next((f"{row.name}:{index}" for row in rows), "cpu")


def class_of(torch_device: "torch.device") -> "type[ComputeDevice]":
    """Return what knows the devices that torch calls so; the processor's where none does."""
    rows = (row for row in BACKENDS.values() if row.torch_type == torch_device.type and row.name != "emulated")
    return _class_of(next(rows, BACKENDS["cpu"]))


def settle(tensors: "Iterable[Tensor]") -> None:
    """Return when all that was queued on the devices of some tensors is done."""
    for device in {tensor.device for tensor in tensors}:
        class_of(device).settle(device)


def _class_of(row: Backend) -> "type[ComputeDevice]":
    module, _, name = row.device.partition(":")
    found: type[ComputeDevice] = getattr(importlib.import_module(module), name)
    return found
