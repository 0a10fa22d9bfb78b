"""Which of the registered clusters train, by what they push; who only looks on is waited for by nobody.

Di-PS, 4.2, takes each cluster that gives signs of life for one that trains. Decided here: a cluster trains from its
first inner step on, which it tells, and for as long as its pushes come. One that gives none for `_PATIENCE` times the
longest of its own last intervals between pushes (before its second push: of the others'), and for as long as a member
may be silent, is not counted until the next. What a cluster says without a push counts for so long once between two
pushes, however often it says it or joins again.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping

_PATIENCE = 3
_INTERVALS = 4
_NAMES = 1000
"""That are remembered when they are gone."""


class Trainers:
    """When each cluster was last known to train.

    >>> trainers = Trainers(least_s=10.0)
    >>> trainers.begun(0.0, "a"); trainers.begun(0.0, "b")
    >>> for now_s in (10.0, 20.0, 30.0):
    ...     trainers.pushed(now_s, "a")
    >>> trainers.of(29.0, ["a", "b", "c"]), trainers.of(31.0, ["a", "b", "c"])
    (('a', 'b'), ('a',))
    """

    def __init__(self, *, least_s: float) -> None:
        """`least_s`: no shorter is anybody's patience."""
        self._least_s = least_s
        self._since_s: dict[str, float] = {}
        """Since when a push is to come: from the last one on, or from when the cluster said that it trains."""
        self._said: set[str] = set()
        """Those that said so since their last push."""
        self._last_push_s: dict[str, float] = {}
        self._intervals_s: dict[str, deque[float]] = {}
        self._asked_s: dict[str, float] = {}

    def begun(self, now_s: float, cluster: str) -> None:
        """Note that a cluster says that it trains."""
        if cluster not in self._said:
            self._said.add(cluster)
            self._since_s[cluster] = now_s
            self._forget_oldest()

    def pushed(self, now_s: float, cluster: str) -> None:
        """Note a push that the shards have, whole."""
        if cluster in self._last_push_s:
            intervals_s = self._intervals_s.setdefault(cluster, deque(maxlen=_INTERVALS))
            longest_s = _PATIENCE * max(intervals_s, default=float("inf"))
            intervals_s.append(min(now_s - self._last_push_s[cluster], max(self._least_s, longest_s)))
        self._since_s[cluster] = self._last_push_s[cluster] = now_s
        self._said.discard(cluster)

    def asked(self, now_s: float, cluster: str) -> None:
        """Note that a cluster has something to push, whatever comes of it."""
        self._asked_s[cluster] = now_s

    def wait(self, now_s: float, registered: Iterable[str], busy: Collection[str]) -> float | None:
        """Return since when at least one of them has something to give, or soon will have; None where none has.

        `busy`: those of which something is on its way.
        """
        gives = [name for name in registered if now_s - self._asked_s.get(name, float("-inf")) <= self._least_s]
        since_s = [self._since_s.get(name, now_s) for name in {*gives, *busy, *self.of(now_s, registered)}]
        return min(since_s, default=None)

    def resume(self, now_s: float) -> None:
        """Note that pushes are taken again, after a time in which none were: nobody is to blame for that."""
        self._since_s |= dict.fromkeys(self._last_push_s, now_s)

    def _forget_oldest(self) -> None:
        if len(self._since_s) > _NAMES:
            oldest = min(self._since_s, key=self._since_s.__getitem__)
            for known in (self._since_s, self._last_push_s, self._intervals_s, self._asked_s):
                known.pop(oldest, None)
            self._said.discard(oldest)

    def since_s(self, cluster: str) -> float | None:
        """Return when its last push came, or since when it trains; None for one that does not."""
        return self._last_push_s.get(cluster, self._since_s.get(cluster))

    def patience_s(self, cluster: str) -> float:
        """Return for how long a cluster may give no push; without end where nobody's intervals are known."""
        own = self._intervals_s.get(cluster)
        longest = own or [max(one) for one in self._intervals_s.values()]
        return max(self._least_s, _PATIENCE * max(longest, default=float("inf")))

    def of(self, now_s: float, registered: Iterable[str]) -> tuple[str, ...]:
        """Return those that train."""
        since_s: Mapping[str, float] = self._since_s
        return tuple(name for name in registered if name in since_s and now_s - since_s[name] <= self.patience_s(name))
