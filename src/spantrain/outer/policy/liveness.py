"""Who is there, who trains, what is late, which shards are stuck: judged by signs of life and by what comes.

Di-PS, 4.2, takes whoever gives signs of life for one that works. Decided here:

- A cluster trains from its first inner step on, which it tells, and for as long as its pushes come. One that gives none
  for `_LATE` times the longest of its own last intervals between pushes (before its second push: of the
  others'), and for as long as a member may be silent, is not counted until the next. What a cluster says without a push
  counts for so long once between two pushes, however often it says it or joins again.
- Signs of life come by one thread and layers by another, so a shard is judged by its layers. A cluster speaks against a
  shard from the first layer that did not get through to the next one that did; but not where another shard's layers do
  not get through to it either, and none did meanwhile: then its own line may be what is broken. A shard is stuck when
  more than half of the clusters that have tried, and two of them where two train, have spoken against it for as long as
  a member may be silent. Its process is then to be ended, and started again.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable

from spantrain.core.outer.events import LayerTransfer


class Liveness:
    """Names, and when each was last heard of.

    >>> members = Liveness(lost_after_s=10.0)
    >>> members.heard(0.0, "a"); members.heard(4.0, "b")
    >>> members.silent(11.0), members.next_limit_s
    ({'a': 11.0}, 10.0)
    """

    def __init__(self, *, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._heard_s: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._heard_s

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are there, sorted."""
        return tuple(sorted(self._heard_s))

    @property
    def next_limit_s(self) -> float | None:
        """When the next is lost, if it is not heard of before."""
        return min(self._heard_s.values()) + self._lost_after_s if self._heard_s else None

    def heard(self, now_s: float, name: str) -> None:
        """Note a sign of life; whoever was not there is from now on."""
        self._heard_s[name] = now_s

    def forget(self, name: str) -> None:
        """Take out one that went."""
        self._heard_s.pop(name, None)

    def silent(self, now_s: float) -> dict[str, float]:
        """Return who is lost by now, with the seconds since it was heard of, longest first."""
        waited = {name: now_s - heard_s for name, heard_s in self._heard_s.items()}
        lost = {name: silent_s for name, silent_s in waited.items() if silent_s >= self._lost_after_s}
        return dict(sorted(lost.items(), key=lambda entry: (-entry[1], entry[0])))


_LATE = 3
_INTERVALS = 4


class Overdue:
    """Knows when something came last, and how long it usually takes.

    >>> version = Overdue(least=64)
    >>> version.says(180), version.says(200), version.says(300), version.says(400)
    (False, True, False, True)
    >>> version.came(410), version.usual, version.is_late(900)
    (410, 192, False)
    """

    def __init__(self, *, least: float, known: bool = True, at: float = 0) -> None:
        """`least`: no interval counts as shorter; `known`: whether the first one will be as long; `at`: its begin."""
        self._least, self._first = least, least if known else math.inf
        self.last: float = at
        """Where it came last."""
        self._intervals: deque[float] = deque(maxlen=_INTERVALS)
        self._said: float | None = None
        """After how long it was last said that it is late."""

    @property
    def usual(self) -> float:
        """The longest of the last intervals, one that was late cut short; infinite where there is nothing to go by."""
        return max(self._least, max(self._intervals, default=self._first))

    def is_late(self, at: float, *, since: float = -math.inf) -> bool:
        """Whether it should have come long ago; `since`: from where on it could come."""
        return at - max(since, self.last) > _LATE * self.usual

    def says(self, at: float) -> bool:
        """Whether to say now that it is late: once, and then whenever twice as much has passed."""
        passed = at - self.last
        if not self.is_late(at) or (self._said is not None and passed < 2 * self._said):
            return False
        self._said = passed
        return True

    def came(self, at: float) -> float | None:
        """Note that it came; return how long that took, if it was said to be late."""
        passed, said = at - self.last, self._said is not None
        self._intervals.append(min(passed, _LATE * self.usual))
        self.last, self._said = at, None
        return passed if said else None


class StuckShards:
    """Hears of layers that got through, and of those that did not.

    >>> stuck = StuckShards(["s0", "s1"], patience_s=10.0)
    >>> from spantrain.core.outer.events import Ticket
    >>> def layer(shard):
    ...     return LayerTransfer(ticket=Ticket(1, 1), cluster="a", worker="a", layer=0, shard=shard, size_bytes=8)
    >>> stuck.failed(0.0, layer("s1")); stuck.moved(layer("s0"))
    >>> stuck.at(9.0, ["a"], 1), [name for name, _ in stuck.at(10.0, ["a"], 1)]
    ([], ['s1'])
    """

    def __init__(self, shards: Collection[str], *, patience_s: float) -> None:
        self._patience_s = patience_s
        self._tried: dict[str, dict[str, float | None]] = {shard: {} for shard in shards}
        """By shard and cluster: since when no layer got through; None where the last one did."""
        self._elsewhere: set[tuple[str, str]] = set()
        """Shards and clusters whose layers got through at another shard since then."""

    def moved(self, transfer: LayerTransfer) -> None:
        """Note a layer that got through, wanted or not."""
        cluster = transfer.cluster
        if transfer.shard not in self._tried:
            return
        self._tried[transfer.shard][cluster] = None
        self._elsewhere.discard((transfer.shard, cluster))
        self._elsewhere |= {(shard, cluster) for shard, tried in self._tried.items() if tried.get(cluster) is not None}

    def failed(self, now_s: float, transfer: LayerTransfer) -> None:
        """Note a layer that did not."""
        tried = self._tried[transfer.shard]
        if tried.get(transfer.cluster) is None:
            tried[transfer.cluster] = now_s

    def forget(self, shard: str) -> None:
        """Begin anew with a shard that is lost."""
        self._tried[shard].clear()
        self._elsewhere = {one for one in self._elsewhere if one[0] != shard}

    def at(self, now_s: float, clusters: Collection[str], trains: int) -> list[tuple[str, str]]:
        """Return the shards that are stuck, each with the reason.

        `clusters`: those that are registered; `trains`: how many of them do.
        """
        found = ((shard, self._why(now_s, shard, clusters, trains)) for shard in self._tried)
        return [(shard, why) for shard, why in found if why]

    def _why(self, now_s: float, shard: str, clusters: Collection[str], trains: int) -> str:
        tried = {name: since_s for name, since_s in self._tried[shard].items() if name in clusters}
        against = sorted(
            (since_s, name) for name, since_s in tried.items()
            if since_s is not None and self._counts(shard, name)
        )  # fmt: skip
        needed = max(min(2, trains), len(tried) // 2 + 1)
        if len(against) < needed:
            return ""
        waited_s = now_s - against[needed - 1][0]
        who = ", ".join(sorted(name for _, name in against))
        told = f"it answers, but for {waited_s:.3g} s no layer got through between it and {who}"
        return told if waited_s >= self._patience_s else ""

    def _counts(self, shard: str, cluster: str) -> bool:
        others = (tried.get(cluster) for name, tried in self._tried.items() if name != shard)
        return (shard, cluster) in self._elsewhere or all(since_s is None for since_s in others)


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
        self._pushes: dict[str, Overdue] = {}
        self._asked_s: dict[str, float] = {}

    def begun(self, now_s: float, cluster: str) -> None:
        """Note that a cluster says that it trains."""
        if cluster not in self._said:
            self._said.add(cluster)
            self._since_s[cluster] = now_s
            if len(self._since_s) > _NAMES:
                oldest = min(self._since_s, key=self._since_s.__getitem__)
                for known in (self._since_s, self._pushes, self._asked_s):
                    known.pop(oldest, None)
                self._said.discard(oldest)

    def pushed(self, now_s: float, cluster: str) -> None:
        """Note a push that the shards have, whole."""
        if cluster in self._pushes:
            self._pushes[cluster].came(now_s)
        else:
            self._pushes[cluster] = Overdue(least=self._least_s / _LATE, known=False, at=now_s)
        self._since_s[cluster] = now_s
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
        self._since_s |= dict.fromkeys(self._pushes, now_s)

    def since_s(self, cluster: str) -> float | None:
        """Return when its last push came, or since when it trains; None for one that does not."""
        return self._pushes[cluster].last if cluster in self._pushes else self._since_s.get(cluster)

    def patience_s(self, cluster: str) -> float:
        """Return for how long a cluster may give no push; without end where nobody's intervals are known."""
        usual_s = {name: one.usual for name, one in self._pushes.items() if one.usual < math.inf}
        return _LATE * usual_s.get(cluster, max(usual_s.values(), default=math.inf))

    def of(self, now_s: float, registered: Iterable[str]) -> tuple[str, ...]:
        """Return those that train."""
        since_s = self._since_s
        return tuple(name for name in registered if name in since_s and now_s - since_s[name] <= self.patience_s(name))
