"""A folder that holds a run already: two runs in one would be mixed, so it is refused, or the old one is removed."""

import shutil
from pathlib import Path

from spantrain.app.training.metrics import METRICS_FILE
from spantrain.app.training.run_folder import DECISIONS_FILE, RUN_FILE, SWITCHES_FILE, TRACE_FILE, files_of_run
from spantrain.app.watching.view import VIEW_FILE
from spantrain.errors import ConfigError
from spantrain.runtime.checkpoint.manifest import BEST, MANIFEST_FILE, MARKER, step_of
from spantrain.runtime.checkpoint.saver import CHECKPOINTS
from spantrain.runtime.control.journal_requests import JOURNAL_FOLDER

_INPUTS = ("plan.json", "profile.json")
"""What runs are made from: of no run alone."""
_FILES = (RUN_FILE, TRACE_FILE, DECISIONS_FILE, SWITCHES_FILE, METRICS_FILE)


def refuse_run(folder: Path, ways: str) -> None:
    """Refuse a folder that holds a run; a plan and a profile alone are none, nor is one that has begun no step.

    Args:
        folder: to write a run to.
        ways: what can be done instead.

    Raises:
        ConfigError: it does.
    """
    checkpoints = (f"{CHECKPOINTS}/{path.name}" for path in _checkpoints(folder))
    files = [name for name in _FILES if (folder / name).exists()]
    if METRICS_FILE in files and not (folder / METRICS_FILE).stat().st_size:
        files.remove(METRICS_FILE)
    found = (*files, *checkpoints)
    if found:
        shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise ConfigError(f"{folder} holds a run already ({shown}), and two would be mixed: {ways}")


def remove_old_run(folder: Path, *, keep: Path | None = None) -> None:
    """Remove what a run has written into a folder, nothing else; a plan and a profile to start from stay.

    Args:
        folder: of the run.
        keep: a plan that is to be run, if it lies there.

    Raises:
        ConfigError: something cannot be removed.
    """
    try:
        # Plans and profiles that it has put there besides those that it was made from.
        plans = (name for name in files_of_run(folder) if Path(name).name == name and name not in _INPUTS)
        later = [folder / name for name in plans if keep is None or name != keep.name]
        for path in (*(folder / name for name in (*_FILES, VIEW_FILE)), *later):
            path.unlink(missing_ok=True)
        for path in (*(folder / "logs").glob("*.log"), *(folder / "tensorboard").glob("events.out.tfevents.*")):
            path.unlink()
        for path in _checkpoints(folder):
            (path / MANIFEST_FILE).unlink(missing_ok=True)
            shutil.rmtree(path)
        if (folder / JOURNAL_FOLDER).exists():
            shutil.rmtree(folder / JOURNAL_FOLDER)
        for marker in (BEST, MARKER):
            (folder / CHECKPOINTS / marker).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{error.filename}: of the old run, cannot be removed: {error.strerror}") from None


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in sorted((folder / CHECKPOINTS).glob("step-*")) if step_of(path) is not None]
