"""The outer optimizer in virtual time: what is counted, who waits, what faults do."""

from dataclasses import replace

import pytest

from spantrain.formats.registry import WireFormat
from spantrain.outer.policy.settings import OuterSettings
from spantrain_studies.outer.bodies import PlainBodies
from spantrain_studies.outer.case import (
    MASTER,
    Fault,
    MemberLine,
    OuterCase,
    SimulatedCluster,
    SimulatedShard,
    equal_layers,
)
from spantrain_studies.outer.world import OuterSimulation, simulate_outer

LINE = MemberLine(bandwidth_bytes_per_s=1e6, latency_s=0.01)
MODEL_BYTES = 2_000_000


def case_of(*step_s: float, line: MemberLine = LINE, shards: int = 2, **more) -> OuterCase:
    """Clusters `c0` and so on, shards `s0` and so on."""
    settings = {"inner_steps": 10, "steps": 100 * len(step_s), "settings": OuterSettings(grace_s=1.0)} | more
    return OuterCase(
        clusters=tuple(SimulatedCluster(name=f"c{k}", step_s=one, line=line) for k, one in enumerate(step_s)),
        shards=tuple(SimulatedShard(name=f"s{k}", line=LINE) for k in range(shards)),
        layers=equal_layers(5, MODEL_BYTES),
        **settings,
    )


def learned_steps(simulation: OuterSimulation) -> int:
    """Steps that the newest version has learned of, the same on all shards."""
    shards = [body for member in simulation.members.values() if hasattr(member, "beat") for body in member._bodies]
    contents = {shard.versions[shard.serving] for shard in shards}
    assert len(contents) == 1
    return sum(span.end - span.first for span in contents.pop())


def test_clusters_of_unequal_speed_train_at_their_own():
    found = simulate_outer(case_of(1.0, 2.0, 4.0, steps=700))
    steps = [one.inner_steps for one in found.clusters.values()]
    assert sum(steps) == 700
    assert steps == pytest.approx([400, 200, 100], abs=2)
    assert found.throughput_vs_ideal == pytest.approx(1.0, abs=0.01)
    assert all(one.stood_still_s < 5.0 for one in found.clusters.values())


@pytest.mark.parametrize("latency_s", [0.01, 0.3])
def test_clusters_alike_end_their_rounds_together(latency_s):
    """Each asks while the others' request for its push is on its way: none is to push again at once."""
    line = replace(LINE, latency_s=latency_s)
    found = simulate_outer(case_of(1.0, 1.0, 1.0, line=line, settings=OuterSettings(grace_s=2.0)))
    assert found.versions == 11, "the first parameters, and ten rounds"


def test_who_has_taken_all_steps_waits_before_it_asks_again_for_what_was_refused():
    """Lines without latency: the second cluster's rest is refused for as long as the first brings the parameters."""
    slow = MemberLine(bandwidth_bytes_per_s=2e5, latency_s=0.0)
    case = case_of(0.3, 0.9, line=slow, shards=1, steps=20, settings=OuterSettings(grace_s=0.0, lost_after_s=3.0))
    case = replace(case, inner_steps=3, shards=(SimulatedShard(name="s0", line=slow),))
    assert simulate_outer(case).tokens_counted == 20


def test_all_that_was_learned_is_in_the_last_version():
    simulation = OuterSimulation(case_of(1.0, 1.3, 5.2), PlainBodies())
    found = simulation.run()
    assert learned_steps(simulation) == found.tokens_counted == found.tokens == 300


def test_tokens_are_steps_times_their_tokens():
    found = simulate_outer(case_of(1.0, 2.0, tokens_per_step=128))
    assert found.tokens == found.tokens_counted == 200 * 128
    assert simulate_outer(case_of(1.0, 2.0, steps=None, seconds=50.0)).tokens == pytest.approx(75, abs=2)


def test_a_slow_cluster_is_not_waited_for_and_contributes():
    found = simulate_outer(case_of(1.0, 1.0, 40.0, steps=810))
    assert found.clusters["c2"].outer_rounds >= 2
    assert found.clusters["c2"].mean_staleness > 2 > found.clusters["c0"].mean_staleness


SLOW = MemberLine(bandwidth_bytes_per_s=4e5, latency_s=0.01)
"""An exchange takes ten steps, as a round does."""


@pytest.mark.parametrize("ahead", [0.0, 0.3, 1.0])
def test_a_bound_on_steps_behind_a_push_makes_clusters_stand_still(ahead):
    case = case_of(1.0, 1.0, line=SLOW, settings=OuterSettings(grace_s=20.0, ahead=ahead))
    found = simulate_outer(case)
    assert found.tokens_counted == found.tokens == 200
    stood_s = found.clusters["c0"].stood_still_s
    assert stood_s == pytest.approx(10 * (10 - 10 * ahead), abs=15)
    longer = simulate_outer(replace(case, settings=replace(case.settings, ahead=ahead / 2)))
    assert longer.clusters["c0"].stood_still_s >= stood_s


@pytest.mark.parametrize("member", [MASTER, "s0", "c1"])
@pytest.mark.parametrize("at_s", [11.0, 14.0, 17.5, 21.0])
def test_nobody_stands_still_for_who_is_gone(member, at_s):
    """Where a version cannot come clusters train on; where it can, one that is gone costs no more than a window."""
    settings = OuterSettings(grace_s=1.0, ahead=0.0, lost_after_s=5.0)
    case = case_of(1.0, 1.0, line=SLOW, steps=None, seconds=200.0, settings=settings)
    found = simulate_outer(replace(case, faults=(Fault(member=member, at_s=at_s, down_s=100.0),)))
    steps, usual = (one.clusters["c0"].inner_steps for one in (found, simulate_outer(case)))
    assert steps > usual + 30 if member != "c1" else steps >= usual - 5, (steps, usual)


def test_copies_are_all_that_a_cluster_stands_still_for():
    slow = MemberLine(bandwidth_bytes_per_s=2e5, latency_s=0.05)
    found = simulate_outer(case_of(1.0, line=slow, copy_s=0.1))
    alone = found.clusters["c0"]
    copies = 2 * alone.outer_rounds + 1
    assert alone.comm_s > 20.0
    assert alone.stood_still_s <= copies * 0.1 + 1e-6


def test_rounded_pushes_keep_lines_busy_for_less_time():
    whole, rounded = (
        simulate_outer(case_of(1.0, settings=OuterSettings(grace_s=1.0, push_format=sent)))
        for sent in (WireFormat.NATIVE, WireFormat.INT8)
    )
    part = (1 + (1 + 2 / 128) / 4) / 2
    assert rounded.clusters["c0"].comm_s == pytest.approx(part * whole.clusters["c0"].comm_s, rel=0.1)
    assert rounded.tokens_counted == whole.tokens_counted


def test_a_window_without_end_waits_for_all():
    """Then no version is made of fewer than all clusters."""
    found = simulate_outer(case_of(1.0, 3.0, settings=OuterSettings(grace_s=500.0)))
    rounds = {one.outer_rounds for one in found.clusters.values()}
    assert max(rounds) - min(rounds) <= 2, "one brings the first parameters, one has more left at the end"
    assert all(one.mean_staleness == 0 for one in found.clusters.values())


@pytest.mark.parametrize("at_s", [0.5, 12.0, 14.5, 17.0, 19.9, 21.0, 40.0])
@pytest.mark.parametrize("member", ["c0", "c1", "s0", "s1", MASTER])
def test_whatever_dies_training_goes_on_and_nothing_counts_twice(member, at_s):
    """The bodies assert that no step is in a version twice."""
    case = case_of(1.0, 1.4, faults=(Fault(member=member, at_s=at_s, down_s=7.0),))
    case = replace(case, settings=OuterSettings(grace_s=1.0, lost_after_s=4.0, transfer_limit_s=60.0))
    simulation = OuterSimulation(case, PlainBodies())
    found = simulation.run()
    for name, one in found.clusters.items():
        if name != member:
            assert one.tokens_lost == 0
            assert one.stood_still_s < 3.0, "until its first version"
    assert all(one.outer_rounds > 3 for one in found.clusters.values())
    if member not in case.layout.shards:
        assert learned_steps(simulation) == found.tokens_counted


def test_a_cluster_that_comes_late_begins_from_the_newest_version():
    case = case_of(1.0, 1.0)
    late = replace(case.clusters[1], begins_s=50.0)
    found = simulate_outer(replace(case, clusters=(case.clusters[0], late)))
    assert found.clusters["c1"].inner_steps < found.clusters["c0"].inner_steps
    assert found.tokens == found.tokens_counted


def test_the_same_case_gives_the_same_result():
    case = case_of(1.0, 1.3, 2.0)
    case = replace(case, clusters=tuple(replace(one, gap=0.5) for one in case.clusters))
    assert simulate_outer(case) == simulate_outer(case)


def test_the_order_of_clusters_in_a_case_changes_nothing():
    case = case_of(1.0, 1.3, 2.0)
    one_by_one = tuple(replace(one, begins_s=0.001 * k) for k, one in enumerate(case.clusters))
    case = replace(case, clusters=one_by_one)
    other = replace(case, clusters=tuple(reversed(case.clusters)))
    one, two = simulate_outer(case), simulate_outer(other)
    assert dict(one.clusters) == dict(two.clusters)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"steps": None}, "either steps or seconds"),
        ({"inner_steps": 0}, "at least 1"),
        ({"faults": (Fault(member="nobody", at_s=1.0, down_s=1.0),)}, "nobody"),
        ({"copy_s": -1.0}, "copy_s"),
        ({"clusters": ()}, "one cluster at least"),
    ],
)
def test_cases_that_cannot_be_are_refused(change, told):
    with pytest.raises(ValueError, match=told):
        replace(case_of(1.0), **change)
