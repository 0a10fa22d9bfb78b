"""Where the cuts of a chain of stages lie: a dynamic programme over units, on whole rows at a time."""

import math
from collections.abc import Sequence

import numpy as np

from spantrain.planner.strategies.pools.costs import Array


def least_bottleneck(stages: Sequence[Array]) -> float:
    """Return the least that the slowest stage can take; `stages[s][i, j]` are the seconds of units i to j-1.

    Infinite entries are what does not fit, or no units at all.

    >>> least_bottleneck([np.array([[np.inf, 1, 3], [np.inf, np.inf, 2], [np.inf] * 3])] * 2)
    2.0
    """
    best = stages[0][0]
    for stage in stages[1:]:
        best = np.maximum(best[:, None], stage).min(axis=0)
    return float(best[-1])


def least_sum(stages: Sequence[Array], most_s: float) -> tuple[float, tuple[int, ...]]:
    """Return the least sum of the stages' seconds, none of them over a limit, and the first unit of each stage."""
    best, sources = np.where(stages[0][0] <= most_s, stages[0][0], math.inf), []
    for stage in stages[1:]:
        sums = np.where(stage <= most_s, stage, math.inf) + best[:, None]
        source = sums.argmin(axis=0)
        sources.append(source)
        best = sums[source, np.arange(len(source))]
    here, begins = len(best) - 1, [0]
    for source in reversed(sources):
        here = int(source[here])
        begins.insert(1, here)
    return float(best[-1]), tuple(begins)
