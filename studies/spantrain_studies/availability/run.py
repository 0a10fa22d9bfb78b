"""A rival's run by virtual time: it commits steps, is interrupted, and asks the rival what to do.

What all of them have in common with ours (`sim.availability`): events, detection of a loss, whole steps alone count.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from spantrain.sim.availability import AvailabilityEvent, detect_s


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run does from one change to the next."""

    step_s: float
    samples: int
    """Of a step."""
    devices: frozenset[str]
    """Whose loss interrupts it."""
    write_s: float = 0.0
    """For which all stand still while a checkpoint is written."""

    def every(self, every_s: float) -> int:
        """Return the steps from one checkpoint to the next if they are to be so many seconds apart."""
        return max(1, round(every_s / self.step_s))

    def with_checkpoints_s(self, every_s: float) -> float:
        """Return the seconds of a step with its part of writing checkpoints."""
        return self.step_s + self.write_s / self.every(every_s)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What a rival does about a loss, or about devices that came."""

    work: Work | None
    """None: nothing runs until a device comes."""
    pause_s: float = 0.0
    """From when a loss is known, or from the end of the step under way, until the first step begins."""
    loses_step: bool = True
    """Whether the step under way at a loss is done again; else it goes on where it was."""
    back: bool = False
    """Whether all go back to the newest checkpoint."""
    settle: bool = False
    """Whether the rival wants to be asked again at the end of the next step, as when a device comes."""


class Rival(Protocol):
    """A policy with its state; it is told everything in the order of time."""

    every_s: float
    """Seconds from one checkpoint to the next."""

    def begin(self, present: frozenset[str]) -> Work | None:
        """Forget all, and begin with these devices."""

    def lost(self, device: str, present: frozenset[str]) -> Turn:
        """A device of the work that is under way is gone."""

    def changed(self, present: frozenset[str]) -> Turn | None:
        """Devices have come, and a step has just ended, or nothing runs; None: all stays as it is."""


@dataclass(frozen=True, kw_only=True)
class RivalGoodput:
    """What comes of a rival's run."""

    samples: float
    """Of steps that stay committed."""
    steps_lost: float
    """Steps done again: those under way at a loss, and those behind the checkpoint that the run went back to."""
    paused_s: float
    """In which nobody trains: detection, changes, and waiting for devices."""
    restarts: int
    """How often it went back to a checkpoint."""


class RivalRun:
    """The state of a run at a virtual time."""

    def __init__(self, rival: Rival, devices: Iterable[str]) -> None:
        """Begin with all devices present."""
        self._rival, self._present = rival, frozenset(devices)
        self._work = rival.begin(self._present)
        self._free_s, self._now_s, self._asked_s = 0.0, 0.0, math.inf
        self._samples, self._kept_samples, self._behind = 0.0, 0.0, 0
        """Samples in all, those of the newest checkpoint, and the steps since."""
        self._lost, self._paused_s, self._restarts = 0.0, 0.0, 0

    def run(self, events: Iterable[AvailabilityEvent], until_s: float) -> RivalGoodput:
        """Go through events in order of time."""
        for event in sorted(events, key=lambda event: event.at_s):
            if event.at_s < until_s and event.comes != (event.device in self._present):
                self._advance(event.at_s)
                if event.comes:
                    self._come(event.device)
                else:
                    self._leave(event.device)
        self._advance(until_s)
        if self._work is not None:
            self._paused_s -= max(0.0, self._free_s - until_s)
        return RivalGoodput(
            samples=self._samples, steps_lost=self._lost, paused_s=self._paused_s, restarts=self._restarts
        )

    def _step_s(self) -> float:
        return self._work.with_checkpoints_s(self._rival.every_s) if self._work else math.inf

    def _advance(self, to_s: float) -> None:
        """Commit the steps that end by then; where the rival is to be asked, at the end of the step under way."""
        if self._work is None:
            self._paused_s += to_s - self._now_s
        while self._work is not None and self._asked_s <= to_s:
            step_s = self._step_s()
            ends_s = self._free_s + math.ceil(max(0.0, self._asked_s - self._free_s) / step_s - 1e-9) * step_s
            if ends_s > to_s:
                break
            self._commit(ends_s)
            self._asked_s = math.inf
            turn = self._rival.changed(self._present)
            if turn is not None:
                self._take(turn, ends_s, 0.0)
        self._commit(to_s)
        self._now_s = to_s

    def _commit(self, to_s: float) -> None:
        if self._work is None or to_s < self._free_s:
            return
        step_s, every = self._step_s(), self._work.every(self._rival.every_s)
        done = int((to_s - self._free_s) / step_s + 1e-9)
        self._free_s += done * step_s
        self._samples += done * self._work.samples
        self._behind += done
        if self._behind >= every:
            self._behind %= every
            self._kept_samples = self._samples - self._behind * self._work.samples

    def _take(self, turn: Turn, at_s: float, known_s: float) -> None:
        """Do what the rival says from a moment on; a step under way goes on with the part of it that was done."""
        done = max(0.0, at_s - self._free_s) / self._step_s() if self._work else 0.0
        if done and turn.loses_step:
            self._lost += 1
        if turn.back:
            self._lost += self._behind
            self._samples, self._behind = self._kept_samples, 0
            self._restarts += 1
        running, self._work = self._work is not None, turn.work
        if turn.work is None:
            return
        unused_s = max(0.0, self._free_s - at_s) if running else 0.0
        self._paused_s += known_s + turn.pause_s - unused_s
        self._free_s = at_s + known_s + turn.pause_s
        if not turn.loses_step:
            self._free_s -= done * self._step_s()
        self._asked_s = self._free_s if turn.settle else math.inf

    def _leave(self, device: str) -> None:
        self._present -= {device}
        if self._work is not None and device in self._work.devices:
            turn = self._rival.lost(device, self._present)
            self._take(turn, self._now_s, detect_s(alone=not self._present))

    def _come(self, device: str) -> None:
        self._present |= {device}
        if self._work is not None:
            self._asked_s = min(self._asked_s, self._now_s)
        elif (turn := self._rival.changed(self._present)) is not None:
            self._take(turn, self._now_s, 0.0)
