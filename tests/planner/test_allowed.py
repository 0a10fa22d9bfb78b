"""What `auto` does only where it is allowed by name: rounded cuts between sites, tensors divided inside a host."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import parse_cluster
from spantrain.core.cluster import Host
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.devices.registry import BACKENDS
from spantrain.errors import InfeasiblePlanError
from spantrain.formats.registry import WireFormat
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.dividing import TensorParallel
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Constraints, JobSpec, PlanRequest, Proposal
from spantrain.planner.strategies.auto.pools import pool_proposals
from spantrain.planner.strategies.auto.strategy import auto

JOB = JobSpec(global_batch=8, micro_batches=(1, 2, 4, 8))
ROUNDED = Constraints(wire_formats=(WireFormat.NATIVE, WireFormat.BFLOAT16))


def request_of(profile: Profile, constraints: Constraints, job: JobSpec = JOB) -> PlanRequest:
    return PlanRequest(profile=profile, job=job, constraints=constraints, evaluate=Evaluator(profile, job))


def best_of(request: PlanRequest) -> Proposal:
    return min(auto(request), key=lambda proposal: request.evaluate(proposal.plan).step_s)


@pytest.fixture
def two_sites(make_cluster: Callable, make_graph: Callable, make_profile: Callable) -> Callable[[float], Profile]:
    """Two sites of slow devices with room for half the model, over a link of some bytes per second."""

    def build(bandwidth: float) -> Profile:
        graph = make_graph(blocks=4, hidden=512)
        room = BACKENDS["emulated"].framework_bytes + int(0.8 * 4 * graph.parameter_bytes)
        cluster = make_cluster({"a": {"a0": 0.05}, "b": {"b0": 0.05}}, bandwidth=bandwidth, memory_bytes=room)
        return make_profile(cluster, graph)

    return build


def one_host(profile: Profile, *, divisible: bool = True, inside: float | None = None) -> Profile:
    """The profile with all devices of a site in one host, and blocks that a group can divide.

    `inside`: bytes per second of what joins the devices, if the cluster file says so.
    """
    cluster = profile.cluster
    names = {site.name: tuple(device.name for device in cluster.devices_at(site.name)) for site in cluster.sites}
    hosts = tuple(
        Host(name=f"h-{site}", site=site, devices=own, inside_bandwidth_bytes_per_s=inside)
        for site, own in names.items()
    )
    devices = tuple(replace(device, host=f"h-{device.site}") for device in cluster.devices)
    sites = tuple(replace(site, hosts=(f"h-{site.name}",)) for site in cluster.sites)
    units = tuple(replace(unit, tensor_sums=2 if divisible else 0) for unit in profile.graph.units)
    return replace(
        profile,
        cluster=replace(cluster, hosts=hosts, devices=devices, sites=sites),
        graph=replace(profile.graph, units=units),
    )


def test_cuts_are_rounded_only_where_allowed(two_sites: Callable[[float], Profile]) -> None:
    profile = two_sites(2e5)
    native, rounded = best_of(request_of(profile, Constraints())), best_of(request_of(profile, ROUNDED))
    assert {stage.wire_format for stage in native.plan.stages} == {WireFormat.NATIVE}
    assert rounded.plan.stages[0].wire_format is WireFormat.BFLOAT16
    evaluate = Evaluator(profile, JOB)
    assert evaluate(rounded.plan).step_s < 0.99 * evaluate(native.plan).step_s
    assert any("rounded to bfloat16: sent as it is, the plan would be" in reason for reason in rounded.reasons)


def test_a_cut_has_the_most_exact_of_the_allowed_formats_that_is_as_fast(two_sites: Callable[[float], Profile]) -> None:
    everything = Constraints(wire_formats=tuple(WireFormat))
    chosen = {}
    for bandwidth in (2e5, 2e6, 2e7, 1.25e9):
        profile = two_sites(bandwidth)
        evaluate = Evaluator(profile, JOB)
        plan = best_of(request_of(profile, everything)).plan
        chosen[bandwidth] = plan.stages[0].wire_format
        by_form = {form: evaluate(with_cut(plan, form)).step_s for form in WireFormat}
        good_enough = [form for form in WireFormat if by_form[form] <= 1.01 * by_form[WireFormat.INT4]]
        assert chosen[bandwidth] is good_enough[0]
    assert chosen[2e5] is WireFormat.INT4
    assert chosen[1.25e9] is WireFormat.NATIVE
    assert set(chosen.values()) > {WireFormat.INT4, WireFormat.NATIVE}


def with_cut(plan: Plan, form: WireFormat) -> Plan:
    first, *others = plan.stages
    return replace(plan, stages=(replace(first, wire_format=form), *others))


def test_cuts_stay_exact_where_rounding_gains_little(two_sites: Callable[[float], Profile]) -> None:
    rounded = best_of(request_of(two_sites(1.25e9), ROUNDED))
    assert len(rounded.plan.stages) == 2
    assert rounded.plan.stages[0].wire_format is WireFormat.NATIVE


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.5)])
def test_a_model_that_fits_only_divided_is_divided(
    make_cluster: Callable, make_graph: Callable, make_profile: Callable, speeds: tuple[float, float]
) -> None:
    """With AdamW in float32 a parameter takes four numbers, of which two replicas hold three if they divide updates."""
    graph = make_graph(blocks=1, hidden=1024)
    room = BACKENDS["emulated"].framework_bytes + int(2.9 * max(unit.parameter_bytes for unit in graph.units))
    cluster = make_cluster({"a": {"a0": speeds[0], "a1": speeds[1]}}, memory_bytes=room)
    profile = one_host(make_profile(cluster, graph))
    with pytest.raises(InfeasiblePlanError):
        auto(request_of(profile, Constraints()))
    found = best_of(request_of(profile, Constraints(tensor_parallel=TensorParallel.ANY)))
    divided = [replica for stage in found.plan.stages for replica in stage.replicas if len(replica.devices) > 1]
    assert divided
    assert Evaluator(profile, JOB)(found.plan).fits
    assert any("divide its tensors" in reason for reason in found.reasons)
    if speeds[0] != speeds[1]:
        assert divided[0].tp_shares[0] > divided[0].tp_shares[1]


@pytest.mark.parametrize(
    ("inside", "allowed", "optimizer", "divides"),
    [
        (300e9, TensorParallel.AUTO, "adamw", True),
        (16e9, TensorParallel.AUTO, "adamw", False),
        (None, TensorParallel.AUTO, "adamw", False),
        (None, TensorParallel.ANY, "adamw", True),
        (300e9, TensorParallel.NONE, "adamw", False),
        (300e9, TensorParallel.AUTO, "adafactor", False),
    ],
)
def test_tensors_are_divided_where_fast_links_join_a_hosts_devices(
    make_cluster: Callable, make_graph: Callable, make_profile: Callable,
    inside: float | None, allowed: TensorParallel, optimizer: str, divides: bool,
) -> None:  # fmt: skip
    """One sample is no work for two devices, unless each has a part of every layer."""
    profile = make_profile(make_cluster({"a": {"a0": 0.01, "a1": 0.01}}), make_graph(blocks=4, hidden=1024))
    profile, job = one_host(profile, inside=inside), JobSpec(global_batch=1, optimizer=optimizer)
    plan = best_of(request_of(profile, Constraints(tensor_parallel=allowed), job)).plan
    assert plan.divides_tensors == divides


@pytest.mark.parametrize("batch", [1, 4, 32])
@pytest.mark.parametrize("sites", [{"a": {"a0": 0.02, "a1": 0.01}}, {"a": {"a0": 0.02, "a1": 0.02}, "b": {"b0": 0.02}}])
def test_more_choice_makes_no_plan_worse(
    make_cluster: Callable, make_graph: Callable, make_profile: Callable, sites: dict[str, dict[str, float]], batch: int
) -> None:
    profile = one_host(make_profile(make_cluster(sites), make_graph(blocks=4, hidden=512)), inside=300e9)
    job = JobSpec(global_batch=batch)
    none, auto_s, any_s = (
        make_plan(profile, job, PlanOptions(constraints=Constraints(tensor_parallel=way))).step_s_predicted
        for way in (TensorParallel.NONE, TensorParallel.AUTO, TensorParallel.ANY)
    )
    assert auto_s <= 1.001 * none
    assert any_s <= 1.001 * auto_s


def test_plans_without_groups_compete_in_the_search_by_counts() -> None:
    """Among plans with groups alone, the best of this pool is slower than the best without."""
    sites = "".join(
        f"  - {{name: s{n}, network: {{bandwidth: 100 Gbit/s, latency: 0.1 ms}}, hosts: "
        f"[{{name: s{n}h, count: 2, devices: {{a100: 8}}, inside: nvlink}}]}}\n"
        for n in range(2)
    )
    links = "links: [{between: [s0, s1], bandwidth: 5 Gbit/s, latency: 20 ms}]"
    cluster = parse_cluster(f"name: alike\nsites:\n{sites}{links}\n", source="alike")
    profile, job = described_profile(cluster, resolve_model("gpt2-medium")), JobSpec(global_batch=128)

    def seconds(allowed: TensorParallel) -> float:
        request = request_of(profile, Constraints(tensor_parallel=allowed), job)
        return min(request.evaluate(proposal.plan).step_s for proposal in pool_proposals(request))

    without = seconds(TensorParallel.NONE)
    assert seconds(TensorParallel.AUTO) <= without
    assert seconds(TensorParallel.ANY) <= without


def test_nothing_is_divided_that_would_not_gain(
    make_cluster: Callable, make_graph: Callable, make_profile: Callable
) -> None:
    profile = one_host(make_profile(make_cluster({"a": {"a0": 1.0, "a1": 1.0}}), make_graph(blocks=2)), divisible=False)
    found = best_of(request_of(profile, Constraints(tensor_parallel=TensorParallel.ANY)))
    assert all(len(replica.devices) == 1 for stage in found.plan.stages for replica in stage.replicas)


def test_a_model_of_many_units_in_little_memory_is_planned(
    make_cluster: Callable, make_graph: Callable, make_profile: Callable
) -> None:
    graph = make_graph(blocks=48)
    room = BACKENDS["emulated"].framework_bytes + 3 * sum(4 * unit.parameter_bytes for unit in graph.units) // 5
    profile = make_profile(make_cluster({"a": {"a0": 1.0, "a1": 0.7}, "b": {"b0": 0.5}}, memory_bytes=room), graph)
    assert Evaluator(profile, JOB)(best_of(request_of(profile, Constraints())).plan).fits
