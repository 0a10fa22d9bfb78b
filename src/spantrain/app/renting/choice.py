"""Which machines are taken: what is asked for, what each choice comes to, the frontier of time against money."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import TypeVar

from spantrain.app.renting.candidates import Candidate
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_speed
from spantrain.core.records import Record
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.planner.engine.outcome import PlanOutcome

T = TypeVar("T")
_AS_FAST = 1.03
"""Where time is wanted, the cheapest of those that take at most so many times the least is taken."""
_ANY_AMOUNT = 1e9
"""Tokens or samples that figures are shown for where none were named."""


class RentGoal(Record):
    """What is to be trained, and one limit; none: for as little money as possible.

    Raises:
        PlanError: two limits, or one that needs an amount without one.
    """

    unit: str
    """What is counted: `tokens` or `samples`."""
    per_sample: int
    """How many of them a sample has."""
    amount: float | None = None
    """To be trained on in all."""
    budget_usd: float | None = None
    deadline_h: float | None = None
    min_samples_per_s: float | None = None
    usd_per_million: float | None = None
    """At most, for a million of `unit`."""

    def __post_init__(self) -> None:
        limits = {
            "--budget": self.budget_usd, "--deadline": self.deadline_h, "--min-throughput": self.min_samples_per_s,
            "--usd-per-million": self.usd_per_million,
        }  # fmt: skip
        given = [name for name, value in limits.items() if value is not None]
        if len(given) > 1:
            raise PlanError(f"{' and '.join(given)} are {len(given)} limits; give one of {', '.join(limits)}")
        if not given and self.amount is None:
            raise PlanError(
                f"what is wanted? Give --{self.unit} N (for as little money as possible), and if you like one limit: "
                f"{', '.join(limits)}"
            )
        if self.amount is None and given[0] in ("--budget", "--deadline"):
            raise PlanError(f"{given[0]} needs --{self.unit} N: how much is to be trained on, e.g. --{self.unit} 1e9")
        for name, value in (*limits.items(), (f"--{self.unit}", self.amount)):
            if value is not None and not 0 < value < float("inf"):
                raise PlanError(f"{name} {value:g}: give a number over 0, or leave it out")

    @property
    def shown_amount(self) -> float:
        """What hours and dollars are of."""
        return self.amount or _ANY_AMOUNT

    @property
    def samples(self) -> float:
        """The same, in samples."""
        return self.shown_amount / self.per_sample

    def keeps(self, row: "RentRow") -> bool:
        """Whether a choice keeps the limit."""
        return (
            (self.budget_usd is None or row.usd <= self.budget_usd)
            and (self.deadline_h is None or row.hours <= self.deadline_h)
            and (self.min_samples_per_s is None or row.samples_per_s >= self.min_samples_per_s)
            and (self.usd_per_million is None or row.usd_per_million <= self.usd_per_million)
        )

    @property
    def wants_time(self) -> bool:
        """Whether the fastest that keeps the limit is taken; else the cheapest."""
        return self.budget_usd is not None or self.usd_per_million is not None

    def rank(self, row: "RentRow") -> tuple[bool, float, float]:
        """Return what is compared: the least is taken."""
        if self.keeps(row):
            return (False, row.hours, row.usd) if self.wants_time else (False, row.usd, row.hours)
        return (True, row.usd, row.hours) if self.wants_time else (True, row.hours, row.usd)

    def best(self, rows: Iterable["RentRow"]) -> "RentRow":
        """Return the choice that is taken; where none keeps the limit, the one that comes nearest."""
        rows = list(rows)
        nearest = min(rows, key=self.rank)
        if not self.wants_time or not self.keeps(nearest):
            return nearest
        near = [row for row in rows if self.keeps(row) and row.hours <= _AS_FAST * nearest.hours]
        return min(near, key=lambda row: (row.usd, row.hours))

    def check(self, nearest: "RentRow") -> None:
        """Refuse a choice that does not keep the limit.

        Raises:
            InfeasiblePlanError: says what would do.
        """
        if self.keeps(nearest):
            return
        if self.budget_usd is not None:
            less = 0.99 * self.shown_amount * self.budget_usd / nearest.usd
            does = f"--budget {nearest.usd * 1.005:.4g}, or --{self.unit} {less:.3g}"
            limit = f"within {self.budget_usd:g} USD"
        elif self.usd_per_million is not None:
            does = f"--usd-per-million {nearest.usd_per_million * 1.005:.4g}"
            limit = f"at {self.usd_per_million:g} USD a million {self.unit}"
        elif self.deadline_h is not None:
            does = f"--deadline '{nearest.hours * 1.005:.4g} h'"
            limit = f"within {self.deadline_h:g} h"
        else:
            does = f"--min-throughput {nearest.samples_per_s * 0.995:.4g}"
            limit = f"at {self.min_samples_per_s:g} samples/s"
        what = "cheapest" if self.wants_time else "fastest"
        raise InfeasiblePlanError(
            f"nothing on offer does it {limit}; it would take {does}. The {what} that was found: "
            f"{nearest.candidate.what}, {nearest.usd:.4g} USD and {nearest.hours:.3g} h for {self.shown_amount:.3g} "
            f"{self.unit}"
        )


class RentRow(Record):
    """What a choice of machines comes to."""

    candidate: Candidate
    plan: Plan
    step_s: float
    """Of a step, with nothing lost."""
    samples_per_s: float
    """Over all, with what preemptions lose."""
    lost_ratio: float
    """Part of the time that preemptions cost."""
    hours: float
    rent_usd: float
    egress_usd: float
    usd_per_million: float

    @property
    def usd(self) -> float:
        """All of it."""
        return self.rent_usd + self.egress_usd

    @property
    def how(self) -> str:
        """What runs where, in a few words."""
        counts = {"stage": len(self.plan.stages), "device": len(self.plan.devices)}
        return " on ".join(f"{count} {what}{'s' if count > 1 else ''}" for what, count in counts.items())

    def document(self) -> dict[str, object]:
        """Return it for JSON, without the plan."""
        return {
            "what": self.candidate.what,
            "machines": [
                {
                    "site": part.offer.place, "kind": part.offer.kind, "hosts": part.hosts,
                    "per_host": part.offer.per_host, "market": part.market.value, "source": part.offer.source,
                    "usd_per_hour": part.price.usd_per_hour, "usd_per_kwh": part.price.usd_per_kwh,
                    "preemptions_per_hour": part.price.preemptions_per_hour,
                }
                for part in self.candidate.parts
            ],
            "devices": self.candidate.devices, "plan": self.how, "step_s": self.step_s, "hours": self.hours,
            "samples_per_s": self.samples_per_s, "lost_ratio": self.lost_ratio, "usd": self.usd,
            "rent_usd": self.rent_usd, "egress_usd": self.egress_usd, "usd_per_million": self.usd_per_million,
        }  # fmt: skip


class RentOutcome(Record):
    """What came of a search."""

    goal: RentGoal
    chosen: RentRow
    one_node: RentRow | None
    """The best single machine, whether it keeps the limit or not; None: no single machine can hold the model."""
    frontier: tuple[RentRow, ...]
    """The choices that no other beats in both time and money, the cheapest first."""
    planned: int
    """How many sets of machines were planned for."""
    looked_at: int
    cluster_text: str
    """The cluster file of what is chosen."""
    profile: Profile
    """Of that cluster, by data sheets."""
    in_full: PlanOutcome
    """Its plan, searched for as long as `spantrain plan` does."""

    def reasons(self) -> list[str]:
        """Say what the choice is better than."""
        own, one = self.chosen, self.one_node
        if one is None:
            lines = ["No single machine on offer can hold the model."]
        elif one.candidate == own.candidate:
            lines = ["One good node alone is the choice: nothing that is joined keeps the limit and is better."]
        else:
            kept = "" if self.goal.keeps(one) else ", which does not keep the limit"
            lines = [
                f"One good node alone: {one.candidate.what}: {one.hours:.3g} h, {one.usd:.4g} USD{kept}; the choice "
                f"takes {_against(own.hours, one.hours, 'time')} and {_against(own.usd, one.usd, 'money')}."
            ]
        if own.lost_ratio:
            lines.append(f"Preemptions cost {own.lost_ratio:.1%} of the time: hours and dollars hold that.")
        if own.egress_usd:
            lines.append(f"Traffic between places costs {own.egress_usd:.3g} USD of {own.usd:.4g}.")
        lines.append(
            f"{self.looked_at} sets of machines were looked at, {self.planned} planned for (by data sheets and "
            f"described networks: nothing was measured); the choice does {format_speed(own.samples_per_s)} samples/s."
        )
        return lines


def _against(own: float, other: float, what: str) -> str:
    if own == other or (other and 0.995 < own / other < 1.005):
        return f"as much {what}"
    if not own or not other:
        return f"no {what}" if other else f"{what} where that takes none"
    ratio = own / other
    return f"{other / own:.3g} times less {what}" if ratio < 1 else f"{ratio:.3g} times the {what}"


def frontier(rows: Sequence[RentRow]) -> tuple[RentRow, ...]:
    """Return the rows that no other beats in both hours and dollars, the cheapest first."""
    return tuple(next(layers((row.usd, row.hours, row) for row in rows), ()))


def layers(costs: Iterable[tuple[float, float, T]]) -> Iterator[list[T]]:
    """Yield what nothing else beats in both costs, then what nothing of the rest does; in each by the first cost.

    >>> list(layers([(1, 3, "slow"), (2, 1, "fast"), (2, 4, "neither")]))
    [['slow', 'fast'], ['neither']]
    """
    left = sorted(costs, key=itemgetter(0, 1))
    while left:
        least = list(accumulate((second for _, second, _ in left), min, initial=math.inf))
        yield [one for before, (_, second, one) in zip(least, left, strict=False) if second < before]
        left = [one for before, one in zip(least, left, strict=False) if one[1] >= before]
