"""The table of DESIGN section 5: equal stages, seconds over the lower bound."""

from dataclasses import replace

import pytest

from spantrain.core.action import Op
from spantrain.core.span import equal_spans
from spantrain.sim.bounds import pipeline_bound_s
from spantrain.sim.costs import TableCosts
from spantrain.sim.engine import SimulationOptions, simulate

ROWS = [
    ((4, 16, 1.0, 1.0), {"gpipe": 1.16, "1f1b": 1.74, "compact": 1.16, "critical-path": 1.00}),
    ((8, 32, 0.5, 1.0), {"gpipe": 1.15, "1f1b": 1.63, "compact": 1.15, "critical-path": 1.00}),
    ((8, 32, 2.0, 1.0), {"gpipe": 1.48, "1f1b": 2.31, "compact": 1.00, "critical-path": 1.00}),
]


@pytest.mark.parametrize(("case", "expected"), ROWS)
def test_ratio_to_the_bound(case, expected, make_plan) -> None:
    stages, count, transfer_s, latency_s = case
    plan = make_plan([(equal_spans(count, 1), [1.0], [count])] * stages)
    costs = TableCosts(
        sample_s=({Op.FORWARD: 1.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0},) * stages,
        latency_s=(latency_s,) * (stages - 1),
        forward_s=(transfer_s,) * (stages - 1),
        backward_s=(transfer_s,) * (stages - 1),
    )
    bound_s = pipeline_bound_s(plan, costs)
    # The table's static orders send gradients after I, with W right behind.
    options = SimulationOptions(trace=False, split_backward=True)
    for schedule, ratio in expected.items():
        result = simulate(replace(plan, schedule=schedule), costs, steps=1, options=options)
        assert result.pipeline_s / bound_s == pytest.approx(ratio, abs=0.01), schedule
