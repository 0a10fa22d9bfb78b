"""Transfers to several sites at once, over one uplink that may change."""

from pathlib import Path

import pytest

from spantrain.config.traces.network_traces import read_changes
from spantrain.core.action import Direction
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.core.speed import SpeedTrace
from spantrain.errors import UsageError
from spantrain.sim.bounds import pipeline_bound_s
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate
from testing.sites import RATE, sites_cluster, sites_profile, two_stages


def case(first: str = "a", second: str = "cd", **lines: float) -> tuple[Plan, ProfileCosts]:
    cluster = sites_cluster(**lines)
    plan = two_stages(cluster, first, second)
    return plan, ProfileCosts(sites_profile(cluster), plan)


def run(plan: Plan, costs: ProfileCosts, **speeds: tuple[tuple[float, float], ...]) -> SimulationResult:
    traces = {name.replace("_", " "): SpeedTrace(changes=changes) for name, changes in speeds.items()}
    return simulate(plan, costs, options=SimulationOptions(link_speed=traces))


def test_a_transfer_takes_the_link_and_the_lines() -> None:
    _, costs = case(lab_up=RATE, office_down=2 * RATE)
    way = costs.transfer("a", "c", Direction.FORWARD, 0, Span(0, 1))
    assert dict(way.uses) == {"lab->office": 1.0, "lab up": 1.0, "office down": 0.5}


def test_an_uplink_for_two_sites_is_slower_than_two_links() -> None:
    """The same bytes in half of the bandwidth: a step takes at least their time on the uplink more."""
    free, shared = (run(*case(**lines)).step_s for lines in ({}, {"lab_up": RATE}))
    wide = run(*case(lab_up=2 * RATE)).step_s
    assert wide == pytest.approx(free)
    # Eight samples of 20 bytes leave by one line of 100 bytes/s instead of by two.
    assert shared >= free + 0.5 * 8 * 20 / RATE
    assert shared >= pipeline_bound_s(*case(lab_up=RATE))


def test_a_pair_alone_is_as_fast_as_without_the_line() -> None:
    free, shared = (run(*case("a", "c", **lines)).step_s for lines in ({}, {"lab_up": RATE, "office_down": RATE}))
    assert shared == pytest.approx(free)


def test_an_uplink_changes_over_time() -> None:
    plan, costs = case(lab_up=RATE)
    usual, slow, fast = (
        run(plan, costs, **speeds).step_s for speeds in ({}, {"lab_up": ((0.0, 0.5),)}, {"lab_up": ((0.0, 2.0),)})
    )
    assert slow >= usual + 0.5 * 8 * 20 / RATE
    # Twice the uplink is as good as none: then the links themselves are what is full.
    assert fast == pytest.approx(run(*case()).step_s)


def test_a_file_of_changes_names_lines(tmp_path: Path) -> None:
    path = tmp_path / "changes.yaml"
    path.write_text("links:\n  lab up:\n    - {at: 0 s, speed: 0.5}\n")
    plan, costs = case(lab_up=RATE)
    changed = {name.replace(" ", "_"): speed.changes for name, speed in read_changes(path).link_speed.items()}
    assert run(plan, costs, **changed).step_s == run(plan, costs, lab_up=((0.0, 0.5),)).step_s


def test_a_line_that_the_cluster_does_not_have_cannot_change() -> None:
    with pytest.raises(UsageError, match="sends nothing over home up; it uses lab->office, lab up"):
        run(*case(lab_up=RATE), home_up=((0.0, 0.5),))


def test_a_line_that_changes_between_two_steps_is_waited_for_by_nobody() -> None:
    """The change comes long after a step's messages have gone: it neither delays the next step nor is forgotten."""
    plan, costs = case(lab_up=RATE)
    usual_s = run(plan, costs).step_s
    traces = {"lab up": SpeedTrace(changes=((1.5 * usual_s, 0.9), (2.5 * usual_s, 0.5), (50 * usual_s, 1.0)))}
    ends_s = simulate(plan, costs, steps=4, options=SimulationOptions(link_speed=traces)).step_ends_s
    calm_s = simulate(plan, costs, steps=4).step_ends_s
    assert ends_s[0] == pytest.approx(calm_s[0])
    assert all(late >= early - 1e-9 for late, early in zip(ends_s, calm_s, strict=True))
    assert ends_s[3] - ends_s[2] >= usual_s + 0.5 * 8 * 20 / RATE - 1e-9
