"""The third way over slow boundaries: shown always, chosen where it is allowed and better, refused by training."""

from dataclasses import replace

import pytest

from spantrain.app.planning.plan_files import write_plans
from spantrain.app.profiling.describe import described_profile
from spantrain.app.training.requests import new_run
from spantrain.config.artefacts import read_plan, read_plan_report
from spantrain.config.cluster_file import load_preset
from spantrain.core.job import TrainJob
from spantrain.errors import PlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, JobSpec

JOB = JobSpec(global_batch=32)
ASKED = ("spantrain-dp",)


@pytest.fixture(scope="module")
def profile():
    return described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


@pytest.fixture(scope="module")
def shown(profile):
    return make_plan(profile, JOB, PlanOptions(strategies=ASKED))


def test_it_is_shown_and_not_chosen(shown):
    outer = shown.outer
    assert shown.chosen != "outer"
    assert not outer.allowed
    assert "--allow-outer" in outer.reason
    assert sum(group.global_batch for group in outer.groups) == JOB.global_batch
    steps_s = [group.step_s for group in outer.groups]
    rate = outer.inner_steps * JOB.global_batch / (outer.inner_steps * max(steps_s) + outer.exchange_s)
    assert outer.samples_per_s == pytest.approx(rate)
    assert shown.plan.outer is None


def test_each_slow_boundary_has_all_three_ways(shown):
    found = [reason for reason in shown.report.reasons if " | " in reason]
    assert len(found) == 3
    for reason in found:
        assert "a pipeline across it" in reason
        assert "without" in reason
        assert "an outer optimizer every 100 steps" in reason
        assert reason.endswith(("the pipeline is taken.", "left out."))


def test_where_allowed_and_better_every_group_has_its_plan(profile, tmp_path):
    out = tmp_path / "plan.json"
    options = PlanOptions(strategies=ASKED, allow_outer=True)
    outcome = write_plans(make_plan(profile, JOB, options), profile, None, out)
    assert outcome.chosen == "outer"
    whole = read_plan(out)
    assert whole.outer == outcome.outer
    assert {path.name for path in tmp_path.glob("plan.*.json")} == {
        "plan.profile.json",
        *(f"plan.{group.name}.json" for group in whole.outer.groups),
    }
    for group in whole.outer.groups:
        path = tmp_path / f"plan.{group.name}.json"
        local = read_plan(path)
        assert local.outer is None
        assert local.global_batch == group.global_batch
        assert read_plan_report(path).prediction.step_s == pytest.approx(group.step_s)
    with pytest.raises(PlanError, match=r"outer optimizer.*--allow-outer"):
        new_run(out, TrainJob(steps=1), tmp_path / "run", functions=())


def near_and_far():
    """The office and the home joined as well as each is inside; the lab far from them, and slow inside."""
    cluster = load_preset("laptop")
    links = tuple(
        replace(link, bandwidth_bytes_per_s=125e6, latency_s=2e-4) if "lab" not in (link.source, link.target) else link
        for link in cluster.links
    )
    slow = replace(cluster.sites[0], bandwidth_bytes_per_s=1e6, latency_s=20e-3)
    return replace(cluster, links=links, sites=(slow, *cluster.sites[1:]))


def test_groups_are_by_network_not_by_site(tmp_path):
    profile = described_profile(near_and_far(), resolve_model("gpt2-tiny"))
    out = tmp_path / "plan.json"
    outcome = write_plans(
        make_plan(profile, JOB, PlanOptions(strategies=("ddp",), allow_outer=True)), profile, None, out
    )
    assert {group.name for group in outcome.outer.groups} == {"lab#1", "lab#2", "office+home"}
    assert (tmp_path / "plan.office+home.json").exists()
    (site,) = {
        profile.cluster.device_by_name[name].site
        for group in outcome.outer.groups
        if group.name == "lab#2"
        for name in group.devices
    }
    assert site == "lab"
    found = [reason.split(" (")[0] for reason in outcome.report.reasons if " | " in reason]
    assert found == ["lab#1 | lab#2", "lab#1 | office+home", "lab#2 | office+home"]
    assert sum(reason.startswith("office+home is in: by itself") for reason in outcome.report.reasons) == 1


def test_rare_exchanges_are_better_and_limits_hold(profile, shown):
    def planned(**options):
        return make_plan(profile, JOB, PlanOptions(strategies=("ddp",), **options))

    rare, allowed, often = planned(), planned(allow_outer=True), planned(outer_every=1)
    assert often.outer.samples_per_s < rare.outer.samples_per_s == shown.outer.samples_per_s
    assert allowed.chosen == "outer"
    limited = planned(allow_outer=True, constraints=Constraints(max_usd_per_step=1.0))
    assert limited.chosen != "outer"
    assert "money" in limited.outer.reason


def test_one_site_has_no_outer_optimizer(profile):
    cluster = profile.cluster
    constraints = Constraints(leave_out=tuple(site.name for site in cluster.sites[1:]))
    outcome = make_plan(profile, JOB, PlanOptions(strategies=ASKED, constraints=constraints))
    assert outcome.outer is None
    assert not [reason for reason in outcome.report.reasons if " | " in reason]
    with pytest.raises(PlanError, match="at least 1 inner step"):
        replace(PlanOptions(), outer_every=0)
