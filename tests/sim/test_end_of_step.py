"""Sums of gradients behind the pipeline, or beside its last weight gradients."""

from dataclasses import dataclass

import pytest

from spantrain.core.action import Op
from spantrain.core.plan import Plan
from spantrain.core.spans import equal_spans
from spantrain.sim.bound import step_bound_s
from spantrain.sim.costs import EndOfStep, TableCosts, TiedSum
from spantrain.sim.engine import SimulationOptions, simulate

CUTS = (0.0, 0.0)


def stage(seconds: float) -> dict[Op, float]:
    return dict.fromkeys((Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT), seconds)


@dataclass(frozen=True, kw_only=True)
class Detailed(TableCosts):
    """Costs that say which stages share parameters, and how sums are cut."""

    tied: tuple[TiedSum, ...] = ()
    buckets: int = 1

    def tied_sums(self) -> tuple[TiedSum, ...]:
        return self.tied

    def gradient_bucket_s(self, stage: int) -> tuple[float, ...]:
        return (self.sum_s / self.buckets,) * self.buckets


def costs(*seconds: float, **more: object) -> Detailed:
    cut = (0.0,) * (len(seconds) - 1)
    return Detailed(sample_s=tuple(map(stage, seconds)), latency_s=cut, forward_s=cut, backward_s=cut, **more)


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
            assert step_bound_s(three, tied) <= simulate(three, tied, schedule=schedule).step_s + 1e-9
    assert step_bound_s(three, tied) >= 20.0


def test_sums_come_behind_the_pipeline_unless_asked_for_otherwise(make_plan) -> None:
    plan = make_plan([(equal_spans(2, 1), [1.0], [2])])
    table = costs(1.0, sum_s=0.8, buckets=4)
    assert isinstance(table, EndOfStep)
    behind = simulate(plan, table, steps=1)
    beside = simulate(plan, table, steps=1, options=SimulationOptions(overlap_gradient_sums=True))
    assert behind.step_s == pytest.approx(behind.pipeline_s + 0.8)
    # The last action takes 2 s (B); its gradients come in quarters, and only the last quarter's sum is left behind it.
    assert beside.step_s == pytest.approx(behind.pipeline_s + 0.2)
    slow = costs(1.0, sum_s=8.0, buckets=4)
    late = simulate(plan, slow, steps=1, options=SimulationOptions(overlap_gradient_sums=True))
    assert late.step_s == pytest.approx(behind.pipeline_s - 1.5 + 8.0)


def test_costs_without_buckets_do_not_overlap(make_plan) -> None:
    plan = make_plan([(equal_spans(2, 1), [1.0], [2])])
    table = TableCosts(sample_s=(stage(1.0),), sum_s=0.8)
    options = SimulationOptions(overlap_gradient_sums=True)
    assert simulate(plan, table, options=options).step_s == simulate(plan, table).step_s
