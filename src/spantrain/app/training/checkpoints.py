"""Checkpoints of a run under way: what devices save, what of it lies on this machine, what the run can go back to."""

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from spantrain.app.reporter import Reporter
from spantrain.app.session import Session
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.resume import Resume, newest
from spantrain.app.training.stop import StopRequest
from spantrain.core.checkpoint import StoredFile
from spantrain.core.names import few
from spantrain.core.plan import Plan
from spantrain.core.quantities import format_bytes
from spantrain.errors import WorkerError
from spantrain.recovery.protection import survived
from spantrain.runtime.checkpoint.coordinator_files import CoordinatorFiles
from spantrain.runtime.checkpoint.manifest import (
    MANIFEST_FILE,
    CheckpointSet,
    Manifest,
    NoRoomError,
    read_manifest,
    step_of,
)
from spantrain.runtime.checkpoint.saver import CHECKPOINTS
from spantrain.runtime.checkpoint.tensor_file import step_folder
from spantrain.runtime.control.orders import BringOrder
from spantrain.runtime.control.requests import SavedFile
from spantrain.runtime.coordinator.roster import DeviceLostError

_EVERY_S = 300.0
"""Between checkpoints that nobody has asked for."""
_AGAIN_S, _LOOK_S, _PATIENCE_S = 5.0, 1.0, 120.0
"""After how long a full disk is tried again, and for how long at the end of a run."""


class RunCheckpoints:
    """Not for several threads at once."""

    def __init__(
        self, session: Session, request: TrainRequest, on_complete: Callable[[int, Path], None],
        manifest_of: Callable[[int], Manifest], reporter: Reporter,
    ) -> None:  # fmt: skip
        """Watch over a run's checkpoints.

        Args:
            session: where it runs.
            request: what it is to do.
            on_complete: hears of those that are complete: steps and folder.
            manifest_of: gives what a manifest says of the run after so many steps, without files.
            reporter: hears what a person should know.
        """
        self._session, self._request, self._manifest_of = session, request, manifest_of
        self._on_complete, self._reporter = on_complete, reporter
        self._written: list[Path] = []
        self._gone: dict[str, int] = {}
        """Of devices that have gone, how many had been written by then; they may come back on other machines."""
        self._taken_bytes = 0
        self._asked_s = time.monotonic()
        """When the last one was begun that nobody has asked for."""
        self._files: CoordinatorFiles | None = None
        self._unwritten: SavedFile | None = None
        """The last file of a checkpoint for whose manifest there was no room."""
        self._again_s = 0.0

    def begin(self, plan: Plan, resume: Resume | None) -> CoordinatorFiles:
        """Have the devices of a plan save, which begin with a checkpoint, if there is one."""
        request = self._request
        later = self._session.coordinator.later
        self._set = CheckpointSet(
            request.out,
            plan.devices,
            keep=request.options.keep_checkpoints,
            describe=lambda saved, files: replace(self._manifest_of(saved.step), scalars=saved.scalars, files=files),
            best_step=lambda: request.best.kept_step,
            needed=self._needed,
        )
        self._end_files()
        self._files = CoordinatorFiles(
            request.out / CHECKPOINTS,
            takes=request.options.gather,
            tell=lambda text: later(lambda: self._reporter.note(text)),
            on_saved=self._saved,
            on_not_saved=self._set.not_saved,
            begins_with={name: resume.folder / name for name in resume.content.files} if resume else {},
            devices=plan.devices,
        )
        return self._files

    def is_due(self, plan: Plan) -> bool:
        """Whether one is to be written though nobody has asked for it: else a loss could cost all that was trained.

        That is where a device has part of the state alone, and nobody has said when to save, or that losses may cost
        anything. In any thread.
        """
        request, now_s = self._request, time.monotonic()
        said = request.job.checkpoint_every or request.options.protect == 0 or request.batches is not None
        if said or now_s < self._asked_s + _EVERY_S or all(survived(stage) for stage in plan.stages):
            return False
        self._asked_s = now_s
        return len(plan.devices) > 1 and (self._files is None or not self._files.is_busy)

    @property
    def path(self) -> str:
        """Folder of the newest that was written; empty: none was."""
        return str(self._written[-1]) if self._written else ""

    def newest(self, present: Collection[str]) -> Resume | None:
        """Return the newest complete one of this run whose files lie here or with a device that is present.

        Else what the run began with; None: with new weights.
        """
        for number, folder in reversed(list(enumerate(self._written))):
            if (folder / MANIFEST_FILE).is_file():
                manifest = read_manifest(folder, check_files=False)
                devices = {file.device for file in _lacking(folder, manifest).values()}
                if all(name in present and self._gone.get(name, 0) <= number for name in devices):
                    return Resume.of(folder, manifest)
        resume = self._request.resume
        return newest(self._request.out) if resume and resume.held else resume

    def gone(self, devices: Collection[str]) -> None:
        """Note that devices have gone, with their disks."""
        self._gone |= dict.fromkeys(devices, len(self._written))

    def end(self, stop: StopRequest) -> None:
        """Have the run end with its best checkpoint, if it is to, and with all files of the one that it ends with here.

        Those of other machines are waited for, until somebody asks to stop.
        """
        best, final = self._request.best, self._written[-1] if self._written else None
        if best.kept_step is not None:
            self._set.end_with(best.kept_step)
            final = step_folder(self._request.out / CHECKPOINTS, best.kept_step)
            self._reporter.note(f"The run ends with the weights of {best.checkpoint}, the best by {best.metric}")
        elif best.kept:
            self._reporter.note(f"The run ends with its last weights: no checkpoint was the best by {best.metric}")
        self._end_files()
        if final is None:
            return
        manifest = read_manifest(final, check_files=False)
        self._bring(final, manifest, stop)
        devices = sorted({file.device for file in _lacking(final, manifest).values()})
        if devices:
            self._reporter.note(f"Of {final} what {few(devices)} saved lies on their machines alone")
        elif self._taken_bytes:
            came = format_bytes(self._taken_bytes)
            self._reporter.note(f"All of {final} lies here; {came} came from other machines in this run")

    def _bring(self, folder: Path, manifest: Manifest, stop: StopRequest) -> None:
        """Have devices that are here bring what they saved of a checkpoint; who is lost meanwhile ends nothing."""
        here, lacking = self._session.coordinator.here(), _lacking(folder, manifest)
        names: dict[str, list[str]] = {}
        for name, file in lacking.items():
            names.setdefault(file.device, []).append(name)
        orders = {
            device: BringOrder(folder=self._request.folder_to_workers(folder), step=manifest.step, names=tuple(own))
            for device, own in names.items()
            if device in here
        }
        if not orders or not self._request.options.gather:
            return
        size = format_bytes(sum(file.size_bytes for file in lacking.values() if file.device in orders))
        self._reporter.note(f"{size} of {folder} come here from {few(sorted(orders))} (Ctrl-C leaves them there)")
        files = CoordinatorFiles(folder.parent, takes=True, tell=self._reporter.note)
        files.expect(manifest.step, lacking)
        stop.begun = False  # the run is done: whoever asks to stop now wants no more of this
        done_bytes: dict[str, int] = {}

        def say(device: str, done: int, _total: int, _text: str) -> None:
            done_bytes[device] = done
            self._reporter.progress(sum(done_bytes.values()) // 2**20, total // 2**20, "MiB have come")

        total = sum(file.size_bytes for file in lacking.values())
        while orders:
            try:
                self._session.coordinator.perform(orders, on_progress=say, files=files)
                break
            except DeviceLostError as error:
                self._reporter.note(str(error))
                del orders[error.device]
            except (WorkerError, KeyboardInterrupt) as error:
                self._reporter.note(str(error) or "What has not come stays where it is")
                break
        files.close()
        self._taken_bytes += files.taken_bytes

    def _saved(self, saved: SavedFile) -> tuple[int, ...]:
        """Note a device's part; return steps that are not kept any longer. In a thread of that device's call."""
        if self._set.accept(saved):
            self._session.coordinator.later(lambda: self._complete(saved))
        return self._set.dropped

    def _complete(self, saved: SavedFile) -> None:
        try:
            folder = self._set.complete(saved)
        except NoRoomError as error:
            if self._unwritten is None or self._unwritten.step < saved.step:
                self._reporter.note(
                    f"{error.__cause__}: this machine has no room for the checkpoint after {saved.step} steps: free "
                    "some, and it is written yet, until the next one is whole; training goes on"
                )
            self._unwritten, self._again_s = saved, time.monotonic() + _AGAIN_S
            return
        self._unwritten = None
        if folder is not None:
            self._written.append(folder)
            self._on_complete(saved.step, folder)

    def look(self, stop: StopRequest) -> None:
        """Try again what there was no room for; where that is all that is left to do, have one signal end it."""
        if self._unwritten is not None and time.monotonic() >= self._again_s:
            self._complete(self._unwritten)
        if self._set.lacks_room(self._request.job.steps):
            stop.begun = False

    def await_room(self, stop: StopRequest) -> None:
        """Wait until the last checkpoint is whole, or somebody asks to stop.

        Raises:
            WorkerError: the disk is still full.
        """
        until_s = time.monotonic() + _PATIENCE_S
        while self._unwritten is not None:
            stop.begun = False  # the run is done: whoever asks to stop now wants no more of this
            if time.monotonic() > until_s:
                raise WorkerError(
                    f"no room for the checkpoint after {self._unwritten.step} steps; earlier ones are whole"
                )
            time.sleep(_LOOK_S)
            self.look(stop)

    def _needed(self, newest: Path, files: Collection[str]) -> set[int]:
        """Return which others stay while files of the newest lie elsewhere: what is here whole, and what comes."""
        if all((newest / name).is_file() for name in files):
            return set()
        steps = {self._files.step} if self._files is not None else set()
        for folder in reversed(self._written):
            if (folder / MANIFEST_FILE).is_file() and not _lacking(folder, read_manifest(folder, check_files=False)):
                steps.add(step_of(folder))
                break
        return {step for step in steps if step is not None}

    def _end_files(self) -> None:
        if self._files is not None:
            self._files.close()
            self._taken_bytes += self._files.taken_bytes


def _lacking(folder: Path, manifest: Manifest) -> dict[str, StoredFile]:
    """Return the files of a checkpoint that do not lie here."""
    return {name: file for name, file in manifest.files.items() if not (folder / name).is_file()}
