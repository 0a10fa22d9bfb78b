"""Gradient sums of several stages that slow each other down while they overlap in time."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

__all__ = ["SharedSums", "ends_together"]

Slowdowns = Callable[[frozenset[int]], Mapping[int, float]]
"""Given the stages whose sums run at once: how many times as long each takes then."""


@runtime_checkable
class SharedSums(Protocol):
    """What costs may say besides: how sums of stages slow each other down. Those of costs that do not, do not."""

    def sum_slowdowns(self, stages: frozenset[int]) -> Mapping[int, float]:
        """Return by stage how many times as long its sum takes while those of all these stages run."""


def ends_together(start_s: Mapping[int, float], alone_s: Mapping[int, float], slowdowns: Slowdowns) -> dict[int, float]:
    """Return when each stage's sum ends, given when it begins and how long it would take alone.

    >>> twice = lambda stages: dict.fromkeys(stages, float(len(stages)))
    >>> ends_together({0: 0.0, 1: 3.0}, {0: 4.0, 1: 4.0}, twice)
    {0: 5.0, 1: 8.0}
    """
    waiting = sorted(start_s, key=lambda stage: (start_s[stage], stage), reverse=True)
    left_s: dict[int, float] = {}
    end_s: dict[int, float] = {}
    now_s = 0.0
    while waiting or left_s:
        if not left_s:
            now_s = start_s[waiting[-1]]
        while waiting and start_s[waiting[-1]] <= now_s:
            stage = waiting.pop()
            left_s[stage] = alone_s[stage]
        slower = slowdowns(frozenset(left_s)) if len(left_s) > 1 else dict.fromkeys(left_s, 1.0)
        first_s = min(now_s + left_s[stage] * slower[stage] for stage in left_s)
        until_s = min(first_s, start_s[waiting[-1]]) if waiting else first_s
        ended = [stage for stage in left_s if now_s + left_s[stage] * slower[stage] <= until_s]
        for stage in left_s:
            left_s[stage] -= (until_s - now_s) / slower[stage]
        for stage in ended:
            end_s[stage] = until_s
            del left_s[stage]
        now_s = until_s
    return dict(sorted(end_s.items()))
