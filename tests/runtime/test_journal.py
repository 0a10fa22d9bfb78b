"""What a coordinator that was killed has left of its run, as the next one reads it."""

from dataclasses import replace

import pytest

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session
from spantrain.app.training.recovery.journal import (
    BegunLeg,
    CommittedStep,
    Journal,
    adopted_run,
    credentials_in,
    first_leg,
    held_run,
)
from spantrain.app.training.requests import TrainRequest
from spantrain.config.artefacts import write_profile
from spantrain.core.checkpoint import SampleLedger
from spantrain.core.job import TrainJob
from spantrain.core.span import Span
from spantrain.errors import ConfigError
from spantrain.runtime.checkpoint.manifest import Manifest, write_manifest, write_marker
from spantrain.runtime.checkpoint.tensor_file import Disk
from spantrain.runtime.control.requests import StepVerdict

VERDICT = StepVerdict(grad_norm=1.0, checkpoint=False, stop=False, evaluate=False)
NOBODY = ((), ())


@pytest.fixture
def plan(make_plan, spec_of):
    return make_plan(spec_of("gpt2"), [0, 2, 5], [[1], [1]], [[Span(0, 2)]] * 2, "1f1b")


@pytest.fixture
def journal(plan, law_profile, tmp_path):
    """A journal that begins, and what is not closed by whoever writes it."""
    profile = law_profile(plan.cluster, plan.model)
    write_profile(profile, tmp_path / "profile.json")
    job = TrainJob(steps=9)
    request = TrainRequest(plan=plan, profile=profile, profile_path="profile.json", job=job, out=tmp_path)
    session = Session(
        cluster=plan.cluster, devices=plan.devices, coordinator=None, network="real", testbed=None, workers=None,
        outlived=True,
    )  # fmt: skip
    credentials_in(tmp_path).parent.mkdir()
    found = Journal(session, request, SilentReporter())
    manifest = Manifest(
        step=0, model=plan.model, plan=plan, job=job, profile=str(tmp_path / "profile.json"), losses=(),
        ledger=SampleLedger().extended(0, plan.global_batch),
    )  # fmt: skip
    found.begin(manifest)
    return found


def commit(journal, *steps):
    for step in steps:
        journal.write(CommittedStep(step=step, loss=float(step), verdict=VERDICT, keepers=NOBODY))


def test_it_goes_on_behind_the_last_step_whose_line_is_whole(journal, plan, tmp_path):
    journal.write(BegunLeg(plan=plan, step=0, kept=False))
    commit(journal, 0, 1)
    path = credentials_in(tmp_path).with_name("journal.jsonl")
    path.write_text(path.read_text() + '{"kind": "CommittedSt')
    found = adopted_run(tmp_path, 9, functions=())
    assert found.resume.losses == (0.0, 1.0)
    assert (found.resume.held.step, found.resume.held.verdict) == (2, VERDICT)
    assert found.resume.held.plan.stages == plan.stages


def test_a_plan_that_took_over_is_the_one_to_go_on_with(journal, plan, tmp_path):
    later = replace(plan, generation=7)
    journal.write(BegunLeg(plan=plan, step=0, kept=False))
    journal.write(CommittedStep(step=0, loss=1.0, verdict=replace(VERDICT, plan=later), keepers=NOBODY))
    found = adopted_run(tmp_path, 9, functions=())
    assert (found.plan.generation, found.resume.held.plan.generation) == (7, plan.generation)


def test_a_keeper_is_one_whose_copy_was_whole(journal, plan, tmp_path):
    first, last = plan.stages
    kept = replace(plan, stages=(replace(first, keepers=last.devices), replace(last, keepers=first.devices)))
    journal.write(BegunLeg(plan=kept, step=0, kept=False))
    journal.write(CommittedStep(step=0, loss=1.0, verdict=VERDICT, keepers=(last.devices, ())))
    held = adopted_run(tmp_path, 9, functions=()).resume.held
    assert [stage.keepers for stage in held.plan.stages] == [last.devices, ()]
    journal.write(CommittedStep(step=1, loss=1.0, verdict=VERDICT, keepers=((),)))
    with pytest.raises(ConfigError, match="step 1 is of a plan with other stages"):
        adopted_run(tmp_path, 9, functions=())


def test_what_a_part_that_goes_on_keeps_is_that_of_the_part_before(journal, plan, tmp_path):
    journal.write(BegunLeg(plan=plan, step=0, kept=False))
    commit(journal, 0, 1)
    journal.write(BegunLeg(plan=replace(plan, generation=3), step=2, kept=True))
    held = adopted_run(tmp_path, 9, functions=()).resume.held
    assert (held.step, held.plan.generation) == (2, plan.generation)


def test_a_part_that_began_from_a_checkpoint_holds_nothing_before_its_first_step(journal, plan, tmp_path):
    journal.write(BegunLeg(plan=plan, step=0, kept=False))
    commit(journal, 0, 1, 2)
    journal.write(BegunLeg(plan=plan, step=1, kept=False))
    assert adopted_run(tmp_path, 9, functions=()) is None
    commit(journal, 1)
    assert adopted_run(tmp_path, 9, functions=()).resume.losses == (0.0, 1.0)


def test_where_nothing_is_held_or_saved_a_run_begins_again_as_it_was_begun(journal, plan, tmp_path):
    """As where the coordinator is lost in the first step, or all go back to the beginning."""
    found = adopted_run(tmp_path, 9, functions=())
    assert (found.resume, found.job.steps, found.plan.stages) == (None, 9, plan.stages)
    journal.write(BegunLeg(plan=plan, step=0, kept=False))
    commit(journal, 0, 1)
    journal.write(BegunLeg(plan=plan, step=0, kept=False))
    assert adopted_run(tmp_path, 9, functions=()).resume is None
    assert held_run(tmp_path) is None


def test_what_the_one_before_has_left_is_of_use_until_the_next_has_begun(journal, plan, tmp_path, monkeypatch):
    """It may be killed on its way there."""
    journal.write(BegunLeg(plan=plan, step=0, kept=False))
    commit(journal, 0, 1)
    request = adopted_run(tmp_path, 9, functions=())
    assert request.resume is not None
    journal._file.close()
    again = Journal(journal._session, request, SilentReporter())
    written = []
    monkeypatch.setattr(again, "write", lambda *entries: written.append(entries))
    again.begin(replace(held_run(tmp_path), step=2))
    assert [[type(entry).__name__ for entry in entries] for entries in written] == [["Manifest", "CommitPoint"]]


def test_what_is_damaged_is_refused_by_its_line(journal, plan, tmp_path):
    journal.write(BegunLeg(plan=plan, step=0, kept=False))
    commit(journal, 0)
    path = credentials_in(tmp_path).with_name("journal.jsonl")
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, '{"kind": "BegunLeg"}\n', *rest]))
    with pytest.raises(ConfigError, match=r"journal\.jsonl, line 2: .*"):
        adopted_run(tmp_path, 9, functions=())
    path.write_text("".join(rest))
    with pytest.raises(ConfigError, match="does not say what the run is; remove it and go on from the newest"):
        adopted_run(tmp_path, 9, functions=())


def test_who_ends_a_run_leaves_no_journal_and_no_credentials(journal, plan, tmp_path):
    with journal:
        journal.write(BegunLeg(plan=plan, step=0, kept=False))
    assert not credentials_in(tmp_path).parent.exists()
    assert adopted_run(tmp_path, 9, functions=()) is None
    assert adopted_run(tmp_path / "none", 9, functions=()) is None


def test_no_more_steps_than_it_has_are_refused(journal, plan, tmp_path):
    journal.write(BegunLeg(plan=plan, step=0, kept=False))
    commit(journal, 0, 1)
    with pytest.raises(ConfigError, match="has 2 steps done; --steps is the number in all"):
        adopted_run(tmp_path, 2, functions=())


def test_what_is_left_of_a_run_whose_steps_are_all_done_is_to_save_unless_that_is_done(journal, plan, tmp_path):
    journal.write(BegunLeg(plan=plan, step=0, kept=False))
    commit(journal, 0)
    last = replace(VERDICT, stop=True, checkpoint=True)
    journal.write(CommittedStep(step=1, loss=1.0, verdict=last, keepers=NOBODY))
    found = adopted_run(tmp_path, 2, functions=())
    assert (first_leg(found).first_step, first_leg(found).is_over) == (2, True)
    assert not first_leg(adopted_run(tmp_path, 3, functions=())).is_over
    saved = replace(held_run(tmp_path), step=2)
    folder = tmp_path / "checkpoint" / "step-2"
    folder.mkdir(parents=True)
    write_manifest(Disk(), folder, saved)
    write_marker(Disk(), folder)
    with pytest.raises(ConfigError, match="has 2 steps done; --steps is the number in all"):
        adopted_run(tmp_path, 2, functions=())
