"""Devices are lost when nothing is under way: all steps are done, or the next plan is to begin."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from spantrain.app.planning import protection
from spantrain.app.training.recovery import joining
from spantrain.app.training.recovery.carry_on import Leg
from spantrain.app.training.recovery.joining import Membership
from spantrain.app.training.recovery.journal import Journal
from spantrain.errors import UsageError
from spantrain.planner.present import NewPlan, light_plan
from spantrain.runtime.checkpoint.manifest import MANIFEST_FILE, read_manifest
from spantrain.runtime.control.requests import DeviceReport, StepVerdict
from spantrain.runtime.coordinator.barrier import CommitPoint, StepBarrier, StepOutcome
from testing.patience import until
from testing.runtime.killed_runs import JOB, LONG, KilledRuns, Killer
from testing.runtime.kills import kill

pytestmark = [pytest.mark.slow, pytest.mark.checkpoint, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def run(make_plan, spec_of, law_profile, tmp_path_factory) -> KilledRuns:
    return KilledRuns(make_plan, spec_of, law_profile, tmp_path_factory)


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


def test_figures_that_cannot_be_written_at_the_end_are_told_of(run, monkeypatch):
    """As on a disk that became full behind the last checkpoint."""

    def full(*_: object) -> None:
        raise UsageError("profile.json: cannot be written: No space left on device")

    monkeypatch.setattr("spantrain.app.training.train.write_run", full)
    killer = Killer({})
    _, outcome = run(killer, [0, 5], [[1]], job=JOB)
    assert "profile.json: cannot be written: No space left on device; what was trained is whole" in killer.notes
    assert read_manifest(Path(outcome.checkpoint)).step == outcome.steps == JOB.steps


def lies_whole(folder: Path) -> bool:
    """Whether a checkpoint is complete, and needs no device's disk."""
    if not (folder / MANIFEST_FILE).is_file():
        return False
    return all((folder / name).is_file() for name in read_manifest(folder, check_files=False).files)


def test_what_nobody_else_holds_when_all_steps_are_done_is_trained_again(run, lost_before_it_hears, monkeypatch):
    killer, report = Killer({}), StepBarrier.report

    def when_saved(barrier: StepBarrier, device: str, told: DeviceReport) -> StepVerdict | None:
        """Hear of the last step as soon as the checkpoint of the one before lies here, all files of it."""
        if told.step == JOB.steps - 1:
            until(lambda: lies_whole(killer.logs.parent / "checkpoint" / "step-8"))
        return report(barrier, device, told)

    monkeypatch.setattr(StepBarrier, "report", when_saved)
    lost_before_it_hears("s1r0", lambda: killer.logs, lambda outcome: outcome.step == JOB.steps - 1)
    _, outcome = run(killer, [0, 1, 3, 5], [[1], [1], [1]], job=replace(JOB, checkpoint_every=2))
    assert outcome.steps == JOB.steps
    assert any("all go back to the checkpoint after 8 steps (1 step is trained again)" in note for note in killer.notes)


def test_who_has_no_part_in_the_next_plan_may_be_lost_before_it_gives_what_it_holds(run, monkeypatch):
    """All have ended what they did; the planner's answer is without the only holder of a stage."""

    def stages_stay(plan, profile, present, **options) -> NewPlan:
        if "s1r0" not in present:
            return light_plan(plan, profile, present, **options)
        first, second = plan.unprotected.stages
        left = tuple(one for one in first.replicas if one.devices[0] in present)
        stages = (replace(first, replicas=left), second)
        return NewPlan(plan=replace(plan.unprotected, stages=stages), how="stages stay")

    def without(plan, profile, present, **options) -> NewPlan:
        return light_plan(plan, profile, present - {"s1r0"}, **options)

    def behind_a_loss(self, committed: CommitPoint) -> Leg:
        if "s1r0" in committed.plan.devices:
            kill(killer.logs / "s1r0.log")
            until(lambda: killer.session is not None and killer.session.coordinator.missing(["s1r0"]))
        return leg(self, committed)

    killer, leg = Killer({2: "s0r1"}, last="s1r0 lost"), Membership.leg
    monkeypatch.setattr(protection, "light_plan", stages_stay)
    monkeypatch.setattr(joining, "full_plan", without)
    monkeypatch.setattr(joining, "is_worth", lambda *_seconds, **_more: True)
    monkeypatch.setattr(Membership, "leg", behind_a_loss)
    _, outcome = run(killer, [0, 2, 5], [[1, 1], [1]], job=LONG, speed=1e-5, protect=0)
    assert sorted(outcome.devices) == ["s0r0"]
    assert any("s1r0 lost (" in note and "all go back to the beginning" in note for note in killer.notes)
