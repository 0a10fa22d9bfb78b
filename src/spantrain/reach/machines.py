"""A machine, and running a Python program there by what its user reaches it with: ssh, srun or kubectl.

The program is sent on standard input and runs under `python3` alone, so nothing has to be installed there. What it
prints comes from outside: it is read within bounds, and nobody executes it.
"""

import contextlib
import os
import queue
import re
import shlex
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from spantrain.core.names import check_name
from spantrain.core.records import Record
from spantrain.errors import Interrupted, PeerLostError, ProtocolError, UsageError, WorkerError

A = TypeVar("A")
B = TypeVar("B")
PYTHON = "python3"
"""The interpreter, where nobody names one."""
Way = Literal["local", "ssh", "slurm", "kubernetes"]

MAX_ANSWER_BYTES = 2**20
"""What one program may print in all; probes print a few kilobytes."""
_CHUNK_BYTES = 65536
"""Of the end of what it says on standard error, which is kept for messages."""
TOOL_S, _MAX_SAID = 120.0, 32 * 2**20
_LEAVE_S = 2.0
_LOOK_S = 0.2
_AT_ONCE = 64
_SSH = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
"""No terminal and no questions: keys, agents, users and jumps are those of the user's own ssh configuration."""
_SRUN = ("--overlap", "--unbuffered", "--nodes=1", "--ntasks=1")
BOOTSTRAP = (
    "import sys;exec(compile(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())).decode(),'<spantrain>','exec'))"
)
"""Reads a program of a known length and runs it; what comes behind it on standard input is the program's own."""


class Machine(Record):
    """One machine, and how to run something there."""

    name: str
    """Of its host in cluster files."""
    way: Way
    target: str = ""
    """What the way calls it: [USER@]HOST of ssh, a node of Slurm, a pod; nothing for this machine."""
    python: str = PYTHON
    """The interpreter there; that of an environment that has SpanTrain, where there is one."""
    options: tuple[str, ...] = ()
    """Further words for ssh, srun or kubectl, such as `-F FILE` or `--namespace NAME`."""
    site: str | None = None
    """Where it stands, if somebody has said so."""

    def __post_init__(self) -> None:
        check_name("machine", self.name)
        if self.way != "local" and (not self.target or self.target[0] == "-" or not self.target.isprintable()):
            raise ValueError(f"machine {self.name}: {self.target[:80]!r} cannot be reached by {self.way}: no such name")

    def command(self, words: Sequence[str]) -> list[str]:
        """Return the words that run a command there, for a process of this machine."""
        # As Slurm's nodes have it; ssh leads to a shell that knows it.
        here = (os.path.expanduser(words[0]), *words[1:])
        match self.way:
            case "local":
                return list(here)
            case "ssh":
                line = re.sub("^'~/", "~/'", shlex.join(words))
                return ["ssh", *_SSH, *self.options, "--", self.target, line]
            case "slurm":
                return ["srun", *_SRUN, f"--nodelist={self.target}", *self.options, *here]
            case "kubernetes":
                return ["kubectl", *self.options, "exec", "-i", self.target, "--", *words]

    def failure(self, status: int, said: str) -> str:
        """Return why a program could not run there, or how it ended, with what it said last and the remedy."""
        if self.way == "ssh" and status == 255:  # ssh's own
            words = shlex.join(["ssh", *self.options, self.target, "true"])
            return f"cannot be reached{said}; make `{words}` work without a question (keys, agent, ~/.ssh/config)"
        if status in (126, 127) or "executable file not found" in said:
            return f"has no {self.python}{said}; install Python 3, or name its interpreter with --python"
        return f"the program ended with {status}{said}"

    def __str__(self) -> str:
        return self.name if self.way == "local" else f"{self.name} (by {self.way}, {self.target})"

    def called(self) -> str | None:
        """Return the name or address under which its way finds it, which others may find it by, too."""
        if self.way != "ssh":
            return self.target if self.way == "slurm" else None
        words = ["ssh", "-G", *self.options, "--", self.target]
        try:
            said = subprocess.run(words, capture_output=True, timeout=_LEAVE_S, check=False, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired):
            return None
        names = [line[9:] for line in said.stdout.decode(errors="replace").splitlines() if line.startswith("hostname ")]
        return names[0] if names else None


def this_machine(name: str) -> Machine:
    """Return the machine of this process, with its interpreter."""
    return Machine(name=name, way="local", python=sys.executable)


def at_once(work: Callable[[A], B], entries: Sequence[A], stop: threading.Event) -> list[B]:
    """Do some work for many machines in threads; where it is broken off, `stop` is set and ends their programs."""
    with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(entries)))) as pool:
        try:
            return list(pool.map(work, entries))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def wait_or_kill(process: "subprocess.Popen[Any]", patience_s: float) -> None:
    """Wait for a process of this machine that was told to end; kill it where that takes longer."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_line(errors: bytes) -> str:
    """Return the last line that a program has said on standard error, as the end of a message."""
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1].strip()[:300]}" if lines else ""


def run_tool(words: Sequence[str]) -> str:
    """Run a program of the user's for starting or finding work elsewhere; return what it printed.

    Raises:
        UsageError: it is not installed.
        WorkerError: it failed, or took too long; with what it said.
    """
    try:
        ended = subprocess.run(words, capture_output=True, timeout=TOOL_S, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise UsageError(f"{words[0]}: cannot be started: {error.strerror}; install it") from None
    except subprocess.TimeoutExpired:
        raise WorkerError(f"`{shlex.join(words)}` took more than {TOOL_S:.0f} s") from None
    if ended.returncode != 0:
        said = ended.stderr[-2000:].decode(errors="replace").strip()
        raise WorkerError(f"`{shlex.join(words)}` ended with status {ended.returncode}: {said}")
    return ended.stdout[:_MAX_SAID].decode(errors="replace")


def run_python(machine: Machine, source: str, *args: str, timeout_s: float, stop: threading.Event | None = None) -> str:
    """Run a Python program on a machine and return what it printed, as text.

    Raises:
        Interrupted: `stop` was set by another thread.
        PeerLostError: it cannot be reached, the program failed there, or it took longer; the message has the remedy.
        ProtocolError: it printed more than a MiB, or no UTF-8.
        UsageError: this machine lacks the program that the way needs.
    """
    with RemoteProgram(machine, source, *args, stop=stop) as program:
        program.end_input()
        lines = list(program.lines(time.monotonic() + timeout_s))
        program.check_ended()
    return "".join(f"{line}\n" for line in lines)


class StartedProgram(ABC):
    """A Python program that was started on a machine, and the threads that hear it.

    A subclass has what its thread needs before it calls the constructor here.
    """

    def __init__(
        self, machine: Machine, source: str, *args: str, within: Sequence[str] = (), apart: bool = False
    ) -> None:
        """Start it.

        Args:
            machine: where, and by which `python`.
            source: the program.
            args: its words.
            within: words before the interpreter's, of a container say.
            apart: in a session of its own, which Ctrl-C does not reach.

        Raises:
            UsageError: this machine lacks the program that the way needs.
        """
        self.machine = machine
        words = machine.command([*within, machine.python, "-c", BOOTSTRAP, *args])
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=apart)
        except OSError as error:
            raise UsageError(f"{machine}: {words[0]} cannot be started: {error.strerror}; install it") from error
        self._errors = b""
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()
        program = source.encode()
        self._write(b"%d\n%s" % (len(program), program))

    def end_input(self) -> None:
        """Close its standard input, by which it notices that no more comes."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has gone, or is closed; its end says why
            self._process.stdin.write(data)
            self._process.stdin.flush()

    @abstractmethod
    def _read(self) -> None:
        """Read its output to the end; in a thread."""

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as said:
            while piece := os.read(said.fileno(), _CHUNK_BYTES):
                self._errors = (self._errors + piece)[-_CHUNK_BYTES:]

    def _status(self, patience_s: float) -> int | None:
        """Wait for its last words and its end; return its status, or None if it does not end."""
        self._threads[1].join(patience_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(patience_s)
        return None

    def _end(self, patience_s: float) -> None:
        """Have it end: its input closes first; it is killed where that does not help."""
        self.end_input()
        wait_or_kill(self._process, patience_s)
        for thread in self._threads:
            thread.join(patience_s)


class RemoteProgram(StartedProgram, contextlib.AbstractContextManager["RemoteProgram"]):
    """A Python program that runs on a machine: lines go there, and lines come back, within bounds.

    It ends with the block, whatever it does; its standard input closes first, by which a program notices.
    """

    def __init__(self, machine: Machine, source: str, *args: str, stop: threading.Event | None = None) -> None:
        """Start it; whoever waits for it is interrupted when `stop` is set.

        Raises:
            UsageError: this machine lacks the program that the way needs.
        """
        self._stop = stop or threading.Event()
        self._came: queue.SimpleQueue[bytes | ProtocolError | None] = queue.SimpleQueue()
        """Its lines, and at the end why no more is read, or nothing."""
        super().__init__(machine, source, *args)

    def __exit__(self, kind: object, *_: object) -> None:
        self._end(_LEAVE_S if kind is None else 0.2)

    def send(self, line: str) -> None:
        """Send it a line."""
        self._write(f"{line}\n".encode())

    def line(self, deadline_s: float) -> str:
        """Return its next line, without its end.

        Raises:
            PeerLostError: it ended, or said nothing until then, by `time.monotonic`.
            ProtocolError: it printed more than it may, or no UTF-8.
        """
        found = next(self.lines(deadline_s), None)
        if found is None:
            self.check_ended()
            raise PeerLostError(f"{self.machine}: its program ended early{last_line(self._errors)}")
        return found

    def lines(self, deadline_s: float) -> Iterator[str]:
        """Yield its lines until it closes its output.

        Raises:
            PeerLostError, ProtocolError: as of `line`.
        """
        while isinstance(line := self._next(deadline_s), bytes):
            try:
                yield line.removesuffix(b"\n").decode()
            except UnicodeDecodeError:
                raise ProtocolError(f"{self.machine}: printed what is no UTF-8: {line[:60]!r}") from None
        self._came.put(line)  # for whoever asks next
        if line is not None:
            raise line

    def check_ended(self) -> None:
        """Wait for its end, which its output's end announces.

        Raises:
            PeerLostError: it failed; the message says how, with the remedy.
        """
        status = self._status(_LEAVE_S)
        if status:  # where there is none, its output is whole all the same; it is ended with the block
            raise PeerLostError(f"{self.machine}: {self.machine.failure(status, last_line(self._errors))}")

    def _next(self, deadline_s: float) -> bytes | ProtocolError | None:
        while True:
            if self._stop.is_set():
                raise Interrupted(f"{self.machine}: is not waited for any more")
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                return self._came.get(timeout=min(_LOOK_S, left_s))
            except queue.Empty:
                if not left_s:
                    told = f"no answer in time{last_line(self._errors)}; see whether it is overloaded"
                    raise PeerLostError(f"{self.machine}: {told}") from None

    def _read(self) -> None:
        assert self._process.stdout is not None
        left_bytes = MAX_ANSWER_BYTES
        with self._process.stdout as said:
            while line := said.readline(left_bytes + 1):
                left_bytes -= len(line)
                if left_bytes < 0:
                    told = f"{self.machine}: printed more than {MAX_ANSWER_BYTES} bytes; it is not read on"
                    self._came.put(ProtocolError(told))
                    return
                self._came.put(line)
        self._came.put(None)
