"""The runtime's own costs are found again in the trace of a run that has them."""

from dataclasses import replace

import pytest

from spantrain.app.profiling.rehearsal import costs_from, rehearsal_plan
from spantrain.config.cluster_file import load_preset
from spantrain.config.files.json_codec import from_json, to_json
from spantrain.core.profile import Profile, RuntimeCosts
from spantrain.errors import ConfigError
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import simulate
from testing.models.graphs import graph_of

DEVICES = ("lab-0", "office-nx", "home-nano")


@pytest.fixture(scope="module")
def profile(law_profile) -> Profile:
    """Of the rehearsal's model, at its speed; nothing shared between stages, whose sums would be at the step's end."""
    from spantrain.models.catalog.catalog import resolve_model

    model = resolve_model("gpt2-tiny")
    plan = rehearsal_plan(load_preset("laptop"), DEVICES, graph_of(model))
    whole = law_profile(plan.cluster, model)
    units = tuple(replace(unit, shared=()) for unit in whole.graph.units)
    return replace(whole, graph=replace(whole.graph, units=units))


NOTHING = RuntimeCosts(action_s=0.0, message_s=0.0, step_end_s=0.0)


def test_costs_are_found_again(profile):
    plan = rehearsal_plan(profile.cluster, DEVICES, profile.graph)
    true = RuntimeCosts(action_s=0.4e-3, message_s=1.5e-3, step_end_s=12e-3)
    result = simulate(plan, ProfileCosts(replace(profile, runtime=true), plan), steps=8)
    found = costs_from(result.trace, plan, profile.graph, profile.link_by_pair)
    assert found.action_s == pytest.approx(true.action_s)
    assert found.message_s == pytest.approx(true.message_s)
    assert found.step_end_s == pytest.approx(true.step_end_s + true.action_s), "until the first action starts"


def test_a_run_that_costs_nothing(profile):
    plan = rehearsal_plan(profile.cluster, DEVICES, profile.graph)
    result = simulate(plan, ProfileCosts(replace(profile, runtime=NOTHING), plan), steps=8)
    found = costs_from(result.trace, plan, profile.graph, profile.link_by_pair)
    assert (found.action_s, found.message_s, found.step_end_s) == pytest.approx((0, 0, 0), abs=1e-9)


def test_real_computation_hides_in_the_emulated_time(profile):
    plan = rehearsal_plan(profile.cluster, DEVICES, profile.graph)
    assert plan.devices == DEVICES
    assert profile.cluster.emulated_speed == pytest.approx(plan.cluster.emulated_speed, rel=0.01)
    costs = ProfileCosts(profile, plan)
    from spantrain.core.action import Action

    slowest_s = max(costs.action_s(name, Action.parse(f"{n}F[0:4]")) for n, name in enumerate(DEVICES))
    assert slowest_s == pytest.approx(30e-3, rel=0.05)


def test_a_prediction_holds_what_the_runtime_takes(profile):
    plan = rehearsal_plan(profile.cluster, DEVICES, profile.graph)
    bare = simulate(plan, ProfileCosts(replace(profile, runtime=NOTHING), plan))
    true = RuntimeCosts(action_s=0.0, message_s=1.5e-3, step_end_s=12e-3)
    full = simulate(plan, ProfileCosts(replace(profile, runtime=true), plan))
    assert full.step_s == pytest.approx(bare.step_s + 4 * true.message_s + true.step_end_s), "two hops up, two down"


def test_in_a_file(profile):
    measured = replace(profile, runtime=RuntimeCosts(action_s=1e-4, message_s=1e-3, step_end_s=1e-2))
    assert from_json(Profile, to_json(measured), "here") == measured
    old = to_json(profile)
    del old["runtime"]
    assert from_json(Profile, old, "here").runtime is None
    wrong = to_json(measured)
    wrong["runtime"]["message_s"] = -1.0
    with pytest.raises(ConfigError, match=r"runtime.*message_s must be at least 0"):
        from_json(Profile, wrong, "here")
