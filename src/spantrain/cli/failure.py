"""How commands end that do not end well: by an error that nobody foresaw, by Ctrl-C, SIGTERM or a closed terminal."""

import datetime
import errno
import io
import os
import platform
import runpy
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, ClassVar

from spantrain.app.cache import state_folder
from spantrain.errors import Interrupted
from spantrain.version import VERSION

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_SECRETS = frozenset({"--token"})
"""Options whose values are not written down."""
_LIBRARIES = ("transformers", "numpy", "grpcio", "pyzmq")


def tell_internal_error(error: BaseException, words: Sequence[str]) -> str:
    """Write the traceback to a file and return what to say; where no file can be written, the traceback is in it.

    Args:
        error: that nobody foresaw.
        words: of the command line.
    """
    now, command = datetime.datetime.now().astimezone().isoformat(timespec="seconds"), _command(words)
    head = "".join(f"{line}\n" for line in (*software(), now, command, ""))
    report = "".join((head, *traceback.format_exception(error)))
    doing = f"while doing `{command}`"
    said = f"an error of SpanTrain itself {doing}: {_in_one_line(error)}"
    name = f"spantrain-error-{datetime.datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"
    with suppress(RuntimeError):  # where the user has no home
        for folder in _folders(words):
            with suppress(OSError):
                path = folder.absolute() / name
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text(report, encoding="utf-8", errors="backslashreplace")
                return (
                    f"{said}\nThe traceback is in {path}; to report the error, send that file, and those under logs/ "
                    "in the run's folder if there are any. `spantrain --traceback ...` shows it here, too."
                )
    return f"{said}\nIts traceback could not be written to a file:\n{report}"


def software() -> Iterator[str]:
    """Yield lines that a report of an error should have: versions of this, Python, the system, libraries."""
    yield f"spantrain {VERSION}"
    yield f"Python {platform.python_version()}, {platform.platform()}"
    # There may be none; and to load it takes seconds.
    with suppress(AttributeError, ImportError, KeyError, OSError, TypeError):
        torch = runpy.run_path(str(Path(find_spec("torch").origin).with_name("version.py")))  # type: ignore[union-attr, arg-type]
        made_for = [f"{name} {torch[name]}" for name in ("cuda", "hip", "xpu") if torch.get(name)]
        yield f"torch {torch['__version__']}, made for {', '.join(made_for) or 'processors alone'}"
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"
    with suppress(ImportError):
        import zmq

        yield f"libzmq {zmq.zmq_version()}, with{'' if zmq.has('curve') else 'out'} CURVE"


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


def clean_interrupt(what: str) -> AbstractContextManager[None]:
    """End at once on the first signal; everything that was started is taken down on the way out."""
    return _stopping_at_once(lambda: True, lambda: f"{what} was interrupted; nothing was left running")


def told_interrupt(stop: Callable[[], bool], leave: Callable[[], bool]) -> AbstractContextManager[None]:
    """Tell of the first signal, which ends what `stop` says will end; a second, or one before that, ends at once.

    SIGTERM and SIGHUP tell `leave` first, which takes longer; a second signal is then like the first.
    """
    leaving = told = False

    def strike(number: int, frame: FrameType | None) -> None:
        nonlocal leaving, told
        del frame
        if told:
            os._exit(130)
        if number != signal.SIGINT and not leaving and leave():
            leaving = True
            return
        told = stop()
        if not told:
            raise KeyboardInterrupt

    return _handling(strike)


def graceful_interrupt(ask: Callable[[], bool], says: Callable[[], str]) -> AbstractContextManager[None]:
    """Count signals by `ask`, which tells whether to end at once; `says`: from where to go on then."""

    def count() -> bool:
        if ask():
            return True
        sys.stderr.write("\nStopping after this step, with a checkpoint. Once more: stop now.\n")
        return False

    return _stopping_at_once(count, lambda: f"at once; {says()}")


@contextmanager
def _stopping_at_once(ends: Callable[[], bool], says: Callable[[], str]) -> Iterator[None]:
    """Raise `Interrupted` where a signal comes that ends all, as `ends` tells."""
    struck = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal struck
        del number, frame
        if ends():
            struck = True
            raise KeyboardInterrupt

    with _handling(stop):
        try:
            yield
        except BaseException as error:
            # It may strike inside of a lock's own code, which then fails in another way.
            if struck or isinstance(error, KeyboardInterrupt):
                raise Interrupted(says()) from None
            raise


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle Ctrl-C, SIGTERM and, unless it is ignored as by nohup, SIGHUP: of that only one that comes first.

    A terminal that is closed sends it twice, by the shell and by the kernel; a session's end sends it and one SIGTERM,
    in either order.
    """
    heard = set[int]()

    def hear(number: int, frame: FrameType | None) -> None:
        again = number == signal.SIGHUP or (number == signal.SIGTERM and heard == {signal.SIGHUP})
        is_new = not heard or not again
        heard.add(number)
        _Listened.is_told_to_end = True
        if is_new:
            handler(number, frame)

    numbers = [one for one in _ENDS if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class _Listened(io.FileIO):
    """A terminal or a pipe that may end before the program, or a log: what cannot be written there goes nowhere.

    A pipe is told of first, unless a signal has come, which may have ended both, as of `... | tee log`.
    """

    is_told_to_end: ClassVar[bool] = False

    def write(self, data: "ReadableBuffer") -> int:
        """Write all."""
        left = memoryview(data)
        while left:
            try:
                left = left[super().write(left) :]
            except OSError as error:
                if error.errno in NO_ROOM and self.fileno() == 2:
                    break  # the log of a run may lack lines, what was asked for may not
                if error.errno not in (errno.EIO, errno.EPIPE):
                    raise
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), self.fileno())
                if error.errno == errno.EPIPE and not self.is_told_to_end:
                    raise
        return memoryview(data).nbytes


def outlive_listeners() -> None:
    """Have a closed terminal end nothing by an error where something is written; what ends is the signal's to say."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")  # if closed from the beginning
        setattr(sys, name, stream)
        ends = stream.isatty() or stat.S_IFMT(os.fstat(stream.fileno()).st_mode) in (stat.S_IFIFO, stat.S_IFSOCK)
        if ends or name == "stderr":
            # With no buffer in between, whose lock a signal that writes would find held.
            raw = _Listened(stream.fileno(), "wb", closefd=False)
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True))
