"""What people ask of a run that is under way: files in a folder of the run's, each with the name of a device."""

import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spantrain.config.files.text_files import locked_file
from spantrain.errors import ConfigError

DRAIN, FAULTS, LOCK_FILE = "drain", "faults", ".lock"
"""Devices that are to leave, faults that are to be made, and the file that a run's process has locked."""
_NAMES = ".devices"
"""A file there, with the names of all devices that can be asked for."""
_ANSWER, _DRAFT = ".answer-", ".draft-"
_LOOK_S = 0.02
_MAX_TEXT = 4096


@contextmanager
def requests_heard(run: Path, names: Collection[str], kind: str = DRAIN) -> Iterator[None]:
    """Have a run's folder take requests for some devices while it is under way; older ones are forgotten."""
    shutil.rmtree(run / kind, ignore_errors=True)
    if names:
        (run / kind).mkdir(parents=True)
        (run / kind / _NAMES).write_text("\n".join(names))
    try:
        yield
    finally:
        shutil.rmtree(run / kind, ignore_errors=True)


def ask(run: Path, device: str, kind: str, text: str, *, nowhere: str) -> None:
    """Ask something of a device of a run that is under way.

    Raises:
        ConfigError: there is no such run (`nowhere` says what could be meant), or it has no such device; or its folder
            cannot be read or written to.
    """
    folder = run / kind
    under_way = folder.is_dir()
    if (run / LOCK_FILE).is_file():
        with suppress(OSError):  # the run's process has locked it
            locked_file(run / LOCK_FILE).close()
            under_way = False
    if not under_way:
        raise ConfigError(f"{run}: {nowhere}")
    try:
        names = (folder / _NAMES).read_text().splitlines()
        if device not in names:
            raise ConfigError(f"DEVICE {device!r} is no device of this run; give one of {', '.join(names)}")
        (folder / (_ANSWER + device)).unlink(missing_ok=True)
        (folder / (_DRAFT + device)).write_text(text)
        (folder / (_DRAFT + device)).replace(folder / device)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read or written: {error.strerror}") from None


def taken(run: Path, kind: str) -> dict[str, str]:
    """Return the requests that have come to a run since this was asked last, by device."""
    folder, found = run / kind, dict[str, str]()
    for file in sorted(folder.glob("[!.]*")):
        with suppress(OSError), file.open(encoding="utf-8", errors="replace") as content:
            found[file.name] = content.read(_MAX_TEXT)
            file.unlink()
    return found


def answer(run: Path, device: str, kind: str, text: str) -> None:
    """Answer who asked something of a device."""
    with suppress(OSError):
        (run / kind / (_DRAFT + device)).write_text(text)
        (run / kind / (_DRAFT + device)).replace(run / kind / (_ANSWER + device))


def answered(run: Path, device: str, kind: str, within_s: float) -> str:
    """Wait for the answer to a request and return it; one that nobody waits for any more is taken back.

    Raises:
        ConfigError: the run did not answer in time, or has ended.
    """
    path, until_s = run / kind / (_ANSWER + device), time.monotonic() + within_s
    try:
        while time.monotonic() < until_s and path.parent.is_dir():
            with suppress(FileNotFoundError):
                text = path.read_text()
                path.unlink()
                return text
            time.sleep(_LOOK_S)
    finally:
        with suppress(OSError):
            (path.parent / device).unlink(missing_ok=True)
    raise ConfigError(f"{run}: did not answer within {within_s:g} s, or has ended; is the run still under way there?")


def ask_to_drain(run: Path, device: str) -> None:
    """Have a device leave a run that is under way.

    Raises:
        ConfigError: there is no such run, or it has no such device; or its folder cannot be read or written to.
    """
    nowhere = (
        "no run that devices may leave is under way there; give the folder that --out named (with --on-loss end, "
        "--staleness 1 or an outer optimizer devices stay)"
    )
    ask(run, device, DRAIN, "", nowhere=nowhere)
