"""From cuts, devices and sizes to a plan that fits into memory: spans, shares, limits, recomputation, sums.

Not here: the choice of cuts and devices (`planner.strategies`).
To add a part of plans that every strategy should choose alike: a file here.
"""
