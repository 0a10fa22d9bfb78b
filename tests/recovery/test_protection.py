"""Who keeps a copy of what: as many as it takes, where there is room, none that would be lost with it."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.span import Span
from spantrain.core.units import ModelSpec
from spantrain.recovery.policy import holds_all
from spantrain.recovery.protection import is_whole, protected, survived

KIND = DeviceKind(
    name="kind", peak_fp16_flop_per_s=1e12, peak_fp32_flop_per_s=1e12, memory_bytes=100,
    memory_bandwidth_bytes_per_s=1e11, power_w=10.0, source="a test",
)  # fmt: skip


def plan_of(stages: list[list[tuple[str, ...]]], hosts: dict[str, tuple[str, str]]) -> Plan:
    """`hosts`: host and site of each device, by name."""
    by_host: dict[tuple[str, str], list[str]] = {}
    for name, place in hosts.items():
        by_host.setdefault(place, []).append(name)
    sites: dict[str, list[str]] = {}
    for host, site in by_host:
        sites.setdefault(site, []).append(host)
    cluster = Cluster(
        name="test",
        kinds=(KIND,),
        sites=tuple(
            Site(name=name, hosts=tuple(own), bandwidth_bytes_per_s=1e9, latency_s=0.0) for name, own in sites.items()
        ),
        hosts=tuple(Host(name=host, site=site, devices=tuple(own)) for (host, site), own in by_host.items()),
        devices=tuple(
            Device(name=name, kind="kind", host=host, site=site, backend="cpu", memory_bytes=100)
            for name, (host, site) in hosts.items()
        ),
        links=(),
    )
    return Plan(
        cluster=cluster,
        model=ModelSpec(name="model", family="gpt2", config={}, dataset="tiny"),
        global_batch=1,
        dtype="float32",
        schedule="1f1b",
        stages=tuple(
            Stage(
                first_unit=index,
                end_unit=index + 1,
                replicas=tuple(
                    Replica(devices=own, sample_share=1.0, in_flight_limit=1, tp_shares=(1.0,) * len(own))
                    for own in row
                ),
                micro_batches=(Span(0, 1),),
            )
            for index, row in enumerate(stages)
        ),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any stages of replicas of one or two devices on any hosts of any sites."""
    count, number = draw(st.integers(1, 5)), 0
    stages: list[list[tuple[str, ...]]] = []
    for _ in range(count):
        row = []
        for size in draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=3)):
            row.append(tuple(f"d{number + member}" for member in range(size)))
            number += size
        stages.append(row)
    hosts = draw(st.lists(st.integers(0, 5), min_size=number, max_size=number))
    places = {f"d{at}": (f"h{host}", f"s{host % 2}") for at, host in enumerate(hosts)}
    return plan_of(stages, places)


@given(plan=plans(), losses=st.integers(0, 3), needs=st.integers(1, 60), room=st.integers(0, 100), seed=st.integers())
def test_what_is_promised_is_kept(plan, losses, needs, room, seed):
    kept_bytes = [needs] * len(plan.stages)
    found = protected(plan, losses, kept_bytes, dict.fromkeys(plan.devices, room))
    assert replace(found, stages=tuple(replace(stage, keepers=()) for stage in found.stages)) == plan
    for name in plan.devices:
        assert sum(needs for stage in found.stages if name in stage.keepers) <= room
    for stage in found.stages:
        assert len(stage.keepers) <= max(0, losses + 1 - len(stage.replicas))
    promised = min(survived(stage) for stage in found.stages)
    gone = Random(seed).sample(list(plan.devices), min(promised, len(plan.devices)))
    assert holds_all(found, set(plan.devices) - set(gone))
    event(f"survives {promised} of {losses}")
    if room >= needs * len(plan.devices) and len(plan.stages) > losses and all(map(is_whole, plan.stages)):
        assert promised >= losses


ONE_EACH = [[("a",)], [("b",)], [("c",)]]


@pytest.mark.parametrize(
    ("hosts", "keepers"),
    [
        ({"a": ("x", "s"), "b": ("y", "s"), "c": ("z", "s")}, ["b", "c", "a"]),  # the next in the pipeline
        ({"a": ("x", "s"), "b": ("x", "s"), "c": ("z", "s")}, ["c", "c", "a"]),  # not of the same host
        ({"a": ("x", "s"), "b": ("y", "t"), "c": ("z", "s")}, ["c", "a", "a"]),  # of the same site
        ({"a": ("x", "s"), "b": ("x", "s"), "c": ("x", "s")}, ["b", "c", "a"]),  # there is no other host
    ],
)
def test_the_nearest_on_another_host_keeps(hosts, keepers):
    found = protected(plan_of(ONE_EACH, hosts), 1, [1, 1, 1], dict.fromkeys("abc", 100))
    assert [stage.keepers for stage in found.stages] == [(name,) for name in keepers]


def test_who_has_no_room_keeps_nothing():
    hosts = {"a": ("x", "s"), "b": ("y", "s"), "c": ("z", "s")}
    found = protected(plan_of(ONE_EACH, hosts), 1, [5, 10, 10], {"a": 0, "b": 4, "c": 12})
    assert [stage.keepers for stage in found.stages] == [("c",), (), ()]
    assert [survived(stage) for stage in found.stages] == [1, 0, 0]
    assert not holds_all(found, {"a", "c"})


def test_a_keeper_of_ones_own_is_refused():
    plan = plan_of(ONE_EACH, {"a": ("x", "s"), "b": ("y", "s"), "c": ("z", "s")})
    for keepers in (("a",), ("d",), ("b", "b")):
        with pytest.raises(ValueError, match="stage 0: keepers must be devices of the plan's other stages, each once"):
            replace(plan, stages=(replace(plan.stages[0], keepers=keepers), *plan.stages[1:]))


def test_devices_that_keep_copies_in_one_memory_share_its_room():
    hosts = {"a": ("x", "s"), "b": ("y", "s"), "c": ("z", "s")}
    memory_of = {"b": "host z", "c": "host z"}
    found = protected(plan_of(ONE_EACH, hosts), 1, [10, 10, 10], {"a": 0, "host z": 19}, memory_of)
    assert [stage.keepers for stage in found.stages] == [("b",), (), ()]
