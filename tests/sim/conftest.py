from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.schedule.layout import CutLayout, minimum_in_flight
from testing.made_up_costs import MadeUpCosts
from testing.plans import plan_of


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    return plan_of


@st.composite
def cuts(draw: st.DrawFn, total: int) -> tuple[Span, ...]:
    edges = sorted({0, total, *draw(st.lists(st.integers(1, max(total - 1, 1)), max_size=8))})
    return tuple(Span(lo, hi) for lo, hi in pairwise(edges) if hi <= total)


@st.composite
def plans_of(draw: st.DrawFn) -> Plan:
    """Any stages, shares and micro-batches; limits from the least that can run to far more than is needed."""
    total = draw(st.integers(1, 20))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        shares = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        rows.append((draw(cuts(total)), [float(share) for share in shares], [total] * len(shares)))
    needed = minimum_in_flight(CutLayout.of(plan_of(rows)))
    slack = draw(st.sampled_from([0, 1, 3, total]))
    return plan_of(
        [
            (spans, shares, [max(1, least + slack) for least in row])
            for (spans, shares, _), row in zip(rows, needed, strict=True)
        ]
    )


@st.composite
def costs_of(draw: st.DrawFn, plan: Plan) -> MadeUpCosts:
    stages = len(plan.stages)
    tenths = st.integers(0, 20).map(lambda value: value / 10)

    def by_cut() -> tuple[float, ...]:
        return tuple(draw(tenths) for _ in range(stages - 1))

    ops = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    return MadeUpCosts(
        sample_s=tuple({op: draw(tenths) for op in ops} for _ in range(stages)),
        latency_s=by_cut(),
        forward_s=by_cut(),
        backward_s=by_cut(),
        slowness={device: draw(st.sampled_from([1.0, 1.5, 3.0])) for device in plan.devices},
        action_overhead_s=draw(st.sampled_from([0.0, 0.01])),
        commit_s=draw(tenths),
        sum_s=draw(tenths),
        update_s=draw(tenths),
    )


@pytest.fixture(scope="session")
def plans() -> st.SearchStrategy[Plan]:
    return plans_of()


@pytest.fixture(scope="session")
def table_costs() -> Callable[[Plan], st.SearchStrategy[MadeUpCosts]]:
    return costs_of
