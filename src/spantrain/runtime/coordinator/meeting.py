"""Where the devices of a stage meet: the first opens a port, the others ask for it."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spantrain.transport.control.protocol import RemoteRefusal

HOLD_S = 10.0
"""How long the coordinator keeps a call that must wait for others; then it says `again`."""

Stages = tuple[int, Sequence[Sequence[str]]]
"""The generation that runs, and the devices of each of its stages."""


class MeetingPoints:
    """Host and port of meeting points, by generation and stage; workers ask in threads of their own."""

    def __init__(self, stages: Callable[[], Stages], *, hold_s: float = HOLD_S) -> None:
        """`stages`: what runs now."""
        self._stages = stages
        self._hold_s = hold_s
        self._changed = threading.Condition()
        self._places: dict[tuple[int, int], tuple[str, int]] = {}
        self._over = False

    def close(self) -> None:
        """Let all go that wait: the order is over."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def answer(self, device: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Note the place that a device has opened, if it has; return the place of its stage once there is one.

        Returns:
            Host and port, or `again` if there is none yet.

        Raises:
            RemoteRefusal: it is none of this device's business.
        """
        match payload:
            case {"generation": int(generation), "stage": int(stage), "host": str(host), "port": int(port)}:
                place: tuple[str, int] | None = host, port
            case {"generation": int(generation), "stage": int(stage)}:
                place = None
            case _:
                raise RemoteRefusal("a meeting point has generation and stage, and host and port from who opens it")
        self._check(device, generation, stage, opens=place is not None)
        with self._changed:
            if place is not None:
                self._places[generation, stage] = place
                self._changed.notify_all()
            found = self._await((generation, stage))
        return {"again": True} if found is None else {"host": found[0], "port": found[1]}

    def _check(self, device: str, generation: int, stage: int, *, opens: bool) -> None:
        running, stages = self._stages()
        if generation != running:
            raise RemoteRefusal(f"generation {generation} does not run, {running} does")
        members = stages[stage] if 0 <= stage < len(stages) else ()
        if device not in (members[:1] if opens else members):
            raise RemoteRefusal(f"device {device} has no meeting point {'to open ' if opens else ''}at stage {stage}")

    def _await(self, key: tuple[int, int]) -> tuple[str, int] | None:
        deadline_s = time.monotonic() + self._hold_s
        while key not in self._places and not self._over and (wait_s := deadline_s - time.monotonic()) > 0:
            self._changed.wait(wait_s)
        return self._places.get(key)
