"""Sums of gradients behind the pipeline, or beside its last weight gradients."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.action import Action, Op
from spantrain.core.plan import Plan
from spantrain.core.span import equal_spans
from spantrain.sim.bounds import step_bound_s
from spantrain.sim.costs import TiedSum
from spantrain.sim.engine import simulate
from testing.made_up_costs import MadeUpCosts

CUTS = (0.0, 0.0)


def stage(seconds: float) -> dict[Op, float]:
    return dict.fromkeys((Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT), seconds)


@dataclass(frozen=True, kw_only=True)
class Detailed(MadeUpCosts):
    """Costs that say which stages share parameters, and how sums are cut."""

    tied: tuple[TiedSum, ...] = ()
    buckets: int = 1

    def tied_sums(self) -> tuple[TiedSum, ...]:
        return self.tied

    def gradient_bucket_s(self, stage: int) -> tuple[float, ...]:
        return (self.sum_s / self.buckets,) * self.buckets


def costs(*seconds: float, sort: type[Detailed] = Detailed, **more: object) -> Detailed:
    cut = (0.0,) * (len(seconds) - 1)
    return sort(sample_s=tuple(map(stage, seconds)), latency_s=cut, forward_s=cut, backward_s=cut, **more)


@pytest.fixture
def three(make_plan) -> Plan:
    return make_plan([(equal_spans(4, 1), [1.0], [4])] * 3)


def test_stages_that_share_a_parameter_wait_for_each_other_only(three) -> None:
    # The middle stage still has weight gradients to do when the others are through.
    plain = costs(1.0, 4.0, 1.0)
    result = simulate(three, plain, steps=1)
    pipeline_s = result.pipeline_s
    assert result.orders["s1r0"][-1].op is Op.BACKWARD_WEIGHT
    short = costs(1.0, 4.0, 1.0, tied=(TiedSum(stages=(0, 2), seconds=0.5),), commit_s=0.25)
    assert simulate(three, short, steps=1).step_s == pytest.approx(pipeline_s + 0.25)
    of_all = costs(1.0, 4.0, 1.0, tied=(TiedSum(stages=(0, 1, 2), seconds=0.5),), commit_s=0.25)
    assert simulate(three, of_all, steps=1).step_s == pytest.approx(pipeline_s + 0.5 + 0.25)


def test_shared_sums_follow_each_other(three) -> None:
    one = TiedSum(stages=(0, 2), seconds=100.0)
    both = costs(1.0, 1.0, 1.0, tied=(one, TiedSum(stages=(1, 2), seconds=100.0)))
    alone = costs(1.0, 1.0, 1.0, tied=(one,))
    assert simulate(three, both).step_s == pytest.approx(simulate(three, alone).step_s + 100.0)


@pytest.mark.parametrize("seconds", [(1.0, 4.0, 1.0), (4.0, 1.0, 1.0), (1.0, 1.0, 3.0)])
@pytest.mark.parametrize("stages", [(0, 2), (1, 2), (0, 1, 2), (1,)])
def test_the_bound_holds_with_shared_sums(three, seconds, stages) -> None:
    for length_s in (0.5, 20.0):
        tied = costs(*seconds, tied=(TiedSum(stages=stages, seconds=length_s),), sum_s=0.5, commit_s=0.1)
        for schedule in ("critical-path", "gpipe", "1f1b"):
            assert step_bound_s(three, tied) <= simulate(replace(three, schedule=schedule), tied).step_s + 1e-9
    assert step_bound_s(three, tied) >= 20.0


@dataclass(frozen=True, kw_only=True)
class Overlapped(Detailed):
    """Costs of units that are alike: buckets become whole evenly over the last backward."""

    def bucket_parts(self, device: str, action: Action) -> tuple[float, ...]:
        return tuple((number + 1) / self.buckets for number in range(self.buckets))


def test_sums_begin_beside_the_last_backward_where_costs_say_when(make_plan) -> None:
    plan = make_plan([(equal_spans(2, 1), [1.0], [2])])
    behind = simulate(plan, costs(1.0, sum_s=0.8, buckets=4), steps=1)
    assert behind.step_s == pytest.approx(behind.pipeline_s + 0.8)
    # The last action takes 2 s (B); its gradients come in quarters, and only the last quarter's sum is left behind it.
    table = costs(1.0, sum_s=0.8, buckets=4, sort=Overlapped)
    assert simulate(plan, table, steps=1).step_s == pytest.approx(behind.pipeline_s + 0.2)
    slow = simulate(plan, costs(1.0, sum_s=8.0, buckets=4, sort=Overlapped), steps=1)
    assert slow.step_s == pytest.approx(behind.pipeline_s - 1.5 + 8.0)
    (shown,) = slow.trace.of("s0r0", "sum")
    assert (shown.start_s, shown.end_s) == pytest.approx((behind.pipeline_s - 1.5, slow.step_s))


def test_a_bucket_waits_for_the_slowest_replica(make_plan) -> None:
    plan = make_plan([(equal_spans(2, 2), [1.0, 1.0], [2, 2])])
    table = costs(1.0, sum_s=0.8, buckets=2, slowness={"s0r1": 3.0}, sort=Overlapped)
    result = simulate(plan, table, steps=1)
    # The slow one is half through its B of 6 s when the first bucket can be summed.
    assert result.step_s == pytest.approx(result.pipeline_s + 0.4)


@settings(deadline=None)
@given(data=st.data())
def test_the_bound_holds_with_overlapped_sums(data, plans, table_costs) -> None:
    plan = data.draw(plans)
    plain = data.draw(table_costs(plan))
    buckets = data.draw(st.integers(1, 5))
    table = Overlapped(**{**vars(plain), "sum_s": data.draw(st.floats(0, 50)), "buckets": buckets})
    for schedule in ("critical-path", "compact"):
        step_s = simulate(replace(plan, schedule=schedule), table).step_s
        assert step_bound_s(plan, table) <= step_s + 1e-9
        assert step_s <= simulate(replace(plan, schedule=schedule), Detailed(**vars(table))).step_s + 1e-9


def test_of_one_stage_the_bound_is_the_step(make_plan) -> None:
    plan = make_plan([(equal_spans(8, 8), [1.0, 1.0], [8, 8])])
    for sum_s in (0.5, 4.0, 40.0):
        table = costs(1.0, sum_s=sum_s, buckets=4, sort=Overlapped)
        step_s = simulate(replace(plan, schedule="gpipe"), table).step_s
        assert step_bound_s(plan, table) == pytest.approx(step_s)
        assert step_s < simulate(replace(plan, schedule="gpipe"), costs(1.0, sum_s=sum_s, buckets=4)).step_s
