"""What makes a checkpoint complete: its manifest, the marker of the newest, and the coordinator's side of saving.

A checkpoint is complete when all devices have written; then old ones go.
"""

import re
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field
from pathlib import Path

from spantrain.config.artefacts import CHECKPOINT_FORMAT, artefact_text, read_artefact
from spantrain.config.files.text_files import read_text
from spantrain.core.checkpoint import CheckpointContent, SampleLedger, StoredFile
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.planned.report import PlanReport
from spantrain.core.records import Record
from spantrain.core.shares import TensorPart
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError, WorkerError
from spantrain.runtime.checkpoint import tensor_file
from spantrain.runtime.checkpoint.saver import CHECKPOINTS
from spantrain.runtime.control.requests import SavedFile
from spantrain.runtime.redistribution.exchange import missing_text, plan_fetch

MANIFEST_FILE = "manifest.json"
MARKER = "latest"
BEST = "best"
"""The marker of the checkpoint that a run has ended with, where that is not the newest."""
_EXAMPLE = "step-10"
_FOLDER = re.compile(r"step-(\d{1,18})")


class NoRoomError(WorkerError):
    """The coordinator's disk is full; what was to be written may be tried again."""


class Manifest(Record):
    """What a checkpoint holds, and the run that it is of."""

    step: int
    """Steps done."""
    model: ModelSpec
    plan: Plan | None
    """That was trained; None: it was imported, no run has begun."""
    job: TrainJob | None
    """None where `plan` is None."""
    profile: str
    """Path of the profile that the plan was made from, or empty."""
    losses: tuple[float | None, ...]
    """Of every step so far, from the first; None where it was not finite (float16), and the step skipped."""
    ledger: SampleLedger
    """Which samples were consumed."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """State that is a number, the same on all devices."""
    files: Mapping[str, StoredFile] = field(default_factory=dict)
    """By name in the checkpoint's folder, on the machine of the device that wrote it."""
    report: PlanReport = field(default_factory=PlanReport)
    """What is said of the plan."""
    calm_plan: Plan | None = None
    """That was made for links as planned, where another one has taken over from it."""

    def __post_init__(self) -> None:
        if (self.plan is None) != (self.job is None):
            raise ValueError("plan and job belong together: give both or neither")
        CheckpointContent(step=self.step, files=self.files)

    @property
    def content(self) -> CheckpointContent:
        """What devices need to know of it."""
        return CheckpointContent(step=self.step, files=self.files, scalars=self.scalars)


def step_of(folder: Path) -> int | None:
    """Return the step that a checkpoint's folder is named for; None of any other name."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def write_manifest(storage: tensor_file.Disk, folder: Path, manifest: Manifest) -> None:
    """Write the manifest; the checkpoint is complete when this returns.

    Raises:
        OSError: it cannot be written.
    """
    _write(storage, folder / MANIFEST_FILE, artefact_text(manifest, CHECKPOINT_FORMAT))


def write_marker(storage: tensor_file.Disk, folder: Path, marker: str = MARKER) -> None:
    """Name a complete checkpoint as the newest of its run, or as the best one.

    Raises:
        OSError: it cannot be written.
    """
    _write(storage, folder.parent / marker, folder.name + "\n")


def _write(storage: tensor_file.Disk, path: Path, text: str) -> None:
    tensor_file.write_named(storage, path.parent, path.name, [text.encode()], lambda _digest: path.name)


def final_checkpoint(run_folder: Path) -> Path:
    """Return the folder of the checkpoint that a run has ended with: the best one if it was to, else the newest.

    Raises:
        ConfigError: there is none.
    """
    ended_with_best = (run_folder / CHECKPOINTS / BEST).is_file()
    return latest_checkpoint(run_folder, BEST if ended_with_best else MARKER)


def latest_checkpoint(run_folder: Path, marker_name: str = MARKER) -> Path:
    """Return the folder of a run's newest complete checkpoint, or of the one that another marker names.

    Raises:
        ConfigError: there is none.
    """
    marker = run_folder / CHECKPOINTS / marker_name
    if not marker.is_file():
        there = ", ".join(sorted(path.parent.name for path in marker.parent.glob(f"*/{MANIFEST_FILE}")))
        remedy = f"write into it which is to be taken: {there}" if there else "give the folder that --out named"
        raise ConfigError(f"{run_folder} holds no checkpoint (no {marker}); {remedy}")
    remedy = f"write the name of a complete one into it, such as {_EXAMPLE}"
    folder = marker.parent / read_text(marker, remedy=remedy).strip()
    if step_of(folder) is None:
        raise ConfigError(f"{marker}: names no checkpoint; {remedy}")
    return folder


def read_manifest(folder: Path, *, check_files: bool = True) -> Manifest:
    """Read a checkpoint's manifest, and check all files that lie here against it, unless that is done elsewhere.

    Raises:
        ConfigError: it is missing or wrong, or a file was damaged.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise ConfigError(
            f"{folder} is no complete checkpoint ({MANIFEST_FILE} is missing); name another one in "
            f"{folder.parent / MARKER}"
        )
    manifest = read_artefact(Manifest, CHECKPOINT_FORMAT, path, ConfigError)
    if step_of(folder) not in (None, manifest.step):
        raise ConfigError(f"{path}: step: must be {step_of(folder)}, as its folder says, got {manifest.step}")
    files = tensor_file.TensorFiles(folder, manifest.files)
    for name in files.present() if check_files else ():
        files.check(name)
    return manifest


@dataclass(eq=False)
class CheckpointSet:
    """The checkpoints of a run, as those that devices have written become complete.

    Order of what is done to the disk: files of the devices, manifest, marker, and only then old checkpoints are
    removed, each one's manifest first. Whenever the program ends, the marker names a complete checkpoint.

    Everything is read back before the next thing is done: each file by the device that wrote it, before it says so;
    here what lies here once more, and the manifest. Of a file on another machine there is the word of its device.
    """

    run_folder: InitVar[Path]
    devices: Collection[str]
    """That save."""
    _: KW_ONLY
    keep: int
    """How many complete ones; the best one is among them, and the newest in any case."""
    describe: Callable[[SavedFile, Mapping[str, StoredFile]], Manifest]
    """Makes the manifest of all files at a step."""
    storage: InitVar[tensor_file.Disk | None] = None
    """Where they lie."""
    best_step: Callable[[], int | None] = lambda: None
    """Says which one is the best so far."""
    needed: Callable[[Path, Collection[str]], Collection[int]] = lambda _newest, _files: ()
    """Says which others are to stay, by the folder of the newest and the names of its files."""

    def __post_init__(self, run_folder: Path, storage: tensor_file.Disk | None) -> None:
        assert self.keep >= 1, "one checkpoint is kept at least"
        self._folder = run_folder / CHECKPOINTS
        self._storage = storage or tensor_file.Disk()
        self._lock = threading.Lock()
        self._told: dict[int, dict[str, SavedFile]] = {}
        """By steps done and device."""
        self._full: dict[str, int] = {}
        """Steps after which devices had no room on their disks: there is one yet until they save the next."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        """Of the tensors in the newest complete one: the next one has them, too, whatever plan it is saved under."""
        found = self._folder.glob(f"step-*/{MANIFEST_FILE}")
        manifests = sorted(found, key=lambda path: path.stat().st_mtime_ns)
        self._complete = [path.parent for path in manifests if step_of(path.parent) is not None]
        """The one that was completed last at the end."""
        self.dropped: tuple[int, ...] = ()
        """Steps whose checkpoints are not kept any longer, nor saved again: devices remove their own files. Read by any
        thread."""

    def accept(self, saved: SavedFile) -> bool:
        """Note one device's file, in any thread; return whether the checkpoint can be completed with it.

        Raises:
            ConfigError: it lies here and is not what the device says.
            WorkerError: it does not agree with what was said before.
        """
        path = tensor_file.step_folder(self._folder, saved.step) / saved.name
        if path.is_file():
            tensor_file.check_file(path, saved.file)
        device = saved.file.device
        self.not_saved(device, saved.step)
        with self._lock:
            del self._full[device]
            told = self._told.setdefault(saved.step, {})
            if device in told:
                if told[device] != saved:
                    raise WorkerError(f"device {device} has saved another file after {saved.step} steps already")
                return False  # told again: the answer was lost on its way
            if any(other.scalars != saved.scalars for other in told.values()):
                raise WorkerError(f"device {device} has other scalars after {saved.step} steps than the others")
            told[device] = saved
            return told.keys() >= {*self.devices}

    def not_saved(self, device: str, step: int) -> None:
        """Note, in any thread, that a device has nothing yet of a checkpoint, nor ever of one that it had no room for.

        What others saved of that is removed.
        """
        with self._lock:
            before = self._full.get(device, step)
            self._full[device] = step
            if before >= step or before in self.dropped:
                return
            self.dropped = (*self.dropped, before)
        for path in tensor_file.files_in(tensor_file.step_folder(self._folder, before)):
            if path.suffix != tensor_file.PARTIAL:
                self._storage.remove(path)

    def complete(self, saved: SavedFile) -> Path | None:
        """Complete the checkpoint that a device's file was the last one of; return its folder, None if a later one is.

        Raises:
            NoRoomError: the disk is full.
            WorkerError: it cannot be written or read back, or lacks what the one before has.
        """
        folder = tensor_file.step_folder(self._folder, saved.step)
        with self._lock:
            told = self._told.get(saved.step)
        if told is None:
            return None
        files = {one.name: one.file for one in told.values()}
        self._shapes = _checked_shapes(folder, files, self._shapes)
        try:
            self._storage.make_folder(folder)
            write_manifest(self._storage, folder, self.describe(saved, files))
            read_manifest(folder, check_files=False)
            write_marker(self._storage, folder)
            if (self._folder / BEST).exists():  # of the run that this one goes on from
                self._storage.remove(self._folder / BEST)
            self._tidy(folder, files)
        except (OSError, ConfigError) as error:
            kind = NoRoomError if isinstance(error, OSError) and error.errno in tensor_file.FULL else WorkerError
            raise kind(f"{folder}: the checkpoint could not be written: {error}; earlier ones are whole") from error
        with self._lock:
            self._told = {step: files for step, files in self._told.items() if step > saved.step}
        return folder

    def lacks_room(self, step: int) -> bool:
        """Whether a device has no room for its part of the checkpoint after a step; asked in any thread."""
        with self._lock:
            return step in self._full.values()

    def end_with(self, step: int) -> None:
        """Have a complete checkpoint be what the run gives, though it is not the newest.

        Raises:
            WorkerError: that cannot be written.
        """
        try:
            write_marker(self._storage, tensor_file.step_folder(self._folder, step), BEST)
        except OSError as error:
            raise WorkerError(
                f"{self._folder / BEST}: cannot be written: {error}; all checkpoints are whole"
            ) from error

    def on_saved(self, saved: SavedFile) -> Path | None:
        """Note one device's file; return the checkpoint's folder if it is complete with it.

        Raises:
            ConfigError, WorkerError: as `accept` and `complete`.
        """
        return self.complete(saved) if self.accept(saved) else None

    def _tidy(self, newest: Path, files: Collection[str]) -> None:
        """Remove what is not kept: older complete ones, remains of saves that did not end."""
        self._complete = [folder for folder in self._complete if folder != newest] + [newest]
        old, kept = self._complete[: -self.keep], self._complete[-self.keep :]
        best = [folder for folder in old if _step(folder) == self.best_step()]
        if best:
            kept = [*best, *(kept[1:] or kept)]
        needed = set(self.needed(newest, files))
        kept = [folder for folder in self._complete if folder in kept or _step(folder) in needed]
        old = [folder for folder in self._complete if folder not in kept]
        self._complete = kept
        past = [folder for folder in old if _step(folder) < _step(newest)]
        self.dropped = (*self.dropped, *map(_step, past))
        for folder in (*past, *_unfinished_before(newest)):
            self._storage.remove(folder / MANIFEST_FILE)
            for path in (*tensor_file.files_in(folder), folder):
                self._storage.remove(path)
        for folder in old:
            if folder not in past:  # of another run in this folder: this one may be writing into it already
                self._storage.remove(folder / MANIFEST_FILE)
        for path in sorted(newest.iterdir()):
            if path.name not in (MANIFEST_FILE, *files) and path.suffix != tensor_file.PARTIAL:  # that comes
                self._storage.remove(path)


def _checked_shapes(
    folder: Path, files: Mapping[str, StoredFile], before: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole tensors in files, with all of each there, and all that were there before.

    Raises:
        WorkerError: something is missing.
    """
    held = [(name, {key: stored.part for key, stored in file.tensors.items()}) for name, file in files.items()]
    shapes = {key: part.full_shape for _, parts in held for key, part in parts.items()}
    wanted = {key: TensorPart(full_shape=shape) for key, shape in {**before, **shapes}.items()}
    _, missing = plan_fetch(wanted, held)
    if missing:
        raise WorkerError(f"{folder}: no device has saved {missing_text(missing)}; the checkpoint before is whole")
    return shapes


def _unfinished_before(newest: Path) -> list[Path]:
    """Return those of earlier steps that have no manifest; all devices have ended their saves before `newest`."""
    folders = [folder for folder in sorted(newest.parent.glob("step-*")) if step_of(folder) is not None]
    return [folder for folder in folders if _step(folder) < _step(newest) and not (folder / MANIFEST_FILE).exists()]


def _step(folder: Path) -> int:
    step = step_of(folder)
    assert step is not None, f"{folder} is no checkpoint's"
    return step
