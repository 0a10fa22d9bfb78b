"""Worker processes are killed while they train: the run goes on with the others, and its losses are one device's."""

from dataclasses import replace

import pytest
import torch

from spantrain.app.planning import ahead, protection
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.train import train
from spantrain.core.shares import StateSharding
from spantrain.errors import PeerLostError
from spantrain.planner.present import NewPlan
from spantrain.recovery.policy import OnLoss
from testing.runtime.killed_runs import BATCH, JOB, LONG, READY, THIRDS, TOLERANCE, KilledRuns, Killer
from testing.runtime.places import in_sites
from testing.runtime.runs import OneProcess

pytestmark = [pytest.mark.slow, pytest.mark.checkpoint, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def run(make_plan, spec_of, law_profile, tmp_path_factory) -> KilledRuns:
    return KilledRuns(make_plan, spec_of, law_profile, tmp_path_factory)


# When, whose part of the pipeline, and who has what is lost, of this and the next tests: each two of them together.
@pytest.mark.parametrize(("victim", "when"), [("s0r0", READY), ("s0r0", 4), ("s1r1", 0), ("s1r1", 4)])
def test_a_lost_replica_costs_the_step_under_way(run, victim, when):
    killer = Killer({when: victim})
    _, outcome = run(killer, [0, 2, 5], [[2, 1], [1, 1]])
    assert victim not in outcome.devices
    assert len(outcome.devices) == 3
    (change,) = outcome.plan_changes
    assert change.reason.startswith(f"{victim} lost (its worker was killed by signal 9)")
    assert "trained again" in change.reason
    assert any("Training goes on after" in note for note in killer.notes)


def test_two_are_lost_one_in_the_recovery_from_the_other(run):
    killer = Killer({3: "s0r1", "s0r1 lost": "s1r0"})
    _, outcome = run(killer, [0, 2, 5], [[2, 1], [1, 1]])
    assert sorted(outcome.devices) == ["s0r0", "s1r1"]


def test_what_is_in_a_lost_machines_memory_comes_from_the_newest_checkpoint(run):
    killer = Killer({5: "s1r0"})
    job = replace(JOB, checkpoint_every=2)
    _, outcome = run(killer, [0, 1, 3, 5], [[1], [1], [1]], job=job, state=StateSharding.OFFLOAD)
    assert sorted(outcome.devices) == ["s0r0", "s2r0"]
    assert any("s1r0 lost" in note and "all go back to the checkpoint after" in note for note in killer.notes)


@pytest.mark.parametrize(("every", "where"), [(2, "the checkpoint after"), (0, "the beginning")])
def test_what_nobody_else_holds_comes_from_the_newest_checkpoint(run, every, where):
    killer = Killer({5: "s1r0"})
    _, outcome = run(killer, [0, 1, 3, 5], [[1], [1], [1]], job=replace(JOB, checkpoint_every=every))
    assert sorted(outcome.devices) == ["s0r0", "s2r0"]
    assert any(
        f"s1r0 lost (its worker was killed by signal 9): what it held is held by no other device, so all go "
        f"back to {where}" in note
        for note in killer.notes
    )


@pytest.mark.parametrize(
    ("victim", "state"), [("s0r0", StateSharding.ZERO1), ("s0r1", StateSharding.ZERO1), ("s0r1", StateSharding.ZERO3)]
)
def test_a_replica_takes_its_part_of_divided_state_along(run, victim, state):
    killer = Killer({5: victim})
    job = replace(JOB, checkpoint_every=2)
    _, outcome = run(killer, [0, 2, 5], [[2, 1], [1]], job=job, state=state)
    assert victim not in outcome.devices
    assert any(f"{victim} lost" in note and "all go back to the checkpoint after" in note for note in killer.notes)


@pytest.mark.parametrize(
    ("when", "state"), [(READY, StateSharding.ZERO1), (0, StateSharding.ZERO1), (4, StateSharding.ZERO3)]
)
def test_divided_state_is_all_there_when_another_stage_loses_a_device(run, when, state):
    killer = Killer({when: "s1r0"})
    _, outcome = run(killer, [0, 2, 5], [[2, 1], [1]], state=state, protect=1)
    assert len(outcome.devices) in (1, 2)
    (change,) = outcome.plan_changes
    assert "trained again" in change.reason
    assert when != 4 or "go back" not in change.reason


@pytest.mark.parametrize(
    ("victim", "when"), [("s0r0", READY), ("s0r0", 0), ("s1r0", READY), ("s1r0", 4), ("s2r0", 0), ("s2r0", 4)]
)
def test_what_a_keeper_holds_costs_the_step_under_way(run, victim, when):
    """Nothing was saved: each stage has one device, and a keeper that has followed it."""
    killer = Killer({when: victim})
    _, outcome = run(killer, [0, 1, 3, 5], [[1], [1], [1]], protect=1)
    assert len(outcome.devices) == 2
    (change,) = outcome.plan_changes
    assert "trained again" in change.reason
    assert when != 4 or "go back" not in change.reason


@pytest.mark.parametrize("victim", ["s0r0", "s0r1", "s1r0"])
def test_a_keeper_may_go_whose_stage_others_have_as_well(run, victim):
    killer = Killer({4: victim})
    _, outcome = run(killer, [0, 2, 5], [[2, 1], [1]], protect=1)
    assert len(outcome.devices) == 2
    assert not any("go back" in note for note in killer.notes)


def test_who_has_no_part_in_the_light_change_gives_what_it_holds_until_the_planner_knows_better(run, monkeypatch):
    """Of two replicas one is lost, and the other has no part in the light change."""
    light = protection.light_plan

    def without(plan, profile, present, **options) -> NewPlan:
        return light(plan, profile, present - {"s1r1"}, **options)

    monkeypatch.setattr(protection, "light_plan", without)
    killer = Killer({2: "s1r0"}, last="The planner's answer")
    _, outcome = run(killer, [0, 2, 5], [[2, 1], [1, 1]], job=LONG, speed=1e-5)
    assert sorted(outcome.devices) == ["s0r0", "s0r1", "s1r1"]
    lost, better = outcome.plan_changes
    assert "trained again" in lost.reason
    assert lost.moved_bytes > 0
    assert better.reason.startswith("The planner's answer: planned anew on 3 devices, steps of ")


def test_one_after_the_other_may_go_as_long_as_the_next_has_a_keeper(run):
    killer = Killer({2: "s1r0", 5: "s2r0"})
    _, outcome = run(killer, [0, 1, 3, 5], [[1], [1], [1]], protect=1)
    assert sorted(outcome.devices) == ["s0r0"]
    assert not any("all go back" in note for note in killer.notes)


def test_one_may_go_while_its_copy_is_on_its_way(run):
    """What its keeper has is then of no use, or just whole."""
    killer = Killer({2: "s1r0", "Training goes on": "s2r0"})
    _, outcome = run(killer, [0, 1, 3, 5], [[1], [1], [1]], protect=1)
    assert sorted(outcome.devices) == ["s0r0"]


def test_two_at_once_may_go_where_two_keep_each_stage(run):
    killer = Killer({4: "s0r0", "s0r0 lost": "s1r0"})
    _, outcome = run(killer, [0, 1, 3, 5], [[1], [1], [1]], protect=2)
    assert sorted(outcome.devices) == ["s2r0"]
    assert not any("all go back" in note for note in killer.notes)


def test_all_but_one_may_go(run):
    killer = Killer({1: "s0r0", 3: "s1r0", 5: "s1r1"})
    _, outcome = run(killer, [0, 2, 5], [[2, 1], [1, 1]])
    assert sorted(outcome.devices) == ["s0r1"]


def test_a_run_ends_where_that_is_wanted(run):
    with pytest.raises(PeerLostError, match="device s0r0 was lost"):
        run(Killer({1: "s0r0"}), [0, 2, 5], [[2, 1], [1, 1]], on_loss=OnLoss.END)


def test_a_device_that_comes_back_is_taken_in_again(run):
    killer = Killer({3: "s0r1"}, back={"Training goes on": "s0r1"}, last="s0r1 joined")
    _, outcome = run(killer, [0, 5], [[1, 1]], job=LONG, speed=1e-5)
    assert sorted(outcome.devices) == ["s0r0", "s0r1"], killer.notes
    lost, joined = outcome.plan_changes
    assert (lost.reason.split()[:2], joined.reason.split()[:2]) == (["s0r1", "lost"], ["s0r1", "joined:"])
    assert joined.moved_bytes > 0


def test_a_device_that_has_left_may_come_back_at_once(run):
    killer = Killer({}, drained={3: "s0r1"}, back={"Training goes on": "s0r1"}, last="s0r1 joined")
    _, outcome = run(killer, [0, 5], [[1, 1]], job=LONG, speed=1e-5)
    assert sorted(outcome.devices) == ["s0r0", "s0r1"], killer.notes


@pytest.fixture
def goes_ahead(monkeypatch):
    """Have all state go ahead, however little it is, and however short steps are."""
    monkeypatch.setattr(ahead, "_WORTH_S", 0.0)
    monkeypatch.setattr(ahead, "_PART_OF_STEP", 1e9)
    monkeypatch.setattr(ahead, "_BESIDE", 0.0)


AHEAD = "of state go ahead to s0r1"


@pytest.mark.usefixtures("goes_ahead")
def test_what_a_device_is_to_have_goes_ahead_while_steps_go_on(run):
    killer = Killer({3: "s0r1"}, back={"Training goes on": "s0r1"}, last="s0r1 joined")
    _, outcome = run(killer, [0, 5], [[1, 1]], job=LONG, speed=1e-5)
    assert sorted(outcome.devices) == ["s0r0", "s0r1"], killer.notes
    assert any(AHEAD in note for note in killer.notes)
    _, joined = outcome.plan_changes
    assert joined.moved_bytes == 0, "nothing was left to be moved"


@pytest.mark.usefixtures("goes_ahead")
@pytest.mark.parametrize("victim", ["s0r0", "s0r1"])
def test_a_loss_while_state_goes_ahead_is_one_like_any_other(run, victim):
    """Who gives, or who takes: by then all go over already, or not."""
    killer = Killer({AHEAD: victim}, drained={3: "s0r1"}, back={"Training goes on": "s0r1"}, last="lost (its worker")
    _, outcome = run(killer, [0, 5], [[1, 1]], job=LONG, speed=1e-5)
    assert sorted({"s0r0", "s0r1"} - {victim}) == sorted(outcome.devices), killer.notes


@pytest.mark.usefixtures("goes_ahead")
def test_what_the_only_holder_of_a_stage_has_goes_ahead_before_it_leaves(run):
    killer = Killer({}, drained={2: "s1r0"}, last="s1r0 leaves")
    _, outcome = run(killer, [0, 1, 3, 5], [[1], [1], [1]], job=replace(JOB, steps=100_000))
    assert sorted(outcome.devices) == ["s0r0", "s2r0"]
    (change,) = outcome.plan_changes
    assert change.moved_bytes == 0
    assert any("of state go ahead to" in note for note in killer.notes)
    assert not any("lost" in note or "trained again" in note for note in killer.notes)


def test_a_device_that_makes_nothing_faster_stands_by_until_another_is_lost(run):
    """Six samples are two for each of three devices, and of four none has less than that."""
    killer = Killer({3: "s1r0", "stands by": "s0r0"}, back={"Training goes on": "s1r0"}, last="s0r0 lost")
    _, outcome = run(killer, [0, 2, 5], [[2, 1], [1, 1]], job=LONG, speed=1e-5)
    assert "s1r0 joined, and stands by: steps would be no shorter with it" in killer.notes
    assert sorted(outcome.devices) == ["s0r1", "s1r0", "s1r1"]


def test_the_only_holder_of_a_stage_leaves_and_no_step_is_lost(run):
    """Nothing was saved: what it holds, it hands over."""
    killer = Killer({}, drained={2: "s1r0"}, last="s1r0 leaves")
    _, outcome = run(killer, [0, 1, 3, 5], [[1], [1], [1]], job=replace(JOB, steps=100_000))
    assert sorted(outcome.devices) == ["s0r0", "s2r0"]
    (change,) = outcome.plan_changes
    assert change.reason.startswith("s1r0 leaves (asked to by spantrain drain): ")
    assert change.moved_bytes > 0
    assert not any("lost" in note or "trained again" in note for note in killer.notes)


def test_devices_that_the_plan_was_made_with_in_mind_are_no_newcomers(make_plan, spec_of, law_profile, tmp_path):
    plan, told = make_plan(spec_of("gpt2"), [0, 5], [[1, 1]], [THIRDS], "1f1b"), Killer({})
    (stage,) = plan.stages
    stages = (replace(stage, replicas=stage.replicas[:1]),)
    plan = replace(plan, stages=stages, cluster=replace(plan.cluster, emulated_speed=1e-5))
    request = TrainRequest(
        plan=plan, profile=law_profile(plan.cluster, plan.model), profile_path="", job=replace(JOB, steps=60),
        out=tmp_path,
    )  # fmt: skip
    names = tuple(plan.cluster.device_by_name)
    assert len(names) > 1
    with open_session(plan.cluster, names, SessionOptions(network=False), tmp_path / "logs", told) as session:
        outcome = train(session, request, told.stop, told)
    assert sorted(outcome.devices) == list(plan.devices)
    assert not any("joined" in note for note in told.notes)


@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_lost_member_of_a_group_that_divides_tensors_costs_the_step_under_way(victim, four, law_profile, tmp_path):
    """Its stage has another replica; the group goes on without it, or not at all."""
    torch.set_num_threads(1)
    plan = four([0, 2, 5], [[["a", "b"], ["c"]], [["d"]]], THIRDS)
    job = replace(JOB, steps=8)
    killer = Killer({3: victim}, logs=tmp_path / "logs")
    request = TrainRequest(
        plan=plan, profile=law_profile(plan.cluster, plan.model), profile_path="", job=job, out=tmp_path,
        options=RunOptions(protect=1),
    )  # fmt: skip
    with open_session(plan.cluster, plan.devices, SessionOptions(network=False), tmp_path / "logs", killer) as session:
        outcome = train(session, request, killer.stop, killer)
    assert victim not in outcome.devices
    change = outcome.plan_changes[0]
    assert change.reason.startswith(f"{victim} lost (its worker was killed by signal 9)")
    assert "go back" not in change.reason
    assert outcome.losses == pytest.approx(OneProcess(plan.model, job, BATCH).train(0, 8), abs=TOLERANCE)


def test_replicas_of_a_site_take_what_they_lack_from_afar_once(make_plan, spec_of, law_profile, tmp_path, monkeypatch):
    """Both replicas come to need a unit that only the other site has: each takes a part, and one gives it the other."""
    torch.set_num_threads(1)
    plan = make_plan(spec_of("gpt2"), [0, 1, 3, 5], [[1], [1], [1, 1]], [THIRDS] * 3, "1f1b")
    plan = in_sites(plan, {"s0r0": "far", "s1r0": "far", "s2r0": "near", "s2r1": "near"})

    def two_stages(plan, _profile, _present, **_options) -> NewPlan:
        _, second, third = plan.unprotected.stages
        stages = replace(second, first_unit=0, end_unit=2), replace(third, first_unit=2)
        return NewPlan(plan=replace(plan, stages=stages), how="stages cut anew")

    monkeypatch.setattr(protection, "light_plan", two_stages)
    killer = Killer({3: "s0r0"}, logs=tmp_path / "logs")
    request = TrainRequest(
        plan=plan, profile=law_profile(plan.cluster, plan.model), profile_path="", job=replace(JOB, steps=6),
        out=tmp_path, options=RunOptions(protect=1),
    )  # fmt: skip
    with open_session(plan.cluster, plan.devices, SessionOptions(network=False), tmp_path / "logs", killer) as session:
        outcome = train(session, request, killer.stop, killer)
    assert "go back" not in outcome.plan_changes[0].reason
    assert outcome.losses == pytest.approx(OneProcess(plan.model, JOB, BATCH).train(0, 6), abs=TOLERANCE)
