"""Spans of samples: the address of everything that flows between stages (DESIGN idea 3)."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_TEXT = re.compile(r"\[(\d+):(\d+)\]")


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Samples `lo` up to, not including, `hi` of a global batch.

    >>> Span(0, 16), str(Span(0, 16)), Span.parse("[4:8]").size
    (Span(lo=0, hi=16), '[0:16]', 4)
    """

    lo: int
    hi: int

    def __post_init__(self) -> None:
        if not 0 <= self.lo < self.hi:
            raise ValueError(f"a span needs 0 <= lo < hi, got [{self.lo}:{self.hi}]")

    def __str__(self) -> str:
        return f"[{self.lo}:{self.hi}]"

    @classmethod
    def parse(cls, text: str) -> "Span":
        """Read the text form, `[lo:hi]`."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not a span: {text!r}; write [lo:hi], e.g. [0:16]")
        return cls(int(match[1]), int(match[2]))

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.hi - self.lo

    def intersect(self, other: "Span") -> "Span | None":
        """Return the samples in both, or None."""
        lo, hi = max(self.lo, other.lo), min(self.hi, other.hi)
        return Span(lo, hi) if lo < hi else None

    def contains(self, other: "Span") -> bool:
        """Whether every sample of `other` is in this span."""
        return self.lo <= other.lo and other.hi <= self.hi


class Coverage:
    """The set of samples that have arrived, in whatever pieces; a sample counts once.

    >>> seen = Coverage()
    >>> seen.add(Span(0, 4)); seen.add(Span(4, 8))
    >>> seen.contains(Span(2, 7)), seen.total, str(seen)
    (True, 8, '[0:8]')
    """

    def __init__(self) -> None:
        # Bounds of what is there, in rising order; pieces neither overlap nor touch.
        self._los: list[int] = []
        self._his: list[int] = []

    def add(self, span: Span) -> None:
        """Add samples that are not there yet.

        Raises:
            ValueError: a sample is there already.
        """
        at = bisect_left(self._los, span.hi)
        if at and self._his[at - 1] > span.lo:
            raise ValueError(f"samples of {span} are there already: {self}")
        touches_before = at > 0 and self._his[at - 1] == span.lo
        touches_after = at < len(self._los) and self._los[at] == span.hi
        if touches_before and touches_after:
            del self._los[at], self._his[at - 1]
        elif touches_before:
            self._his[at - 1] = span.hi
        elif touches_after:
            self._los[at] = span.lo
        else:
            self._los.insert(at, span.lo)
            self._his.insert(at, span.hi)

    def contains(self, span: Span) -> bool:
        """Whether every sample of `span` is there."""
        at = bisect_right(self._los, span.lo)
        return at > 0 and self._his[at - 1] >= span.hi

    def end_of(self, sample: int) -> int:
        """Return up to where everything is there from a sample on; the sample itself if it is not there."""
        at = bisect_right(self._los, sample)
        return max(sample, self._his[at - 1]) if at else sample

    @property
    def total(self) -> int:
        """Number of samples there."""
        return sum(self._his) - sum(self._los)

    def __str__(self) -> str:
        return ",".join(f"[{lo}:{hi}]" for lo, hi in zip(self._los, self._his, strict=True)) or "nothing"


def equal_spans(total: int, size: int) -> tuple[Span, ...]:
    """Cut `total` samples into spans of `size`; the last may be smaller.

    >>> [str(span) for span in equal_spans(10, 4)]
    ['[0:4]', '[4:8]', '[8:10]']
    """
    if total < 1 or size < 1:
        raise ValueError(f"need at least one sample and a size of one, got {total} and {size}")
    return tuple(Span(lo, min(lo + size, total)) for lo in range(0, total, size))


def apportion(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Divide `total` whole things by shares (largest remainder, ties to the first); parts may be 0.

    >>> apportion(10, [3, 1]), apportion(3, [1, 1])
    ((8, 2), (2, 1))
    """
    weight = sum(shares)
    if not shares or weight <= 0 or min(shares) < 0:
        raise ValueError(f"shares must be non-negative and not all zero, got {list(shares)}")
    if len(set(shares)) == 1:
        each, rest = divmod(total, len(shares))
        return (each + 1,) * rest + (each,) * (len(shares) - rest)
    exact = [total * share / weight for share in shares]
    parts = [int(value) for value in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (-round(exact[i] - parts[i], 12), i))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


def _divided(spans: Sequence[Span], shares: Sequence[float]) -> list[tuple[int, ...]]:
    parts = {size: apportion(size, shares) for size in {span.size for span in spans}}
    return [parts[span.size] for span in spans]


def divided_sizes(spans: Sequence[Span], shares: Sequence[float]) -> tuple[tuple[int, ...], ...]:
    """Return, for each replica, the sizes of its parts of spans by their sample shares; it may get nothing of some.

    >>> divided_sizes([Span(0, 8), Span(8, 9)], [3, 1])
    ((6, 1), (2,))
    """
    return tuple(tuple(filter(None, row)) for row in zip(*_divided(spans, shares), strict=True))


def divided(spans: Sequence[Span], shares: Sequence[float]) -> tuple[tuple[Span, ...], ...]:
    """Return those parts, one behind the other in each span."""
    found: list[list[Span]] = [[] for _ in shares]
    for span, sizes in zip(spans, _divided(spans, shares), strict=True):
        for own, (lo, hi) in zip(found, pairwise(accumulate(sizes, initial=span.lo)), strict=True):
            own += [Span(lo, hi)] if lo < hi else []
    return tuple(map(tuple, found))


def tapered_sizes(total: int, size: int, *, small: int, first: bool, last: bool) -> list[int]:
    """Return sizes that sum to `total`: equal ones, where wanted with the first or last one cut up into growing pieces.

    >>> tapered_sizes(32, 8, small=2, first=True, last=True)
    [2, 2, 4, 8, 8, 4, 2, 2]
    >>> tapered_sizes(20, 8, small=8, first=False, last=False)
    [8, 8, 4]
    """
    ramp = [small]
    while sum(ramp) < size:  # each piece is at most as large as all before it
        ramp.append(min(sum(ramp), size - sum(ramp)))
    ramps = (int(first) + int(last)) * size
    if ramps > total:
        return tapered_sizes(total, size, small=size, first=False, last=False)
    inner = total - ramps
    equal = [size] * (inner // size) + ([inner % size] if inner % size else [])
    return [*(ramp if first else []), *equal, *(reversed(ramp) if last else [])]
