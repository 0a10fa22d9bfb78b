"""Sums over devices, on wires that can be reckoned by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.cost.network import NetworkCost
from spantrain.cost.sums import Algorithm, Collectives, SumOptions, Words

LATENCY_S = {"site": 1.0, "host": 0.1, "device": 0.01}
MIB = 2**20
S_PER_BYTE = {"site": 1.0, "host": 0.1, "device": 0.01}


class Wires:
    """Devices are named site/host/number; what crosses sites is slow, and shared by all that cross the same way."""

    def level(self, a: str, b: str) -> str:
        for number, name in ((1, "site"), (2, "host")):
            if a.split("/")[:number] != b.split("/")[:number]:
                return name
        return "device"

    def latency_s(self, source, target):
        return LATENCY_S[self.level(source, target)]

    def busy_together_s(self, pairs, size_bytes, beside):
        def way(pair):
            return tuple(name.split("/")[0] for name in pair) if self.level(*pair) == "site" else pair

        users = [way(pair) for pair in (*pairs, *beside)]
        return [size_bytes * S_PER_BYTE[self.level(*pair)] * users.count(way(pair)) for pair in pairs]

    def place(self, device):
        site, host, _ = device.split("/")
        return site, host


SUMS = Collectives(Wires())
ONE_HOST = [f"s/h/{n}" for n in range(4)]


def test_equal_neighbours_take_the_formula():
    k, n = 4, 400.0
    ring = SUMS.seconds(ONE_HOST, n)
    assert ring == pytest.approx(2 * (k - 1) * (0.01 + n / k * 0.01))
    tree = SUMS.seconds(ONE_HOST, n, Algorithm.TREE)
    assert tree == pytest.approx(2 * 2 * (0.01 + n * 0.01))
    assert SUMS.seconds(ONE_HOST[:1], n) == 0.0


def test_a_tree_pays_for_small_sums_over_many_devices():
    many = [f"s/h/{n}" for n in range(64)]
    assert SUMS.fastest(many, 0.001)[0] is Algorithm.TREE
    assert SUMS.fastest(many, 1e6)[0] is Algorithm.RING
    assert SUMS.fastest(many, 1e6)[1] == SUMS.seconds(many, 1e6)


def test_only_one_ring_of_a_hierarchy_crosses_sites():
    devices = [f"{site}/{host}/{n}" for site in "ab" for host in "xy" for n in range(2)]
    n = 80.0
    inside_host = 2 * (0.01 + n / 2 * 0.01)
    inside_site = 2 * (0.1 + n / 2 * 0.1)
    between = 2 * (1.0 + n / 2 * 1.0)
    found = SUMS.seconds(devices, n, Algorithm.HIERARCHICAL)
    assert found == pytest.approx(inside_host + inside_site + between)
    # A ring that goes to and fro between the sites shares each way with itself.
    mixed = [f"{site}/x/{n}" for n in range(4) for site in "ab"]
    assert SUMS.seconds(mixed, n) > SUMS.seconds(sorted(mixed), n)


def test_pieces_pay_for_slow_neighbours_only_where_they_pass_them():
    devices = ["a/x/0", "a/x/1", "a/x/2", "b/x/0"]
    turns = 2 * 3
    assert SUMS.seconds(devices, 0.0) < turns * 1.0
    # A piece goes at most twice into b and twice out of it in six turns.
    assert SUMS.seconds(devices, 0.0) >= 3 * 1.0


def test_rings_that_cross_the_same_way_share_it():
    ring, other = ("a/x/0", "b/x/0"), ("a/x/1", "b/x/1")
    alone = SUMS.seconds(ring, 10.0)
    assert SUMS.seconds(ring, 10.0, options=SumOptions(beside=(other,))) == pytest.approx(2 * alone - 2 * 1.0)


@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(2, 9),
    size=st.floats(0.0, 1e4),
    algorithm=st.sampled_from(list(Algorithm)),
    places=st.lists(st.sampled_from(["a/x", "a/y", "b/x"]), min_size=9, max_size=9),
)
def test_more_bytes_never_take_less_time(count, size, algorithm, places):
    devices = [f"{place}/{n}" for n, place in enumerate(places[:count])]
    assert 0 < SUMS.seconds(devices, size, algorithm) <= SUMS.seconds(devices, size + 1.0, algorithm) + 1e-9


def test_over_a_profile_the_ring_is_equation_5_with_latency(cost_profile):
    cost = NetworkCost(cost_profile)
    assert cost.collectives.seconds(("a0",), 1e6) == 0.0
    assert cost.collectives.seconds(("a0", "a1"), 1e6) == pytest.approx(2 * 0.5 * 1e6 / 1e8 + 2 * 1e-3)
    # Two of three neighbours are slow: each of 4 turns waits for a third of the bytes, some of them for latency too.
    bytes_s = 2 * 2 / 3 * 1e6 / 1e6
    assert bytes_s + 1e-2 <= cost.collectives.seconds(("a0", "a1", "b0"), 1e6) <= bytes_s + 4 * 1e-2


def test_two_rings_from_one_host_share_its_port(cost_profile):
    cost = NetworkCost(cost_profile)
    alone = cost.busy_together_s([("a0", "a1")], 1e6)
    assert cost.busy_together_s([("a0", "a1")], 1e6, beside=[("a0", "a1")]) == [2 * alone[0]]
    # A far flow takes no more of the port than its line does: a hundredth.
    assert cost.busy_together_s([("a0", "a1")], 1e6, beside=[("a0", "b0")]) == [pytest.approx(alone[0] / 0.99)]


def test_one_sum_at_least_is_done_at_once():
    with pytest.raises(ValueError, match="at least 1"):
        SumOptions(at_once=0)


class Hops:
    """A ring of devices 0, 1, ...: the latency and the seconds of a MiB from each to the next."""

    def __init__(self, latency_s: list[float], mib_s: list[float]) -> None:
        self._latency_s, self.mib_s = latency_s, mib_s

    def latency_s(self, source, target):
        return self._latency_s[source]

    def seconds(self, mib: float, at_once: int = 1) -> float:
        options = SumOptions(words=Words.EACH, at_once=at_once)
        return Collectives(self).seconds(range(len(self.mib_s)), mib * MIB, options=options)

    def busy_together_s(self, pairs, size_bytes, beside):
        return [size_bytes / MIB * self.mib_s[source] for source, _ in pairs]


def alike(count: int, mbit: float, latency_s: float) -> Hops:
    return Hops([latency_s] * count, [MIB / (mbit * 125e3)] * count)


@pytest.mark.parametrize(
    ("ring", "mib", "at_once", "live_s"),
    [
        (alike(2, 100, 0.08), 0.001, 1, 0.336),
        (alike(3, 100, 0.16), 0.001, 1, 1.284),
        (alike(2, 100, 0.02), 16.0, 1, 1.748),
        (alike(3, 100, 0.02), 16.0, 1, 1.911),
        (alike(3, 200, 0.04), 16.0, 1, 1.681),
        (alike(3, 500, 0.02), 16.0, 1, 0.715),
        (alike(2, 100, 0.02), 8.0, 2, 1.498),
        (alike(2, 500, 0.02), 16.0, 2, 0.760),
        (alike(3, 200, 0.04), 8.0, 2, 1.060),
        (alike(3, 500, 0.02), 16.0, 2, 0.778),
    ],
)
def test_a_ring_of_gloo_takes_what_it_took_live(ring, mib, at_once, live_s):
    """On the testbed, beside other programs (`benchmarks/gradient_sums.py`)."""
    assert ring.seconds(mib, at_once) == pytest.approx(live_s, rel=0.16)


@settings(deadline=None, max_examples=60)
@given(
    hops=st.lists(
        st.tuples(st.sampled_from([2e-4, 0.005, 0.02, 0.025]), st.sampled_from([1e-3, 0.01, 0.08])),
        min_size=2,
        max_size=6,
    ),
    mib=st.floats(0.01, 300),
    at_once=st.integers(1, 3),
)
def test_gloo_is_never_faster_with_more_bytes_more_latency_or_less_bandwidth(hops, mib, at_once):
    latency_s, mib_s = (list(column) for column in zip(*hops, strict=True))
    taken_s = Hops(latency_s, mib_s).seconds(mib, at_once)
    more = 1 + 1e-9
    assert taken_s <= Hops(latency_s, mib_s).seconds(mib * 1.3, at_once) * more
    assert taken_s <= Hops([2 * seconds for seconds in latency_s], mib_s).seconds(mib, at_once) * more
    assert taken_s <= Hops(latency_s, [2 * seconds for seconds in mib_s]).seconds(mib, at_once) * more
    assert taken_s <= Hops(latency_s, mib_s).seconds(mib, at_once + 1) * more
    # No hop carries more than it can; and every device's piece goes round twice, but for the last hop.
    turns = 2 * (len(hops) - 1)
    assert taken_s >= turns / len(hops) * mib * at_once * max(mib_s) / more
    assert taken_s >= 2 * (sum(latency_s) - max(latency_s)) / more
