"""What a change of plan asks of each device, for random plans of the same devices; no torch at work."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.span import Span
from spantrain.runtime.worker.switch import (
    givers_of,
    keeps_groups,
    keeps_stage,
    moves_nothing,
    needed_units,
    switch_group,
)
from testing.plans import stage_and_replica

UNITS = 5
SPANS = (Span(0, 2), Span(2, 6))
DEVICES = "abcdef"


@st.composite
def places(draw: st.DrawFn) -> list[tuple[tuple[int, int], list[list[str]]]]:
    """Stages: (first and end unit, devices by replica)."""
    devices = draw(st.permutations(DEVICES))
    inner = sorted(draw(st.sets(st.integers(1, UNITS - 1), max_size=3)))
    cuts = sorted(draw(st.sets(st.integers(1, len(DEVICES) - 1), min_size=len(inner), max_size=len(inner))))
    edges, borders = [0, *inner, UNITS], [0, *cuts, len(DEVICES)]
    stages = []
    for index in range(len(edges) - 1):
        replicas: list[list[str]] = []
        for device in devices[borders[index] : borders[index + 1]]:
            if replicas and draw(st.booleans()):
                replicas[-1].append(device)
            else:
                replicas.append([device])
        stages.append(((edges[index], edges[index + 1]), replicas))
    return stages


@pytest.fixture(scope="module")
def base(make_plan, spec_of) -> Plan:
    return make_plan(spec_of("gpt2"), [0, UNITS], [[1] * len(DEVICES)], [SPANS], "gpipe")


def plan_at(base: Plan, where) -> Plan:
    host = replace(base.cluster.hosts[0], devices=tuple(DEVICES))
    devices = tuple(replace(base.cluster.devices[0], name=name) for name in DEVICES)
    stages = tuple(
        Stage(
            first_unit=first,
            end_unit=end,
            replicas=tuple(
                Replica(devices=tuple(group), sample_share=1.0, in_flight_limit=6, tp_shares=(1.0,) * len(group))
                for group in replicas
            ),
            micro_batches=SPANS,
        )
        for (first, end), replicas in where
    )
    return replace(base, cluster=replace(base.cluster, hosts=(host,), devices=devices), stages=stages)


def units_of(plan: Plan, device: str) -> set[int]:
    return set(plan.stages[stage_and_replica(plan, device)[0]].units)


def whole_here(plan: Plan, device: str) -> bool:
    stage, replica = stage_and_replica(plan, device)
    return len(plan.stages[stage].replicas[replica].devices) == 1


@settings(max_examples=200)
@given(old=places(), new=places())
def test_everything_needed_is_there_and_both_sides_know(old, new, base):
    before, after = plan_at(base, old), plan_at(base, new)
    for name in DEVICES:
        givers = givers_of(before, after, name)
        needed = set(needed_units(before, after, name))
        assert name not in givers
        assert len(set(givers)) == len(givers)
        assert needed <= units_of(after, name)
        if not keeps_stage(before, after, name):
            alone_with = units_of(before, name) if whole_here(before, name) else set()
            assert needed == units_of(after, name) - alone_with
        for unit in needed:
            stage = next(stage for stage in before.stages if unit in stage.units)
            sources = {name, *givers}
            assert any(sources >= set(replica.devices) for replica in stage.replicas)
        for peer in switch_group(before, after, name).peers:
            assert name in switch_group(before, after, peer).peers
        assert set(givers) <= set(switch_group(before, after, name).peers)
    assert moves_nothing(before, after) == all(keeps_stage(before, after, name) for name in DEVICES)


@settings(max_examples=50)
@given(where=places())
def test_other_micro_batches_and_shares_of_samples_need_nothing(where, base):
    before = plan_at(base, where)
    stages = tuple(
        replace(
            stage,
            micro_batches=(Span(0, 6),),
            replicas=tuple(
                replace(replica, sample_share=number + 1.0) for number, replica in enumerate(stage.replicas)
            ),
        )
        for stage in before.stages
    )
    after = replace(before, stages=stages, schedule="1f1b")
    assert moves_nothing(before, after)
    for name in DEVICES:
        assert givers_of(before, after, name) == ()
        assert switch_group(before, after, name).peers == ()


def test_groups_stay_where_only_units_move(base):
    before = plan_at(base, [((0, 2), [["a", "b"], ["c"]]), ((2, 5), [["d"], ["e", "f"]])])
    after = plan_at(base, [((0, 3), [["a", "b"], ["c"]]), ((3, 5), [["d", "e"], ["f"]])])
    assert keeps_groups(before, after, "a")
    assert not keeps_stage(before, after, "a")
    assert not keeps_groups(before, after, "d")
    assert needed_units(before, after, "c") == (2,)
    assert needed_units(before, after, "d") == ()  # it had all of it and keeps a part
    assert needed_units(before, after, "a") == (0, 1, 2)  # parts of other sizes, perhaps
    assert len(givers_of(before, after, "c")) in (1, 2)


def test_the_nearest_replica_gives(base):
    before = plan_at(base, [((0, 2), [["a"], ["b"]]), ((2, 5), [["c"], ["d"], ["e"], ["f"]])])
    hosts = (
        replace(base.cluster.hosts[0], name="one", devices=("a", "b", "c", "d")),
        replace(base.cluster.hosts[0], name="two", devices=("e", "f")),
    )
    devices = tuple(replace(device, host="two" if device.name in "ef" else "one") for device in before.cluster.devices)
    site = replace(base.cluster.sites[0], hosts=("one", "two"))
    cluster = replace(before.cluster, hosts=hosts, devices=devices, sites=(site,))
    before = replace(before, cluster=cluster)
    head, tail = before.stages
    moved = (replace(head, replicas=head.replicas[:1]), replace(tail, replicas=(*tail.replicas, head.replicas[1])))
    assert givers_of(before, replace(before, stages=moved), "b")[0] in ("c", "d")
