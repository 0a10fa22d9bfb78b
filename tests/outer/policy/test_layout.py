"""Which layers each shard holds, and at which place the shards are."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spantrain.core.outer.layers import Layer, ParameterSpec, ShardLayout, ShardRun, divide
from spantrain.outer.policy.placement import OuterPlaces, PlacementRequest, place_shards
from testing.outer.policy import layers_of


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 9))
def test_the_largest_shard_is_as_small_as_it_can_be(sizes, shards):
    shards = min(shards, len(sizes))
    layout = divide(layers_of(*sizes), [f"s{k}" for k in range(shards)])
    assert [layer for run in layout.runs for layer in run.layers] == list(range(len(sizes)))
    largest = max(sum(sizes[layer] for layer in run.layers) for run in layout.runs)
    assert largest == min(
        max(sum(sizes[first:end]) for first, end in zip((0, *cuts), (*cuts, len(sizes)), strict=True))
        for cuts in combinations(range(1, len(sizes)), shards - 1)
    )
    assert [layout.shard_of(k) for k in layout.layers_of("s0")] == ["s0"] * len(layout.layers_of("s0"))


def test_layouts_that_cannot_be_are_refused():
    layers = layers_of(1, 2)
    with pytest.raises(ValueError, match="got 3 shards for 2 layers; use 1 to 2 shards"):
        divide(layers, ["a", "b", "c"])
    with pytest.raises(ValueError, match="once and in order"):
        ShardLayout(layers=layers, runs=(ShardRun(shard="a", first=1, end=2), ShardRun(shard="b", first=0, end=1)))
    twice = (*layers, Layer(name="2", parameters=(ParameterSpec(name="0.weight", shape=(1,)),)))
    with pytest.raises(ValueError, match=r"each parameter must be there once, got 0\.weight"):
        divide(twice, ["a"])


def request(**more) -> PlacementRequest:
    known = {
        "bandwidth_bytes_per_s": {"x": {"a": 100e6, "b": 10e6}, "y": {"a": 10e6, "b": 100e6}},
        "throughput": {"a": 3.0, "b": 1.0},
        "line_bytes_per_s": {},
        "memory_bytes": {},
    }
    places = OuterPlaces(**{name: more.pop(name, usual) for name, usual in known.items()})
    return PlacementRequest(places=places, shard_bytes={"s0": 10**8, "s1": 10**8}, **more)


def test_one_place_is_the_fastest_cluster_mean_not_the_fastest_link():
    row = {"x": {"a": 900e6, "b": 5e6}, "y": {"a": 100e6, "b": 100e6}}
    placed = place_shards(request(bandwidth_bytes_per_s=row, throughput={"a": 1.0, "b": 1.0}))
    assert placed.places == {"s0": "y", "s1": "y"}
    assert placed.exchange_s == {"a": 4.0, "b": 4.0}
    assert [score.place for score in placed.single] == ["y", "x"]
    assert placed.single[0].paper_score < placed.single[1].paper_score


def test_rounded_pushes_take_less_of_an_exchange():
    even = {place: {"a": 10e6, "b": 10e6} for place in "x"}
    whole, rounded = (
        place_shards(request(bandwidth_bytes_per_s=even, bytes_pushed_per_byte=part)) for part in (1.0, 0.25)
    )
    assert rounded.weighted_s == pytest.approx(0.625 * whole.weighted_s)


def test_shards_are_spread_where_that_is_faster():
    even = {place: {"a": 10e6, "b": 10e6} for place in "xy"}
    placed = place_shards(request(bandwidth_bytes_per_s=even))
    assert set(placed.places.values()) == {"x", "y"}
    assert placed.weighted_s == pytest.approx(20.0)
    line = place_shards(request(bandwidth_bytes_per_s=even, line_bytes_per_s={"a": 10e6, "b": 10e6}))
    assert len(set(line.places.values())) == 1, "their own lines are full anyway"


def test_a_place_holds_no_more_than_its_memory():
    placed = place_shards(request(memory_bytes={"x": int(6e8), "y": int(6e8)}))
    assert sorted(placed.places.values()) == ["x", "y"]
    assert "no place alone has room" in placed.reason
    with pytest.raises(ValueError, match="more than there is room for"):
        place_shards(request(memory_bytes={"x": int(6e8), "y": 0}))


def test_every_bandwidth_must_be_there():
    with pytest.raises(ValueError, match="place x: needs a bandwidth to each of a, b, got a"):
        request(bandwidth_bytes_per_s={"x": {"a": 1.0}})
