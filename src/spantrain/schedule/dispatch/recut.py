"""Other micro-batches in mid-step: what may be cut how, and what becomes of the numbers of a replica's micro-batches.

A replica may cut finer what has not begun, and put together again what it cut, up to the micro-batches of its plan. So
it never needs to hold more than the plan has found room for (`schedule.layout`: finer micro-batches of any
stage need no more of any other), and no static order gets a dependency that it did not have. (SpanTrain 3.4 resizes
micro-batches during a step without saying what keeps neighbours from waiting for each other; coarser ones than planned
are left to the next step here, where the whole plan is checked.)
"""

from collections.abc import Mapping, Sequence

from spantrain.core.action import Op
from spantrain.core.records import Record
from spantrain.core.span import Span
from spantrain.errors import ScheduleError


def halved(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the spans with each cut in the middle that has more than one sample.

    >>> " ".join(map(str, halved([Span(0, 5), Span(5, 6)])))
    '[0:2] [2:5] [5:6]'
    """
    parts: list[Span] = []
    for span in spans:
        middle = span.lo + span.size // 2
        parts += [Span(span.lo, middle), Span(middle, span.hi)] if span.size > 1 else [span]
    return tuple(parts)


def check_recut(spans: Sequence[Span], unbegun: Sequence[Span], planned: Sequence[Span], stage: int) -> list[int]:
    """Return which of the micro-batches that have not begun a re-cut replaces, by position.

    Raises:
        ScheduleError: it holds samples of others, leaves some out, or is coarser than planned.
    """
    replaced = [k for k, own in enumerate(unbegun) if any(own.intersect(span) for span in spans)]
    before = sum(unbegun[k].size for k in replaced)
    shared = sum(part.size for k in replaced for span in spans if (part := unbegun[k].intersect(span)))
    told = " ".join(map(str, spans))
    if not before == shared == sum(span.size for span in spans):
        raise ScheduleError(
            f"stage {stage}: a re-cut to {told} does not hold the samples of whole micro-batches that have not begun: "
            f"{' '.join(map(str, unbegun)) or 'none'}"
        )
    coarse = [str(span) for span in spans if not any(own.contains(span) for own in planned)]
    if coarse:
        raise ScheduleError(
            f"stage {stage}: a re-cut to {', '.join(coarse)} is coarser than planned ({' '.join(map(str, planned))}); "
            "that can only be changed between steps"
        )
    return replaced


class Renumbering(Record):
    """Micro-batches before and after a re-cut, by number."""

    spans: tuple[Span, ...]
    """After it."""
    old_of: tuple[int | None, ...]
    """By new number: the old one; None: it is new."""
    new_of: Mapping[int, int]
    """By old number, of those that stay: the new one."""
    follows: Mapping[int, tuple[int, ...]]
    """By old number, of those that go: the new ones that are due when it was; all samples of them were due by then."""

    @property
    def added(self) -> tuple[int, ...]:
        """The numbers of the new ones."""
        return tuple(number for number, old in enumerate(self.old_of) if old is None)

    @classmethod
    def of(cls, before: Sequence[Span], replaced: Sequence[int], spans: Sequence[Span]) -> "Renumbering":
        """Put spans instead of others."""
        gone = set(replaced)
        kept = {span: index for index, span in enumerate(before) if index not in gone}
        after = tuple(sorted((*kept, *spans)))
        number = {span: index for index, span in enumerate(after)}
        last = {span: max(index for index in replaced if before[index].intersect(span)) for span in spans}
        return cls(
            spans=after,
            old_of=tuple(kept.get(span) for span in after),
            new_of={index: number[span] for span, index in kept.items()},
            follows={index: tuple(number[span] for span in spans if last[span] == index) for index in replaced},
        )


def recut_order(order: Sequence[tuple[Op, int]], change: Renumbering) -> list[tuple[Op, int]]:
    """Return an order of (operation, number) with the new numbers; what replaces a micro-batch comes where it was."""
    changed: list[tuple[Op, int]] = []
    for op, index in order:
        numbers = change.follows[index] if index in change.follows else (change.new_of[index],)
        changed += [(op, number) for number in numbers]
    return changed
