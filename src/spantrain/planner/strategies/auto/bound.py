"""Seconds that no order of work can beat, for many plans at once.

The terms are those of DESIGN section 5 for unequal stages. Signs: stages s = 0 .. P-1; F, I, W are the least seconds of
one span on any replica of a stage; `up` and `down` those of the messages of one span; run, run_fi, run_f, run_i the
seconds of a whole step on the busiest replica. Whatever the order of work:

- arrival_s = sum over t < s of F_t + up_t: nothing is at stage s before;
- way_s = sum over t < s of down_t + I_t: what follows the end of an I of stage s until the last I of stage 0 that
  needs it; then comes its W, what is left of the gradient sum of stage 0, and that of what it shares with the last
  stage (`tied`), together `end`;
- after_s: what follows the end of an F of stage s, through the last stage, until that last I;
- gradient_s: the first gradient at stage s.

A replica does one action at a time, so the step takes at least: arrival_s + run + sum_s (what is left of the gradient
sum of s behind its last action, beside which it begins at the earliest); arrival_s + run_fi + way_s + end (some I is
last, its way down follows); arrival_s + run_f + after_s + end; gradient_s + run_i + way_s + end. A link that is busy
for so long, in the same way. A span is held by its replica from F to W, for at least round_s = gradient_s - arrival_s
+ I + W; n samples of which at most K are held at once need n * round_s / K seconds from arrival_s on, and if they come
in m equal spans of which k fit, ceil(m / k) * round_s. Afterwards comes the barrier.
"""

from collections.abc import Sequence

import numpy as np

from spantrain.planner.strategies.auto.hops import Array


def pipeline_bounds_s(parts: Sequence[Array], hops: Sequence[Array], tied_s: Array | float) -> Array:
    """Return the least seconds until all gradients are summed; `tied_s` those of what first and last stage share.

    `parts[s][field]` and `hops[s][field]` (one fewer) are arrays of one shape, one entry for each plan; fields as in
    `auto_parts`. Infinite where a part does not fit.
    """
    count = len(parts)
    arrival: list[Array] = [np.zeros_like(parts[0][0])]
    way: list[Array] = [arrival[0]]
    for part, hop in zip(parts[:-1], hops, strict=True):
        arrival.append(arrival[-1] + part[0] + hop[0])
        way.append(way[-1] + hop[1] + part[1])
    end = parts[0][2] + parts[0][7] + tied_s
    best = arrival[0]
    gradient = arrival[-1] + parts[-1][0]
    after = parts[-1][1] + way[-1]
    for s in range(count - 1, -1, -1):
        part = parts[s]
        if s < count - 1:
            upper, hop = parts[s + 1], hops[s]
            first_input = gradient + upper[1]
            best = np.maximum(best, arrival[s] + part[0] + hop[2] + hop[4] + upper[0] + after + end)
            best = np.maximum(best, first_input + hop[3] + hop[5] + part[1] + way[s] + end)
            gradient = first_input + hop[1]
            after = np.maximum(hop[0] + upper[0] + after, part[1] + way[s])
        summed = part[7] if 0 < s < count - 1 else part[7] + tied_s
        best = np.maximum(best, arrival[s] + part[3] + summed)
        tail = np.maximum(part[4] + way[s], part[5] + after)
        best = np.maximum(best, arrival[s] + tail + end)
        best = np.maximum(best, gradient + part[6] + way[s] + end)
        round_s = gradient - arrival[s] + part[1] + part[2]
        best = np.maximum(best, arrival[s] + part[8] * round_s)
    return best


def values(
    parts: Sequence[Array], hops: Sequence[Array], per_second: Array | float, step_s: Array, *, counts_more: bool
) -> Array:
    """Return the least value of the objective of plans whose steps take at least so long."""
    found: Array = per_second * step_s
    if counts_more:
        found = found + sum(part[9] for part in parts) + sum(hop[6] for hop in hops)
    return found
