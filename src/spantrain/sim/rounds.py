"""A lower bound for pipelines that do the same work once for each micro-batch (the proof is in `rounds_bound_s`)."""

from collections.abc import Iterable
from dataclasses import replace
from heapq import heappop, heappush

from spantrain.core.records import Record


class RoundWork(Record):
    """A piece of work that comes once with every micro-batch: an F, I or W of a replica, or a message."""

    resources: tuple[tuple[str, float], ...]
    """What does it: one device, or the links of a message, each with the part of it that is taken."""
    seconds: float
    before: tuple[tuple[int, float], ...]
    """What must have ended before it starts, by index, and the seconds that must lie between."""
    chain: tuple[int, ...] = ()
    """Work of the same micro-batch on the same resource, first to last: each needs the one before, this the last."""
    room: tuple[int, int] | None = None
    """For a forward under an in-flight limit: the work that frees its room, and how many micro-batches may be held."""


class Round(Record):
    """All work of one micro-batch, predecessors first, and how many micro-batches there are."""

    works: tuple[RoundWork, ...]
    count: int

    def backwards(self) -> "Round":
        """Return the same seen from the end of the step: time and all dependencies turned round."""
        last = len(self.works) - 1
        after: list[list[tuple[int, float]]] = [[] for _ in self.works]
        chain: list[list[int]] = [[] for _ in self.works]
        room: dict[int, tuple[int, int]] = {}
        for index, work in enumerate(self.works):
            for other, lag_s in work.before:
                after[other].append((last - index, lag_s))
            for other in work.chain:
                chain[other].insert(0, last - index)
            if work.room is not None:
                room[work.room[0]] = (last - index, work.room[1])
        works = [
            replace(work, before=tuple(after[index]), chain=tuple(chain[index]), room=room.get(index))
            for index, work in enumerate(self.works)
        ]
        return Round(works=tuple(reversed(works)), count=self.count)


def rounds_bound_s(one: Round) -> float:
    """Return the least seconds in which all micro-batches can be done, in whatever order.

    Proof. Take any order of work. For a work v and k = 1 .. M let `starts[v][k]` be a number that the k-th start of v
    (of whichever micro-batch) cannot precede, and `ends[v][k]` one that the last end of any k copies of v cannot
    precede.

    1. Before the k-th start of v, k micro-batches have their copy of each predecessor u behind them; the last of these
       ended at `ends[u][k]` or later, and the copy of v that waited for it comes `lag` later at the earliest. So
       `starts[v][k] >= ends[u][k] + lag`. A device, or the connection of two devices, does one copy of v after
       another, so `starts[v][k] >= starts[v][k-1] + seconds`. With room for L micro-batches, before the k-th start
       k - L copies of the work that frees room have ended: `starts[v][k] >= ends[w][k-L]`.
    2. Of any k copies of v the last to start is at least the k-th start: `ends[v][k] >= starts[v][k] + seconds`. The
       same k micro-batches have also had what comes before v in its chain, on the same resource; from any work u of
       the chain on, none of it before the first start of u: `ends[v][k] >= starts[u][1] + k * (seconds from u to v)`.
    3. The same read from the end of the step gives `tails`: what must still pass after the k-th last end of v.
    4. On one resource, call the k-th copy of v to start v_k. Its start is at least `starts[v][k]`; M - k copies start
       later, so it is the (M-k+1)-th last, and `tails[v][M-k+1]` must pass behind it. Hence the order is one of a
       single machine with these release times and tails, and takes no less than the best preemptive one
       (`one_machine_bound_s`). A link may serve several messages at once, each with a part of it; a preemptive order
       that does the same work can end each of them as early.
    """
    starts = _earliest_starts(one)
    tails = _earliest_starts(one.backwards())
    tails.reverse()
    jobs: dict[str, list[tuple[float, float, float]]] = {}
    for work, begin_s, left_s in zip(one.works, starts, tails, strict=True):
        for name, part in work.resources:
            jobs.setdefault(name, []).extend(
                (begin_s[k], work.seconds * part, left_s[one.count - 1 - k]) for k in range(one.count)
            )
    return max((one_machine_bound_s(of_one) for of_one in jobs.values()), default=0.0)


def _earliest_starts(one: Round) -> list[list[float]]:
    """Return `starts` by work and (k - 1), by points 1 and 2 of the proof."""
    starts: list[list[float]] = [[] for _ in one.works]
    ends: list[list[float]] = [[] for _ in one.works]
    shared = _shared_loads(one)
    for k in range(1, one.count + 1):
        for index, work in enumerate(one.works):
            start_s = starts[index][-1] + work.seconds if k > 1 else 0.0
            for other, lag_s in work.before:
                start_s = max(start_s, ends[other][k - 1] + lag_s)
            if work.room is not None and k > work.room[1]:
                start_s = max(start_s, ends[work.room[0]][k - work.room[1] - 1])
            starts[index].append(start_s)
            end_s = start_s + work.seconds
            for first, load_s in shared[index]:
                end_s = max(end_s, starts[first][0] + k * load_s)
            ends[index].append(end_s)
    return starts


def _shared_loads(one: Round) -> list[list[tuple[int, float]]]:
    """Return, by work, those of its chain and itself, each with the seconds of the chain from it on."""
    loads: list[list[tuple[int, float]]] = []
    for index, work in enumerate(one.works):
        load_s = work.seconds
        found = []
        for other in reversed(work.chain):
            load_s += one.works[other].seconds
            found.append((other, load_s))
        loads.append(found or [(index, load_s)])
    return loads


def one_machine_bound_s(jobs: Iterable[tuple[float, float, float]]) -> float:
    """Return the end of the best preemptive order on one machine; a job is (release, seconds, tail).

    Jackson's rule: whenever a job is released or ends, go on with the one that has the longest tail. It is optimal for
    the largest of end plus tail, over all orders that may break jobs off, which any order is.

    >>> one_machine_bound_s([(0, 4, 1), (1, 2, 6)])
    9.0
    """
    waiting: list[tuple[float, float]] = []
    now_s = last_s = 0.0
    for release_s, seconds, tail_s in sorted(jobs):
        now_s, last_s = _work_off(waiting, now_s, release_s, last_s)
        heappush(waiting, (-tail_s, seconds))
        now_s = max(now_s, release_s)
    return _work_off(waiting, now_s, float("inf"), last_s)[1]


def _work_off(waiting: list[tuple[float, float]], now_s: float, until_s: float, last_s: float) -> tuple[float, float]:
    """Do what waits, longest tail first, until a time; return the time reached and the last end with its tail."""
    while waiting and now_s < until_s:
        tail_s, seconds = waiting[0]
        if now_s + seconds > until_s:
            waiting[0] = (tail_s, seconds - (until_s - now_s))
            return until_s, last_s
        heappop(waiting)
        now_s += seconds
        last_s = max(last_s, now_s - tail_s)
    return now_s, float(last_s)
