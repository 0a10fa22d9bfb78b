"""Wrong tokens slowed down, and every refusal counted (DESIGN idea 7)."""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping

_SOURCE_LIMIT = 1024


class JoinThrottle:
    """Decide whether an address that has shown wrong tokens may try again; time is an argument.

    >>> throttle = JoinThrottle(attempts=2, window_s=10.0)
    >>> throttle.record_failure(0.0, "10.0.0.9"), throttle.wait_s(1.0, "10.0.0.9")
    (None, 0.0)
    >>> throttle.record_failure(2.0, "10.0.0.9"), throttle.wait_s(3.0, "10.0.0.9")
    (None, 7.0)
    """

    def __init__(self, *, attempts: int, window_s: float) -> None:
        self._attempts = attempts
        self._window_s = window_s
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        self._lock = threading.Lock()

    def wait_s(self, now_s: float, source: str) -> float:
        """Return how long an address must wait; 0 when it may try."""
        with self._lock:
            times = self._failures.get(source)
            if times is None or len(times) < self._attempts:
                return 0.0
            return max(0.0, times[0] + self._window_s - now_s)

    def record_failure(self, now_s: float, source: str) -> None:
        """Remember a wrong token; of the addresses seen, only the last thousand or so are remembered."""
        with self._lock:
            self._failures.setdefault(source, deque(maxlen=self._attempts)).append(now_s)
            self._failures.move_to_end(source)
            while len(self._failures) > _SOURCE_LIMIT:
                self._failures.popitem(last=False)


class RefusalCounter:
    """How often each reason was given for a refusal, from any thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, reason: str) -> None:
        """Count one refusal."""
        with self._lock:
            self._counts[reason] += 1

    def snapshot(self) -> Mapping[str, int]:
        """Return the counts so far."""
        with self._lock:
            return dict(self._counts)
