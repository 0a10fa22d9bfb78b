"""What the search over pools looks for: the least of something within limits."""

import math
from dataclasses import dataclass

import numpy as np

from spantrain.planner.request import Constraints, Objective
from spantrain.planner.strategies.pools.costs import Array

_ROUGHLY = 1.25
"""By how much a guess may be wrong."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Seconds or US dollars of a step, with limits on both."""

    cheapest: bool = False
    """Whether money is what has to be little, and not time."""
    most_step_s: float = math.inf
    most_usd: float = math.inf
    """Per step."""
    most_usd_per_s: float = math.inf

    @staticmethod
    def of(objective: Objective, constraints: Constraints, global_batch: int) -> "Goal":
        """Return the goal of a request; energy is taken for money, which it mostly follows."""
        limits = constraints
        slowest = math.inf if limits.max_step_s is None else limits.max_step_s
        if limits.min_samples_per_s is not None:
            slowest = min(slowest, global_batch / limits.min_samples_per_s)
        return Goal(
            cheapest=objective is not Objective.THROUGHPUT,
            most_step_s=slowest,
            most_usd=math.inf if limits.max_usd_per_step is None else limits.max_usd_per_step,
            most_usd_per_s=math.inf if limits.max_usd_per_hour is None else limits.max_usd_per_hour / 3600,
        )

    @property
    def counts_money(self) -> bool:
        """Whether money matters at all."""
        return self.cheapest or min(self.most_usd, self.most_usd_per_s) < math.inf

    @property
    def has_limits(self) -> bool:
        """Whether anything may be too much."""
        return min(self.most_step_s, self.most_usd, self.most_usd_per_s) < math.inf

    def score(self, step_s: float, usd_per_s: float, usd_of_traffic: float = 0.0) -> tuple[float, float, float]:
        """Return what is compared: by how much limits are broken, the value, then the seconds."""
        usd = usd_per_s * step_s + usd_of_traffic
        broken = max(0.0, step_s / self.most_step_s - 1) + max(0.0, usd / self.most_usd - 1)
        broken += max(0.0, usd_per_s / self.most_usd_per_s - 1)
        return broken, usd if self.cheapest else step_s, step_s

    def value(self, step_s: float, usd: float) -> float:
        """Return what has to be little."""
        return usd if self.cheapest else step_s

    def hopeless(self, least_s: float, least_usd: float, best: tuple[float, float]) -> bool:
        """Whether what takes at least so much breaks a limit, or is no better than what is known, by far.

        `best`: seconds and US dollars of the best plan that keeps all limits.
        """
        if least_s > self.most_step_s * _ROUGHLY or least_usd > self.most_usd * _ROUGHLY:
            return True
        return (least_usd > best[1] * _ROUGHLY) if self.cheapest else (least_s > best[0] * _ROUGHLY)

    def most_step_to_look_at_s(self, best_s: float) -> float:
        """Return the longest step that is worth a closer look, when one that keeps the limits takes so long."""
        return self.most_step_s * _ROUGHLY if self.cheapest else best_s * _ROUGHLY

    def tightness(self, step_s: Array, usd_per_s: Array) -> Array:
        """Return what is used up of the tightest limit; over 1: it is broken."""
        usd = usd_per_s * step_s
        found: Array = np.maximum(step_s / self.most_step_s, usd / self.most_usd)
        return np.maximum(found, usd_per_s / self.most_usd_per_s)

    def values(self, step_s: Array, usd_per_s: Array) -> Array:
        """Return the values of many guesses."""
        return usd_per_s * step_s if self.cheapest else step_s
