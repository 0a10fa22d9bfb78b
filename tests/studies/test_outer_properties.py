"""Simulated runs under random speeds, lines and faults: what holds whatever happens."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

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

MODEL_BYTES = 1_000_000
FEW = settings(deadline=None, max_examples=15)

lines = st.builds(
    lambda kilobytes, ms: MemberLine(bandwidth_bytes_per_s=1e3 * kilobytes, latency_s=1e-3 * ms),
    st.integers(200, 5000),
    st.integers(0, 100),
)


@st.composite
def cases(draw: st.DrawFn, *, faults: int = 0) -> OuterCase:
    """Up to four clusters up to five times as slow as each other, up to three shards, on lines of their own."""
    tenths = draw(st.lists(st.integers(2, 10), min_size=1, max_size=4))
    shards = draw(st.integers(1, 3))
    clusters = tuple(
        SimulatedCluster(
            name=f"c{k}",
            step_s=one / 10,
            line=draw(lines),
            gap=draw(st.sampled_from([0.0, 0.5])),
            begins_s=draw(begins),
        )
        for k, one in enumerate(tenths)
    )
    names = [MASTER, *(one.name for one in clusters), *(f"s{k}" for k in range(shards))]
    return OuterCase(
        clusters=clusters,
        shards=tuple(SimulatedShard(name=f"s{k}", line=draw(lines), command_s=0.01) for k in range(shards)),
        layers=equal_layers(8, MODEL_BYTES),
        inner_steps=draw(st.integers(3, 20)),
        steps=draw(st.integers(20, 200)),
        settings=OuterSettings(
            grace_s=draw(st.sampled_from([0.0, 0.5, 20.0])),
            lost_after_s=3.0,
            transfer_limit_s=60.0,
            fragments=draw(st.sampled_from([1, 1, 2])),
        ),
        snapshot_every=draw(st.integers(1, 3)),
        faults=tuple(
            Fault(member=draw(st.sampled_from(names)), at_s=draw(st.integers(0, 400)) / 10, down_s=draw(downs))
            for _ in range(faults)
        ),
    )


begins = st.sampled_from([0.0, 0.0, 5.0])
downs = st.sampled_from([0.2, 2.0, 8.0])


class Watched(PlainBodies):
    """Remembers every version that a shard served, and what it had learned."""

    def __init__(self) -> None:
        super().__init__()
        self.served: dict[str, list[int]] = {}

    def shard(self, name, layout, fragment):
        body = super().shard(name, layout, fragment)
        serve = body._serve

        def noted(command):
            answer = serve(command)
            if body.serving is not None:
                self.served.setdefault((name, fragment), []).append(body.serving)
            return answer

        body._serve = noted
        return body


def contents(simulation: OuterSimulation) -> list:
    """What each shard's newest version of each fragment has learned."""
    members = [member for member in simulation.members.values() if hasattr(member, "beat")]
    return [body.versions[body.serving] for member in members for body in member._bodies]


@FEW
@given(cases())
def test_every_token_that_was_trained_is_counted_once(case):
    """The bodies assert that none is in a version twice."""
    simulation = OuterSimulation(case, PlainBodies())
    found = simulation.run()
    assert found.tokens == found.tokens_counted == case.steps
    learned = {*contents(simulation)}
    assert len(learned) <= len(case.fragments), "a fragment has one content on all shards"
    assert all(sum(span.end - span.first for span in one) == case.steps for one in learned)


@FEW
@given(cases())
def test_nobody_waits_for_another(case):
    """A cluster stands still until it has its first version, and never after: copies cost nothing here."""
    found = simulate_outer(case)
    first_exchange_s = (
        4 * len(case.clusters) * MODEL_BYTES / min(one.bandwidth_bytes_per_s for one in case.lines.values())
    )
    longest_step_s = max(one.step_s * (1 + one.gap) for one in case.clusters)
    waited_s = 2.0 * len(case.layers) + first_exchange_s + longest_step_s + max(one.begins_s for one in case.clusters)
    assert all(one.stood_still_s <= waited_s for one in found.clusters.values())


@FEW
@given(cases(), st.sampled_from([0.0, 0.05]))
def test_one_cluster_alone_is_slower_by_its_copies_only(case, copy_s):
    alone = replace(case, clusters=(replace(case.clusters[0], begins_s=0.0),), copy_s=copy_s)
    (one,) = simulate_outer(alone).clusters.values()
    assert one.stood_still_s <= 2 * (one.outer_rounds + 1) * copy_s + 1e-6


@FEW
@given(cases(faults=3))
def test_whatever_dies_nothing_deadlocks_and_nothing_counts_twice(case):
    bodies = Watched()
    simulation = OuterSimulation(case, bodies)
    found = simulation.run()
    dead = {fault.member for fault in case.faults}
    assert sum(one.inner_steps for one in found.clusters.values()) <= case.steps
    for name, one in found.clusters.items():
        assert 0 <= one.tokens_counted <= one.tokens
        if name not in dead and not dead & {*case.layout.shards, MASTER}:
            assert one.tokens_lost == 0
    for served in bodies.served.values():
        assert served == sorted(served), "versions grow"


@FEW
@given(cases(), st.randoms(use_true_random=False))
def test_who_is_named_first_changes_nothing(case, chance):
    """Clusters that come one after the other; two that came at once would be told apart by their order."""
    clusters = [replace(one, begins_s=0.001 * k) for k, one in enumerate(case.clusters)]
    mixed = list(clusters)
    chance.shuffle(mixed)
    one, other = (simulate_outer(replace(case, clusters=tuple(order))) for order in (clusters, mixed))
    assert one.tokens == other.tokens
    assert one.tokens_counted == other.tokens_counted


def window_of(order: tuple[str, ...]) -> tuple:
    """Return what shards hold after a round in which pushes arrive in this order, in one window."""
    slots = {name: 0.001 * k for k, name in enumerate(order)}
    case = OuterCase(
        clusters=tuple(
            SimulatedCluster(name=name, step_s=0.5 + slot, line=MemberLine(bandwidth_bytes_per_s=1e6))
            for name, slot in slots.items()
        ),
        shards=(SimulatedShard(name="s0", line=MemberLine(bandwidth_bytes_per_s=1e7)),),
        layers=equal_layers(2, MODEL_BYTES),
        inner_steps=10,
        steps=30 * len(order),
        settings=OuterSettings(grace_s=60.0),
    )
    simulation = OuterSimulation(case, PlainBodies())
    found = simulation.run()
    (content,) = contents(simulation)
    return found.versions, sum(span.end - span.first for span in content)


@settings(deadline=None, max_examples=6)
@given(st.permutations(("a", "b", "c")))
def test_the_order_of_arrival_in_a_window_changes_nothing(order):
    assert window_of(tuple(order)) == window_of(("a", "b", "c"))
