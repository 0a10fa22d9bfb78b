"""Other ways to train over clusters, in virtual time."""

from dataclasses import replace

import pytest

from spantrain_studies.outer.case import Fault, MemberLine, OuterCase, SimulatedCluster, SimulatedShard, equal_layers
from spantrain_studies.outer.methods import METHODS, simulate_method

LINE = MemberLine(bandwidth_bytes_per_s=1e6)
MODEL_BYTES = 1_000_000


def case_of(*step_s: float, **more) -> OuterCase:
    settings = {"inner_steps": 10, "steps": 400 * len(step_s)} | more
    return OuterCase(
        clusters=tuple(SimulatedCluster(name=f"c{k}", step_s=one, line=LINE) for k, one in enumerate(step_s)),
        shards=(SimulatedShard(name="s0", line=LINE), SimulatedShard(name="s1", line=LINE)),
        layers=equal_layers(4, MODEL_BYTES),
        **settings,
    )


@pytest.mark.parametrize("method", METHODS)
def test_all_steps_are_taken(method):
    found = simulate_method(method, case_of(1.0, 2.0, 3.0))
    assert sum(one.inner_steps for one in found.clusters.values()) == 1200
    assert found.method == method


def test_synchronous_clusters_take_as_many_steps_each_and_wait_for_the_slowest():
    found = simulate_method("diloco", case_of(1.0, 2.0))
    assert [one.inner_steps for one in found.clusters.values()] == [400, 400]
    # 40 rounds of 20 s, with an exchange of 1 s, half of 2 times the model, behind all but the last.
    assert found.span_s == pytest.approx(40 * 20 + 39 * 1.0)
    assert found.clusters["c0"].stood_still_s == pytest.approx(40 * 10 + 39 * 1.0)
    assert found.comm_s == pytest.approx(2 * 40 * 1.0)


def test_a_sum_in_every_step_costs_an_exchange_each():
    found = simulate_method("dp", case_of(1.0, 1.0, steps=200))
    assert found.span_s == pytest.approx(100 * 1.0 + 99 * 1.0)


def test_naive_clusters_wait_for_their_own_exchange_alone():
    found = simulate_method("async-diloco", case_of(1.0, 5.0))
    fast, slow = found.clusters.values()
    assert fast.inner_steps > 4 * slow.inner_steps
    assert fast.stood_still_s == pytest.approx(fast.outer_rounds * 1.0, rel=0.1)
    assert slow.mean_staleness > fast.mean_staleness


def test_one_cluster_has_nothing_to_exchange():
    for method in METHODS:
        assert simulate_method(method, case_of(1.0)).throughput_vs_ideal == pytest.approx(1.0)


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0), (1.0, 1.5, 2.0), (1.0, 1.0, 5.2)])
def test_the_outer_optimizer_is_the_fastest(speeds):
    found = {method: simulate_method(method, case_of(*speeds)).tokens_per_s for method in METHODS}
    assert max(found, key=lambda method: found[method]) == "outer"
    assert found["outer"] > found["diloco"] > found["dp"]


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="no method 'ddp'"):
        simulate_method("ddp", case_of(1.0))
    faults = (Fault(member="c0", at_s=1.0, down_s=1.0),)
    with pytest.raises(ValueError, match="without faults"):
        simulate_method("diloco", replace(case_of(1.0), faults=faults))


class Told:
    """What arithmetic is asked for, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self, cluster):
        self.said.append(f"{cluster} steps")

    def publish(self, cluster):
        self.said.append(f"{cluster} publishes")

    def merge(self, cluster):
        self.said.append(f"{cluster} merges")


def test_all_publish_before_any_goes_on():
    told = Told()
    simulate_method("diloco", case_of(1.0, 2.0, inner_steps=1, steps=2), told)
    assert told.said == ["c0 steps", "c1 steps", "c0 publishes", "c1 publishes", "c0 merges", "c1 merges"]


def test_naive_clusters_merge_what_there_is():
    told = Told()
    simulate_method("async-diloco", case_of(1.0, 9.0, inner_steps=2, steps=4), told)
    assert told.said[:5] == ["c0 steps", "c0 steps", "c0 publishes", "c0 merges", "c0 steps"]
