"""Worker processes are killed while they train: the run goes on with the others, and its losses are one device's."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from spantrain.app.live_requests import ask_to_drain
from spantrain.app.planning import ahead, protection
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.recovery.carry_on import Leg
from spantrain.app.training.recovery.joining import Membership
from spantrain.app.training.recovery.journal import Journal
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.artefacts import write_profile
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.shares import StateSharding
from spantrain.core.span import Span
from spantrain.errors import PeerLostError
from spantrain.planner.present import NewPlan
from spantrain.recovery.policy import OnLoss
from spantrain.runtime.checkpoint.manifest import read_manifest
from spantrain.runtime.coordinator.barrier import CommitPoint, StepOutcome
from testing.runtime.kills import kill
from testing.runtime.places import in_sites
from testing.runtime.runs import OneProcess

pytestmark = [pytest.mark.slow, pytest.mark.checkpoint, pytest.mark.timeout(600)]

BATCH = 6
THIRDS = [Span(0, 2), Span(2, 4), Span(4, 6)]
JOB = TrainJob(steps=9, seed=5, learning_rate=0.01, warmup_steps=5, max_grad_norm=0.5, trace_steps=1, adapter="off")
LONG = replace(JOB, steps=100_000, learning_rate=0.001)
"""Until the run is asked to stop: who makes it wait decides how long it is, and rounding may not grow that fast."""
TOLERANCE = 1e-4
READY = "All devices are ready"


@dataclass
class Killer(SilentReporter):
    """Kills devices: each when a text is noted, or when the step of a number has ended."""

    victims: dict[int | str, str]
    notes: list[str] = field(default_factory=list)
    logs: Path = Path()
    back: dict[int | str, str] = field(default_factory=dict)
    """Devices whose workers are started again, and when."""
    drained: dict[int | str, str] = field(default_factory=dict)
    session: Session | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    last: str = ""
    """What is noted five steps before the run is asked to stop, if anything."""
    left: int | None = None

    def step(self, outcome: StepOutcome, _metrics: object, total_steps: int) -> None:
        self._strike(lambda when: when == outcome.step)
        if self.left is not None:
            self.left -= 1
        if self.left == 0:
            self.stop.ask()

    def note(self, text: str) -> None:
        self.notes.append(text)
        self._strike(lambda when: isinstance(when, str) and when in text)
        if self.last and self.last in text:
            self.left = 5

    def _strike(self, is_time: Callable[[int | str], bool]) -> None:
        for when in [when for when in self.victims if is_time(when)]:
            kill(self.logs / f"{self.victims.pop(when)}.log")
        for when in [when for when in self.drained if is_time(when)]:
            ask_to_drain(self.logs.parent, self.drained.pop(when))
        for when in [when for when in self.back if is_time(when)]:
            # In a thread: the last worker may end only when this one has told it to.
            threading.Thread(target=self.session.start_again, args=(self.back.pop(when),), daemon=True).start()


@pytest.fixture(scope="module")
def run(make_plan, spec_of, law_profile, tmp_path_factory):
    """Two stages of two replicas each, and then one of one, unless a plan is given."""
    torch.set_num_threads(1)

    def run(
        killer: Killer, cuts, replicas, *, job: TrainJob = JOB, speed=1.0, state=StateSharding.NONE, **options
    ) -> tuple[Plan, TrainOutcome]:
        plan = make_plan(spec_of("gpt2"), cuts, replicas, [THIRDS] * len(replicas), "1f1b")
        plan = replace(plan, stages=tuple(replace(stage, state_sharding=state) for stage in plan.stages))
        plan = replace(plan, cluster=replace(plan.cluster, emulated_speed=speed))
        out = tmp_path_factory.mktemp("run")
        killer.logs = out / "logs"
        profile = law_profile(plan.cluster, plan.model)
        write_profile(profile, out / "profile.json")
        request = TrainRequest(
            plan=plan, profile=profile, profile_path=str(out / "profile.json"), job=job, out=out,
            options=RunOptions(**options),
        )  # fmt: skip
        with open_session(plan.cluster, plan.devices, SessionOptions(network=False), out / "logs", killer) as session:
            killer.session = session
            outcome = train(session, request, killer.stop, killer)
        assert (killer.victims, killer.back, killer.drained) == ({}, {}, {})
        wanted = OneProcess(plan.model, job, BATCH).train(0, outcome.steps)
        assert outcome.losses == pytest.approx(wanted, abs=TOLERANCE)
        return plan, outcome

    return run


@pytest.mark.parametrize("when", [READY, 0, 4])
@pytest.mark.parametrize("victim", ["s0r0", "s1r1"])
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
    ("when", "state"),
    [(READY, StateSharding.ZERO1), (0, StateSharding.ZERO1), (4, StateSharding.ZERO1), (4, StateSharding.ZERO3)],
)
def test_divided_state_is_all_there_when_another_stage_loses_a_device(run, when, state):
    killer = Killer({when: "s1r0"})
    _, outcome = run(killer, [0, 2, 5], [[2, 1], [1]], state=state, protect=1)
    assert len(outcome.devices) in (1, 2)
    (change,) = outcome.plan_changes
    assert "trained again" in change.reason
    assert when != 4 or "go back" not in change.reason


@pytest.mark.parametrize("when", [READY, 0, 4])
@pytest.mark.parametrize("victim", ["s0r0", "s1r0", "s2r0"])
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


@pytest.fixture
def lost_before_it_hears(monkeypatch):
    """Kills a device when what is committed is what is awaited, and no device has been told of it."""

    def lost(victim: str, logs: Callable[[], Path], is_time: Callable[[StepOutcome], bool]) -> None:
        committed, victims = Journal.committed, [victim]

        def and_kill(self, outcome, verdict) -> None:
            committed(self, outcome, verdict)
            if victims and is_time(outcome):
                kill(logs() / f"{victims.pop()}.log")

        monkeypatch.setattr(Journal, "committed", and_kill)

    return lost


@pytest.mark.parametrize("evaluate_every", [0, 4])
@pytest.mark.parametrize("victim", ["s0r0", "s1r1"])
def test_one_may_go_when_all_steps_are_done(run, lost_before_it_hears, victim, evaluate_every):
    """Behind the last step, or the evaluation that follows: the others save what is held, and train nothing again."""
    killer, job = Killer({}), replace(JOB, evaluate_every=evaluate_every)

    def is_time(outcome: StepOutcome) -> bool:
        return (outcome.loss is None) if evaluate_every else (outcome.step == JOB.steps - 1)

    lost_before_it_hears(victim, lambda: killer.logs, is_time)
    _, outcome = run(killer, [0, 2, 5], [[2, 1], [1, 1]], job=job)
    assert outcome.steps == JOB.steps
    assert victim not in outcome.devices
    assert outcome.plan_changes == ()
    assert any(f"{victim} lost (its worker was killed by signal 9): all steps are done, " in it for it in killer.notes)
    saved = read_manifest(Path(outcome.checkpoint))
    assert (saved.step, {file.device for file in saved.files.values()}) == (JOB.steps, set(outcome.devices))
    assert len(outcome.losses) == JOB.steps


def test_what_nobody_else_holds_when_all_steps_are_done_is_trained_again(run, lost_before_it_hears):
    killer = Killer({})
    lost_before_it_hears("s1r0", lambda: killer.logs, lambda outcome: outcome.step == JOB.steps - 1)
    _, outcome = run(killer, [0, 1, 3, 5], [[1], [1], [1]], job=replace(JOB, checkpoint_every=2))
    assert outcome.steps == JOB.steps
    assert any("all go back to the checkpoint after 8 steps (1 step is trained again)" in note for note in killer.notes)


def test_who_leaves_may_be_lost_before_it_gives_what_it_holds(run, monkeypatch):
    """All have ended what they did, and the next plan is without it."""
    killer, leg = Killer({}, drained={2: "s1r0"}, last="s1r0 lost"), Membership.leg

    def behind_a_loss(self, committed: CommitPoint) -> Leg:
        if "s1r0" in committed.plan.devices:
            kill(killer.logs / "s1r0.log")
            time.sleep(0.5)
        return leg(self, committed)

    monkeypatch.setattr(Membership, "leg", behind_a_loss)
    _, outcome = run(killer, [0, 1, 3, 5], [[1], [1], [1]], job=LONG, speed=1e-5)
    assert sorted(outcome.devices) == ["s0r0", "s2r0"]
    assert any("s1r0 lost (its worker was killed by signal 9): " in note for note in killer.notes)
    assert any("all go back to the beginning" in note for note in killer.notes)


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
