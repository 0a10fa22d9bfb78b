"""Which of master and shards run and do not work: their master is asked how it stands, and says how the shards do.

What is decided is in `Health`, which knows no clock and no process. A thread that has ended takes its process with it,
and a shard that moves no layers is told by the master to end; this here is for a process that does nothing any more.
"""

import threading
import time
from collections.abc import Callable, Mapping
from queue import SimpleQueue

from spantrain.errors import PeerLostError, SpanTrainError

MASTER = "master"
ASK_EVERY_S = 5.0


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

    def answered(self, now_s: float, well: Mapping[str, bool]) -> None:
        """Note what the master said: by shard, whether it takes part."""
        self._answers_since_s = now_s if self._answers_since_s is None else self._answers_since_s
        for name in (MASTER, *(name for name in self._shards if well.get(name, True))):
            self._well_s[name] = now_s
            self._ends.pop(name, None)

    def silent(self) -> None:
        """Note that it did not answer."""
        self._answers_since_s = None

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


class Asker:
    """A thread that asks the master every few seconds; it ends with the process."""

    def __init__(self, reach: Callable[[], tuple[str, str] | None], *, every_s: float = ASK_EVERY_S) -> None:
        """`reach`: returns address and token of the master, None as long as there is none."""
        self._reach, self._every_s = reach, every_s
        self._news: SimpleQueue[tuple[float, Mapping[str, bool] | None]] = SimpleQueue()
        threading.Thread(target=self._run, name="asks the master", daemon=True).start()

    def tell(self, health: Health) -> None:
        """Pass on what was answered since the last call."""
        while not self._news.empty():
            now_s, well = self._news.get()
            if well is None:
                health.silent()
            else:
                health.answered(now_s, well)

    def _run(self) -> None:
        while True:
            found = self._reach()
            if found is not None:
                well = _ask(*found)
                self._news.put((time.monotonic(), well))
            time.sleep(self._every_s)


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
