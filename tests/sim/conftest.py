from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.spans import Span
from spantrain.core.units import ModelSpec
from spantrain.policy.limits import minimum_in_flight
from spantrain.schedule.layout import Layout
from spantrain.sim.costs import TableCosts

KIND = DeviceKind(
    name="made-up",
    peak_fp16_flop_per_s=1.0,
    peak_fp32_flop_per_s=1.0,
    memory_bytes=1,
    memory_bandwidth_bytes_per_s=1.0,
    power_w=1.0,
    source="a test",
)

Row = tuple[Sequence[Span], Sequence[float], Sequence[int]]
"""Of a stage: micro-batches, and each replica's sample share and in-flight limit."""


def plan_of(rows: Sequence[Row], schedule: str = "compact") -> Plan:
    names = [f"s{stage}r{replica}" for stage, row in enumerate(rows) for replica in range(len(row[1]))]
    stages = tuple(
        Stage(
            first_unit=index,
            end_unit=index + 1,
            replicas=tuple(
                Replica(devices=(f"s{index}r{number}",), sample_share=share, in_flight_limit=limit)
                for number, (share, limit) in enumerate(zip(shares, limits, strict=True))
            ),
            micro_batches=tuple(spans),
        )
        for index, (spans, shares, limits) in enumerate(rows)
    )
    cluster = Cluster(
        name="test",
        kinds=(KIND,),
        sites=(Site(name="here", hosts=("one",), bandwidth_bytes_per_s=1.0, latency_s=0.0),),
        hosts=(Host(name="one", site="here", devices=tuple(names)),),
        devices=tuple(
            Device(name=name, kind="made-up", host="one", site="here", backend="emulated", memory_bytes=1)
            for name in names
        ),
        links=(),
    )
    return Plan(
        cluster=cluster,
        model=ModelSpec(name="none", family="gpt2", config={}, dataset="stdlib-text"),
        global_batch=max(span.hi for span in rows[0][0]),
        dtype="float32",
        stages=stages,
        schedule=schedule,
    )


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
    needed = minimum_in_flight(Layout.of(plan_of(rows)))
    slack = draw(st.sampled_from([0, 1, 3, total]))
    return plan_of(
        [
            (spans, shares, [max(1, least + slack) for least in row])
            for (spans, shares, _), row in zip(rows, needed, strict=True)
        ]
    )


@st.composite
def costs_of(draw: st.DrawFn, plan: Plan) -> TableCosts:
    stages = len(plan.stages)
    tenths = st.integers(0, 20).map(lambda value: value / 10)

    def by_cut() -> tuple[float, ...]:
        return tuple(draw(tenths) for _ in range(stages - 1))

    ops = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    return TableCosts(
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
def table_costs() -> Callable[[Plan], st.SearchStrategy[TableCosts]]:
    return costs_of
