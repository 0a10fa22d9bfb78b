"""The spans and limits of a plan, and how far forwards must run ahead of each backward.

Stages may cut the batch into different micro-batches. A coarse micro-batch of one stage then needs several of its
neighbours', so a replica must be able to run, and hold, more than the span that it next wants to go back.
`forward_counts` follows these needs through the whole pipeline.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from spantrain.core.plan import Plan
from spantrain.core.spans import Span

__all__ = ["Counts", "Layout", "forward_counts", "windows"]

Counts = tuple[tuple[tuple[int, ...], ...], ...]
"""By stage, replica and own span."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Who works on which samples, in which order, and may hold how many."""

    micro_batches: tuple[tuple[Span, ...], ...]
    """By stage."""
    spans: tuple[tuple[tuple[Span, ...], ...], ...]
    """By stage and replica: its own parts of the micro-batches, in order."""
    limits: tuple[tuple[int, ...], ...]
    """In-flight limit in samples, by stage and replica."""

    @classmethod
    def of(cls, plan: Plan) -> "Layout":
        """Take the layout out of a plan."""
        return cls(
            micro_batches=tuple(stage.micro_batches for stage in plan.stages),
            spans=tuple(
                tuple(stage.replica_spans(index) for index in range(len(stage.replicas))) for stage in plan.stages
            ),
            limits=tuple(tuple(replica.in_flight_limit for replica in stage.replicas) for stage in plan.stages),
        )

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.spans)

    @property
    def rising(self) -> bool:
        """Whether every stage takes its micro-batches by rising sample."""
        return all(list(spans) == sorted(spans) for spans in self.micro_batches)

    @cached_property
    def stage_spans(self) -> tuple[tuple[Span, ...], ...]:
        """By stage: the spans of all its replicas, by rising sample; each sample is in exactly one."""
        return tuple(tuple(sorted(span for own in replicas for span in own)) for replicas in self.spans)

    def overlapping(self, stage: int, span: Span) -> tuple[Span, ...]:
        """Return the spans of a stage's replicas that share samples with a span."""
        return _overlapping(self.stage_spans[stage], span)

    def micro_batch_index(self, stage: int, span: Span) -> int:
        """Return which micro-batch of the stage, by rising sample, a replica's span is part of."""
        return bisect_right(sorted(self.micro_batches[stage]), span.lo, key=lambda other: other.lo) - 1


def _overlapping(spans: Sequence[Span], span: Span) -> tuple[Span, ...]:
    """Return those of sorted, disjoint spans that share samples with a span."""
    start = bisect_right(spans, span.lo, key=lambda other: other.hi)
    end = bisect_left(spans, span.hi, key=lambda other: other.lo)
    return tuple(spans[start:end])


def forward_counts(layout: Layout, wanted: Callable[[int, Span], int]) -> Counts:
    """Return, for each own span, how many own spans a replica must have forwarded before its backward can come.

    `wanted(stage, span)` is how far, as a sample number, the schedule itself wants forwards to have run before the
    backward of the span. What a stage runs ahead, the stages before it must supply: with G of the next stage known,
    this stage's G of a span is the larger of what is wanted and the G of all the next stage's spans that share
    samples with it, rounded up to whole own spans.
    """
    ahead: dict[Span, int] = {}
    by_stage: list[tuple[tuple[int, ...], ...]] = []
    for stage in reversed(range(layout.num_stages)):
        ahead = _reach(layout, stage, wanted, ahead)
        by_stage.append(
            tuple(
                tuple(bisect_left(own, ahead[span], key=lambda other: other.lo) for span in own)
                for own in layout.spans[stage]
            )
        )
    return tuple(reversed(by_stage))


def _reach(layout: Layout, stage: int, wanted: Callable[[int, Span], int], after: dict[Span, int]) -> dict[Span, int]:
    """Return the sample up to which a stage must have forwarded, for each of its spans; `after` is the next stage's."""
    spans = layout.stage_spans[stage]
    reach: dict[Span, int] = {}
    for span in spans:
        following = _overlapping(layout.stage_spans[stage + 1], span) if after else ()
        target = max([span.hi, wanted(stage, span), *(after[other] for other in following)])
        reach[span] = spans[bisect_left(spans, target, key=lambda other: other.lo) - 1].hi
    return reach


def windows(layout: Layout, counts: Counts) -> tuple[tuple[int, ...], ...]:
    """Return, by stage and replica, the most samples held at once when backwards wait for `counts` forwards."""
    return tuple(
        tuple(
            max((sum(span.size for span in own[k : ahead[k]]) for k in range(len(own))), default=0)
            for own, ahead in zip(replicas, counted, strict=True)
        )
        for replicas, counted in zip(layout.spans, counts, strict=True)
    )
