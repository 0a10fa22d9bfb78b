"""Workers on another machine: started there, heard, and ended with the program that has started them."""

import json
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spantrain.core.records import Record
from spantrain.errors import PeerLostError, ProtocolError
from spantrain.reach.code import PackedCode
from spantrain.reach.facts import program, read_answer
from spantrain.reach.machines import Machine, StartedProgram, last_line

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


class KeptMachine(StartedProgram):
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
        self._heard, self._ended = heard, ended
        self._running: set[str] = set()
        self._asking = threading.Lock()
        self._answers: queue.SimpleQueue[KeeperAnswer | None] = queue.SimpleQueue()
        # Apart: Ctrl-C is told to this program alone, which then ends the others in order.
        super().__init__(machine, program("keeper"), within=within, apart=True)

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
            PeerLostError: it cannot be started; one that is cut off meanwhile is told as ended.
        """
        self._running.add(name)
        try:
            self._ask({"do": "start", "name": name, "words": list(words), "environment": dict(environment)})
        except PeerLostError:
            if name in self._running:  # else it is told as one that has ended
                self._running.discard(name)
                raise

    def close(self) -> None:
        """End the workers that are still there, and the keeper."""
        self._ended = lambda _name, _how: None
        self._end(_LEAVE_S)

    def _ask(self, request: Mapping[str, Any], *, behind: bytes = b"", within_s: float = _ANSWER_S) -> KeeperAnswer:
        try:
            with self._asking:
                self._write(json.dumps(request).encode() + b"\n" + behind)
                answer = self._answers.get(timeout=within_s)
        except queue.Empty:
            raise PeerLostError(f"{self.machine}: no answer in {within_s:.0f} s; is it overloaded?") from None
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
        with self._process.stdout as said:
            while noise <= _MAX_NOISE and (line := said.readline(_MAX_LINE_BYTES)):
                try:
                    self._take(read_answer(KeeperLine, line.decode(errors="replace"), f"a line of {self.machine}"))
                except ProtocolError:
                    noise += 1
        if noise > _MAX_NOISE:
            self._process.kill()
        gone, self._running = self._running, set()
        self._answers.put(None)
        for name in sorted(gone):
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
                self._heard(name, f"({said.left_out} of its lines were left out: too many)")
            how = f"was killed by signal {-said.ended}" if said.ended < 0 else f"ended with status {said.ended}"
            self._running.discard(name)
            self._ended(name, f"its worker {how}")

    def _why_gone(self) -> str:
        status = self._status(_LEAVE_S)
        return "its answers ended" if status is None else self.machine.failure(status, last_line(self._errors))
