"""Actions that are with the device: handed over, and not over yet.

A device that works beside its host is given its next action before the one that it does is over, so that it need not
wait until that one is launched. What comes next is decided as late as can be: what arrives until then may change it. So
the end of an action is told to the policy a little before it is expected, by what actions of that kind took last and
how long it takes to launch one; of a kind that was not seen yet, when it is over.
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from spantrain.core.action import Action, Op
from spantrain.devices.base import Submitted, Tensors

_SPARE_S = 0.5e-3
"""Beyond the time of a launch: what deciding takes, and what one action differs from another."""
_LOOK_S = 0.2e-3
"""How often it is looked whether an action is over."""


@dataclass(kw_only=True)
class AheadAction:
    """One of them."""

    step: int
    action: Action
    work: Submitted[Tensors]
    held_samples: int
    """Samples in flight behind it."""
    tell_s: float
    """When its end may be told."""
    told: bool = False


class Ahead:
    """Keeps them in order."""

    def __init__(self, most: int) -> None:
        """Keep as many as the device takes."""
        self._most = most
        self._actions: deque[AheadAction] = deque()
        self._typical_s: dict[tuple[int, Op, int], float] = {}
        """By stage, operation and samples: what the last one took."""
        self._launch_s = 0.0
        """What launching took: the longer of the last two."""
        self._last_launch_s = 0.0
        self._free_s = -math.inf
        """When the device is expected to have nothing to do."""

    def __bool__(self) -> bool:
        return bool(self._actions)

    @property
    def is_full(self) -> bool:
        """Whether the device takes no more."""
        return len(self._actions) >= self._most

    def submitted(
        self, step: int, action: Action, work: Submitted[Tensors], *, since_s: float, held_samples: int
    ) -> None:
        """Note an action whose launch began at `since_s` and is over."""
        now_s = time.monotonic()
        self._launch_s = max(self._last_launch_s, now_s - since_s)
        self._last_launch_s = now_s - since_s
        typical_s = self._typical_s.get((action.stage, action.op, action.span.size), math.inf)
        self._free_s = max(since_s, self._free_s) + typical_s
        entry = AheadAction(
            step=step,
            action=action,
            work=work,
            held_samples=held_samples,
            tell_s=self._free_s - self._launch_s - _SPARE_S,
        )
        self._actions.append(entry)

    def over(self, *, wait: bool = False) -> Iterator[AheadAction]:
        """Yield those that are over, in order; all of them, as they are, if it is to be waited for."""
        while self._actions and (wait or self._actions[0].work.is_over):
            entry = self._actions.popleft()
            entry.work.wait()
            kind = entry.action.stage, entry.action.op, entry.action.span.size
            self._typical_s[kind] = entry.work.ended_s - entry.work.started_s
            if not self._actions:
                self._free_s = entry.work.ended_s
            yield entry

    def ending(self) -> Iterator[AheadAction]:
        """Yield those whose end is to be told now, each once."""
        now_s = time.monotonic()
        for entry in self._actions:
            if not entry.told and now_s >= entry.tell_s:
                entry.told = True
                yield entry

    @property
    def patience_s(self) -> float:
        """For how long nothing need be looked at here."""
        return _LOOK_S if self._actions else math.inf
