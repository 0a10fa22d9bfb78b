"""What is fed with hostile input, and what is counted of it: only refusals, in bounded time and memory.

A target makes each case from a random generator of its own, so any case can be made again by its number alone:
`run_target(target, 1, seed, first=NUMBER)`.
"""

import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

_BATCH = 50
"""Cases between two looks at the memory: a look costs as much as some cases."""
_MOST_FAILURES = 5
"""A target that has failed so often is not run on."""
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A reader of what others wrote, and how to make what is fed to it."""

    name: str
    make: Callable[[Random], Any]
    """One case: mostly something valid with something wrong in it."""
    run: Callable[[Any, Path], object]
    """Read a case; may use the folder, which is empty at the start and kept over all cases of a run."""
    refusals: tuple[type[Exception], ...]
    """All that it may raise."""
    most_s: float = 1.0
    """Of processor time, for a case."""
    most_bytes: int = 64 * 2**20
    """That the process may grow by meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What became of the cases of a target."""

    name: str
    cases: int
    accepted: int
    refused: int
    reasons: Mapping[str, int]
    """Refusals by their class, and by their reason where they have one."""
    slowest_s: float
    """Of processor time."""
    slowest_case: int
    most_bytes: int
    """That the process grew by, at most, in a few cases."""
    failures: tuple[str, ...]
    """What was neither taken nor refused, or broke a bound, each with its number."""


def run_target(target: Target, cases: int, seed: int = 0, *, first: int = 0) -> Figures:
    """Feed a target with cases of these numbers; end early when several have failed."""
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(target, seed, Path(folder))
        run.case(first, warm=True)  # what is loaded and cached once is no case's cost
        for begin in range(first, first + cases, _BATCH):
            run.batch(range(begin, min(begin + _BATCH, first + cases)))
            if len(run.failures) >= _MOST_FAILURES:
                break
        return run.figures()


class _Run:
    def __init__(self, target: Target, seed: int, folder: Path) -> None:
        self._target, self._seed, self._folder = target, seed, folder
        self._reasons: Counter[str] = Counter()
        self._cases = 0
        self._slowest_s, self._slowest_case, self._most_bytes = 0.0, -1, 0
        self.failures: list[str] = []

    def batch(self, numbers: range) -> None:
        before_bytes = _memory_bytes("VmRSS")
        _forget_peak()
        for number in numbers:
            self.case(number)
        grown_bytes = _memory_bytes("VmHWM") - before_bytes
        self._most_bytes = max(self._most_bytes, grown_bytes)
        if grown_bytes > self._target.most_bytes:
            self._fail(
                numbers[0],
                f"and up to {len(numbers) - 1} after it: memory grew by {grown_bytes} bytes, at most "
                f"{self._target.most_bytes} are allowed",
            )

    def case(self, number: int, *, warm: bool = False) -> None:
        case = self._target.make(Random(f"{self._target.name}/{self._seed}/{number}"))
        begun_s = time.process_time()
        reason = None
        try:
            self._target.run(case, self._folder)
        except self._target.refusals as refusal:
            reason = str(getattr(refusal, "reason", type(refusal).__name__))
        except Exception:  # noqa: BLE001 - this is what is looked for
            if not warm:
                self._fail(number, f"{traceback.format_exc(limit=-3)}of {case!r:.600}")
        took_s = time.process_time() - begun_s
        if warm:
            return
        self._cases += 1
        if reason is not None:
            self._reasons[reason] += 1
        if took_s > self._slowest_s:
            self._slowest_s, self._slowest_case = took_s, number
        if took_s > self._target.most_s:
            self._fail(number, f"took {took_s:.3g} s, at most {self._target.most_s:.3g} are allowed: {case!r:.500}")

    def _fail(self, number: int, text: str) -> None:
        self.failures.append(f"{self._target.name}, seed {self._seed}, case {number}: {text}")

    def figures(self) -> Figures:
        refused = self._reasons.total()
        return Figures(
            name=self._target.name,
            cases=self._cases,
            accepted=self._cases - refused - len(self.failures),
            refused=refused,
            reasons=dict(self._reasons.most_common()),
            slowest_s=self._slowest_s,
            slowest_case=self._slowest_case,
            most_bytes=self._most_bytes,
            failures=tuple(self.failures),
        )


def _memory_bytes(field: str) -> int:
    """Return what Linux says of this process; 0 elsewhere."""
    if not _STATUS.exists():
        return 0
    row = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(row.split()[1])


def _forget_peak() -> None:
    if _RESET.exists():
        _RESET.write_text("5")
