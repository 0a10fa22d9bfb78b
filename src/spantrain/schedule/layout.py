"""The spans and limits of a plan: how far forwards run ahead of each backward, and who sends which samples to whom.

Stages may cut the batch into different micro-batches. A coarse micro-batch of one stage then needs several of its
neighbours', so a replica must be able to run, and hold, more than the span that it next wants to go back.
`forward_counts` follows these needs through the whole pipeline.

In-flight limits that would stop the pipeline are found before it runs. A replica goes back on a span when the next
stage has gone back on all micro-batches that share samples with it; those may reach further, and need further
forwards of the stages before them, and so on down to the last stage. Policies take the oldest samples first and keep
room for older forwards, so a pipeline never stops as long as every replica may hold, from any own span on, what these
micro-batches reach: `minimum_in_flight`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate

from spantrain.core.action import Direction
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.core.span import Span

Counts = tuple[tuple[tuple[int, ...], ...], ...]
"""By stage, replica and own span."""


class CutLayout(Record):
    """Who works on which samples, in which order, and may hold how many."""

    micro_batches: tuple[tuple[Span, ...], ...]
    """By stage."""
    spans: tuple[tuple[tuple[Span, ...], ...], ...]
    """By stage and replica: its own parts of the micro-batches, in order."""
    limits: tuple[tuple[int, ...], ...]
    """In-flight limit in samples, by stage and replica."""
    shared: tuple[tuple[int, ...], ...] = ()
    """By crew, its stages, where any has several (`core.plan.Crew`); empty: each stage has its own devices."""

    @classmethod
    def of(cls, plan: Plan) -> "CutLayout":
        """Take the layout out of a plan."""
        return cls(
            micro_batches=tuple(stage.micro_batches for stage in plan.stages),
            spans=tuple(
                tuple(stage.replica_spans(index) for index in range(len(stage.replicas))) for stage in plan.stages
            ),
            limits=tuple(tuple(replica.in_flight_limit for replica in stage.replicas) for stage in plan.stages),
            shared=tuple(crew.numbers for crew in plan.crews) if plan.interleaved else (),
        )

    @property
    def crews(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each crew."""
        return self.shared or tuple((stage,) for stage in range(self.num_stages))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.spans)

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


def forward_counts(layout: CutLayout, wanted: Callable[[int, Span], int]) -> Counts:
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


def _reach(
    layout: CutLayout, stage: int, wanted: Callable[[int, Span], int], after: dict[Span, int]
) -> dict[Span, int]:
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


def windows(layout: CutLayout, counts: Counts) -> tuple[tuple[int, ...], ...]:
    """Return, by stage and replica, the most samples held at once when backwards wait for `counts` forwards."""
    return tuple(
        tuple(_window(own, ahead) for own, ahead in zip(replicas, counted, strict=True))
        for replicas, counted in zip(layout.spans, counts, strict=True)
    )


def _window(own: Sequence[Span], ahead: Sequence[int]) -> int:
    """Return the most samples of spans k up to `ahead[k]`."""
    samples = list(accumulate((span.size for span in own), initial=0))
    return max((samples[end] - samples[k] for k, end in enumerate(ahead)), default=0)


def minimum_in_flight(layout: CutLayout) -> tuple[tuple[int, ...], ...]:
    """Return, by stage and replica, the samples that it must be able to hold; own micro-batches by rising sample.

    With the same micro-batches everywhere this is the largest own one:

    >>> from spantrain.core.span import equal_spans
    >>> def layout(*sizes):
    ...     cuts = tuple(equal_spans(16, size) for size in sizes)
    ...     return CutLayout(micro_batches=cuts, spans=tuple((cut,) for cut in cuts), limits=((16,),) * len(cuts))
    >>> minimum_in_flight(layout(4, 4)), minimum_in_flight(layout(2, 8, 4))
    (((4,), (4,)), ((8,), (8,), (4,)))
    """
    return windows(layout, forward_counts(layout, lambda _stage, span: span.hi))


def check_limits(plan: Plan) -> list[str]:
    """Return what would stop the pipeline; nothing if it can run."""
    layout = CutLayout.of(plan)
    return [
        f"stage {stage}, replica {plan.stages[stage].replicas[replica].devices[0]}: in-flight limit "
        f"{layout.limits[stage][replica]} samples, but the micro-batches of the other stages need it to hold {needed}; "
        "allow it more, or make the coarser micro-batches smaller"
        for stage, row in enumerate(minimum_in_flight(layout))
        for replica, needed in enumerate(row)
        if layout.limits[stage][replica] < needed
    ]


Routes = tuple[tuple[str, Span], ...]


def neighbour(stage: int, direction: Direction) -> int:
    """Return the stage that a stage sends to; there may be none.

    >>> neighbour(2, Direction.FORWARD), neighbour(2, Direction.BACKWARD)
    (3, 1)
    """
    return stage + (1 if direction is Direction.FORWARD else -1)


class Router:
    """Cuts what a replica produces, or needs, along the micro-batches of the neighbouring stage's replicas.

    Devices are named by the leader of their replica. A piece is a part of one micro-batch of its receiver, in rising
    order, so that a receiver with finer micro-batches starts before all of a coarse one has come.
    """

    def __init__(self, plan: Plan) -> None:
        self._layout = CutLayout.of(plan)
        self._owner: list[dict[Span, str]] = [
            {span: replica.devices[0] for replica, own in zip(stage.replicas, spans, strict=True) for span in own}
            for stage, spans in zip(plan.stages, self._layout.spans, strict=True)
        ]

    def destinations(self, stage: int, direction: Direction, span: Span) -> Routes:
        """Return which devices get which samples of a span that a replica of a stage has finished F (or I or B) on.

        Forward: replicas of the next stage; backward: of the stage before. Empty at the pipeline's ends.
        """
        return self._neighbours(neighbour(stage, direction), span)

    def sources(self, stage: int, direction: Direction, span: Span) -> Routes:
        """Return which devices send which samples of a span to a stage, in which pieces at most."""
        return self._neighbours(stage + stage - neighbour(stage, direction), span)

    def _neighbours(self, stage: int, span: Span) -> Routes:
        if not 0 <= stage < len(self._owner):
            return ()
        owner, found = self._owner[stage], self._layout.overlapping(stage, span)
        if len(found) == 1:
            return ((owner[found[0]], span),)
        return tuple((owner[own], Span(max(own.lo, span.lo), min(own.hi, span.hi))) for own in found)
