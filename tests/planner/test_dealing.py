"""How layers are dealt out, and where the cuts between them lie."""

from dataclasses import replace
from itertools import pairwise

import pytest

from spantrain.core.plan import Plan
from spantrain.core.units import Unit
from spantrain.cost.replicas import ReplicaCost
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.request import JobSpec, PlanRequest
from spantrain.planner.strategies.baselines import equal_layers
from spantrain.planner.strategies.dealing import Dealt, dealings, dealt

JOB, WIDE = JobSpec(global_batch=16), 64
"""How much more than others some units give on."""


def wide(unit: Unit) -> Unit:
    """Return a unit that gives on much."""
    outputs = tuple(replace(one, bytes_per_sample=WIDE * one.bytes_per_sample) for one in unit.outputs)
    return replace(unit, outputs=outputs)


@pytest.fixture
def request_of(make_cluster, make_graph, make_profile):
    """Two devices in two sites, and a model of whose units only each third gives on little."""

    def build(bandwidth: float) -> PlanRequest:
        graph = make_graph(blocks=16)
        units = tuple(unit if index % 3 == 0 else wide(unit) for index, unit in enumerate(graph.units))
        cluster = make_cluster({"a": {"d0": 1.0}, "b": {"d1": 1.0}}, bandwidth=bandwidth)
        profile = make_profile(cluster, replace(graph, units=units))
        return PlanRequest(profile=profile, job=JOB, evaluate=Evaluator(profile, JOB))

    return build


def found_of(request: PlanRequest, below_s: float = float("inf")) -> tuple[Plan, list[Dealt]]:
    base = equal_layers("1f1b", request, units_each=2)[0].plan
    return base, list(dealt(base, ReplicaCost(request.profile), request.profile.graph, below_s))


def test_each_unit_is_somewhere_once_and_each_device_has_as_many_rounds_as_were_dealt(request_of):
    request = request_of(1e9)
    base, found = found_of(request)
    assert {one.places for one in found} <= {tuple(places) for places in dealings(2)}
    for one in found:
        assert one.begins[0] == 0
        assert one.begins[-1] == len(request.profile.graph.units)
        assert all(begin < end for begin, end in pairwise(one.begins))
        assert [stage.devices for stage in one.plan.stages] == [base.stages[place].devices for place in one.places]


def test_over_a_slow_way_cuts_lie_where_little_is_given_on(request_of):
    _, slow = found_of(request_of(1e5))
    _, fast = found_of(request_of(1e12))

    def ratio(found: list[Dealt]) -> float:
        """Return the part of cuts behind units that give on much, of the fastest of each dealing."""
        best = {}
        for one in sorted(found, key=lambda one: one.busy_s, reverse=True):
            best[one.places, one.spans] = one
        cuts = [cut for one in best.values() for cut in one.begins[1:-1]]
        return sum((cut - 1) % 3 != 0 for cut in cuts) / len(cuts)

    assert ratio(slow) < 0.2 < ratio(fast)


def test_a_pipeline_that_is_busy_for_too_long_is_none(request_of):
    request = request_of(1e9)
    every = found_of(request)[1]
    half_s = sorted(one.busy_s for one in every)[len(every) // 2]
    assert [one.key for one in found_of(request, half_s)[1]] == [one.key for one in every if one.busy_s < half_s]


def test_cuts_move_by_themselves_and_with_a_neighbour_but_not_past_each_other(request_of):
    one = found_of(request_of(1e9))[1][0]
    stages = [end - begin for begin, end in pairwise(one.begins)]
    for cuts, way in one.ways:
        other = one.moved(cuts, way)
        assert other is not None
        assert [cut for cut, unit in enumerate(other.begins) if unit != one.begins[cut]] == list(cuts)
        assert sum(end - begin for begin, end in pairwise(other.begins)) == sum(stages)
    assert any(len(cuts) == 2 for cuts, _ in one.ways)
    far = one
    while (further := far.moved(range(1, 2), 1)) is not None:
        far = further
    assert far.begins[1] == far.begins[2] - 1
