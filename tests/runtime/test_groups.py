"""Who belongs together in a stage, what its devices hold, and what time a group of emulated ones takes."""

from dataclasses import replace

import pytest
import torch

from spantrain.core.action import Op
from spantrain.core.plan import Replica, Stage
from spantrain.core.shares import TensorPart
from spantrain.core.span import Span
from spantrain.devices.emulated import EmulatedDevice
from spantrain.errors import ConfigError
from spantrain.models.tensor_parallel.division import take
from spantrain.runtime.gradients.groups import group_ranks
from spantrain.runtime.gradients.members import MemberGroup
from spantrain.runtime.gradients.part_sums import share_parts
from spantrain.runtime.step.emulation import emulated_seconds, emulated_unit_seconds
from spantrain.runtime.step.stage_member import unit_shares
from spantrain.runtime.step.work import DeviceClock
from testing.models.graphs import graph_of
from testing.models.thread_group import run_members
from testing.runtime.thread_groups import ThreadMembers

pytestmark = pytest.mark.tensor_parallel


def stage_of(*groups: tuple[float, ...]) -> Stage:
    names = iter("abcdefgh")
    replicas = tuple(
        Replica(devices=tuple(next(names) for _ in shares), tp_shares=shares, sample_share=1.0, in_flight_limit=4)
        for shares in groups
    )
    return Stage(first_unit=0, end_unit=1, replicas=replicas, micro_batches=(Span(0, 4),))


@pytest.mark.parametrize(
    ("groups", "rings", "meet"),
    [
        (((1.0,),), (), True),
        (((2.0, 1.0),), (), True),
        (((1.0,), (1.0,)), ((0, 1),), True),
        (((2.0, 1.0), (4.0, 2.0)), ((0, 2), (1, 3)), True),
        (((2.0, 1.0), (1.0, 2.0)), ((0, 2),), False),
        (((1.0,), (1.0, 1.0)), ((0, 1),), False),
    ],
    ids=["alone", "one group", "replicas", "alike", "other shares", "other degree"],
)
def test_who_sums_with_whom(groups, rings, meet):
    layout = group_ranks(stage_of(*groups))
    assert layout.rings == rings
    assert layout.parts_meet is meet


def part(*ranges: tuple[int, int], length: int = 6) -> TensorPart:
    return TensorPart(full_shape=(length, 2), ranges=tuple(Span(*ends) for ends in ranges))


def share_with_threads(*parts: dict[str, TensorPart]):
    members = ThreadMembers.meet(len(parts))
    return run_members(
        len(parts), lambda thread: share_parts(members[thread.rank], parts[thread.rank], torch.device("cpu"))
    )


def test_parts_are_put_together_and_taken_apart():
    """Whole parameters are the leader's; fused ones have several ranges."""
    parts = ({"w": part((0, 1), (3, 4)), "b": part()}, {"w": part((1, 3), (4, 6)), "b": part()})
    full = {"w": torch.arange(12.0).view(6, 2), "b": torch.ones(6, 2)}
    members = ThreadMembers.meet(2)

    def work(thread):
        own = parts[thread.rank]
        shared = share_parts(members[thread.rank], own, torch.device("cpu"))
        gradients = {name: take(full[name], one) for name, one in own.items()}
        whole = {name: value.clone() for name, value in shared.gather(gradients).items()}
        doubled = {name: 2 * value for name, value in whole.items()}
        shared.scatter(doubled, gradients)
        return whole, gradients

    (leader, first), (follower, second) = run_members(2, work)
    assert follower == {}
    assert all(torch.equal(leader[name], full[name]) for name in full)
    assert first["w"].tolist() == (2 * full["w"][[0, 3]]).tolist()
    assert second["w"].tolist() == (2 * full["w"][[1, 2, 4, 5]]).tolist()
    assert torch.equal(first["b"], 2 * full["b"])


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (({"w": part((0, 3))}, {"w": part((3, 5))}), "hold 5 of 6"),
        (({"w": part((0, 3))}, {"w": part()}), "in different ways"),
        (({"w": part((0, 6))}, {"v": part()}), "different parameters"),
    ],
    ids=["missing", "whole and divided", "other names"],
)
def test_a_group_that_does_not_hold_all_is_refused(parts, words):
    with pytest.raises(ConfigError, match=words):
        share_with_threads(*parts)


def test_the_part_of_a_unit_is_that_of_its_matrices():
    parts = {"w": part((0, 2)), "v": part((0, 3)), "norm": TensorPart(full_shape=(6,))}
    assert unit_shares(parts, [["w", "norm"], ["w", "v"], ["norm"]]) == (1 / 3, 5 / 12, 1.0)


def test_a_group_takes_the_time_of_its_slowest_member_in_each_unit(make_plan, spec_of):
    plan = make_plan(spec_of("gpt2"), [0, 5], [[1, 1, 1]], [[Span(0, 2)]], "gpipe")
    devices = tuple(replace(device, backend="emulated") for device in plan.cluster.devices)
    cluster = replace(plan.cluster, devices=devices)
    units = graph_of(plan.model).units
    alone = [emulated_seconds(cluster, "s0r0", "float32", [unit])(Op.FORWARD, 2) for unit in units]
    shares = {"s0r0": [0.75] * 5, "s0r1": [0.25, 0.25, 0.25, 0.25, 1.0]}
    for member in shares:
        together = emulated_unit_seconds(cluster, member, shares, "float32", units)
        assert sum(together(Op.FORWARD, 2)) == pytest.approx(0.75 * sum(alone[:4]) + alone[4])


class _Exchanging(MemberGroup):
    """A group whose exchanges took two seconds."""

    size = 2
    exchanging_s = 2.2

    def exchanged_s(self) -> float:
        return 2.0


class _Clock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s

    def wait_until(self, deadline_s: float) -> None:
        self.time_s = max(self.time_s, deadline_s)


def test_what_emulated_members_exchange_comes_on_top():
    time = _Clock()
    device = EmulatedDevice(clock=time)
    clock = DeviceClock(device=device, seconds=lambda _op, samples: 3.0 * samples, group=_Exchanging())

    def work():
        time.time_s += 2.5
        return ()

    assert clock.run(Op.FORWARD, 1, work) == ()
    assert time.time_s == 105.0
    assert device.real_s == pytest.approx(0.3, abs=0.01), "neither the network nor waiting is computation"
