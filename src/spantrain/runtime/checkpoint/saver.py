"""A device's side of checkpoints: begin with one, save between two steps while training goes on, end.

Of the tensors a copy is taken in host memory, which a thread writes. Who resumes needs parts of a checkpoint from its
own disk and from those of the others.
"""

import glob
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from spantrain.core.checkpoint import StoredFile, StoredTensor
from spantrain.core.names import file_stem
from spantrain.core.shares import TensorPart
from spantrain.devices.registry import class_of
from spantrain.errors import WorkerError
from spantrain.formats.tensor_bytes import dtype_name, tensor_pieces
from spantrain.models.randomness.draws import torch_state
from spantrain.runtime.channels import DriverChannel
from spantrain.runtime.checkpoint import tensor_file
from spantrain.runtime.checkpoint.device_files import FETCHED, FileSender, FilesToBeginWith
from spantrain.runtime.checkpoint.holding import RANDOM_TORCH, Holding, put_back, tensors_of, wanted_of
from spantrain.runtime.control.data_requests import NotSaved
from spantrain.runtime.control.requests import SavedFile
from spantrain.runtime.redistribution.exchange import ExchangeGroup, TensorBlock, boxes_of
from spantrain.runtime.redistribution.transfer import FilesBeyond, TensorExchange


def restore(
    files: FilesToBeginWith,
    holding: Holding,
    optimizer: torch.optim.Optimizer,
    group: ExchangeGroup,
    post: DriverChannel | None,
) -> None:
    """Put a device's part of a checkpoint in place, whatever plan it was saved under; all devices do so together.

    Args:
        files: of the checkpoint, as far as they lie on this machine or the coordinator's.
        holding: what this device holds under the new plan.
        optimizer: of the same parameters.
        group: the devices of the run.
        post: between them; None where there is one only.

    Raises:
        ConfigError: it is of another model, a file is damaged, or nobody has what is needed.
    """
    stored_files = files.files
    wanted = wanted_of(holding, stored_files)
    beyond = FilesBeyond(names=files.at_coordinator, fetch=files.fetch)
    exchange = TensorExchange(group, stored_files, files, post, beyond=beyond)
    try:
        put_back(holding, optimizer, exchange.run(wanted))
        for name in files.present():  # random numbers go on where this device's file lies here
            stored = stored_files[name]
            if stored.device == group.own and RANDOM_TORCH in stored.tensors:
                (box,) = boxes_of(stored.tensors[RANDOM_TORCH].part)
                (state,) = files.read(name, [TensorBlock(RANDOM_TORCH, box)])
                torch_state(put=state)
    finally:
        files.forget()


CHECKPOINTS = "checkpoint"
"""Name of the folder in a run's folder."""


class SnapshotBuffers:
    """Host memory for one snapshot, used again by the next: as much as the tensors themselves.

    Of an accelerator the buffers are page-locked and copies are queued on its stream: what trains next waits for them
    there, the processor does not.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._copied: list[Any] = []

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors; what is returned may be read after `wait`, and until the next `take`."""
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor.detach(), non_blocking=tensor.device.type != "cpu")
        marks = (class_of(device).mark(device) for device in {tensor.device for tensor in tensors.values()})
        self._copied = [mark for mark in marks if mark is not None]
        return dict(self._buffers)

    def wait(self) -> None:
        """Wait until all copies are there."""
        for event in self._copied:
            event.synchronize()
        self._copied = []

    def _buffer(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        before = self._buffers.get(name)
        if before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype:
            return before
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")


_DIGEST_DIGITS = 12
_END_S = 1.0
"""How long the end of a run that failed waits for what is being written."""


def is_written_by(saved: SavedFile, device: str) -> bool:
    """Whether a device may have written this file: by its description and by its name."""
    return saved.file.device == device and saved.name == _file_name(device, saved.file.sha256)


def _file_name(device: str, sha256: str) -> str:
    return f"{file_stem(device)}-{sha256[:_DIGEST_DIGITS]}.safetensors"


def write_device_file(
    storage: tensor_file.Disk,
    folder: Path,
    device: str,
    tensors: Mapping[str, torch.Tensor],
    parts: Mapping[str, TensorPart],
) -> tuple[str, StoredFile]:
    """Write one device's tensors, so that a file under its name is whole, and read it back; return that name and what
    is in it.

    The name holds the content's digest: a file of an earlier run at the same step is never overwritten.

    Raises:
        OSError: it cannot be written.
        ConfigError: what is read back is something else.
    """
    storage.make_folder(folder)
    name, sha256, size_bytes = tensor_file.write_named(
        storage, folder, file_stem(device), tensor_pieces(tensors), lambda digest: _file_name(device, digest)
    )
    stored = {name: StoredTensor(part=parts[name], dtype=dtype_name(tensor.dtype)) for name, tensor in tensors.items()}
    file = StoredFile(device=device, sha256=sha256, size_bytes=size_bytes, tensors=stored)
    tensor_file.check_file(folder / name, file)
    return name, file


@dataclass(eq=False)
class DeviceCheckpoints:
    """A device's saves to checkpoints; at most one save is under way, and the next one waits for it.

    Used as a context: at its end what is being written is finished.
    """

    output_dir: InitVar[str]
    """Below which they are saved; empty: nothing will be."""
    device: str
    holding: Holding
    optimizer: torch.optim.Optimizer
    report: Callable[[SavedFile], Collection[int]]
    """Tells the coordinator of a file and returns steps that are not kept any longer."""
    storage: InitVar[tensor_file.Disk | None] = None
    sender: FileSender | None = None
    """Brings files there."""
    complain: Callable[[NotSaved], object] | None = None
    """Tells the coordinator that the disk is full."""
    again_s: float = 5.0
    """After how long it is tried again, until the next save."""
    patience_s: float = 120.0
    """How long at the end."""

    def __post_init__(self, output_dir: str, storage: tensor_file.Disk | None) -> None:
        self._checkpoints = Path(output_dir) / CHECKPOINTS if output_dir else None
        self._storage = storage or tensor_file.Disk()
        self._buffers = SnapshotBuffers()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._too_late = threading.Event()
        """What is still to be written is not wanted any more."""
        self._ends_s: float | None = None
        self._forgotten: set[int] = set()
        """Steps of which nothing of this device is left."""

    def hold(self, holding: Holding, optimizer: torch.optim.Optimizer) -> None:
        """From now on this is what the device holds."""
        self.holding, self.optimizer = holding, optimizer

    def save(self, steps_done: int, scalars: Mapping[str, float]) -> None:
        """Copy what this device saves, and have it written while training goes on; returns when it is copied.

        Args:
            steps_done: so many; it names the checkpoint.
            scalars: numbers that are the same on all devices.

        Raises:
            WorkerError: the save before failed.
        """
        assert self._checkpoints is not None, "a device without a folder saves nothing"
        self._too_late.set()
        self.wait()
        self._too_late.clear()
        held, folder = (
            tensors_of(self.holding, self.optimizer),
            tensor_file.step_folder(self._checkpoints, steps_done),
        )
        copies = self._buffers.take({name: tensor for name, (tensor, _) in held.items()})
        parts = {name: part for name, (_, part) in held.items()}

        def write() -> None:
            try:
                self._buffers.wait()
                written = self._written(folder, steps_done, copies, parts)
                if written is None:
                    return
                name, stored = written
                saved = SavedFile(step=steps_done, name=name, file=stored, scalars=scalars)
                self._forget(folder.parent, self.report(saved))
                if self.sender is not None:
                    self.sender.offer(folder / name, steps_done)
            except Exception as error:  # noqa: BLE001 - the outermost loop of this thread: `wait` tells whatever it was
                self._failure = error

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def _written(
        self, folder: Path, step: int, tensors: Mapping[str, torch.Tensor], parts: Mapping[str, TensorPart]
    ) -> tuple[str, StoredFile] | None:
        """Write a file as `write_device_file`, again and again where the disk is full; None: until it is too late."""
        complained = False
        while True:
            try:
                return write_device_file(self._storage, folder, self.device, tensors, parts)
            except OSError as error:
                if error.errno not in tensor_file.FULL or (
                    self._ends_s is not None and time.monotonic() > self._ends_s
                ):
                    raise
                if not complained and self.complain is not None:
                    self.complain(NotSaved(step=step, why=f"{folder}: {error.strerror}"))
                complained = True
            if self._too_late.wait(self.again_s):
                return None

    def wait(self) -> None:
        """Wait until what is being written is on the disk and the coordinator knows.

        Raises:
            WorkerError: that failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            told = f"{self._checkpoints}: a checkpoint could not be written: {failure}; earlier ones are whole"
            raise WorkerError(told) from failure

    def __enter__(self) -> Self:
        if self._checkpoints:  # nobody writes yet: all devices of a run begin together
            tensor_file.remove_partials(self._storage, self._checkpoints)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.sender is not None:
            self.sender.end()
        if error is None:
            self._ends_s = time.monotonic() + self.patience_s
            self.wait()
        elif self._thread is not None:
            self._too_late.set()
            self._thread.join(_END_S)

    def _forget(self, checkpoints: Path, dropped: Collection[int]) -> None:
        """Remove own files of checkpoints that are no longer kept, where the coordinator cannot."""
        for step in sorted(set(dropped) - self._forgotten):
            self._forgotten.add(step)
            folder = tensor_file.step_folder(checkpoints, step)
            for pattern in (f"{glob.escape(file_stem(self.device))}-*.safetensors", f".*{FETCHED}"):
                for path in tensor_file.files_in(folder, pattern):
                    self._storage.remove(path)
            if not tensor_file.files_in(folder):
                self._storage.remove(folder)
