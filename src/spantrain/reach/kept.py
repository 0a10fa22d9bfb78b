"""Workers on another machine: started there, heard, and ended with the program that has started them."""

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spantrain.core.records import Record
from spantrain.errors import PeerLostError, ProtocolError, UsageError
from spantrain.reach.code import PackedCode
from spantrain.reach.facts import program, read_answer
from spantrain.reach.machines import BOOTSTRAP, Machine, last_line, wait_or_kill

_ANSWER_S = 60.0
_TAKE_CODE_S = 600.0
"""Of 64 MiB on a slow line."""
_MAX_LINE_BYTES = 2**16
_MAX_NOISE = 1000
"""Lines that are not the keeper's: what a login prints of itself."""
_LEAVE_S = 8.0
"""More than the keeper gives its workers to say goodbye."""


class KeeperAnswer(Record):
    """What a keeper answers to a request; each has some of it."""

    problem: str = ""
    found: bool = False
    lacks: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class KeeperLine(Record):
    """A line of a keeper's: an answer, or what is to be told of a worker."""

    answer: KeeperAnswer | None = None
    worker: str = ""
    line: str = ""
    ended: int | None = None
    left_out: int = 0


class KeptMachine:
    """A machine where `reach.programs.keeper` runs, which starts workers and ends with them when this is closed."""

    def __init__(
        self,
        machine: Machine,
        *,
        within: Sequence[str] = (),
        heard: Callable[[str, str], None],
        ended: Callable[[str, str], None],
    ) -> None:
        """Reach the machine.

        Args:
            machine: by whose `python` the keeper runs.
            within: words before the interpreter's, of a container say.
            heard: is told each line of a worker, by name, in another thread.
            ended: is told how a worker has ended, in another thread; those that are cut off, too.

        Raises:
            UsageError: this machine lacks the program that the way needs.
        """
        self.machine = machine
        self._heard, self._ended = heard, ended
        self._running: set[str] = set()
        self._asking = threading.Lock()
        self._answers: queue.SimpleQueue[KeeperAnswer | None] = queue.SimpleQueue()
        self._errors = b""
        words = machine.command([*within, machine.python, "-c", BOOTSTRAP])
        pipe = subprocess.PIPE
        try:  # a session of its own: Ctrl-C is told to this program alone, which then ends the others in order
            self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            raise UsageError(f"{machine}: {words[0]} cannot be started: {error.strerror}; install it") from error
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()
        source = program("keeper").encode()
        self._send(b"%d\n%s" % (len(source), source))

    @property
    def is_cut_off(self) -> bool:
        """Whether nothing comes from the machine any more."""
        return not self._threads[0].is_alive()

    def place(self, code: PackedCode) -> bool:
        """Have the code in the machine's cache; return whether it had to be sent.

        Raises:
            PeerLostError: it cannot be had there.
        """
        if self._ask({"do": "find_code", "digest": code.digest}).found:
            return False
        request = {"do": "take_code", "digest": code.digest, "size": len(code.packed)}
        self._ask(request, behind=code.packed, within_s=_TAKE_CODE_S)
        return True

    def look(
        self, modules: Sequence[str], paths: Sequence[str], *, python_path: str = ""
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return which modules cannot be imported there, beside the code, and which paths are not there.

        `python_path` is what workers will have as PYTHONPATH.

        Raises:
            PeerLostError: there is no answer.
        """
        answer = self._ask({"do": "look", "modules": list(modules), "paths": list(paths), "python_path": python_path})
        return answer.lacks, answer.missing

    def start(self, name: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a worker: the words behind the interpreter's, in the code's folder.

        Raises:
            PeerLostError: it cannot be started.
        """
        self._running.add(name)
        self._ask({"do": "start", "name": name, "words": list(words), "environment": dict(environment)})

    def close(self) -> None:
        """End the workers that are still there, and the keeper."""
        self._ended = lambda _name, _how: None
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        wait_or_kill(self._process, _LEAVE_S)
        for thread in self._threads:
            thread.join(_LEAVE_S)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has gone, or is closed; its end says why
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _ask(self, request: Mapping[str, Any], *, behind: bytes = b"", within_s: float = _ANSWER_S) -> KeeperAnswer:
        try:
            with self._asking:
                self._send(json.dumps(request).encode() + b"\n" + behind)
                answer = self._answers.get(timeout=within_s)
        except queue.Empty:
            raise PeerLostError(
                f"{self.machine}: no answer in {within_s:.0f} s; see whether it is overloaded"
            ) from None
        if answer is None:
            self._answers.put(None)  # for whoever asks next
            raise PeerLostError(f"{self.machine}: {self._why_gone()}")
        if answer.problem:
            raise PeerLostError(f"{self.machine}: {answer.problem}")
        return answer

    # Threads.

    def _read(self) -> None:
        noise = 0
        assert self._process.stdout is not None
        while line := self._process.stdout.readline(_MAX_LINE_BYTES):
            try:
                self._take(read_answer(KeeperLine, line.decode(errors="replace"), f"a line of {self.machine}"))
            except ProtocolError:
                noise += 1
                if noise > _MAX_NOISE:
                    self._process.kill()
                    break
        self._answers.put(None)
        for name in sorted(self._running):
            self._ended(name, f"its machine {self.machine} is cut off: {self._why_gone()}")

    def _take(self, said: KeeperLine) -> None:
        name = said.worker
        if said.answer is not None:
            self._answers.put(said.answer)
        elif name not in self._running:
            raise ProtocolError(f"{self.machine} tells of {name[:80]!r}, which was not started there")
        elif said.ended is None:
            self._heard(name, said.line)
        else:
            if said.left_out:
                self._heard(name, f"({said.left_out} lines of this machine's workers were left out: too many)")
            how = f"was killed by signal {-said.ended}" if said.ended < 0 else f"ended with status {said.ended}"
            self._running.discard(name)
            self._ended(name, f"its worker {how}")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while piece := os.read(self._process.stderr.fileno(), _MAX_LINE_BYTES):
            self._errors = (self._errors + piece)[-_MAX_LINE_BYTES:]

    def _why_gone(self) -> str:
        deadline_s = time.monotonic() + _LEAVE_S
        while self._threads[1].is_alive() and time.monotonic() < deadline_s:
            self._threads[1].join(0.1)
        try:
            status = self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            return "its answers ended"
        return self.machine.failure(status, last_line(self._errors))
