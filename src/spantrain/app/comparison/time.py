"""How long a method may be measured: fewer steps where a step takes long, so that a comparison comes to an end."""

WARM_UP_STEPS = 2
_TRIALS = 4
"""Two ways to set a framework up, two steps of each."""


def steps_within(steps: int, step_s: float, most_s: float) -> tuple[int, int]:
    """Return how many steps to run, at least one, and how many of them, the first ones, not to count.

    Steps that are left out are those of a method whose steps are so long that warming up is a small part of one. Where
    one step has the time, a second one is run too, and where two have it, a third: so the first need not count.

    Args:
        steps: that are run where there is time; two or more.
        step_s: what a step takes, as far as that is known.
        most_s: that all may take together.

    >>> [steps_within(8, step_s, 30.0) for step_s in (0.5, 7.0, 14.0, 20.0, 100.0)]
    [(8, 2), (4, 2), (3, 1), (2, 1), (1, 0)]
    """
    least = min(3, 1 + int(most_s / step_s))
    count = max(least, min(steps, int(most_s / step_s)))
    return count, WARM_UP_STEPS if count == steps else min(WARM_UP_STEPS, count // 2)


def worth_trying(step_s: float, most_s: float) -> bool:
    """Whether there is time to try ways for real; else the simulator's word on them has to do."""
    return _TRIALS * step_s <= most_s
