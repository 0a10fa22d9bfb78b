"""What is told of an error that nobody foresaw: one message, and a file with the traceback."""

import datetime
import os
import platform
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from spantrain.app.cache import state_folder
from spantrain.version import VERSION

_SECRETS = frozenset({"--token"})
"""Options whose values are not written down."""
_LIBRARIES = ("torch", "transformers", "numpy", "zmq", "grpc")


def tell_internal_error(error: BaseException, words: Sequence[str]) -> str:
    """Write the traceback to a file and return what to say; where no file can be written, the traceback is in it.

    Args:
        error: that nobody foresaw.
        words: of the command line.
    """
    report = "".join((*_head(words), *traceback.format_exception(error)))
    doing = f"while doing `{_command(words)}`"
    said = f"an error of SpanTrain itself {doing}: {_in_one_line(error)}"
    try:
        path = _written(report, _folders(words))
    except (OSError, RuntimeError):  # the last where the user has no home
        return f"{said}\nIts traceback could not be written to a file:\n{report}"
    return (
        f"{said}\nThe traceback is in {path}; to report the error, send that file, and those under logs/ in the run's "
        "folder if there are any. `spantrain --traceback ...` shows it here, too."
    )


def _head(words: Sequence[str]) -> Iterator[str]:
    yield f"spantrain {VERSION}, Python {platform.python_version()}, {platform.platform()}\n"
    for name in _LIBRARIES:
        # Those that are loaded: an error is no time to load more.
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            yield f"{name} {version}\n"
    yield f"{datetime.datetime.now().astimezone().isoformat(timespec='seconds')}\n{_command(words)}\n\n"


def _command(words: Sequence[str]) -> str:
    shown = []
    for before, word in zip(("", *words), words, strict=False):
        option, given, _ = word.partition("=")
        hidden = f"{option}=..." if given and option in _SECRETS else "..." if before in _SECRETS else word
        shown.append(hidden)
    return " ".join(("spantrain", *shown))


def _in_one_line(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    text = " ".join(str(error).split())[:300]
    place = "".join(f" ({frame.filename}:{frame.lineno} in {frame.name})" for frame in last)
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"


def _folders(words: Sequence[str]) -> Iterator[Path]:
    """Yield where the file may go: the run's folder if it is there, the user's own for such things, the present one."""
    for option in ("--out", "--resume"):
        if option in words[:-1]:
            folder = Path(words[words.index(option) + 1])
            if folder.is_dir():
                yield folder
    yield state_folder()
    yield Path()


def _written(report: str, folders: Iterable[Path]) -> Path:
    """Write it to the first folder that takes it.

    Raises:
        OSError: none does.
    """
    now = datetime.datetime.now()
    problem = OSError("no folder")
    for folder in folders:
        path = folder.absolute() / f"spantrain-error-{now:%Y%m%d-%H%M%S}-{os.getpid()}.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(report, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            problem = error
            continue
        return path
    raise problem
