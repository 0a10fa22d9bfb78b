"""The global batch as a choice: a plan for each size that learning allows (SpanTrain's algorithm 1, its first loop)."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from spantrain.core.profile import Profile
from spantrain.core.records import Record
from spantrain.errors import ConfigError, InfeasiblePlanError
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions, PlanOutcome
from spantrain.planner.request import JobSpec, Objective

_RANGE = re.compile(r"(?P<least>\d{1,9})(?:\.\.(?P<most>\d{1,9}))?")
_NEARLY = 1.01
"""A smaller batch is taken where it costs at most so many times the best one's time, money or energy a sample."""


class BatchRow(Record):
    """What the best plan for one global batch comes to."""

    global_batch: int
    samples_per_s: float | None = None
    step_s: float | None = None
    per_sample: float | None = None
    """Seconds, US dollars or joules, as the objective is; None where it is not known."""
    reason: str = ""
    """Why there is no plan."""

    def __str__(self) -> str:
        """Say its rate in a few words."""
        rate = "no plan" if self.samples_per_s is None else f"{self.samples_per_s:.3g} samples/s"
        return f"{self.global_batch}: {rate}"


def batches_of(text: str, most: int) -> tuple[int, ...]:
    """Return the global batches of `N` or of `LEAST..MOST`: the least, its doublings, and the most.

    >>> batches_of("48..200", 1024)
    (48, 96, 192, 200)

    Raises:
        ConfigError: it is neither, or out of bounds.
    """
    found = _RANGE.fullmatch(text.replace(" ", ""))
    least, last = (int(found["least"]), int(found["most"] or found["least"])) if found else (0, 0)
    if not 1 <= least <= last <= most:
        raise ConfigError(f"--global-batch {text}: give samples, 1 to {most}, or LEAST..MOST, e.g. 64..512")
    doubled = (least * 2**power for power in range((last // least).bit_length()))
    return tuple(dict.fromkeys((*(size for size in doubled if size <= last), last)))


def plan_for_any(
    profile: Profile, job: JobSpec, options: PlanOptions, batches: Sequence[int], tell: Callable[[BatchRow], None]
) -> tuple[PlanOutcome, tuple[BatchRow, ...]]:
    """Return the best plan of those for several global batches, the smallest that is nearly the best, and all figures.

    `tell` hears of each as it is known.

    Raises:
        InfeasiblePlanError: none has a plan.
        UsageError: as `make_plan`.
    """
    outcomes: dict[int, PlanOutcome] = {}
    rows: list[BatchRow] = []
    for size in batches:
        try:
            outcomes[size] = make_plan(profile, replace(job, global_batch=size), options)
            rows.append(_row(size, outcomes[size], options.objective))
        except InfeasiblePlanError as error:
            if size == batches[-1] and not outcomes:
                raise
            rows.append(BatchRow(global_batch=size, reason=str(error)))
        tell(rows[-1])
    values = {
        row.global_batch: math.inf if row.per_sample is None else row.per_sample for row in rows if not row.reason
    }
    chosen = next(size for size in values if values[size] <= _NEARLY * min(values.values()))
    outcome = outcomes[chosen]
    report = replace(outcome.report, reasons=(*outcome.report.reasons, *_lines(rows, chosen, job.optimizer)))
    return replace(outcome, report=report, search_s=sum(one.search_s for one in outcomes.values())), tuple(rows)


def _row(size: int, outcome: PlanOutcome, objective: Objective) -> BatchRow:
    figures = outcome.strategies.get(outcome.chosen)
    money = None if figures is None or figures.money_per_step is None else figures.money_per_step / size
    per_sample = {
        Objective.THROUGHPUT: 1 / outcome.samples_per_s_predicted,
        Objective.COST: money,
        Objective.ENERGY: None if figures is None else figures.joules_per_sample,
    }
    return BatchRow(
        global_batch=size,
        samples_per_s=outcome.samples_per_s_predicted,
        step_s=outcome.step_s_predicted,
        per_sample=per_sample[objective],
    )


def _lines(rows: Sequence[BatchRow], chosen: int, optimizer: str) -> tuple[str, str]:
    """Say what was compared, and what a larger batch asks of the learning rate."""
    least = rows[0].global_batch
    compared = (
        f"Global batch {chosen}, of those allowed the smallest within {100 * (_NEARLY - 1):.0f} % of the best "
        f"({', '.join(map(str, rows))})."
    )
    linear = optimizer in ("sgd", "momentum")
    times = chosen / least if linear else math.sqrt(chosen / least)
    rule = "in proportion, Goyal et al. 2017" if linear else "by the square root, Malladi et al. 2022"
    advice = (
        f"A learning rate that was good for {least} samples wants about {times:.3g} times as much ({rule}), after a "
        "warm-up; larger batches need more samples for the same loss."
    )
    return compared, advice if chosen != least else f"The learning rate for {least} samples stays as it is."
