"""Constraints: what contradicts is told at once, in one message; what is kept is kept."""

import pytest

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, Evaluation, JobSpec, Objective, Quota

LAPTOP = load_preset("laptop")


@pytest.mark.parametrize(
    ("constraints", "says"),
    [
        ({"leave_out": ("hme",)}, ["cannot leave out hme", "laptop has"]),
        ({"keep": ("lab-9",)}, ["cannot keep lab-9"]),
        ({"keep": ("lab",), "leave_out": ("lab",)}, ["lab is both to be kept and left out"]),
        ({"keep": ("lab-0",), "leave_out": ("lab",)}, ["lab-0 is to be kept and its site lab left out"]),
        ({"keep": ("lab",), "leave_out": ("lab-0", "lab-1")}, ["lab is to be kept and all its devices left out"]),
        ({"quotas": (Quota(kind="tx2", count=3),)}, ["a quota of 3 tx2: laptop has 2 of them"]),
        ({"quotas": (Quota(kind="tx2", count=2, site="home"),)}, ["a quota of 2 tx2 in home: laptop has 1"]),
        ({"keep": ("lab-0", "lab-1"), "quotas": (Quota(kind="xavier-nx", count=1),)}, ["2 xavier-nx are to be kept"]),
        ({"leave_out": ("lab", "office", "home")}, ["leaves no device"]),
        ({"leave_out": ("hme",), "keep": ("lab-9",)}, ["cannot leave out hme", "cannot keep lab-9"]),
    ],
)
def test_contradictions_are_refused(constraints, says):
    with pytest.raises(PlanError) as caught:
        Constraints(**constraints).allowed_devices(LAPTOP)
    for text in says:
        assert text in str(caught.value)


def test_quotas_keep_what_is_to_be_kept_first():
    quota = Quota(kind="xavier-nx", count=1)
    kept = Constraints(quotas=(quota,), keep=("office-nx",)).devices_within_quotas(LAPTOP)
    assert kept == ("office-nx", "office-tx2", "home-tx2", "home-nano")
    assert Constraints(quotas=(quota,)).devices_within_quotas(LAPTOP)[0] == "lab-0"


@pytest.mark.parametrize("name", ["min_samples_per_s", "max_step_s", "max_usd_per_step", "max_usd_per_hour"])
def test_limits_are_positive(name):
    with pytest.raises(PlanError, match=name):
        Constraints(**{name: 0.0})


def test_limits_on_time_and_money_are_told_with_their_numbers():
    found = Evaluation(
        step_s=2.0,
        samples_per_s=16.0,
        usd_per_step=0.01,
        joules_per_sample=3.0,
        bubble_ratio=0.1,
        peak_bytes={},
        over_memory=(),
    )
    assert found.broken(Constraints()) == []
    broken = found.broken(
        Constraints(min_samples_per_s=20.0, max_step_s=1.0, max_usd_per_step=0.001, max_usd_per_hour=10.0)
    )
    assert [text.split(",")[0] for text in broken] == [
        "16 samples/s",
        "2 s per step",
        "0.01 USD per step",
        "18 USD per hour",
    ]
    assert [found.value(objective) for objective in Objective] == [2.0, 0.01, 3.0]


def test_a_limit_on_time_that_a_plan_keeps_is_kept_whatever_is_to_be_least():
    """Where only interleaved plans keep it, too; a limit that none keeps is told with the one that is nearest."""
    profile, job = described_profile(LAPTOP, resolve_model("gpt2-tiny")), JobSpec(global_batch=4)
    fastest = make_plan(profile, job).samples_per_s_predicted
    limit = Constraints(min_samples_per_s=0.99 * fastest)
    assert make_plan(profile, job, PlanOptions(constraints=limit)).samples_per_s_predicted == pytest.approx(fastest)
    cheap = make_plan(profile, job, PlanOptions(constraints=limit, objective=Objective.COST))
    assert cheap.samples_per_s_predicted >= 0.99 * fastest
    beyond = PlanOptions(constraints=Constraints(min_samples_per_s=2 * fastest), objective=Objective.COST)
    with pytest.raises(InfeasiblePlanError, match=f"the closest: auto: {fastest:.4g} samples/s, at least"):
        make_plan(profile, job, beyond)
