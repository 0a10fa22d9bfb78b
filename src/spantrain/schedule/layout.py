"""The spans and limits of a plan, and how far forwards must run ahead of each backward.

Stages may cut the batch into different micro-batches. A coarse micro-batch of one stage then needs several of its
neighbours', so a replica must be able to run, and hold, more than the span that it next wants to go back.
`forward_counts` follows these needs through the whole pipeline.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from spantrain.core.plan import Plan
from spantrain.core.span import Span

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
        starts, ends = self._bounds[stage]
        return self.stage_spans[stage][bisect_right(ends, span.lo) : bisect_left(starts, span.hi)]

    @cached_property
    def _bounds(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """By stage: where the spans of its replicas start, and where they end."""
        return tuple((tuple(span.lo for span in spans), tuple(span.hi for span in spans)) for spans in self.stage_spans)

    def micro_batch_index(self, stage: int, span: Span) -> int:
        """Return which micro-batch of the stage, by rising sample, a replica's span is part of."""
        return bisect_right(self._starts[stage], span.lo) - 1

    @cached_property
    def _starts(self) -> tuple[tuple[int, ...], ...]:
        """By stage: the first samples of its micro-batches, rising."""
        return tuple(tuple(sorted(span.lo for span in spans)) for spans in self.micro_batches)


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
            tuple(_how_many([span.lo for span in own], [ahead[span] for span in own]) for own in layout.spans[stage])
        )
    return tuple(reversed(by_stage))


def _how_many(starts: Sequence[int], targets: Sequence[int]) -> tuple[int, ...]:
    """Return how many of the spans that start there come before each target."""
    return tuple(bisect_left(starts, target) for target in targets)


def _reach(layout: Layout, stage: int, wanted: Callable[[int, Span], int], after: dict[Span, int]) -> dict[Span, int]:
    """Return the sample up to which a stage must have forwarded, for each of its spans; `after` is the next stage's."""
    spans = layout.stage_spans[stage]
    starts = [span.lo for span in spans]
    reach: dict[Span, int] = {}
    for span in spans:
        target = max(span.hi, wanted(stage, span))
        if after:
            target = max(target, *(after[other] for other in layout.overlapping(stage + 1, span)))
        reach[span] = spans[bisect_left(starts, target) - 1].hi
    return reach


def windows(layout: Layout, counts: Counts) -> tuple[tuple[int, ...], ...]:
    """Return, by stage and replica, the most samples held at once when backwards wait for `counts` forwards."""
    return tuple(
        tuple(_window(own, ahead) for own, ahead in zip(replicas, counted, strict=True))
        for replicas, counted in zip(layout.spans, counts, strict=True)
    )


def _window(own: Sequence[Span], ahead: Sequence[int]) -> int:
    """Return the most samples of spans k up to `ahead[k]`."""
    samples = list(accumulate((span.size for span in own), initial=0))
    return max((samples[end] - samples[k] for k, end in enumerate(ahead)), default=0)
