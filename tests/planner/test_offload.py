"""Plans whose state is in a host's memory: where they fit, what they take, when the default has them."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from spantrain.core.profile import Profile
from spantrain.core.shares import StateSharding
from spantrain.cost.memory import MemoryCost
from spantrain.cost.replicas import HOST_BYTES_PER_S, UPDATE_BYTES_PER_S
from spantrain.devices.registry import BACKENDS
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import JobSpec, PlanRequest
from spantrain.planner.strategies.auto.strategy import auto
from spantrain.planner.strategies.baselines import offload, single_device
from spantrain.planner.strategies.relaxation import Relaxation

JOB = JobSpec(global_batch=8)
GIB = 2**30


@pytest.fixture
def profile(make_cluster: Callable, make_graph: Callable, make_profile: Callable) -> Callable[..., Profile]:
    """One device with room for a part of the state, in a host of some memory."""

    def build(host_bytes: int | None, *, room: float = 1.5, speed: float = 1.0, unified: bool = False) -> Profile:
        graph = make_graph(blocks=12, hidden=512)
        memory_bytes = BACKENDS["emulated"].framework_bytes + int(room * graph.parameter_bytes)
        cluster = make_cluster({"a": {"a0": speed}}, memory_bytes=memory_bytes)
        hosts = tuple(replace(host, memory_bytes=host_bytes) for host in cluster.hosts)
        kinds = tuple(replace(kind, unified_memory=unified) for kind in cluster.kinds)
        return make_profile(replace(cluster, hosts=hosts, kinds=kinds), graph)

    return build


def request_of(profile: Profile) -> PlanRequest:
    return PlanRequest(profile=profile, job=JOB, evaluate=Evaluator(profile, JOB))


def test_what_fits_nowhere_else_is_offloaded_where_the_hosts_memory_is_known(profile):
    request = request_of(profile(64 * GIB))
    with pytest.raises(InfeasiblePlanError):
        single_device(request)
    steps_s = [request.evaluate(found.plan).step_s for found in auto(request)]
    assert len(set(steps_s)) > 1
    assert steps_s == sorted(steps_s)
    best = auto(request)[0].plan
    assert Relaxation(request).bound().step_s <= request.evaluate(best).step_s
    assert [stage.state_sharding for stage in best.stages] == [StateSharding.OFFLOAD]
    assert request.evaluate(best).fits
    with pytest.raises(InfeasiblePlanError, match="does not fit"):
        auto(request_of(profile(None)))
    assert offload(request_of(profile(None)))


def test_what_no_plan_can_be_under_is_told_where_nobody_says_what_memory_a_host_has(profile):
    outcome = make_plan(profile(None), JOB, PlanOptions(strategies=("offload",)))
    assert 0 < outcome.bound.step_s <= outcome.step_s_predicted
    assert any(reason.startswith("No plan can be under ") for reason in outcome.report.reasons)
    assert Relaxation(request_of(profile(None))).bound().step_s == math.inf


@pytest.mark.parametrize(
    ("host_bytes", "unified", "text"),
    [(2**20, False, r"needs .* for the state of a0, has 1 MiB"), (64 * GIB, True, "nothing to offload to")],
)
def test_where_it_cannot_be(profile, host_bytes, unified, text):
    with pytest.raises(InfeasiblePlanError, match=text):
        offload(request_of(profile(host_bytes, unified=unified)))


def test_nothing_is_offloaded_where_all_fits(profile):
    request = request_of(profile(64 * GIB, room=8.0))
    assert all(not stage.offloads for found in auto(request) for stage in found.plan.stages)


@pytest.mark.parametrize(("megabit_per_s", "offloads"), [(20.0, True), (100_000.0, False)])
def test_what_fits_over_a_link_is_offloaded_where_that_is_clearly_better(
    make_cluster, make_graph, make_profile, megabit_per_s, offloads
):
    """Two devices that hold a model together, over a link that is slower than the way to their own host, or faster."""
    graph = make_graph(blocks=12, hidden=512)
    room = BACKENDS["emulated"].framework_bytes + int(3.0 * graph.parameter_bytes)
    sites = {"a": {"a0": 1.0}, "b": {"b0": 1.0}}
    cluster = make_cluster(sites, memory_bytes=room, bandwidth=megabit_per_s * 125e3)
    known = replace(cluster, hosts=tuple(replace(host, memory_bytes=64 * GIB) for host in cluster.hosts))
    request = request_of(make_profile(known, graph))
    best = auto(request)[0]
    assert any(stage.offloads for stage in best.plan.stages) == offloads
    assert ("has its state in its host's memory" in " ".join(best.reasons)) == offloads
    unknown = request_of(make_profile(cluster, graph))
    assert not any(stage.offloads for found in auto(unknown) for stage in found.plan.stages)


def test_a_step_takes_the_longer_of_compute_and_copies_and_the_hosts_update(profile):
    for speed in (1000.0, 1e-2):
        request = request_of(profile(64 * GIB, speed=speed))
        graph, plans = request.profile.graph, [found.plan for found in offload(request)]
        (stage,) = plans[0].stages
        count, trained = len(stage.micro_batches), graph.parameter_bytes
        copies_s = 2 * count * trained / HOST_BYTES_PER_S
        update_s = 7 * trained / UPDATE_BYTES_PER_S
        step_s = request.evaluate(plans[0]).step_s
        if speed > 1:
            assert step_s == pytest.approx(copies_s + update_s, rel=0.05)
        else:
            assert step_s > update_s + 10 * copies_s


def test_the_device_holds_units_at_work(profile):
    found = profile(64 * GIB)
    memory, graph = MemoryCost(found), found.graph
    plan = offload(request_of(found))[0].plan
    always = memory.plan_held_sizes(plan)["a0"].always
    largest = max(graph.held_parameter_bytes(range(len(graph.units))))
    shared = graph.shared_within_bytes(range(len(graph.units)))
    assert always.parameter_bytes == 2 * largest + shared
    assert (always.gradient_bytes, always.optimizer_bytes) == (2 * largest, 0)
    assert memory.host_bytes(plan.stages[0]) == pytest.approx(4 * graph.parameter_bytes, rel=1e-6)
