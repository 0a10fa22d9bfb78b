"""Programs that a test starts as a user would: what they say, what they start, that nothing is left."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from spantrain.config.artefacts import reference_to_profile, write_plan, write_profile
from spantrain.core.plan import Plan
from testing.patience import PATIENCE_S


@dataclass
class Program:
    """A running `spantrain`, what it has said, and everything that it has started."""

    process: subprocess.Popen[bytes]
    temporary: Path
    said: list[str] = field(default_factory=list)
    _silent: bool = False
    """Whether it will say nothing more: it has ended."""
    _heard: threading.Condition = field(default_factory=threading.Condition)
    _listener: threading.Thread | None = None

    def listen(self) -> None:
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._heard:
                self.said.append(line.decode())
                self._heard.notify_all()
        with self._heard:
            self._silent = True
            self._heard.notify_all()

    def _said(self, text: str) -> bool:
        return any(text in line for line in self.said)

    def wait_to_hear(self, text: str) -> None:
        with self._heard:
            self._heard.wait_for(lambda: self._said(text) or self._silent, PATIENCE_S)
            found = self._said(text)
        assert found, f"never said {text!r}, but: {''.join(self.said)}"

    def family(self) -> list[psutil.Process]:
        """All processes that live in this program's temporary folder: it and what it started."""
        return living_in(self.temporary)

    def worker(self, device: str) -> psutil.Process:
        """The process that writes this device's log."""
        for process in self.family():
            if os.readlink(f"/proc/{process.pid}/fd/1").endswith(f"/{device}.log"):
                return process
        raise AssertionError(f"no worker of {device}")

    def end(self) -> tuple[int, str]:
        """Wait for its end; return its exit code and all that it has said."""
        code = self.process.wait(PATIENCE_S)
        assert self._listener is not None
        self._listener.join(PATIENCE_S)
        return code, "".join(self.said)


@contextlib.contextmanager
def programs(make_folder: Callable[[str], Path]) -> Iterator[Callable[..., Program]]:
    """Give what starts `spantrain` with some words, behind those of `before`; what still runs at the end is killed."""
    found = []

    def run(*words: object, listening: bool = True, before: Sequence[str] = (), **variables: str) -> Program:
        temporary = make_folder("t")
        process = subprocess.Popen(
            [*before, sys.executable, "-m", "spantrain", *map(str, words)],
            stdout=(temporary.parent / f"{temporary.name}.out").open("wb"),
            stderr=subprocess.PIPE,
            cwd=temporary,
            env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", **variables},
        )
        program = Program(process, temporary)
        found.append(program)
        if listening:
            program.listen()
        return program

    yield run
    for program in found:
        for process in program.family():
            with contextlib.suppress(psutil.Error):
                process.kill()
        program.process.wait()


def living_in(folder: Path) -> list[psutil.Process]:
    """Return all processes whose working directory a folder is."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def process_of_log(log: Path) -> int:
    """The number of the process whose output goes to a file."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if Path(f"/proc/{process.pid}/fd/1").readlink() == log and process.status() != psutil.STATUS_ZOMBIE:
                return process.pid
    raise AssertionError(f"no process writes {log}")


def written(plan: Plan, law_profile, folder: Path) -> Path:
    """Write a plan and its profile; return the plan's path."""
    write_profile(law_profile(plan.cluster, plan.model), folder / "profile.json")
    reference = reference_to_profile(folder / "profile.json", folder / "plan.json")
    write_plan(replace(plan, profile=reference), folder / "plan.json")
    return folder / "plan.json"


def nothing_is_left(program: Program) -> None:
    assert program.family() == []
    left = list(program.temporary.rglob("*"))
    assert not left, left


def simulate_refuses(spantrain: Callable[..., Any], *words: object) -> str:
    """Return what `spantrain simulate` says, which refuses this; `spantrain` runs the program."""
    ended = spantrain("simulate", *words)
    assert (ended.code, ended.out) == (2, ""), ended
    assert "Traceback" not in ended.err
    return " ".join(ended.err.split())


def needs_no_torch(*words: str) -> None:
    """A command that ends well and has loaded neither torch nor anything else that takes seconds."""
    code = (
        "import sys\n"
        "from spantrain.cli.main import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'sklearn', 'grpc', 'zmq'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    words_here = [sys.executable, "-c", code]
    ended = subprocess.run(words_here, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr
