"""The coordinator's side of saving: a checkpoint is complete when all devices have written; then old ones go."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from spantrain.core.checkpoint import StoredFile
from spantrain.errors import WorkerError
from spantrain.runtime.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST_FILE,
    Manifest,
    step_of,
    write_manifest,
    write_marker,
)
from spantrain.runtime.checkpoint.saver import SavedFile, step_folder
from spantrain.runtime.checkpoint.storage import Disk, Storage

__all__ = ["CheckpointSet"]


class CheckpointSet:
    """The checkpoints of a run, as those that devices have written become complete.

    Order of what is done to the disk: files of the devices, manifest, marker, and only then old checkpoints are
    removed, each one's manifest first. Whenever the program ends, the marker names a complete checkpoint.
    """

    def __init__(
        self,
        run_folder: Path,
        devices: Collection[str],
        *,
        keep: int,
        describe: Callable[[SavedFile, Mapping[str, StoredFile]], Manifest],
        storage: Storage | None = None,
    ) -> None:
        """Watch over a run; `describe` makes the manifest of all files at a step."""
        assert keep >= 1, "one checkpoint is kept at least"
        self._folder = run_folder / CHECKPOINTS
        self._devices = frozenset(devices)
        self._keep = keep
        self._describe = describe
        self._storage = storage or Disk()
        self._saved: dict[int, dict[str, StoredFile]] = {}
        self._complete = _complete_folders(self._folder)
        self._dropped: tuple[int, ...] = ()

    @property
    def dropped(self) -> tuple[int, ...]:
        """Steps whose checkpoints are not kept any longer, nor saved again: devices remove their own files.

        Read by any thread.
        """
        return self._dropped

    def on_saved(self, saved: SavedFile) -> Path | None:
        """Note one device's file; return the checkpoint's folder if it is complete with it.

        Raises:
            WorkerError: the manifest cannot be written.
        """
        files = self._saved.setdefault(saved.step, {})
        files[saved.name] = saved.file
        if {file.device for file in files.values()} < self._devices:
            return None
        folder = step_folder(self._folder, saved.step)
        try:
            self._storage.make_folder(folder)
            write_manifest(self._storage, folder, self._describe(saved, self._saved.pop(saved.step)))
            write_marker(self._storage, folder)
            self._tidy(folder, files)
        except OSError as error:
            raise WorkerError(
                f"{folder}: the checkpoint could not be written: {error}; the one before is whole"
            ) from error
        return folder

    def _tidy(self, newest: Path, files: Collection[str]) -> None:
        """Remove what is not kept: older complete ones, remains of saves that did not end."""
        self._complete = [folder for folder in self._complete if folder != newest] + [newest]
        old, self._complete = self._complete[: -self._keep], self._complete[-self._keep :]
        past = [folder for folder in old if _step(folder) < _step(newest)]
        self._dropped = (*self._dropped, *map(_step, past))
        for folder in (*past, *_unfinished_before(newest)):
            self._remove(folder)
        for folder in old:
            if folder not in past:  # of another run in this folder: this one may be writing into it already
                self._storage.remove(folder / MANIFEST_FILE)
        for path in sorted(newest.iterdir()):
            if path.name != MANIFEST_FILE and path.name not in files:
                self._storage.remove(path)

    def _remove(self, folder: Path) -> None:
        self._storage.remove(folder / MANIFEST_FILE)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            self._storage.remove(path)
        self._storage.remove(folder)


def _complete_folders(checkpoints: Path) -> list[Path]:
    """Return the complete ones, the one that was completed last at the end."""
    manifests = [path for path in checkpoints.glob(f"step-*/{MANIFEST_FILE}") if step_of(path.parent) is not None]
    return [path.parent for path in sorted(manifests, key=lambda path: path.stat().st_mtime_ns)]


def _unfinished_before(newest: Path) -> list[Path]:
    """Return those of earlier steps that have no manifest; all devices have ended their saves before `newest`."""
    folders = [folder for folder in sorted(newest.parent.glob("step-*")) if step_of(folder) is not None]
    return [folder for folder in folders if _step(folder) < _step(newest) and not (folder / MANIFEST_FILE).exists()]


def _step(folder: Path) -> int:
    step = step_of(folder)
    assert step is not None, f"{folder} is no checkpoint's"
    return step
