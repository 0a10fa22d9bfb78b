"""How many connections are taken in a while: a burst at once, and then so many a second. Time is an argument. Pure."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class ConnectionPace:
    """A bucket of tokens.

    >>> pace = ConnectionPace(burst=2, per_s=4.0)
    >>> [pace.wait_s(now_s) for now_s in (0.0, 0.0, 0.0, 0.25)]
    [0.0, 0.0, 0.25, 0.0]
    """

    burst: int
    per_s: float
    _spent: float = 0.0
    _seen_s: float | None = None

    def wait_s(self, now_s: float) -> float:
        """Take one if there is one, and return 0; else return after how many seconds there is one."""
        if self._seen_s is not None:
            self._spent = max(0.0, self._spent - (now_s - self._seen_s) * self.per_s)
        self._seen_s = now_s
        if self._spent + 1.0 > self.burst + 1e-9:
            return (self._spent + 1.0 - self.burst) / self.per_s
        self._spent += 1.0
        return 0.0

    def is_full(self, now_s: float) -> bool:
        """Whether nothing has been taken for so long that it is as good as new."""
        return self._seen_s is None or (now_s - self._seen_s) * self.per_s >= self._spent
