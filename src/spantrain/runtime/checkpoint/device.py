"""One device's checkpoints during a run: begin with one, save, end."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from spantrain.core.checkpoint import CheckpointContent
from spantrain.runtime.checkpoint.holding import Holding, tensors_of
from spantrain.runtime.checkpoint.manifest import CHECKPOINTS
from spantrain.runtime.checkpoint.restore import restore
from spantrain.runtime.checkpoint.saver import CheckpointSaver, SavedFile
from spantrain.runtime.checkpoint.storage import Disk, Storage, remove_partials
from spantrain.runtime.redistribution.transfer import Group, Post


class DeviceCheckpoints:
    """What a device does with checkpoints; a context, at whose end what is being written is finished."""

    def __init__(
        self,
        output_dir: str,
        device: str,
        holding: Holding,
        optimizer: torch.optim.Optimizer,
        report: Callable[[SavedFile], Collection[int]],
        storage: Storage | None = None,
    ) -> None:
        """Save below `output_dir`; `report` tells the coordinator of a file (`CheckpointSaver`)."""
        self._holding = holding
        self._optimizer = optimizer
        self._folder = Path(output_dir) / CHECKPOINTS if output_dir else None
        self._storage = storage or Disk()
        self._saver = CheckpointSaver(Path(output_dir) / CHECKPOINTS, device, report, self._storage)

    def resume(self, folder: str, content: CheckpointContent | None, group: Group, post: Post | None) -> None:
        """Begin with a checkpoint, if there is one to begin with; all devices of the run do so together.

        Raises:
            ConfigError: it is of another model, damaged, or not here.
        """
        if content is not None:
            restore(Path(folder), content, self._holding, self._optimizer, group, post)

    def hold(self, holding: Holding, optimizer: torch.optim.Optimizer) -> None:
        """From now on this is what the device holds."""
        self._holding, self._optimizer = holding, optimizer

    def save(self, steps_done: int, scalars: Mapping[str, float]) -> None:
        """Copy what this device saves, and have it written while training goes on.

        Raises:
            WorkerError: the save before failed.
        """
        tensors, parts = tensors_of(self._holding, self._optimizer)
        self._saver.save(steps_done, tensors, parts, scalars)

    def __enter__(self) -> Self:
        if self._folder:
            remove_partials(self._storage, self._folder)  # nobody writes yet: all devices of a run begin together
        self._saver.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._saver.__exit__(kind, error, trace)
