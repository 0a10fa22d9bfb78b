"""Steps over links that change: what the adapter gains, that it costs nothing when calm, comes back, does not flap."""

import random
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean

import pytest

from spantrain.adaptation.boundary import AutoBoundary
from spantrain.adaptation.network_state import LinkState
from spantrain.adaptation.registry import make_boundary
from spantrain.core.plan import Plan
from spantrain.core.span import equal_spans
from spantrain.core.speed import SpeedTrace
from spantrain.sim.adaptive import AdaptedStep, SimulatedForecast, simulate_adapting, slowed_costs
from spantrain.sim.bounds import step_bound_s
from spantrain.sim.costs import TableCosts
from spantrain.sim.engine import SimulationOptions, simulate
from spantrain.sim.search.search import SearchEffort, taper
from testing import four_sites

LITTLE = SearchEffort(max_runs=40, max_actions=20_000)


def run(
    adapter: str, plan: Plan, costs: TableCosts, links: Mapping[str, SpeedTrace], steps: int = 16
) -> tuple[AdaptedStep, ...]:
    forecast = SimulatedForecast(lambda _plan: costs)
    boundary = make_boundary(adapter, plan, forecast)
    return simulate_adapting(plan, lambda _plan: costs, steps=steps, link_speed=links, boundary=boundary, local=adapter)


def mean_s(done: tuple[AdaptedStep, ...], begin_s: float, end_s: float) -> float:
    """Mean of the steps that are wholly in a time."""
    return fmean(step.step_s for step in done if begin_s <= step.begun_s and step.begun_s + step.step_s <= end_s)


@pytest.fixture(scope="module", params=[0.01, 0.02])
def case(request) -> tuple[Plan, Plan, TableCosts]:
    """The paper's own way (forwards first, equal micro-batches), ours, and their costs."""
    costs = four_sites.costs(request.param)
    plan = four_sites.plan(request.param)
    return replace(plan, schedule="compact"), taper(plan, costs, effort=LITTLE), costs


@pytest.mark.parametrize("left", [0.6, 0.4])
def test_auto_beats_off_and_the_papers_adapter_on_slower_links(case, left):
    compact, ours, costs = case
    calm_s = simulate(ours, costs, steps=1).step_s
    begin_s, end_s = 3.05 * calm_s, 14 * calm_s
    links = four_sites.all_links((begin_s, left), (end_s, 1.0))
    means = {
        name: mean_s(run(adapter, plan, costs, links), begin_s, end_s)
        for name, adapter, plan in (
            ("the paper's pipeline", "off", compact),
            ("the paper's adapter", "paper", compact),
            ("ours, off", "off", ours),
            ("ours, auto", "auto", ours),
        )
    }
    speeds = {(f"s{a}r0", f"s{b}r0"): left for a, b in four_sites.PAIRS}
    bound_s = step_bound_s(ours, slowed_costs(costs, LinkState(speeds=speeds)))
    print(f"links at {left:.0%}:", {name: round(seconds, 3) for name, seconds in means.items()}, f"bound {bound_s:.3f}")
    assert means["ours, auto"] < 0.99 * means["ours, off"]
    assert means["the paper's pipeline"] > 1.3 * means["ours, auto"]
    assert means["the paper's adapter"] > 1.03 * means["ours, auto"]


@pytest.mark.parametrize("left", [0.6, 0.4])
def test_a_run_with_auto_is_as_fast_as_with_the_best_choice_that_stays(case, left):
    """Links are slow for most of the run; one choice is made for just these links."""
    compact, ours, costs = case
    calm_s = simulate(ours, costs, steps=1).step_s
    links = four_sites.all_links((3.05 * calm_s, left), (14 * calm_s, 1.0))
    speeds = {(f"s{a}r0", f"s{b}r0"): left for a, b in four_sites.PAIRS}
    slow = slowed_costs(costs, LinkState(speeds=speeds))
    static = {f"micro-batches of {size}": with_size(compact, size) for size in (1, 2, 4, 8)}
    static |= {"ours for calm links": ours, "ours for slow links": taper(ours, slow, effort=LITTLE)}
    traced = SimulationOptions(trace=False, link_speed=links)
    took = {name: simulate(p, costs, steps=16, options=traced).step_ends_s[-1] for name, p in static.items()}
    auto_s = total_s(run("auto", ours, costs, links))
    print(f"links at {left:.0%}:", {name: round(seconds, 2) for name, seconds in took.items()}, f"auto {auto_s:.2f}")
    assert auto_s <= 1.005 * min(took.values())


def with_size(plan: Plan, size: int) -> Plan:
    spans = equal_spans(plan.global_batch, size)
    return replace(plan, stages=tuple(replace(stage, micro_batches=spans) for stage in plan.stages))


def total_s(done: tuple[AdaptedStep, ...]) -> float:
    return done[-1].begun_s + done[-1].step_s


def test_a_moment_on_slow_links_is_waited_out_and_each_device_does_what_it_can():
    """On and off by turns, three steps each: a plan for slow links would always come too late."""
    costs, plan = four_sites.costs(0.02), four_sites.plan(0.02, samples=32)
    ours = taper(plan, costs, effort=LITTLE)
    calm_s = simulate(ours, costs, steps=1).step_s
    changes = [(3 * calm_s * k, 0.5 if k % 2 else 1.0) for k in range(6)]
    done, off = (run(name, ours, costs, four_sites.all_links(*changes), steps=14) for name in ("auto", "off"))
    assert total_s(done) < total_s(off)
    assert sum(bool(step.reason) for step in done) <= 2
    assert any(step.recuts for step in done)


def test_the_papers_adapter_on_calm_links_changes_what_it_always_does_and_nothing_more(case):
    for plan in case[:2]:
        done = run("paper", plan, case[2], {}, steps=6)
        assert [step.reason for step in done if step.reason] == ["small ones at the end of the step"]
        assert not any(step.recuts for step in done)


def test_the_papers_adapter_halves_on_slow_links_and_is_back_two_steps_after_they_are_calm(case):
    compact, _, costs = case
    calm_s = simulate(compact, costs, steps=1).step_s
    over_s = 8 * calm_s
    done = run("paper", compact, costs, four_sites.all_links((3.05 * calm_s, 0.4), (over_s, 1.0)))
    assert any(step.recuts for step in done)
    assert any("poor link" in step.reason for step in done)
    after = [step for step in done if step.begun_s > over_s]
    assert all(step.plan.stages == done[1].plan.stages and not step.recuts for step in after[3:])
    assert after[-1].step_s == pytest.approx(done[1].step_s, rel=1e-9)


@pytest.mark.parametrize("left", [0.5, 0.4])
def test_back_as_planned_two_steps_after_the_links_are(case, left):
    _, ours, costs = case
    calm_s = simulate(ours, costs, steps=1).step_s
    over_s = 9.5 * calm_s
    done = run("auto", ours, costs, four_sites.all_links((2.5 * calm_s, left), (over_s, 1.0)))
    after = [step for step in done if step.begun_s > over_s]
    assert len(after) > 4
    assert all(step.step_s <= 1.03 * calm_s for step in after[2:])
    assert after[-1].plan.stages == ours.stages


def test_calm_links_cost_nothing_and_nothing_is_simulated(case):
    _, ours, costs = case
    forecast = SimulatedForecast(lambda _plan: costs)
    boundary = AutoBoundary(ours, forecast)
    calm = simulate_adapting(ours, lambda _plan: costs, steps=6, link_speed={}, boundary=boundary, local="auto")
    off = run("off", ours, costs, {}, steps=6)
    assert [step.step_s for step in calm] == pytest.approx([step.step_s for step in off], rel=1e-9)
    assert boundary.simulated == 0


@pytest.mark.parametrize("threshold", [1 / 1.2, 1 / 1.5])
def test_noise_around_a_threshold_changes_the_plan_once_at_most(threshold):
    costs, plan = four_sites.costs(0.02), four_sites.plan(0.02, samples=32)
    step_s = simulate(plan, costs, steps=1).step_s
    changes = []
    for seed in range(20):
        chance = random.Random(seed)
        times = [0.2 * step_s * k for k in range(1, 120)]
        links = four_sites.all_links((0.0, 1.0), *((t, threshold * chance.uniform(0.9, 1.1)) for t in times))
        done = run("auto", plan, costs, links, steps=12)
        changes.append(sum(bool(step.reason) for step in done))
    print(f"changes of plan in 20 seeds of noise around {threshold:.2f}: {changes}")
    assert max(changes) <= 1


def test_an_outage_is_waited_out(case):
    _, ours, costs = case
    links = four_sites.all_links((5.0, 0.0), (35.0, 1.0))
    done = run("auto", ours, costs, links, steps=10)
    assert max(step.step_s for step in done) == pytest.approx(30 + done[0].step_s, rel=0.1)
    assert done[-1].step_s == pytest.approx(done[0].step_s, rel=0.03)


def test_every_change_says_why(case):
    _, ours, costs = case
    done = run("auto", ours, costs, four_sites.all_links((3.0, 0.4)))
    reasons = [step.reason for step in done if step.reason]
    assert reasons
    assert all("links at a part of the planned rate" in reason and "simulated" in reason for reason in reasons)
