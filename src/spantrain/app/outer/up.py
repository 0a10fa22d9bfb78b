"""Master and shards of an outer.yaml on this machine, kept up until told to stop.

`Health` decides, and knows no clock and no process; `ProcessSupervisor` carries it out, and is told the time.
A thread that has ended takes its process with it, and a shard that moves no layers is told by the master to end:
`Health` is for a process that runs and does nothing any more. The master is asked how it stands, and how the shards do.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from spantrain.app.outer.join import address_file, naming
from spantrain.config.files.text_files import make_private_folder
from spantrain.core.names import file_stem
from spantrain.core.records import Record
from spantrain.errors import PeerLostError, SpanTrainError, UsageError
from spantrain.outer.master.files import MasterFiles, token_file
from spantrain.outer.outer_file import OuterConfig
from spantrain.reach.machines import wait_or_kill
from spantrain.transport.control.address import Address

MASTER = "master"
_ASK_S = 5.0
_PAUSE_S, _MAX_PAUSE_S = 1.0, 10.0
_CALM_S = 60.0
"""After so long the earlier ends of a process are forgotten."""
_END_S = 15.0
_SICK_END_S = 5.0
"""Until a process that does not work, and was told to end, is killed."""
_WRONG_INPUT = 2
"""The exit code of a process that would not run a second time either."""
_ERROR = "\nError: "
"""Before the message with which a process ends."""
_LAST_BYTES = 2**16
"""Of a log: the last words are among them."""


class Health:
    """Judges processes by the answers that the master gave.

    >>> health = Health(["s0"], patience_s=60.0)
    >>> started_s = {"master": 0.0, "s0": 0.0}
    >>> health.answered(10.0, {"s0": True}); health.answered(20.0, {"s0": False})
    >>> health.sick(20.0, started_s)
    []
    >>> health.answered(70.0, {"s0": False})
    >>> [name for name, _ in health.sick(70.0, started_s)]
    ['s0']
    """

    def __init__(self, shards: list[str], *, patience_s: float) -> None:
        """`patience_s`: for how long a process may do nothing; twice that after each time in vain."""
        self._shards, self._patience_s = shards, patience_s
        self._well_s: dict[str, float] = {}
        self._ends: dict[str, int] = {}
        self._answers_since_s: float | None = None

    def answered(self, now_s: float, well: Mapping[str, bool] | None) -> None:
        """Note what the master said: by shard, whether it takes part; None: it did not answer."""
        if well is None:
            self._answers_since_s = None
            return
        self._answers_since_s = now_s if self._answers_since_s is None else self._answers_since_s
        for name in (MASTER, *(name for name in self._shards if well.get(name, True))):
            self._well_s[name] = now_s
            self._ends.pop(name, None)

    def sick(self, now_s: float, started_s: Mapping[str, float]) -> list[tuple[str, str]]:
        """Return who is to be ended, and why; `started_s`: when each that runs was started.

        Shards are judged as of the last answer. A master that has never answered cannot be asked from here: it is left
        alone.
        """
        found = []
        if self._answers_since_s is not None:
            known_s = {name: max(self._well_s.get(name, 0.0), self._answers_since_s) for name in self._shards}
            why, now_s = "the master has not heard of it", self._well_s[MASTER]
        else:
            known_s = {MASTER: self._well_s[MASTER]} if MASTER in self._well_s else {}
            why = "it has not answered"
        for name in known_s.keys() & started_s.keys():
            waited_s = now_s - max(known_s[name], started_s[name])
            if waited_s >= self._patience_s * 2 ** self._ends.get(name, 0):
                self._ends[name] = self._ends.get(name, 0) + 1
                found.append((name, f"{why} for {waited_s:.0f} s, though its process runs"))
        return found


_Answers = SimpleQueue[tuple[float, Mapping[str, bool] | None]]


def _asked(reach: Callable[[], tuple[str, str] | None], stop: threading.Event, *, every_s: float) -> _Answers:
    """Return where the answers come of a master that a thread asks every few seconds, until told to stop.

    `reach`: returns its address and token, None as long as there is none.
    """
    answers: _Answers = SimpleQueue()

    def ask() -> None:
        while not stop.wait(every_s):
            if (found := reach()) is not None:
                well = _ask(*found)
                answers.put((time.monotonic(), well))

    threading.Thread(target=ask, name="asks the master", daemon=True).start()
    return answers


def _ask(address: str, token: str) -> Mapping[str, bool] | None:
    """Return which shards take part, as the master says; None if it does not answer."""
    from spantrain.outer.link.link import ask_status

    try:
        status = ask_status(address, token)
    except PeerLostError:
        return None
    except SpanTrainError:
        return {}  # it answers, if not to this
    idle = ("ready", "restoring") if status.layers else ("ready", "restoring", "joining")
    return {shard.name: shard.state in idle for shard in status.shards}


@dataclass(kw_only=True)
class _Child:
    argv: Sequence[str]
    process: "subprocess.Popen[bytes] | None" = None
    started_s: float = 0.0
    start_at_s: float = 0.0
    kill_at_s: float | None = None
    """If it was told to end."""
    starts: int = 0
    pause_s: float = 0.0
    """How long it stayed down the last time."""
    log_begin: int = 0
    """Where in its log the process's own words begin."""


class ProcessSupervisor(contextlib.AbstractContextManager["ProcessSupervisor"]):
    """A context manager, at whose end all end: politely, then by force.

    It leaves no process behind, also when this one is killed: they see the end of their input.
    """

    def __init__(
        self,
        commands: Mapping[str, Sequence[str]],
        log_folder: Path,
        note: Callable[[str], None],
        *,
        may_start: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Start nothing yet.

        Args:
            commands: Argument lists of the program, by the name of the process.
            log_folder: For what they print.
            note: Hears of ends and starts.
            may_start: Whether what a process needs of others is there.
        """
        self._children = {name: _Child(argv=argv) for name, argv in commands.items()}
        self._log_folder = log_folder
        self._note = note
        self._may_start = may_start
        log_folder.mkdir(parents=True, exist_ok=True)

    def log_of(self, name: str) -> Path:
        """Return where a process's output goes."""
        return self._log_folder / f"{file_stem(name)}.log"

    def look(self, now_s: float) -> None:
        """Start what is due; note what has ended.

        Raises:
            UsageError: one ended because of what it was given: it would end again; or its log cannot be written.
        """
        for name, child in self._children.items():
            if child.process is None:
                if now_s >= child.start_at_s and self._may_start(name):
                    self._start(name, child, now_s)
            elif (code := child.process.poll()) is not None:
                self._ended(name, child, code, now_s)
            elif child.kill_at_s is not None and now_s >= child.kill_at_s:
                child.process.kill()

    @property
    def started_s(self) -> Mapping[str, float]:
        """When each that runs, and was not told to end, was started."""
        return {
            name: child.started_s for name, child in self._children.items()
            if child.process is not None and child.kill_at_s is None
        }  # fmt: skip

    def end(self, name: str, reason: str, now_s: float) -> None:
        """End one that runs and does not work, by force if need be; it is started again as any that ends."""
        child = self._children[name]
        if child.process is not None:
            self._note(f"{name} is ended: {reason}")
            child.process.terminate()
            child.kill_at_s = now_s + _SICK_END_S

    def __exit__(self, *_: object) -> None:
        running = [child.process for child in self._children.values() if child.process is not None]
        for process in running:
            process.terminate()
        end_s = time.monotonic() + _END_S
        for process in running:
            wait_or_kill(process, max(0.1, end_s - time.monotonic()))
            assert process.stdin is not None
            process.stdin.close()

    def _start(self, name: str, child: _Child, now_s: float) -> None:
        try:
            log = self.log_of(name).open("ab")
        except OSError as error:
            raise UsageError(f"{self.log_of(name)}: cannot be written: {error.strerror}; move it away") from None
        with log:
            child.log_begin = log.seek(0, os.SEEK_END)
            child.process = subprocess.Popen(
                [sys.executable, "-m", "spantrain", *child.argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        child.started_s, child.starts = now_s, child.starts + 1
        if child.starts > 1:
            self._note(f"{name} was started again")

    def _ended(self, name: str, child: _Child, code: int, now_s: float) -> None:
        assert child.process is not None
        assert child.process.stdin is not None
        child.process.stdin.close()
        child.process, child.kill_at_s = None, None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        how += f": {self._last_words(name, child)}" if code > 0 else ""
        if code == _WRONG_INPUT:
            raise UsageError(f"{name} {how}; its log: {self.log_of(name)}")
        # It stays down longer each time, until it has run for a while.
        calm = now_s - child.started_s >= _CALM_S
        child.pause_s = _PAUSE_S if calm else min(_MAX_PAUSE_S, 2 * child.pause_s or _PAUSE_S)
        child.start_at_s = now_s + child.pause_s
        self._note(f"{name} {how}; it is started again in {child.pause_s:.0f} s (its log: {self.log_of(name)})")

    def _last_words(self, name: str, child: _Child) -> str:
        """Return the message with which a process ended, or else its last line."""
        with self.log_of(name).open("rb") as log:
            log.seek(max(child.log_begin, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            text = log.read(_LAST_BYTES).decode(errors="replace").strip()
        _, error, message = f"\n{text}".rpartition(_ERROR)
        return message if error else text.rpartition("\n")[2] or "it said nothing"


_LOOK_EVERY_S = 0.1
_PATIENCE = 6
"""Times the silence after which a member is lost, for which a process may do nothing."""
_MIN_PATIENCE_S = 60.0


class OuterUp(Record):
    """A master that can be joined."""

    address: str
    token: str
    token_file: Path
    logs: Path


def keep_up(
    config: OuterConfig,
    config_path: Path,
    stop: threading.Event,
    *,
    ready: Callable[[OuterUp], None],
    note: Callable[[str], None],
    patience_s: float | None = None,
    metrics: str | None = None,
    relay: str | None = None,
) -> None:
    """Run them, start again what ends or does not work, until told to stop.

    `ready` hears once that the master can be joined. `patience_s`: for how long one may do nothing. `metrics`:
    HOST:PORT of the master's, the shards' are on the ports behind it. `relay`: HOST:PORT of one by which all of them
    are reached.

    Raises:
        UsageError: the master's folder cannot be used, or one of them does not take what the file says.
    """
    logs, written, token = config.master.folder / "logs", address_file(config), token_file(config.master.folder)
    _prepare(config, logs, written)
    file, more = str(config_path), ("--end-with-input", *(("--relay", relay) if relay is not None else ()))
    commands = {MASTER: ("outer", "master", file, *more)}
    commands |= {shard.name: ("outer", "shard", file, shard.name, *more) for shard in config.shards}
    if metrics is not None:
        first = Address.parse(metrics)
        commands = {
            name: (*words, "--metrics", str(first.at_port(first.port + number if first.port else 0)))
            for number, (name, words) in enumerate(commands.items())
        }
    answers = _asked(lambda: _reach(config, written, token), stop, every_s=patience_s / 8 if patience_s else _ASK_S)
    usual_s = max(_MIN_PATIENCE_S, _PATIENCE * config.for_master.settings.lost_after_s)
    health = Health([shard.name for shard in config.shards], patience_s=patience_s or usual_s)
    told = False
    with ProcessSupervisor(
        commands, logs, note, may_start=lambda name: name == MASTER or written.exists()
    ) as supervisor:
        while not stop.is_set():
            supervisor.look(time.monotonic())
            while not answers.empty():
                health.answered(*answers.get())
            for name, reason in health.sick(time.monotonic(), supervisor.started_s):
                supervisor.end(name, reason, time.monotonic())
            if not told and written.exists():
                told, (address, text) = True, (path.read_text().strip() for path in (written, token))
                ready(OuterUp(address=address, token=text, token_file=token, logs=logs))
            stop.wait(_LOOK_EVERY_S)


def _reach(config: OuterConfig, written: Path, token: Path) -> tuple[str, str] | None:
    """Return how the master is asked from this machine; None before it is there."""
    try:
        port, text = Address.parse(written.read_text().strip()).port, token.read_text().strip()
    except OSError:
        return None
    return str(config.master.listen.at_port(port).from_here()), text


def _prepare(config: OuterConfig, logs: Path, written: Path) -> None:
    """Check the master's folder before anything runs, and take out the address of a master that has ended.

    Raises:
        ConfigError: it cannot be written, is in use, or what is kept in it is damaged, or of another model or data.
    """
    with naming(config, "master.state"), contextlib.closing(MasterFiles(config.master.folder)) as files:
        files.check(config.for_master)
        make_private_folder(logs)
        try:
            written.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"{written}: cannot be removed: {error.strerror}; remove it") from None
