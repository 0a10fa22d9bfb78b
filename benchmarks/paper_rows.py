"""What the papers' tables are made of: contenders on a profile, rows, verdicts, and how they print."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from textwrap import fill
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.units import TensorSpec, Unit, UnitGraph
from spantrain.errors import InfeasiblePlanError, SpanTrainError
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, JobSpec, PlanRequest, Proposal, Strategy
from spantrain.planner.strategies.registry import strategies

OURS = "ours"
"""What `spantrain plan` chooses: the default strategy beside the best site and the best device."""

CLOSE = 0.1
"""Beyond a paper's range by so much counts as within: papers round, and we read text, not bars."""
NEAR, OFF = 1.5, 3.0
"""Factors from a paper's range up to which a figure is `near`, and `off`; beyond it is `far`."""

Range = tuple[float, float]
C = TypeVar("C", bound="Any")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a contender came to; without figures there is a reason."""

    samples_per_s: float | None = None
    step_s: float | None = None
    search_s: float = 0.0
    """Of the processor, since other programs stretch the wall clock's."""
    whole_s: float = 0.0
    """The same, with the simulation of what was found."""
    plan: Plan | None = None
    joules_per_sample: float | None = None
    reason: str = ""

    @property
    def shape(self) -> str:
        """Devices by stage, as kinds and counts."""
        if self.plan is None:
            return self.reason
        kinds = {device.name: device.kind for device in self.plan.cluster.devices}
        stages = []
        for stage in self.plan.stages:
            count = Counter(kinds[name] for name in stage.devices)
            stages.append("+".join(f"{number} {kind}" for kind, number in count.items()))
        return " | ".join(stages)


@dataclass(kw_only=True)
class Contest:
    """One job on one profile, and who answers it; answers are kept."""

    profile: Profile
    job: JobSpec
    constraints: Constraints = field(default_factory=Constraints)
    contenders: Mapping[str, Strategy] = field(default_factory=lambda: MappingProxyType({}))
    """By name, besides the program's strategies."""
    known: dict[str, Answer] = field(default_factory=dict)
    """Answers so far, by contender."""

    def __post_init__(self) -> None:
        self.evaluate = Evaluator(self.profile, self.job)

    def request(self) -> PlanRequest:
        """Return what a strategy is asked."""
        return PlanRequest(profile=self.profile, job=self.job, constraints=self.constraints, evaluate=self.evaluate)

    def answer(self, name: str) -> Answer:
        """Return what a strategy, another contender, or `OURS`, comes to."""
        if name not in self.known:
            started_s = time.process_time()
            found = self._ours() if name == OURS else self._of(name)
            self.known[name] = replace(found, whole_s=time.process_time() - started_s)
        return self.known[name]

    def _of(self, name: str) -> Answer:
        if name in self.contenders:
            return self.best_of(self.contenders[name])
        if name not in strategies():
            return Answer(reason=f"no strategy {name!r} in this version")
        return self.best_of(strategies()[name].propose)

    def best_of(self, propose: Callable[[PlanRequest], tuple[Proposal, ...]]) -> Answer:
        """Return the best of what a strategy proposes, by the event simulator; nothing is searched on top of it."""
        started_s = time.process_time()
        try:
            proposals = propose(self.request())
        except SpanTrainError as error:
            return Answer(reason=str(error), search_s=time.process_time() - started_s)
        search_s = time.process_time() - started_s
        answers = [self.simulated(proposal.plan) for proposal in proposals]
        found = [answer for answer in answers if answer.samples_per_s is not None]
        if not found:
            reasons = dict.fromkeys(answer.reason for answer in answers)
            return Answer(reason="; ".join(reasons) or "no proposal", search_s=search_s)
        return replace(max(found, key=lambda answer: answer.samples_per_s or 0.0), search_s=search_s)

    def simulated(self, plan: Plan) -> Answer:
        """Return what a plan does here."""
        broken = self.constraints.broken_by_devices(self.profile.cluster, plan.devices)
        if broken:
            return Answer(reason="; ".join(broken))
        try:
            found = self.evaluate(plan)
        except SpanTrainError as error:
            return Answer(reason=str(error))
        if not found.fits:
            return Answer(reason=f"out of memory on {', '.join(found.over_memory)}")
        return Answer(
            samples_per_s=found.samples_per_s, step_s=found.step_s, plan=plan, joules_per_sample=found.joules_per_sample
        )

    def _ours(self) -> Answer:
        started_s = time.process_time()
        try:
            outcome = make_plan(self.profile, self.job, PlanOptions(constraints=self.constraints))
        except InfeasiblePlanError as error:
            return Answer(reason=str(error), search_s=time.process_time() - started_s)
        answer = self.simulated(outcome.plan)
        return replace(answer, search_s=time.process_time() - started_s)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """An answer as it stands beside a page: enough to ask again and compare."""

    of: str
    """Which `Contests`."""
    case: Mapping[str, object]
    contender: str
    samples_per_s: float | None
    seconds: float
    """Of the processor."""


class Contests(Generic[C]):
    """Contests by what they are about, a frozen dataclass; each is made once."""

    def __init__(self, name: str, make: Callable[[C], Contest]) -> None:
        self.name, self._make = name, make
        self._made: dict[C, Contest] = {}

    def __call__(self, case: C) -> Contest:
        """Return the contest about a case."""
        if case not in self._made:
            self._made[case] = self._make(case)
        return self._made[case]

    def recorded(self) -> Iterator[Recorded]:
        """Yield all answers so far."""
        for case, contest in self._made.items():
            for contender, answer in contest.known.items():
                yield Recorded(
                    of=self.name,
                    case=asdict(case),
                    contender=contender,
                    samples_per_s=answer.samples_per_s,
                    seconds=round(answer.whole_s, 3),
                )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of a paper, and ours."""

    what: str
    """Setting, model and baseline."""
    paper: Range | None
    """What the paper's text says; None: its text has no number for this."""
    ours: float | None
    """The judged figure."""
    more: Mapping[str, float | str | None] = field(default_factory=dict)
    """Other columns."""
    note: str = ""
    """Key of the note that belongs to it, or a reason."""
    about: float | None = 1.0
    """The value on whose two sides lie two winners; None: there is no winner."""
    seconds: bool = False
    """Whether it is a time of search, of which less is better and nothing else is claimed."""


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """A table or figure of a paper."""

    name: str
    title: str
    source: str
    """Which sentence of the paper the numbers are from."""
    judged: str
    """What the column `ours` is."""
    rows: tuple[Row, ...]
    notes: Mapping[str, str]
    seconds: float = 0.0
    """Of the wall clock."""
    processor_s: float = 0.0

    def counts(self) -> Counter[str]:
        """Return how many rows came to which verdict, factors left out."""
        return Counter(band(verdict(row)) for row in self.rows)

    def text(self) -> str:
        """Return it for a terminal or a page."""
        names = list(dict.fromkeys(name for row in self.rows for name in row.more))
        head = ["what", "paper", self.judged, "verdict", *names, "note"]
        lines = [head, *(self._cells(row, names) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        body = [
            "  ".join(
                cell.ljust(width) if at in (0, len(head) - 1) else cell.rjust(width) for at, (cell, width) in pairs
            )
            for pairs in (list(enumerate(zip(line, widths, strict=True))) for line in lines)
        ]
        notes = [fill(f"({key}) {text}", 118, subsequent_indent="    ") for key, text in self.notes.items()]
        lines_out = [
            f"{self.name}: {self.title}",
            f"Paper: {self.source}",
            "",
            *(line.rstrip() for line in body),
            *notes,
        ]
        return "\n".join((*lines_out, f"[{self.seconds:.0f} s, {self.processor_s:.0f} of the processor]"))

    def _cells(self, row: Row, names: Sequence[str]) -> list[str]:
        more = [_shown(row.more.get(name)) for name in names]
        return [row.what, paper_range(row.paper), _shown(row.ours), verdict(row), *more, row.note]


def paper_range(values: Range | None) -> str:
    """Return it as in the paper.

    >>> paper_range((2.3, 2.38)), paper_range((5.9, 5.9)), paper_range(None)
    ('2.3-2.38', '5.9', '-')
    """
    if values is None:
        return "-"
    low, high = values
    return f"{low:g}" if low == high else f"{low:g}-{high:g}"


def _shown(value: float | str | None) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def ratio(a: Answer, b: Answer) -> float | None:
    """Return the throughput of the first over that of the second; None where one has none."""
    if a.samples_per_s is None or b.samples_per_s is None:
        return None
    return a.samples_per_s / b.samples_per_s


def verdict(row: Row, value: float | None = None) -> str:
    """Say how the judged figure of a row, or another in its place, stands to the paper's.

    By the factor from the nearer end of the paper's range: `within` (10 %), `near` (1.5), `off` (3), or `far`; the
    factor stands behind it. Where another wins than in the paper, that is said in the place of all these.

    >>> [verdict(Row(what="", paper=(2.0, 3.0), ours=ours)) for ours in (3.2, 4.0, 1.1, 300.0, 0.5)]
    ['within', 'near x1.33', 'off x0.55', 'far x100', 'other winner x0.25']
    >>> verdict(Row(what="", paper=None, ours=0.9)), verdict(Row(what="", paper=(2.0, 2.0), ours=None))
    ('no number', 'no answer')
    """
    ours = row.ours if value is None else value
    if ours is None:
        return "no answer"
    if row.paper is None:
        return "no number"
    low, high = row.paper
    if low * (1 - CLOSE) <= ours <= high * (1 + CLOSE):
        return "within"
    if row.seconds:
        return "faster" if ours < low else "slower"
    factor = ours / (low if ours < low else high)
    if row.about is not None and (ours > row.about) != ((low + high) / 2 > row.about):
        name = "other winner"
    else:
        apart = max(factor, 1 / factor)
        name = "near" if apart <= NEAR else "off" if apart <= OFF else "far"
    return f"{name} x{factor:.3g}"


def band(said: str) -> str:
    """Return a verdict without its factor.

    >>> band("far x100"), band("other winner x0.25"), band("within")
    ('far', 'other winner', 'within')
    """
    name, _, factor = said.rpartition(" x")
    return name if name and factor else said


def larger_images(graph: UnitGraph, times: int) -> UnitGraph:
    """Return a convolutional model's units on images of so many times the pixels: all but parameters grows with them.

    The shipped graphs are for 32 x 32 pixels; 224 x 224 has 49 times as many, and as many more positions in every
    feature map, since 32 and 224 divide by all strides.
    """
    return replace(graph, units=tuple(_larger(unit, times) for unit in graph.units))


def _larger(unit: Unit, times: int) -> Unit:
    outputs = tuple(_larger_tensor(tensor, times) for tensor in unit.outputs)
    return replace(
        unit,
        unit_class=f"{unit.unit_class}@{times}",
        forward_flop_per_sample=unit.forward_flop_per_sample * times,
        outputs=outputs,
        activation_bytes_per_sample=unit.activation_bytes_per_sample * times,
    )


def _larger_tensor(tensor: TensorSpec, times: int) -> TensorSpec:
    side = round(times**0.5)
    shape = (*tensor.shape_per_sample[:1], *(extent * side for extent in tensor.shape_per_sample[1:]))
    return replace(tensor, shape_per_sample=shape, bytes_per_sample=tensor.bytes_per_sample * times)
