"""What is chosen: the best that keeps to the limits, of those that were asked; and the reasons told for it."""

from dataclasses import replace

import pytest

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.errors import InfeasiblePlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, JobSpec, Objective

JOB = JobSpec(global_batch=32)
ASKED = ("spantrain-dp", "ddp", "eddl", "hetpipe", "single-device")


@pytest.fixture(scope="module")
def profile():
    return described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


@pytest.mark.parametrize(
    ("objective", "of"),
    [
        (Objective.THROUGHPUT, lambda figures: figures.step_s),
        (Objective.COST, lambda figures: figures.money_per_step),
        (Objective.ENERGY, lambda figures: figures.joules_per_sample),
    ],
)
def test_the_chosen_one_has_the_least_of_what_is_wanted(profile, objective, of):
    outcome = make_plan(profile, JOB, PlanOptions(objective=objective, strategies=ASKED))
    assert of(outcome.strategies[outcome.chosen]) == min(of(figures) for figures in outcome.strategies.values())
    assert outcome.plan.strategy == outcome.chosen
    assert outcome.report.prediction.step_s == outcome.step_s_predicted


def test_what_breaks_a_limit_is_not_chosen_and_says_why(profile):
    fastest = make_plan(profile, JOB, PlanOptions(strategies=ASKED))
    wanted = fastest.samples_per_s_predicted * 0.99
    constraints = Constraints(min_samples_per_s=wanted)
    outcome = make_plan(profile, JOB, PlanOptions(objective=Objective.COST, constraints=constraints, strategies=ASKED))
    assert outcome.samples_per_s_predicted >= wanted
    assert outcome.strategies["ddp"].fits
    assert "at least" in outcome.strategies["ddp"].reason


def test_a_hard_limit_names_the_closest(profile):
    constraints = Constraints(max_usd_per_step=1e-12)
    with pytest.raises(
        InfeasiblePlanError, match=r"no plan keeps the constraints.*ddp: .* USD per step, at most 1e-12"
    ):
        make_plan(profile, JOB, PlanOptions(constraints=constraints, strategies=("ddp", "eddl")))


def test_devices_without_a_price_cannot_win_on_cost(profile):
    kinds = tuple(replace(kind, name=f"x-{kind.name}") for kind in profile.cluster.kinds)
    devices = tuple(replace(device, kind=f"x-{device.kind}") for device in profile.cluster.devices)
    cluster = replace(profile.cluster, kinds=kinds, devices=devices)
    unpriced = described_profile(cluster, profile.model)
    with pytest.raises(InfeasiblePlanError, match="has no price"):
        make_plan(unpriced, JOB, PlanOptions(objective=Objective.COST, strategies=("ddp",)))
    assert make_plan(unpriced, JOB, PlanOptions(strategies=("ddp",))).strategies["ddp"].money_per_step is None


def test_every_site_has_one_sentence(profile):
    outcome = make_plan(profile, JOB, PlanOptions(strategies=("spantrain-dp", "single-device")))
    for site in profile.cluster.sites:
        assert sum(reason.startswith(f"Site {site.name} is ") for reason in outcome.report.reasons) == 1
    assert any(reason.startswith("best single site") for reason in outcome.report.reasons)


def test_many_devices_are_not_searched_site_by_site(profile):
    device, cluster = profile.cluster.devices[0], profile.cluster
    names = [f"d{number}" for number in range(40)]
    host = replace(cluster.host_by_name[device.host], devices=tuple(names))
    many = replace(
        cluster,
        sites=(replace(cluster.sites[0], hosts=(host.name,)),),
        hosts=(host,),
        devices=tuple(replace(device, name=name, host=host.name) for name in names),
        links=(),
    )
    outcome = make_plan(
        described_profile(many, profile.model), JobSpec(global_batch=80), PlanOptions(strategies=("ddp",))
    )
    assert outcome.best_single_site.step_s == outcome.step_s_predicted, "the best that was simulated inside one site"
