"""Costs from a profile's measurements."""

from dataclasses import replace

import pytest

from spantrain.core.action import Action, Direction
from spantrain.core.cluster import Cluster, Device, Host, Link, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile, RuntimeCosts, UnitTiming
from spantrain.core.span import Span, equal_spans
from spantrain.core.units import ModelSpec, TensorSpec, Unit, UnitGraph
from spantrain.sim.bounds import pipeline_bound_s
from spantrain.sim.costs import ProfileCosts
from spantrain.sim.engine import simulate
from testing.plans import KIND
from testing.profiles import PROVENANCE, exact_links

DEVICES = ("a", "b", "c")
MODEL = ModelSpec(name="tiny", family="gpt2", config={}, dataset="stdlib-text")


def unit(name: str, *, parameter_bytes: int, cut_bytes: int, shared: tuple[str, ...] = ()) -> Unit:
    kept = TensorSpec(name="hidden", shape_per_sample=(1,), dtype="float32", bytes_per_sample=cut_bytes)
    mask = TensorSpec(name="mask", shape_per_sample=(1,), dtype="int64", bytes_per_sample=8, requires_grad=False)
    return Unit(
        name=name,
        unit_class=name,
        parameter_bytes=parameter_bytes,
        forward_flop_per_sample=1.0,
        outputs=(kept, mask),
        activation_bytes_per_sample=cut_bytes,
        shared=shared,
    )


def two_sites() -> Cluster:
    """Device a at one site, b and c at another; 100 bytes/s and 0.5 s between them, 1000 bytes/s and 0.1 s inside."""
    site_of = {"a": "home", "b": "away", "c": "away"}
    return Cluster(
        name="two",
        kinds=(KIND,),
        sites=tuple(
            Site(name=site, hosts=hosts, bandwidth_bytes_per_s=1000.0, latency_s=0.1)
            for site, hosts in (("home", ("ha",)), ("away", ("hb", "hc")))
        ),
        hosts=tuple(Host(name=f"h{name}", site=site_of[name], devices=(name,)) for name in DEVICES),
        devices=tuple(
            Device(name=n, kind=KIND.name, host=f"h{n}", site=site_of[n], backend="emulated", memory_bytes=1)
            for n in DEVICES
        ),
        links=tuple(
            Link(source=x, target=y, bandwidth_bytes_per_s=100.0, latency_s=0.5)
            for x, y in (("home", "away"), ("away", "home"))
        ),
    )


@pytest.fixture
def profile() -> Profile:
    cluster = two_sites()
    graph = UnitGraph(
        units=(
            unit("embed", parameter_bytes=60, cut_bytes=20, shared=("wte",)),
            unit("head", parameter_bytes=60, cut_bytes=4, shared=("wte",)),
        ),
        shared_bytes={"wte": 50},
    )
    timings = tuple(
        UnitTiming(
            unit_class=name,
            kind=KIND.name,
            dtype="float32",
            samples=1,
            forward_s=1.0,
            backward_input_s=2.0,
            backward_weight_s=3.0,
        )
        for name in ("embed", "head")
    )
    return Profile(
        cluster=cluster,
        model=MODEL,
        graph=graph,
        dtype="float32",
        timings=timings,
        links=exact_links(cluster),
        scores=(),
        provenance=PROVENANCE,
    )


@pytest.fixture
def plan(profile: Profile) -> Plan:
    def replica(name: str) -> Replica:
        return Replica(devices=(name,), sample_share=1.0, in_flight_limit=4)

    cut = equal_spans(4, 2)
    return Plan(
        cluster=profile.cluster,
        model=MODEL,
        global_batch=4,
        dtype="float32",
        stages=(
            Stage(first_unit=0, end_unit=1, replicas=(replica("a"),), micro_batches=cut),
            Stage(first_unit=1, end_unit=2, replicas=(replica("b"), replica("c")), micro_batches=cut),
        ),
        schedule="critical-path",
    )


def test_seconds_and_bytes_come_from_the_profile(profile: Profile, plan: Plan) -> None:
    costs = ProfileCosts(profile, plan)
    assert costs.action_s("b", Action.parse("1F[0:2]")) == pytest.approx(2.0)
    assert costs.action_s("a", Action.parse("0B[0:2]")) == pytest.approx(10.0)
    there = costs.transfer("a", "b", Direction.FORWARD, 0, Span(0, 1))
    back = costs.transfer("b", "a", Direction.BACKWARD, 1, Span(0, 1))
    assert (there.size_bytes, there.latency_s, there.occupancy_s) == (28, 0.5, pytest.approx(0.28))
    assert (back.size_bytes, back.occupancy_s) == (20, pytest.approx(0.2))  # the mask has no gradient
    assert there.links == costs.transfer("a", "c", Direction.FORWARD, 0, Span(1, 2)).links != back.links
    assert costs.gradient_sum_s(0) == 0.0
    # Twice: the word of the receiver, and half of the bytes.
    assert costs.gradient_sum_s(1) == pytest.approx(2 * (0.1 + 60 / 2 / 1000 + 0.1))
    # Stages 0 and 1 exchange; then b hands the sum to c.
    (tied,) = costs.tied_sums()
    assert tied.stages == (0, 1)
    assert tied.seconds == pytest.approx(0.5 + 50 / 100 + 0.1 + 50 / 1000)
    assert costs.commit_s == pytest.approx(1.0)


def test_what_stages_share_and_nobody_trains_is_not_summed(profile: Profile, plan: Plan) -> None:
    frozen = replace(profile, graph=replace(profile.graph, frozen_shared=("wte",)))
    costs = ProfileCosts(frozen, plan)
    assert costs.tied_sums() == ()
    assert costs.tied_bytes() == {}


def test_a_simulated_step_of_the_profile(profile: Profile, plan: Plan) -> None:
    costs = ProfileCosts(profile, plan)
    result = simulate(plan, costs)
    assert result.link_bytes == {("a", "b"): 56, ("a", "c"): 56, ("b", "a"): 40, ("c", "a"): 40}
    assert result.pipeline_s >= pipeline_bound_s(plan, costs)
    # Stage 0 is the bottleneck: 4 s of F and 20 s of B, plus at most a few waits.
    assert 24.0 <= result.pipeline_s <= 28.0
    end_s = costs.gradient_sum_s(1) + sum(tied.seconds for tied in costs.tied_sums()) + costs.commit_s
    assert result.pipeline_s < result.step_s <= result.pipeline_s + end_s + 1e-9


def test_a_commit_may_be_measured(profile: Profile, plan: Plan) -> None:
    runtime = RuntimeCosts(action_s=0.0, message_s=0.0, step_end_s=0.25)
    assert ProfileCosts(replace(profile, runtime=runtime), plan).commit_s == 0.25
    alone = replace(plan, stages=(replace(plan.stages[0], end_unit=2),))
    assert ProfileCosts(profile, alone).commit_s == 0.0
    assert ProfileCosts(profile, alone).tied_sums() == ()
