"""Explanations: the what-if that is said to help does help, and the ones that do not are not named."""

from dataclasses import replace

import pytest

from spantrain.app.planning.explain import explain_plan, with_faster_link, with_more_of
from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.errors import PlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.engine.predict import predict
from spantrain.planner.request import JobSpec


@pytest.fixture(scope="module")
def case():
    profile = described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))
    plan = make_plan(profile, JobSpec(global_batch=32), PlanOptions(strategies=("spantrain-dp",))).plan
    return plan, profile


def slow_line(cluster, factor):
    links = tuple(replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor) for link in cluster.links)
    return replace(cluster, links=links)


def test_helps_are_better_and_sorted(case):
    found = explain_plan(*case)
    assert found.step_s == pytest.approx(predict(*case).step_s)
    assert found.bound_s <= found.step_s * (1 + 1e-9)
    steps = [help_.step_s for help_ in found.helps]
    assert steps == sorted(steps)
    assert all(step_s < found.step_s for step_s in steps)
    assert found.tried > len(found.helps)
    assert len(found.stages) == len(case[0].stages)


def test_a_slow_line_is_found_to_limit(case):
    plan, profile = case
    cluster = slow_line(profile.cluster, 0.02)
    found = explain_plan(replace(plan, cluster=cluster), replace(profile, cluster=cluster))
    assert found.limited_by.startswith(("link lab->home", "link home->lab"))
    assert found.helps[0].kind == "link"
    assert "lab <-> home" in found.helps[0].change
    assert max(load.busy_ratio for load in found.links.values()) > 0.5


def test_doubling_a_link_halves_its_seconds_only(case):
    _, profile = case
    faster = with_faster_link(profile, ("lab", "home"), 2.0)
    assert faster.link("home-nano", "lab-1").bandwidth_bytes_per_s == 2 * 2.5e6
    assert faster.link("lab-0", "office-nx") == profile.link("lab-0", "office-nx")


def test_one_more_device_takes_its_part(case):
    plan, profile = case
    template = plan.stages[0].replicas[0]
    more, other = with_more_of(plan, profile, 0, template)
    assert len(more.stages[0].replicas) == len(plan.stages[0].replicas) + 1
    assert len(other.cluster.devices) == len(profile.cluster.devices) + 1
    name = "more-1"
    assert sum(span.size for span in more.stages[0].replica_spans(len(more.stages[0].replicas) - 1)) > 0
    assert predict(more, other).utilisation[name] > 0


def test_another_models_plan_is_refused(case):
    plan, profile = case
    with pytest.raises(PlanError, match=r"of other .*the profile has gpt2-tiny"):
        explain_plan(replace(plan, model=replace(plan.model, name="other")), profile)
