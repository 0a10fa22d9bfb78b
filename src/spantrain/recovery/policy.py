"""Policies for lost and failed devices: machines that are told what happened and answer what to do."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from spantrain.core.plan import Plan, Stage
from spantrain.errors import SpanTrainError

_WORTH = 0.97
"""Another plan is taken if its step is at most so long, over the present one's."""


class OnLoss(StrEnum):
    """What becomes of a run that loses a device."""

    GO_ON = "go-on"
    """It goes on with those that are left."""
    END = "end"
    """It ends; `--resume` goes on by hand."""


@dataclass(frozen=True, slots=True)
class DeviceFailed:
    """A device that takes part went away, has been silent for too long, or says that its order failed."""

    device: str
    error: SpanTrainError
    caused_elsewhere: bool = False
    """Whether it lays it on another device."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """Have all devices end what is under way, for this error."""

    error: SpanTrainError


class EndOnLoss:
    """The first loss or failure ends the run.

    A device that fails because another did is not the one to name, unless all have failed so, or nothing is heard of
    another for longer than it takes to find a loss. Time is an argument.
    """

    def __init__(self, members: Collection[str], blame_s: float = math.inf) -> None:
        """Decide over a run of these devices; `blame_s`: how long it takes at most to find who was lost."""
        self._left = set(members)
        self._blame_s = blame_s
        self._blames_others: SpanTrainError | None = None
        self._blamed_s = math.inf

    def on_event(self, now_s: float, event: DeviceFailed) -> tuple[EndRun, ...]:
        """Return that the run ends, once it is known for which error."""
        self._left.discard(event.device)
        if not event.caused_elsewhere:
            return (EndRun(event.error),)
        self._blames_others = self._blames_others or event.error
        self._blamed_s = min(self._blamed_s, now_s)
        return () if self._left else (EndRun(self._blames_others),)

    def on_time(self, now_s: float) -> tuple[EndRun, ...]:
        """Return that the run ends, where one has failed for another's sake and all others are there and wait."""
        if self._blames_others is None or now_s < self._blamed_s + self._blame_s:
            return ()
        return (EndRun(self._blames_others),)

    def check(self, now_s: float, events: Iterable[DeviceFailed]) -> None:
        """Raise the error for which the run ends, if it does, now that these things have happened."""
        for command in (*(one for event in events for one in self.on_event(now_s, event)), *self.on_time(now_s)):
            raise command.error


def is_worth(before_s: float, after_s: float, *, move_s: float = 0.0, steps_left: int | None = None) -> bool:
    """Whether to go over to a plan, by the seconds of a step before and after.

    Args:
        before_s: of a step now.
        after_s: of one then.
        move_s: that all stand still until state is where it is to be; made up for by the steps left.
        steps_left: None: more than anybody counts.

    >>> is_worth(1.0, 0.98), is_worth(1.0, 0.9), is_worth(1.0, 0.9, move_s=2.0, steps_left=10)
    (False, True, False)
    """
    return after_s <= _WORTH * before_s and (steps_left is None or (before_s - after_s) * steps_left > move_s)


def holds_all(plan: Plan, present: Collection[str]) -> bool:
    """Whether devices that are present hold every unit between them: a whole replica of each stage, or a keeper.

    Of stages whose replicas divide state it takes all of them.
    """

    def is_held(stage: Stage) -> bool:
        whole = [all(name in present for name in replica.devices) for replica in stage.replicas]
        return all(whole) if stage.divides_state else any(whole)

    return all(is_held(stage) or any(name in present for name in stage.keepers) for stage in plan.stages)
