"""What other systems do when devices leave and come: each policy's machine, by virtual time."""

from dataclasses import replace
from functools import cache

import pytest

from spantrain.app.profiling.describe import described_profile
from spantrain.config.cluster_file import load_preset, parse_cluster
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.request import JobSpec
from spantrain.sim.availability import PREPARED_S, AvailabilityEvent, detect_s
from spantrain_studies.availability.bamboo import Bamboo, designs
from spantrain_studies.availability.chains import Chains
from spantrain_studies.availability.likeness import HostSymmetry
from spantrain_studies.availability.oobleck import Oobleck
from spantrain_studies.availability.plans import OwnPlans
from spantrain_studies.availability.restart import Restart
from spantrain_studies.availability.run import RivalRun, Turn, Work
from spantrain_studies.availability.torchft import TorchFt, groups_of
from spantrain_studies.availability.varuna import grid_planner

EQUAL = """
name: six
description: six equal boards
sites:
  - name: lab
    network: {bandwidth: 1 Gbit/s, latency: 0.2 ms}
    hosts:
      - {name: nx, count: 6, backend: emulated, devices: {xavier-nx: 1}}
links: []
"""
CLUSTER = replace(parse_cluster(EQUAL, source="six"), emulated_speed=0.006)
NAMES = tuple(one.name for one in CLUSTER.devices)
ALL = frozenset(NAMES)
JOB = JobSpec(global_batch=24, optimizer="adamw")
TUNED = {"restart_s": 5.0, "every_s": 30.0, "worth": 0.97}
DETECT_S = detect_s(alone=False)


@cache
def chains() -> Chains:
    return Chains(described_profile(CLUSTER, resolve_model("gpt2-tiny")), JOB)


@cache
def plans() -> OwnPlans:
    return OwnPlans(chains().profile, JOB)


def went(at_s: float, device: str, *, comes: bool = False) -> AvailabilityEvent:
    return AvailabilityEvent(at_s=at_s, device=device, comes=comes)


class Fixed:
    """A rival that does the same work on whoever is there, and what it is told at a loss."""

    every_s = 10.0

    def __init__(self, **turn: object) -> None:
        self.turn, self.asked = turn, 0

    def begin(self, present):
        return Work(step_s=1.0, samples=2, devices=present)

    def lost(self, device, present):
        return Turn(work=self.begin(present), **self.turn)

    def changed(self, present):
        self.asked += 1


def test_only_whole_steps_count():
    found = RivalRun(Fixed(), ALL).run([], 10.5)
    assert (found.samples, found.steps_lost, found.paused_s) == (20, 0, 0)


def test_a_loss_costs_the_step_under_way_detection_and_the_pause():
    found = RivalRun(Fixed(pause_s=3.0), ALL).run([went(5.5, "nx-0")], 20.0)
    assert found.steps_lost == 1
    assert found.paused_s == pytest.approx(DETECT_S + 3.0)
    assert found.samples == 2 * (5 + int(20.0 - 5.5 - 3.0 - DETECT_S))


def test_a_step_may_go_on_where_it_was():
    kept, lost = (RivalRun(Fixed(loses_step=again), ALL).run([went(5.9, "nx-0")], 30.0) for again in (False, True))
    assert kept.steps_lost == 0
    assert kept.samples >= lost.samples


def test_who_goes_back_does_so_to_the_newest_checkpoint():
    found = RivalRun(Fixed(back=True), ALL).run([went(17.5, "nx-0")], 17.6)
    assert (found.samples, found.steps_lost, found.restarts) == (20, 8, 1)


def test_who_comes_is_thought_of_when_the_step_ends_and_who_wants_to_settle_is_asked():
    calm, settling = Fixed(), Fixed(settle=True)
    RivalRun(calm, ALL).run([went(2.5, "nx-0"), went(9.2, "nx-0", comes=True)], 9.25)
    assert calm.asked == 0
    RivalRun(settling, ALL).run([went(2.5, "nx-0")], 20.0)
    assert settling.asked == 1


def test_a_pause_that_the_end_cuts_short_is_not_reckoned_whole():
    found = RivalRun(Fixed(pause_s=100.0), ALL).run([went(5.0, "nx-0")], 20.0)
    assert found.paused_s == pytest.approx(15.0)


def test_like_devices_are_asked_for_once():
    likeness = HostSymmetry(load_preset("laptop"))
    marks = dict.fromkeys(("lab-0", "lab-1", "office-nx", "office-tx2", "home-tx2", "home-nano"), (0,))
    one, other = (likeness.renamed({**marks, gone: (1,)}) for gone in ("lab-0", "lab-1"))
    assert one["lab-0"] == other["lab-1"] == "lab-1"
    assert one["home-nano"] == "home-nano"
    with_six = plans().best(ALL - {NAMES[0]})
    assert with_six is not None
    assert NAMES[0] not in with_six.devices
    assert plans().calm_step_s(with_six) == plans().calm_step_s(plans().best(ALL - {NAMES[4]}))


def test_varuna_restarts_with_an_equal_grid():
    planner = grid_planner(chains().whole)
    plan, step_s = planner(ALL - {"nx-2"})
    assert {len(stage.replicas) for stage in plan.stages} == {len(plan.stages[0].replicas)}
    assert "nx-2" not in plan.devices
    varuna = Restart(plans(), planner, writes=False, **TUNED)
    before = varuna.begin(ALL)
    turn = varuna.lost("nx-2", ALL - {"nx-2"})
    assert turn.back
    assert turn.pause_s > 5.0
    assert turn.work.step_s == step_s >= before.step_s
    again = varuna.changed(ALL)
    assert again is None or not again.back


def test_bamboo_goes_on_with_a_neighbour_and_restarts_without():
    (design,) = designs(chains(), ALL, 1)
    places = len(design.slots)
    bamboo = Bamboo(chains(), design, **TUNED)
    calm = bamboo.begin(ALL)
    lost = design.slots[1][0]
    turn = bamboo.lost(lost, ALL - {lost})
    assert not turn.loses_step
    assert not turn.back
    assert turn.work.step_s > calm.step_s
    assert turn.work.devices == calm.devices - {lost}
    if len(design.slots[0]) == 1:
        neighbour = design.slots[0][0]
        assert bamboo.lost(neighbour, ALL - {lost, neighbour}).back == (places > 1)
    came = bamboo.changed(ALL)
    assert came is None or came.work.step_s <= calm.step_s * 1.01


def test_oobleck_keeps_two_pipelines_and_shrinks_the_one_that_is_hurt():
    oobleck = Oobleck(chains(), **TUNED)
    calm = oobleck.begin(ALL)
    before = oobleck.row
    assert len(before) >= 2
    hurt = before[0].devices[0]
    turn = oobleck.lost(hurt, ALL - {hurt})
    assert not turn.back
    assert turn.pause_s >= PREPARED_S
    assert turn.work.devices == calm.devices - {hurt}
    assert turn.work.step_s > calm.step_s
    for left in sorted(turn.work.devices)[:-1]:
        turn = oobleck.lost(left, turn.work.devices - {left})
    assert turn.work is not None


def test_torchft_drops_a_group_with_any_of_its_devices_until_it_has_healed():
    groups = groups_of(plans(), (NAMES[:3], NAMES[3:]))
    torchft = TorchFt(plans(), groups, restart_s=5.0, every_s=30.0)
    calm = torchft.begin(ALL)
    turn = torchft.lost(NAMES[0], ALL - {NAMES[0]})
    assert turn.work.samples == groups[1].plan.global_batch == calm.samples / 2
    assert turn.work.devices == frozenset(NAMES[3:])
    heard = torchft.healed([went(1.0, NAMES[0]), went(9.0, NAMES[0], comes=True)])
    assert heard[1].at_s == pytest.approx(9.0 + groups[0].heal_s)
    assert torchft.healed([went(1.0, "nx-0"), went(9.0, "nx-0", comes=True), went(9.0, "nx-0")]) == [went(1.0, "nx-0")]
    assert torchft.changed(ALL).work == calm
    torchft.lost(NAMES[0], ALL - {NAMES[0]})
    assert torchft.lost(NAMES[5], ALL - {NAMES[0], NAMES[5]}).back
