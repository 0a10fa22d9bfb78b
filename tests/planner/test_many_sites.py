"""Many sites and many devices: more of them is never worse, names and their order play no part, the bound holds."""

import math
import random
import statistics
from dataclasses import replace
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.app.profiling.describe import described_profile
from spantrain.config.artefacts import read_profile, write_profile
from spantrain.config.cluster_file import load_preset, parse_cluster
from spantrain.config.kinds import load_kinds
from spantrain.core.cluster import LISTED_SITES, Cluster, Device, Host, Link, Site
from spantrain.cost.rings import turns_s, waiting_s, without_repeats
from spantrain.formats.registry import WireFormat
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.clusters import clusters_of
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.engine.predict import costs_of
from spantrain.planner.engine.reasons import bounded
from spantrain.planner.request import Constraints, JobSpec, Objective, PlanRequest
from spantrain.planner.strategies.pools.costs import PoolPlan, PoolReplica, PoolStage
from spantrain.planner.strategies.pools.placing import Placer
from spantrain.planner.strategies.pools.profile_costs import ProfilePools
from spantrain.planner.strategies.pools.recipes import ChainCosts, StageChain
from spantrain.planner.strategies.pools.territories import Territories
from spantrain.planner.strategies.registry import strategies
from spantrain.planner.strategies.relaxation import Relaxation
from spantrain.sim.engine import SimulationOptions, simulate
from spantrain.sim.fold import fold, simulate_whole

MBIT = 125e3
SAME = 1.005


def sites_of(*counts, rate=5_000 * MBIT, latency_s=0.02, order=None, memory=1.0):
    """Sites by the devices of each kind that they have, in hosts of eight."""
    kinds = load_kinds()
    sites, hosts, devices = [], [], []
    for number in order or range(len(counts)):
        first = len(hosts)
        for kind, count in counts[number].items():
            for begin in range(0, count, 8):
                host = f"s{number}-{kind}-{begin}"
                names = tuple(f"{host}-{index}" for index in range(min(8, count - begin)))
                hosts.append(Host(name=host, site=f"s{number}", devices=names))
                size = int(kinds[kind].memory_bytes * memory)
                devices += [
                    Device(name=n, kind=kind, host=host, site=f"s{number}", backend="emulated", memory_bytes=size)
                    for n in names
                ]
        own = tuple(host.name for host in hosts[first:])
        sites.append(Site(name=f"s{number}", hosts=own, bandwidth_bytes_per_s=12.5e9, latency_s=5e-5))
    return Cluster(
        name="many",
        kinds=tuple(kinds[kind] for kind in dict.fromkeys(device.kind for device in devices)),
        sites=tuple(sites),
        hosts=tuple(hosts),
        devices=tuple(devices),
        links=tuple(
            Link(source=a.name, target=b.name, bandwidth_bytes_per_s=rate, latency_s=latency_s)
            for a, b in permutations(sites, 2)
        ),
    )


def planned(cluster, batch=96, model="gpt2-tiny", **options):
    profile = described_profile(cluster, resolve_model(model))
    return make_plan(profile, JobSpec(global_batch=batch), PlanOptions(**options))


PLAIN = Constraints(interleaving=False)
"""For what is asked of the search by sites: most of the time would go into interleaving what it has found."""


def request_of(cluster, batch=128, model="gpt2-small"):
    profile, job = described_profile(cluster, resolve_model(model)), JobSpec(global_batch=batch)
    return PlanRequest(profile=profile, job=job, evaluate=Evaluator(profile, job))


def test_fourteen_sites_are_no_worse_than_one():
    one, many = (planned(sites_of(*({"a100": 8},) * count), constraints=PLAIN) for count in (1, 14))
    assert many.step_s_predicted <= SAME * one.step_s_predicted
    assert many.best_single_site.step_s == pytest.approx(one.step_s_predicted, rel=1 - 1 / SAME)
    assert one.bound.step_s <= one.step_s_predicted


LITTLE = ({"a100": 136}, {"t4": 32}, {"v100": 40})
MORE = {
    "device": sites_of({"a100": 137}, *LITTLE[1:]),
    "site": sites_of(*LITTLE, {"a100": 8}),
    "bandwidth": sites_of(*LITTLE, rate=20_000 * MBIT),
}


def test_more_is_never_worse():
    before = planned(sites_of(*LITTLE))
    for what, cluster in MORE.items():
        assert planned(cluster).step_s_predicted <= SAME * before.step_s_predicted, what
    twice = planned(sites_of(*LITTLE), batch=192)
    assert twice.samples_per_s_predicted * SAME >= before.samples_per_s_predicted


@pytest.mark.parametrize("batch", [32, 128])
def test_leaving_a_slow_kind_out_is_no_better_than_having_the_choice(batch):
    cluster = sites_of({"t4": 1}, {"l4": 2, "t4": 2}, rate=100 * MBIT)
    slow = tuple(device.name for device in cluster.devices if device.kind == "t4")
    whole, without = (
        planned(cluster, batch=batch, model="resnet-101", constraints=Constraints(leave_out=names))
        for names in ((), slow)
    )
    assert whole.step_s_predicted <= SAME * without.step_s_predicted


def test_the_order_of_a_file_plays_no_part():
    rows = ({"a100": 136}, {"t4": 16}, {"a100": 136}, {"v100": 8})
    steps = [planned(sites_of(*rows, order=order)).step_s_predicted for order in ((0, 1, 2, 3), (3, 2, 0, 1))]
    assert steps[0] == pytest.approx(steps[1], rel=1e-9)


def test_no_strategy_beats_the_default_one():
    profile = described_profile(load_preset("asteroid-c-100"), resolve_model("resnet-101"))
    asked = ("auto", "spantrain", "1f1b")
    found = make_plan(profile, JobSpec(global_batch=64), PlanOptions(strategies=asked)).strategies
    assert all(found["auto"].step_s <= SAME * other.step_s for other in found.values() if other.step_s)


def test_a_best_site_of_mixed_kinds_is_asked_for_its_own_plan_once():
    pool = sites_of({"h100": 33, "xavier-nx": 1}, {"rtx-4090": 2}, rate=400 * MBIT)
    found = planned(pool, batch=48)
    assert found.step_s_predicted <= SAME * found.best_single_site.step_s


def test_twenty_small_sites_have_a_plan_whatever_is_asked():
    cluster = sites_of(*({"a100": 2},) * 20)
    kept = planned(cluster, constraints=replace(PLAIN, keep=("s7",))).plan
    assert any(cluster.device_by_name[name].site == "s7" for name in kept.devices)
    assert planned(cluster, objective=Objective.ENERGY).plan.devices
    rounded = planned(cluster, constraints=replace(PLAIN, wire_formats=(WireFormat.NATIVE, WireFormat.INT8)))
    assert rounded.step_s_predicted <= SAME * planned(cluster, constraints=PLAIN).step_s_predicted


def test_sites_that_look_alike_are_searched_once_single_ones_first():
    request = request_of(sites_of(*({"a100": 8},) * 6, {"a100": 16}, {"t4": 8}))
    found = list(Territories(ProfilePools(request, most_degree=1)))
    singles = [territory.sites for territory in found if len(territory.sites) == 1]
    assert singles == [("s6",), ("s7",)], "eight of a kind stand behind sixteen"
    assert [len(territory.sites) for territory in found][:2] == [1, 1]
    assert {sum(territory.available.values()) for territory in found if len(territory.sites) == 8} == {72}


def ported(cluster, **rates):
    """The cluster with other ports in some of its sites."""
    sites = (
        replace(site, bandwidth_bytes_per_s=rates.get(site.name, site.bandwidth_bytes_per_s)) for site in cluster.sites
    )
    return replace(cluster, sites=tuple(sites))


def test_a_site_with_slow_ports_does_not_stand_for_one_with_fast_ones():
    """Each kind of a site has one host, so that only what is between kinds tells the sites apart."""
    request = request_of(ported(sites_of(*({"rtx-4090": 2, "t4": 2},) * 4), s0=1.25e9, s3=1.25e9))
    singles = [one.sites for one in Territories(ProfilePools(request, most_degree=1)) if len(one.sites) == 1]
    assert singles == [("s1",)]


def test_the_best_sites_are_searched_by_themselves_and_not_one_alone():
    """Twenty sites, of which every second one has slow ports: the plan is the one that a fast one has alone."""
    kinds = {"t4": 2, "rtx-4090": 2}
    many = ported(sites_of(*(kinds,) * 20), **{f"s{number}": 1.25e9 for number in range(0, 20, 2)})
    one, twenty = (planned(pool, batch=512, model="resnet-101", constraints=PLAIN) for pool in (sites_of(kinds), many))
    assert twenty.step_s_predicted <= SAME * one.step_s_predicted


def test_a_slow_device_more_makes_no_small_site_slower():
    """The best plan leaves all slow ones out, with larger micro-batches than what is expected to be best."""
    four, five = (
        planned(ported(sites_of({"rtx-4090": 2, "t4": slow}), s0=1.25e9), batch=512, model="resnet-101")
        for slow in (2, 3)
    )
    assert five.step_s_predicted <= SAME * four.step_s_predicted


def test_a_site_among_few_devices_is_searched_by_itself():
    """Three like sites of nine devices behind 1 Gbit/s: no plan over several of them is any good."""
    kinds = {"t4": 7, "v100": 2}
    one, three = (
        planned(
            sites_of(*(kinds,) * count, rate=1_000 * MBIT, latency_s=0.037),
            batch=32,
            model="resnet-101",
            constraints=PLAIN,
        )
        for count in (1, 3)
    )
    assert three.step_s_predicted <= SAME * one.step_s_predicted


@pytest.mark.parametrize("objective", [Objective.THROUGHPUT, Objective.ENERGY])
@pytest.mark.parametrize("preset", ["laptop", "asteroid-b-100"])
def test_no_plan_of_any_strategy_is_under_the_bound(preset, objective):
    request = replace(request_of(load_preset(preset), batch=24, model="resnet-101"), objective=objective)
    bound = Relaxation(request).bound()
    for name in ("auto", "single-site", "single-device", "spantrain-dp"):
        for proposal in strategies()[name].propose(request):
            found = request.evaluate(proposal.plan)
            assert found.step_s >= bound.step_s
            assert found.value(objective) >= bound.value


@pytest.mark.parametrize(("times", "said"), [(1.25, "is 25.0 % over it"), (458.0, "takes 458 times that")])
def test_how_far_a_plan_is_over_the_bound_is_said_in_per_cent_or_times(times, said):
    request = request_of(sites_of({"a100": 2}), batch=16)
    plan, bound = strategies()["ddp"].propose(request)[0].plan, Relaxation(request).bound()
    text = bounded(plan, replace(request.evaluate(plan), step_s=times * bound.step_s), bound, 2)
    assert f"This one {said}; its devices wait" in text
    alone, none = (replace(bound, alone_s=seconds) for seconds in (2 * bound.compute_s, math.inf))
    assert "inside one site" in bounded(plan, request.evaluate(plan), alone, 2)
    assert "inside one site" not in bounded(plan, request.evaluate(plan), none, 2)


def test_the_bound_falls_with_more_and_joining_costs_what_links_let_through():
    slow, fast = (Relaxation(request_of(sites_of({"a100": 8}, {"a100": 8}, rate=rate))) for rate in (10 * MBIT, 1e12))
    assert slow.alone_s("s0") == fast.alone_s("s0")
    assert fast.joined_s(("s0", "s1")) == pytest.approx(fast.bound().compute_s, rel=0.01)
    assert slow.joined_s(("s0", "s1")) > 1.8 * fast.joined_s(("s0", "s1"))


HOPS = st.tuples(st.sampled_from([0.0, 0.5, 3.0]), st.sampled_from([1.0, 2.0, 2.5]))


@settings(max_examples=60, deadline=None)
@given(hops=st.lists(HOPS, min_size=65, max_size=90), turns=st.integers(1, 180))
def test_a_long_ring_takes_as_long_as_turn_by_turn(hops, turns):
    latency, busy = np.array(hops).T
    ready = free = np.zeros(len(hops))
    for _ in range(turns):
        free = np.maximum(ready, free) + busy
        ready = np.roll(free + latency, 1)
    assert turns_s(latency.tolist(), busy.tolist(), turns) == pytest.approx(float(ready.max()))


@settings(max_examples=40, deadline=None)
@given(hops=st.lists(HOPS, min_size=3, max_size=8), count=st.integers(1, 200))
def test_a_ring_of_repeated_hops_does_what_the_shortest_does(hops, count):
    latency, busy = (list(row) for row in zip(*hops * 24, strict=True))
    short = without_repeats(latency, busy)
    assert len(short[1]) <= len(hops)
    if len(short[1]) > 2:
        assert waiting_s(*short, count) == pytest.approx(waiting_s(latency, busy, count), rel=0.01)
    assert turns_s(*short, count) == pytest.approx(turns_s(latency, busy, count))


def test_many_pipelines_that_do_not_divide_evenly_are_simulated_as_one():
    request = request_of(sites_of({"a100": 80}), batch=4750, model="gpt2-tiny")
    costs = ProfilePools(request, most_degree=1)
    runs = ((PoolReplica(0, 1), 40),)
    stages = tuple(PoolStage(units=units, runs=runs) for units in (range(7), range(7, costs.units)))
    plan = costs.plan(PoolPlan(micro_batch=2, micro_batches=60, stages=stages))
    assert plan.stages[0].micro_batches[-1].size == 30
    price = costs_of(plan, request.profile)
    whole = simulate(plan, price, steps=1, options=SimulationOptions(trace=False))
    assert fold(plan, price) is not None
    assert simulate_whole(plan, price).step_s == pytest.approx(whole.step_s, rel=0.02)


def test_sites_in_a_hundred_places_are_groups_of_their_own():
    cluster = sites_of(*({"t4": 2},) * 100)
    profile = described_profile(cluster, resolve_model("gpt2-small"))
    groups = clusters_of(profile, tuple(device.name for device in cluster.devices))
    assert [group.devices for group in groups[:2]] == [("s0-t4-0-0", "s0-t4-0-1"), ("s1-t4-0-0", "s1-t4-0-1")]
    assert len(groups) == 100
    near = sites_of(*({"t4": 2},) * 20, rate=12.5e9, latency_s=5e-5)
    profile = described_profile(near, resolve_model("gpt2-small"))
    assert len(clusters_of(profile, tuple(device.name for device in near.devices))) == 1


SITE = """
  - name: s{n}
    network: {{bandwidth: 1 Gbit/s, latency: 0.1 ms}}
    hosts: [{{name: h{n}, devices: {{t4: 1}}}}]"""
LINKS = """
links:
  - {between: all, bandwidth: 1 Gbit/s, latency: 5 ms}
  - {between: [s1, s2], bandwidth: 2 Gbit/s, latency: 5 ms}
"""


def test_very_many_sites_need_one_line_for_their_links(tmp_path):
    rows = "".join(SITE.format(n=n) for n in range(LISTED_SITES + 1))
    cluster = parse_cluster(f"name: many\nsites:{rows}{LINKS}", source="c.yaml")
    assert len(cluster.links) == 2
    assert cluster.link("h1", "h2").bandwidth_bytes_per_s == 250e6
    assert cluster.link("h1", "h3").bandwidth_bytes_per_s == 125e6
    path = tmp_path / "profile.json"
    write_profile(described_profile(cluster, resolve_model("gpt2-tiny")), path)
    assert read_profile(path).cluster == cluster


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), slow=st.booleans())
def test_chains_cut_together_are_cut_as_alone(seed, slow):
    """Whatever is left out by a bound would take longer than what was asked."""
    rng = random.Random(seed)
    cluster = sites_of({"a100": 8, "t4": 4}, {"v100": 6}, rate=5e6 if slow else 5e9)
    profile = described_profile(cluster, resolve_model("gpt2-tiny"))
    job = JobSpec(global_batch=32)
    costs = ProfilePools(PlanRequest(profile=profile, job=job, evaluate=Evaluator(profile, job)), most_degree=1)
    candidates = []
    for _ in range(12):
        width = rng.randint(1, 3)
        depth = rng.randint(1, costs.units)
        rows = [((PoolReplica(rng.randrange(len(costs.pools)), 1), width),) for _ in range(depth)]
        candidates.append(StageChain(rng.choice((1, 2)), width, rng.randint(1, 20), tuple(rows)))
    alone = [ChainCosts(costs).guesses([candidate])[0].guess for candidate in candidates]
    chains = ChainCosts(costs)
    assert [cut.guess for cut in chains.guesses(candidates)] == alone
    most_s = statistics.median(guess.step_s for guess in alone if guess is not None)
    for cut, guess in zip(ChainCosts(costs).guesses(candidates, most_s), alone, strict=True):
        assert guess is None or cut.least_s <= guess.step_s * (1 + 1e-9)
        assert cut.guess == (guess if cut.least_s <= most_s else None)


def slow_hosts(stages, width, micro_batches):
    """What is expected of a pipeline on hosts of eight with slow ports, and what simulation makes of it."""
    cluster = sites_of({"a100": stages * width})
    cluster = replace(cluster, sites=tuple(replace(site, bandwidth_bytes_per_s=1e7) for site in cluster.sites))
    profile, job = described_profile(cluster, resolve_model("gpt2-tiny")), JobSpec(global_batch=width * micro_batches)
    costs = ProfilePools(PlanRequest(profile=profile, job=job, evaluate=Evaluator(profile, job)), most_degree=1)
    cuts = [costs.units * stage // stages for stage in range(stages + 1)]
    runs = ((PoolReplica(0, 1), width),)
    plan = PoolPlan(
        micro_batch=1,
        micro_batches=micro_batches,
        stages=tuple(PoolStage(units=range(i, j), runs=runs) for i, j in pairwise(cuts)),
    )
    placer = Placer(ChainCosts(costs), {}, counts_money=False, deep=True)
    whole = simulate_whole(costs.plan(plan), costs_of(costs.plan(plan), profile))
    return placer.least_s(plan), placer.timing(plan)[0], whole


def test_a_host_between_two_others_passes_on_what_goes_up_and_what_comes_down():
    """Three hosts of two stages each, hundreds of micro-batches: their messages are nearly all that takes time."""
    least_s, expected_s, whole = slow_hosts(6, 4, 200)
    assert least_s <= expected_s
    assert expected_s == pytest.approx(whole.step_s, rel=0.1)


def test_what_replicas_exchange_and_pass_on_is_expected():
    """One sample a replica: the sums of stages that meet in a host, and of the embedding, take most of the step."""
    least_s, expected_s, whole = slow_hosts(4, 6, 1)
    assert least_s <= expected_s
    assert 0.7 < expected_s / whole.step_s < 1.5
