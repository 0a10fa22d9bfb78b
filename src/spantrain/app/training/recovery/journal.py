"""What a coordinator that is started again needs to go on where the one before it ended: a journal in the run's folder.

A line for each step that is committed, written before any worker hears of it, so that the journal is never behind what
workers hold. It is there as long as the run: whoever ends it properly, with an error or without, removes it, but where
no worker hears of the end: they keep what they hold.
"""

import contextlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, get_args

from spantrain.app.reporter import Reporter
from spantrain.app.session import Session
from spantrain.app.training.recovery.carry_on import Leg
from spantrain.app.training.requests import TrainRequest, what_to_run
from spantrain.app.training.resume import Resume, newest
from spantrain.config.files.json_codec import from_json, to_json
from spantrain.config.files.parsing import parse_json
from spantrain.config.files.text_files import locked_file, read_text, write_atomically
from spantrain.core.checkpoint import CheckpointContent
from spantrain.core.plan import Plan
from spantrain.core.quantities import if_finite
from spantrain.core.records import Record
from spantrain.errors import ConfigError, PlanError, ProfileError
from spantrain.recovery.policy import OnLoss, holds_all
from spantrain.runtime.checkpoint.manifest import MANIFEST_FILE, Manifest
from spantrain.runtime.checkpoint.saver import CHECKPOINTS
from spantrain.runtime.checkpoint.tensor_file import step_folder
from spantrain.runtime.control.data_requests import CREDENTIALS_FILE, JOURNAL_FILE, JOURNAL_FOLDER
from spantrain.runtime.control.orders import KeptState
from spantrain.runtime.control.requests import StepVerdict
from spantrain.runtime.coordinator.barrier import CommitPoint, StepOutcome
from spantrain.runtime.coordinator.coordinator import Coordinator
from spantrain.runtime.coordinator.journal_feed import JournalFeed

_LOCK_S = 5.0
"""A worker that has lost its coordinator ends its copy in a moment."""
_log = logging.getLogger(__name__)
_REMEDY = "remove it and go on from the newest checkpoint"


def credentials_in(run: Path) -> Path:
    """Return where a run's coordinator keeps what workers know it by."""
    return run / JOURNAL_FOLDER / CREDENTIALS_FILE


class CommittedStep(Record):
    """A step that is committed."""

    step: int
    loss: float | None
    verdict: StepVerdict
    keepers: tuple[tuple[str, ...], ...]
    """Of each stage, those whose copies were whole."""


class BegunLeg(Record):
    """A part of the run in which its devices stay the same."""

    plan: Plan
    step: int
    """The first one."""
    kept: bool
    """Whether devices go on with what they hold."""


class RunOrigin(Record):
    """What another machine needs to go on with a run."""

    folder: str
    """The run's, as workers know it."""
    profile: str
    """The text of its file."""


Entry = Manifest | RunOrigin | CommitPoint | BegunLeg | CommittedStep
"""What the run is (the first line), where it was begun, what devices hold when it is adopted, a part of it, a step."""


class Journal(contextlib.AbstractContextManager["Journal"]):
    """Writes the journal of a run whose workers outlive this process; a context."""

    def __init__(self, session: Session, request: TrainRequest, reporter: Reporter) -> None:
        """Nothing is written of other runs, nor of those that can only go on from a checkpoint."""
        self._folder = request.out / JOURNAL_FOLDER if session.outlived else None
        self._session, self._request, self._reporter = session, request, reporter
        self._file: IO[bytes] | None = None
        self._feed: JournalFeed | None = None

    def begin(self, manifest: Manifest) -> None:
        """Begin the file: with what the run is, and what devices hold of it.

        Raises:
            ConfigError: it cannot be written.
        """
        request = self._request
        if self._folder is None or not request.is_journalled:
            return
        path = self._folder / JOURNAL_FILE
        try:
            self._file = locked_file(path, _LOCK_S)
        except BlockingIOError:
            raise ConfigError(f"{path}: another program writes it; end that, or choose another folder") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror}; choose another folder") from None
        if device := request.options.standby_coordinator:
            later, note = self._session.coordinator.later, self._reporter.note
            credentials = read_text(credentials_in(request.out), remedy="begin anew")
            self._feed = JournalFeed(device, credentials, lambda text: later(lambda: note(text)))
            self._session.coordinator.give_journal(self._feed)
        entries: list[Entry] = [manifest]
        if (self._feed is not None or request.known_as) and manifest.profile:
            text = read_text(Path(manifest.profile), remedy="make it anew")
            entries.append(RunOrigin(folder=request.folder_to_workers(request.out), profile=text))
        if request.resume and request.resume.held is not None:
            entries.append(request.resume.held)
        self._file.truncate(0)
        self.write(*entries)  # at once: what the one before has left is of use until then

    def __exit__(self, kind: object, *_: object) -> None:
        is_held = kind is not None and self._file is not None and not self._session.coordinator.here()
        if self._feed is not None:
            self._feed.end()
        if self._file is not None:
            self._file.close()
        if self._folder is not None and not is_held:
            shutil.rmtree(self._folder, ignore_errors=True)

    def committed(self, outcome: StepOutcome, verdict: StepVerdict) -> None:
        """Write a step, before any device hears of the verdict on it."""
        if outcome.loss is not None:
            loss, keepers = if_finite(outcome.loss), outcome.keepers
            self.write(CommittedStep(step=outcome.step, loss=loss, verdict=verdict, keepers=keepers))

    def saved(self, step: int, folder: Path) -> None:
        """Have the copy on another machine know of a checkpoint that is complete."""
        if self._feed is not None:
            self._feed.saved(step, read_text(folder / MANIFEST_FILE, remedy="go on from an earlier one"))

    def write(self, *entries: Entry) -> None:
        """Write a line of each; on a disk that is full the journal ends, and is no more."""
        if self._file is None:
            return
        path, lines = Path(self._file.name), [{"kind": type(entry).__name__, **to_json(entry)} for entry in entries]
        try:
            self._file.write(b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines))
            self._file.flush()
            if self._feed is not None:
                self._feed.written(path, self._file.tell())
        except OSError as error:
            _log.warning("%s: cannot be written, so it ends: %s", path, error.strerror)
            with contextlib.suppress(OSError):
                self._file.close()
                path.unlink()
            self._file = None
            if self._feed is not None:
                self._feed.end()


def _read(path: Path) -> tuple[Manifest, RunOrigin | None, CommitPoint | None]:
    """Read a journal.

    Returns:
        What the run is, with the plan that runs next and all losses; where it was begun, if that may be elsewhere; what
        devices hold: None where a part had begun from a checkpoint, and no step of it is committed. A last line
        that was cut off is none.

    Raises:
        ConfigError: it is damaged.
    """
    lines = read_text(path, remedy=_REMEDY).splitlines(keepends=True)
    entries = [_entry(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.endswith("\n")]
    manifest = entries[0] if entries else None
    if not isinstance(manifest, Manifest):
        raise ConfigError(f"{path}: does not say what the run is; {_REMEDY}")
    plan, held, losses, origin = manifest.plan, None, list(manifest.losses), None
    for entry in entries[1:]:
        match entry:
            case RunOrigin():
                origin = entry
            case CommitPoint():
                held = entry
            case BegunLeg():
                plan, held = entry.plan, held if entry.kept else None
                del losses[entry.step :]
            case CommittedStep():
                assert plan is not None, "a run that has begun has a plan"
                if len(entry.keepers) != len(plan.stages):
                    raise ConfigError(f"{path}: step {entry.step} is of a plan with other stages; {_REMEDY}")
                ran = plan.with_keepers(entry.keepers)
                held = CommitPoint(step=entry.step + 1, verdict=entry.verdict, plan=ran)
                losses.append(entry.loss)
                plan = entry.verdict.plan or plan
    return replace(manifest, plan=plan, losses=tuple(losses)), origin, held


def _entry(line: str, where: str) -> Entry:
    fields: dict[str, Any] = parse_json(line, where, error=ConfigError, remedy=_REMEDY)
    kinds = {kind.__name__: kind for kind in get_args(Entry)}
    kind = kinds.get(str(fields.pop("kind", None)) if isinstance(fields, dict) else "")
    if kind is None:
        raise ConfigError(f"{where}: is no line of a journal; {_REMEDY}")
    found: Entry = from_json(kind, fields, where, error=ConfigError)
    return found


def _journal_of(run: Path) -> tuple[Manifest, RunOrigin | None, CommitPoint | None] | None:
    path = run / JOURNAL_FOLDER / JOURNAL_FILE
    return _read(path) if path.is_file() else None


def held_run(run: Path) -> Manifest | None:
    """Return what workers may hold of a run whose coordinator has gone, all steps done in it; None where there is none.

    Raises:
        ConfigError: the journal is damaged.
    """
    manifest, _, held = _journal_of(run) or (None, None, None)
    return replace(manifest, step=held.step) if manifest and held else None


def adopted_run(run: Path, steps: int, *, functions: tuple[str, ...]) -> TrainRequest | None:
    """Return how a run whose coordinator has gone without ending it goes on; None if there is no such run.

    That is from its beginning where nothing of it is held or saved, and None where something is saved alone.

    Raises:
        ConfigError: the journal is damaged, or the run has as many steps done.
    """
    found = _journal_of(run)
    if found is None:
        return None
    (manifest, origin, held), saved = found, newest(run)
    if held is None and (saved is not None or manifest.losses):
        return None
    done = held.step if held else 0
    is_over = held is not None and steps == done and held.verdict is not None and held.verdict.stop
    if not (is_over or steps > done) or (is_over and saved is not None and saved.content.step == steps):
        raise ConfigError(f"{run} has {done} steps done; --steps is the number in all, give more than that")
    if origin is not None and not Path(manifest.profile).is_file():  # this is the standby coordinator's machine
        manifest = replace(manifest, profile=str((run / "profile.json").resolve()))
        write_atomically(Path(manifest.profile), origin.profile)
    assert manifest.job is not None, "a run that has begun has a job"
    return TrainRequest(
        **what_to_run(run, manifest, None, functions),
        job=replace(manifest.job, steps=steps),
        out=run,
        known_as=origin.folder if origin is not None else "",
        resume=None
        if held is None
        else Resume(
            folder=step_folder(run / CHECKPOINTS, done),
            content=CheckpointContent(step=done, files={}),
            losses=manifest.losses,
            ledger=manifest.ledger,
            held=held,
        ),
    )


def can_go_on(request: TrainRequest, coordinator: Coordinator) -> bool:
    """Whether a run whose coordinator had gone can go on with what those hold that have joined, without the others."""
    held = request.resume.held if request.resume else None
    if held is None or request.options.on_loss is OnLoss.END:
        return False
    if not holds_all(held.plan, coordinator.holders(held.step)):
        return False
    try:
        request.check_plan(request.light_change(request.plan, frozenset(coordinator.here())).plan)
    except (PlanError, ProfileError):
        return False
    return True


def with_what_is_held(session: Session, request: TrainRequest, reporter: Reporter) -> TrainRequest:
    """Return how a run goes on whose coordinator had gone: with what workers hold, if that is all, else as saved."""
    resume = request.resume
    if resume is None or resume.held is None:
        return request
    held = resume.held
    request = replace(request, plan=replace(request.plan, generation=request.plan.generation + 1))
    holders = session.coordinator.holders(held.step)
    if holds_all(held.plan, holders):
        reporter.note(f"Goes on after step {held.step} with what {len(holders)} workers hold; no checkpoint is read")
        return request
    missing = [name for name in held.plan.devices if name not in holders]
    saved = newest(request.out)
    where = f"the checkpoint after {saved.content.step} steps" if saved else "the beginning"
    reporter.note(f"Step {held.step} is held no more by {', '.join(missing)}: all go back to {where}")
    return replace(request, resume=saved)


def first_leg(request: TrainRequest) -> Leg:
    """Return with what a run begins."""
    plan, resume = request.plan, request.resume
    if resume is None or resume.held is None:
        return Leg(plan=plan, first_step=resume.content.step if resume else 0, resume=resume)
    held = resume.held
    return Leg(
        plan=plan, first_step=held.step, kept=KeptState(verdict=held.verdict), held_under=held.plan,
        is_over=held.step == request.job.steps,
    )  # fmt: skip
