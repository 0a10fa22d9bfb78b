"""What a plan or a checkpoint asks for: its schedule, its functions, the profile that it was made from."""

from dataclasses import replace
from pathlib import Path

import pytest

from spantrain.app.planning.explain import explain_plan
from spantrain.app.planning.plan_files import open_plan, under_schedule, write_plans
from spantrain.app.simulation.schedule import show_plan
from spantrain.app.simulation.simulate import SimulateRequest, run_simulation
from spantrain.app.training.requests import new_run, resumed_run
from spantrain.app.weights import export_run
from spantrain.config.artefacts import read_plan, reference_to_profile, write_plan, write_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.checkpoint import SampleLedger
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.errors import ConfigError, PlanError, ProfileError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.sources import factory_spec
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import JobSpec
from spantrain.runtime.checkpoint.manifest import Manifest, write_manifest, write_marker
from spantrain.runtime.checkpoint.saver import CHECKPOINTS
from spantrain.runtime.checkpoint.tensor_file import Disk, step_folder
from spantrain.schedule.registry import splits_backward

JOB = TrainJob(steps=2)


@pytest.fixture(scope="module")
def profile(law_profile) -> Profile:
    return law_profile(load_preset("laptop"), resolve_model("gpt2-tiny"))


@pytest.fixture
def plan_path(profile, tmp_path) -> Path:
    options = PlanOptions(strategies=("single-device",))
    write_plans(make_plan(profile, JobSpec(global_batch=8), options), profile, None, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def checkpointed(run: Path, plan: Plan, profile_path: str) -> None:
    """The run's folder after a step, without the tensors."""
    manifest = Manifest(
        step=1, model=plan.model, plan=plan, job=JOB, profile=profile_path, losses=(1.0,),
        ledger=SampleLedger().extended(0, plan.global_batch),
    )  # fmt: skip
    folder = step_folder(run / CHECKPOINTS, 1)
    folder.mkdir(parents=True)
    write_manifest(Disk(), folder, manifest)
    write_marker(Disk(), folder)


def rewritten(plan_path: Path, plan: Plan, profile: Profile, name: str) -> Path:
    """The plan with another profile, as files."""
    write_profile(profile, plan_path.with_name(f"{name}.profile.json"))
    path = plan_path.with_name(f"{name}.json")
    reference = reference_to_profile(plan_path.with_name(f"{name}.profile.json"), path)
    write_plan(replace(plan, profile=reference), path)
    return path


def test_another_schedule_makes_another_plan(plan_path, tmp_path):
    planned = read_plan(plan_path)
    request = new_run(plan_path, JOB, tmp_path / "run", functions=(), schedule="gpipe")
    assert request.plan == replace(planned, schedule="gpipe", hints=None)
    assert request.report.prediction is None
    assert not splits_backward(request.plan.schedule)
    own = new_run(plan_path, JOB, tmp_path / "run", functions=(), schedule=planned.schedule)
    assert own.plan == planned == under_schedule(planned, None)


def test_a_run_goes_on_with_the_profile_that_its_plan_was_made_from(plan_path, profile, tmp_path):
    request = new_run(plan_path, JOB, tmp_path / "run", functions=(), schedule="1f1b")
    checkpointed(tmp_path / "run", request.plan, request.profile_path)
    again = resumed_run(tmp_path / "run", 3, tmp_path / "run", functions=())
    assert (again.plan, again.profile) == (request.plan, profile)
    write_profile(replace(profile, dtype="bfloat16"), Path(request.profile_path))
    with pytest.raises(ProfileError, match="is not the profile that"):
        resumed_run(tmp_path / "run", 3, tmp_path / "run", functions=())


@pytest.fixture
def evil_plan(plan_path, profile, tmp_path) -> Path:
    """A plan whose model is a function that leaves a mark where it is called, or its file imported."""
    file = tmp_path / "evil.py"
    file.write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\ndef build():\n    raise SystemExit(3)\n")
    model = factory_spec(f"{file}:build")
    return rewritten(plan_path, replace(read_plan(plan_path), model=model), replace(profile, model=model), "evil")


def test_a_function_runs_only_where_it_is_named(evil_plan, tmp_path):
    """Neither a plan nor a checkpoint can have one called."""
    with pytest.raises(ConfigError, match=r"this run calls .*evil.py:build.*start it with --function evil.py:build"):
        new_run(evil_plan, JOB, tmp_path / "run", functions=())
    with pytest.raises(ConfigError, match=r"--function evil\.py:build"):
        new_run(evil_plan, JOB, tmp_path / "run", functions=("other.py:build", "evil.py:other"))
    plan = read_plan(evil_plan)
    checkpointed(tmp_path / "run", plan, str(evil_plan.with_name("evil.profile.json")))
    with pytest.raises(ConfigError, match=r"--function evil\.py:build"):
        resumed_run(tmp_path / "run", 3, tmp_path / "run", functions=())
    with pytest.raises(ConfigError, match=r"--function evil\.py:build"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "mark").exists()
    request = new_run(evil_plan, JOB, tmp_path / "run", functions=(f"{tmp_path}/evil.py:build",))
    assert request.plan.model.source == f"{tmp_path}/evil.py:build"
    with pytest.raises(ConfigError, match="the factory raised SystemExit: 3"):
        export_run(tmp_path / "run", tmp_path / "out", functions=(f"{tmp_path}/evil.py:build",))


def test_looking_at_a_plan_calls_nothing(evil_plan, tmp_path):
    plan, profile = open_plan(evil_plan)
    run_simulation(SimulateRequest(plan=plan, profile=profile, schedules=("1f1b",)))
    explain_plan(plan, profile)
    show_plan("1f1b", evil_plan)
    make_plan(profile, JobSpec(global_batch=8), PlanOptions(strategies=("single-device",)))
    assert not (tmp_path / "mark").exists()


def test_a_function_without_the_digest_of_its_file_is_refused(evil_plan, profile, tmp_path):
    plan = read_plan(evil_plan)
    model = replace(plan.model, source_sha256="")
    path = rewritten(evil_plan, replace(plan, model=model), replace(profile, model=model), "other")
    with pytest.raises(
        ConfigError, match=r"the SHA-256 of .*evil.py:build's file is not known; profile and plan again"
    ):
        new_run(path, JOB, tmp_path / "run", functions=(model.source,))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"n_layer": 10**9}, "n_layer must be a whole number from 1 to 4096, got 1000000000"),
        ({"n_layer": 13}, "the profile has 14 units, but gpt2-tiny as it is configured there has 15"),
        ({"n_layer": "many"}, "n_layer must be a whole number from 1 to 4096, got 'many'"),
        ({}, "n_layer must be a whole number from 1 to 4096, got None"),
    ],
)
def test_models_that_nobody_can_have_are_refused_at_once(plan_path, profile, config, says):
    plan = read_plan(plan_path)
    kept = {name: value for name, value in plan.model.config.items() if name != "n_layer"}
    model = replace(plan.model, config={**kept, **config})
    path = rewritten(plan_path, replace(plan, model=model), replace(profile, model=model), "wrong")
    with pytest.raises(PlanError, match=says):
        open_plan(path)
