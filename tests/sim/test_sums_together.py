"""Gradient sums of several stages at once, over links that they share."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.core.action import Op
from spantrain.core.span import equal_spans
from spantrain.sim.bounds import step_bound_s
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import simulate
from spantrain.sim.sums import ends_together
from testing.made_up_costs import MadeUpCosts
from testing.sites import LATENCY_S, RATE, sites_cluster, sites_profile, two_stages

SECONDS = st.floats(0.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class OneLine(MadeUpCosts):
    """All sums cross one link and share it evenly."""

    def sum_slowdowns(self, stages: frozenset[int]) -> Mapping[int, float]:
        return dict.fromkeys(stages, float(len(stages)))


def evenly(stages: frozenset[int]) -> Mapping[int, float]:
    return dict.fromkeys(stages, float(len(stages)))


@given(sums=st.lists(st.tuples(SECONDS, st.floats(0.01, 100.0)), min_size=1, max_size=6))
def test_one_link_is_never_idle_while_a_sum_waits(sums: list[tuple[float, float]]) -> None:
    end_s = ends_together({stage: [pair] for stage, pair in enumerate(sums)}, evenly)
    free_s = 0.0
    for begin_s, seconds in sorted(sums):
        free_s = max(free_s, begin_s) + seconds
    assert max(end_s.values()) == pytest.approx(free_s)
    for stage, (begin_s, seconds) in enumerate(sums):
        assert begin_s + seconds - 1e-6 <= end_s[stage] <= free_s + 1e-6


@given(sums=st.lists(st.tuples(SECONDS, st.floats(0.01, 100.0)), min_size=1, max_size=6))
def test_sums_that_share_nothing_end_as_if_alone(sums: list[tuple[float, float]]) -> None:
    end_s = ends_together({stage: [pair] for stage, pair in enumerate(sums)}, lambda stages: dict.fromkeys(stages, 1.0))
    assert end_s == {stage: pytest.approx(begin_s + seconds) for stage, (begin_s, seconds) in enumerate(sums)}


def test_stages_whose_rings_leave_one_site_share_its_uplink() -> None:
    """Stage 0 sums over lab and office, stage 1 over lab and home."""
    cluster = sites_cluster(lab_up=RATE)
    plan = two_stages(cluster, "ac", "bd")
    costs = ProfileCosts(sites_profile(cluster), plan)
    piece_s = 60 / 2 / RATE
    assert costs.sum_slowdowns(frozenset({0})) == {0: 1.0}
    both = (LATENCY_S + 2 * piece_s) / (LATENCY_S + piece_s)
    assert costs.sum_slowdowns(frozenset({0, 1})) == {0: pytest.approx(both), 1: pytest.approx(both)}
    wide = ProfileCosts(sites_profile(sites_cluster()), two_stages(sites_cluster(), "ac", "bd"))
    assert wide.sum_slowdowns(frozenset({0, 1})) == {0: 1.0, 1: 1.0}


def test_a_stage_that_sums_alone_is_undisturbed() -> None:
    cluster = sites_cluster(lab_up=RATE)
    plan = two_stages(cluster, "a", "bd")
    assert ProfileCosts(sites_profile(cluster), plan).sum_slowdowns(frozenset({0, 1})) == {0: 1.0, 1: 1.0}


def test_a_step_ends_when_the_line_has_carried_all_sums(make_plan) -> None:
    plan = make_plan([(equal_spans(4, 1), [1.0], [4])] * 3)
    stage = dict.fromkeys((Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT), 1.0)
    table = {"sample_s": (stage,) * 3, "latency_s": (0.0,) * 2, "forward_s": (0.0,) * 2, "backward_s": (0.0,) * 2}
    apart, together = (simulate(plan, kind(**table, sum_s=100.0)) for kind in (MadeUpCosts, OneLine))
    assert apart.step_s == pytest.approx(apart.pipeline_s + 100.0)
    assert 300.0 < together.step_s <= together.pipeline_s + 300.0
    assert step_bound_s(plan, OneLine(**table, sum_s=100.0)) <= together.step_s
