"""Where the replicas of a stage meet: the first opens a port, the others ask for it."""

import threading
import time
from typing import Any

from spantrain.transport.control.protocol import RemoteRefusal

__all__ = ["MeetingPoints"]

_MEETING_S = 25.0


class MeetingPoints:
    """Host and port of meeting points, by generation and stage; workers ask in threads of their own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._places: dict[tuple[int, int], tuple[str, int]] = {}

    def answer(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Note the place that a worker has opened, if it has; return the place of its stage once there is one.

        Raises:
            RemoteRefusal: nobody opened it in time.
        """
        key = (int(payload["generation"]), int(payload["stage"]))
        with self._changed:
            if "port" in payload:
                self._places[key] = (str(payload["host"]), int(payload["port"]))
                self._changed.notify_all()
            place = self._await(key)
        return {"host": place[0], "port": place[1]}

    def _await(self, key: tuple[int, int]) -> tuple[str, int]:
        deadline_s = time.monotonic() + _MEETING_S
        while key not in self._places:
            wait_s = deadline_s - time.monotonic()
            if wait_s <= 0:
                raise RemoteRefusal(f"the first replica of stage {key[1]} did not open its meeting point")
            self._changed.wait(wait_s)
        return self._places[key]
