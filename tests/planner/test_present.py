"""Plans for the devices that are there: valid, within memory, near the planner's, and said in a phrase."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.app.planning.plan_files import check_fits_profile
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.present import NewPlan, full_plan, light_plan
from spantrain.planner.request import JobSpec
from testing.planner_requests import draw_memory_bytes, draw_sites

BATCH = 8


def planned(profile: Profile, *strategies: str) -> Plan:
    found = make_plan(profile, JobSpec(global_batch=BATCH, optimizer="sgd"), PlanOptions(strategies=strategies)).plan
    return replace(found, generation=7)


def without(plan: Plan, *lost: str) -> list[str]:
    return [device.name for device in plan.cluster.devices if device.name not in lost]


def assert_serves(before: Plan, new: NewPlan, profile: Profile, present: list[str]) -> None:
    """The plan runs on devices that are present, within their memory, and is for the same job as before."""
    plan = new.plan
    assert set(plan.devices) <= set(present)
    changed = {"stages", "hints", "strategy"}
    assert all(getattr(plan, name) == getattr(before, name) for name in plan.__dataclass_fields__.keys() - changed)
    check_fits_profile(plan, profile)
    job = JobSpec(global_batch=BATCH, optimizer="sgd", schedule=plan.schedule)
    assert Evaluator(profile, job)(plan).fits
    assert new.how
    assert "\n" not in new.how


@pytest.fixture(scope="session")
def sites(make_cluster: Callable, make_graph: Callable, make_profile: Callable) -> Callable[..., Profile]:
    def build(sites: dict[str, dict[str, float]], *, blocks: int = 6, **more: Any) -> Profile:
        profile = make_profile(make_cluster(sites, **more), make_graph(blocks=blocks, hidden=512))
        return replace(profile, model=replace(profile.model, family="module"))

    return build


@settings(deadline=None, max_examples=15)
@given(data=st.data())
def test_any_loss(data: st.DataObject, sites: Callable[..., Profile]) -> None:
    profile = sites(draw_sites(data, most_devices=2), memory_bytes=draw_memory_bytes(data))
    strategy = data.draw(st.sampled_from(["auto", "gpipe", "ddp"]))
    try:
        plan = planned(profile, strategy)
    except InfeasiblePlanError:
        return
    lost = data.draw(st.sets(st.sampled_from(plan.devices), max_size=len(plan.devices) - 1))
    present, told = without(plan, *lost), list[str]()
    for make in (light_plan, full_plan):
        try:
            new = make(plan, profile, present, optimizer="sgd")
        except PlanError as error:
            told.append(str(error))
        else:
            assert_serves(plan, new, profile, present)
    assert all("does not fit" in message and name in message for message in told for name in present)
    assert len(told) in (0, 2)


def test_samples_of_a_lost_replica_go_to_the_others(sites: Callable[..., Profile]) -> None:
    profile = sites({"a": {"a0": 0.01, "a1": 0.01, "a2": 0.02}})
    plan = planned(profile, "ddp")
    new = light_plan(plan, profile, ["a0", "a2"], optimizer="sgd")
    assert new.how == "samples of a1 go to a0 and a2"
    assert [stage.units for stage in new.plan.stages] == [stage.units for stage in plan.stages]
    slow, fast = new.plan.stages[0].replicas
    assert fast.sample_share > slow.sample_share


def test_units_of_a_lost_stage_go_to_the_others(sites: Callable[..., Profile]) -> None:
    profile = sites({"a": {"a0": 0.01, "a1": 0.01, "a2": 0.02}})
    plan = planned(profile, "gpipe")
    new = light_plan(plan, profile, without(plan, "a1"), optimizer="sgd")
    assert new.how == "stages cut anew on 2 devices"
    assert [stage.devices for stage in new.plan.stages] == [("a0",), ("a2",)]
    assert len(new.plan.stages[1].units) > len(new.plan.stages[0].units)


def test_refusal_names_devices_and_bytes(sites: Callable[..., Profile]) -> None:
    profile = sites({"a": {"a0": 0.01, "a1": 0.01}}, memory_bytes=400 * 2**20)
    plan = planned(profile)
    assert set(plan.devices) == {"a0", "a1"}
    for make in (light_plan, full_plan):
        with pytest.raises(PlanError, match=r"does not fit on a1.*a1 needs .* has 400"):
            make(plan, profile, ["a1"], optimizer="sgd")


def test_nobody_is_left(sites: Callable[..., Profile]) -> None:
    profile = sites({"a": {"a0": 0.01}})
    with pytest.raises(PlanError, match="no device"):
        light_plan(planned(profile), profile, [], optimizer="sgd")
