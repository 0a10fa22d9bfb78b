"""Plans for the devices that are there: valid, within memory, near the planner's, and said in a phrase."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.app.planning.plan_files import check_fits_profile
from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.span import equal_spans
from spantrain.cost.memory import MemoryCost, framework_bytes
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.formats.registry import WireFormat
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.present import NewPlan, full_plan, light_plan
from spantrain.planner.request import JobSpec
from testing.planner_requests import draw_memory_bytes, draw_sites

BATCH = 8
JOB = JobSpec(global_batch=32, optimizer="sgd")


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
    job = JobSpec(global_batch=plan.global_batch, optimizer="sgd", schedule=plan.schedule)
    assert Evaluator(profile, job)(plan).fits
    assert new.how
    assert "\n" not in new.how


@pytest.fixture(scope="session")
def sites(make_cluster: Callable, make_graph: Callable, make_profile: Callable) -> Callable[..., Profile]:
    def build(sites: dict[str, dict[str, float]], *, blocks: int = 6, **more: Any) -> Profile:
        profile = make_profile(make_cluster(sites, **more), make_graph(blocks=blocks, hidden=512))
        return replace(profile, model=replace(profile.model, family="module"))

    return build


@pytest.fixture(scope="module")
def laptop() -> Profile:
    return described_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


@pytest.fixture(scope="module")
def best(laptop: Profile) -> Plan:
    """The plan of `JOB` for all devices of the laptop."""
    return make_plan(laptop, JOB).plan


def pipeline(profile: Profile, *rows: tuple[int, tuple[str, ...]], **more: Any) -> Plan:
    """Stages by their end unit and replicas, members of a group joined by +; four micro-batches of four samples."""
    stages, first = [], 0
    for end, names in rows:
        groups = [tuple(name.split("+")) for name in names]
        replicas = (
            Replica(devices=own, sample_share=1.0, in_flight_limit=16, tp_shares=(1.0,) * len(own)) for own in groups
        )
        stages.append(Stage(first_unit=first, end_unit=end, replicas=tuple(replicas), micro_batches=equal_spans(16, 4)))
        first = end
    plan = Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=16,
        dtype=profile.dtype,
        stages=tuple(stages),
        schedule="critical-path",
        generation=7,
    )
    return replace(plan, **more)


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_any_loss_and_return(data: st.DataObject, sites: Callable[..., Profile]) -> None:
    profile = sites(draw_sites(data, most_devices=2), memory_bytes=draw_memory_bytes(data))
    strategy = data.draw(st.sampled_from(["auto", "gpipe", "ddp", "spantrain"]))
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
            again = light_plan(new.plan, profile, without(plan), optimizer="sgd")
            assert_serves(plan, again, profile, without(plan))
    assert len(told) in (0, 2)
    assert all("does not fit" in message and name in message for message in told for name in present)


def test_laptop_loses_a_device_and_gets_it_back(laptop: Profile, best: Plan) -> None:
    plan, evaluate = best, Evaluator(laptop, JOB)
    present = without(plan, plan.devices[0])
    light, full = (make(plan, laptop, present, optimizer="sgd").plan for make in (light_plan, full_plan))
    assert evaluate(full).step_s >= 0.95 * evaluate(light).step_s
    back = light_plan(light, laptop, without(plan), optimizer="sgd").plan
    assert evaluate(plan).step_s >= 0.93 * evaluate(back).step_s


def test_what_a_plan_costs_besides_its_steps_counts(laptop: Profile, best: Plan) -> None:
    """Here stages whose first device is the slowest of all are dear."""

    def dear(after: Plan) -> float:
        return 10.0 * sum(stage.devices[0] == "home-nano" for stage in after.stages)

    present = without(best, "home-tx2")
    free, other = (light_plan(best, laptop, present, optimizer="sgd", besides=own).plan for own in (lambda _: 0, dear))
    assert dear(free) > 0
    assert dear(other) == 0


def test_an_interleaved_pipeline_that_loses_a_device_goes_on_with_a_stage_for_each(laptop: Profile, best: Plan) -> None:
    plan = best
    assert plan.interleaved
    assert light_plan(plan, laptop, without(plan), optimizer="sgd") == NewPlan(plan=plan, how="nothing changes")
    lost = plan.stages[1].devices[0]
    new = light_plan(plan, laptop, without(plan, lost), optimizer="sgd")
    assert re.match("stages cut anew on|devices change stages on", new.how)
    assert not new.plan.interleaved
    assert_serves(plan, new, laptop, without(plan, lost))


def test_samples_of_a_lost_replica_go_to_the_others(sites: Callable[..., Profile]) -> None:
    profile = sites({"a": {"a0": 0.01, "a1": 0.01, "a2": 0.02}})
    plan = planned(profile, "ddp")
    new = light_plan(plan, profile, ["a0", "a2"], optimizer="sgd")
    assert new.how == "samples of a1 go to a0 and a2"
    assert [stage.units for stage in new.plan.stages] == [stage.units for stage in plan.stages]
    slow, fast = new.plan.stages[0].replicas
    assert fast.sample_share > slow.sample_share


def test_units_of_a_lost_stage_go_to_the_others(sites: Callable[..., Profile]) -> None:
    profile = sites({"a": {"a0": 0.01, "a1": 0.01, "a2": 0.02}}, memory_bytes=400 * 2**20)
    plan = pipeline(profile, (3, ("a0",)), (5, ("a1",)), (8, ("a2",)))
    new = light_plan(plan, profile, ["a0", "a2"], optimizer="sgd")
    assert new.how == "stages cut anew on 2 devices"
    assert [stage.devices for stage in new.plan.stages] == [("a0",), ("a2",)]
    assert_serves(plan, new, profile, ["a0", "a2"])


def test_nothing_changes_where_nothing_is_gained(laptop: Profile) -> None:
    plan = make_plan(laptop, JobSpec(global_batch=16), PlanOptions(strategies=("spantrain",))).plan
    new = light_plan(plan, laptop, without(plan), optimizer="adamw")
    assert new == NewPlan(plan=plan, how="nothing changes")


def test_a_device_with_less_and_less_memory_is_eased_and_in_the_end_left_out(laptop: Profile, best: Plan) -> None:
    """Fewer samples at once, units computed again, other cuts: whatever it is, it fits, and is said."""
    name, profile, plan, said = "office-nx", laptop, best, list[str]()
    fixed = framework_bytes(laptop.cluster.device_by_name[name].backend)
    while name in plan.devices:
        peak = MemoryCost(profile, "sgd", plan.dtype).plan_peak_bytes(plan)[name]
        less = {name: fixed + int(0.8 * (peak - fixed))}
        profile = replace(profile, cluster=profile.cluster.with_memory(less))
        new = light_plan(plan, profile, without(plan), optimizer="sgd")
        assert Evaluator(profile, JOB)(new.plan).fits
        assert new.how != "nothing changes"
        plan = new.plan
        said.append(new.how)
    assert re.match(r"at most \d+ samples at once on .*office-nx and office-tx2, \d+ before", said[1])
    assert any(re.search(r"\d units? computed again on office-nx", how) for how in said)
    assert len(said) > 5


def test_a_device_that_comes_takes_the_place_of_a_slow_stage_or_beside_one(laptop: Profile) -> None:
    plan, present = pipeline(laptop, (14, ("office-nx",))), ["office-nx", "lab-0", "lab-1"]
    new = light_plan(plan, laptop, present, optimizer="sgd")
    assert_serves(plan, new, laptop, present)
    assert {"lab-0", "lab-1"} <= set(new.plan.devices)
    assert new.how == f"devices change stages on {len(new.plan.devices)} devices, lab-0 and lab-1 among them"


def test_many_alike_devices_lose_one_quickly_and_keep_their_places(sites: Callable[..., Profile]) -> None:
    profile = sites({site: {f"{site}{k}": 0.01 for k in range(24)} for site in ("a", "b")})
    rows = [(end, tuple(f"{site}{k}" for k in range(24))) for end, site in ((4, "a"), (8, "b"))]
    plan = pipeline(profile, *rows)
    spans = equal_spans(96, 48)
    stages = tuple(replace(stage, micro_batches=spans) for stage in plan.stages)
    plan = replace(plan, stages=stages, global_batch=96)
    new = light_plan(plan, profile, without(plan, "b3"), optimizer="sgd")
    assert_serves(plan, new, profile, without(plan, "b3"))
    assert set(new.plan.stages[0].devices) == {f"a{k}" for k in range(24)}
    assert new.how in ("samples of b3 go to b0, b1 and 21 more", "stages cut anew on 47 devices")


def test_only_devices_that_the_plan_did_not_use_are_left(laptop: Profile) -> None:
    plan = pipeline(laptop, (14, ("office-nx",)))
    new = light_plan(plan, laptop, ["lab-0"], optimizer="sgd")
    assert_serves(plan, new, laptop, ["lab-0"])
    assert new.how == "planned anew on 1 device"


def test_a_group_goes_on_without_a_member(laptop: Profile) -> None:
    plan = pipeline(laptop, (6, ("lab-0+lab-1",)), (14, ("office-nx",)))
    new = light_plan(plan, laptop, ["lab-1", "office-nx"], optimizer="sgd")
    assert_serves(plan, new, laptop, ["lab-1", "office-nx"])
    assert all(len(replica.devices) == 1 for stage in new.plan.stages for replica in stage.replicas)
    whole = light_plan(plan, laptop, ["lab-0", "lab-1"], optimizer="sgd")
    assert_serves(plan, whole, laptop, ["lab-0", "lab-1"])
    assert whole.plan.stages[0].replicas[0].devices == ("lab-0", "lab-1")


@pytest.mark.parametrize("first", ["lab-0+lab-1", "lab-0"])
def test_cuts_between_sites_stay_rounded(laptop: Profile, first: str) -> None:
    plan = pipeline(laptop, (4, (first,)), (8, ("office-nx",)), (14, ("home-tx2",)))
    rounded = [replace(stage, wire_format=WireFormat.BFLOAT16) for stage in plan.stages[:-1]]
    plan = replace(plan, stages=(*rounded, plan.stages[-1]))
    new = light_plan(plan, laptop, [*first.split("+"), "home-tx2"], optimizer="sgd")
    sites = [{laptop.cluster.device_by_name[name].site for name in stage.devices} for stage in new.plan.stages]
    assert len(new.plan.stages) == 1 or sites[0] != sites[1]
    assert [stage.wire_format for stage in new.plan.stages[:-1]] == [WireFormat.BFLOAT16] * (len(sites) - 1)


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
