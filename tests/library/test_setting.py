"""Plans for a user's model: made by data sheets, taken again, refused for another model."""

import json

import pytest
import torch
from safetensors.torch import save_file

import spantrain
from spantrain.app.training.requests import resumed_run
from spantrain.app.weight_folder import find_weights
from spantrain.app.weights import write_weights
from spantrain.core.checkpoint import SampleLedger
from spantrain.core.shares import StateSharding
from spantrain.errors import ConfigError, PlanError, ProfileError
from spantrain.library.callbacks import UserReporter
from spantrain.library.setting import Setting, model_of
from spantrain.library.trainer import state_of
from spantrain.models.build import whole_model
from spantrain.models.data.choice import model_on_data
from spantrain.runtime.checkpoint.manifest import Manifest

QUIET = UserReporter((), spantrain.TrainingArguments(logging_steps=0), stop=lambda: None, save=lambda: None)


def setting_of(user_file, out, *, plan=None, build="build", loss="loss", **given) -> Setting:
    model = model_of(f"{user_file}:{build}", f"{user_file}:{loss}", data=None, tokenizer=None, sequence_length=None)
    arguments = spantrain.TrainingArguments(output_dir=out, max_steps=3, train_batch_size=8, **given)
    return Setting(model, arguments, cluster=None, plan=plan, optimizer="sgd", measure=False)


def test_a_plan_by_data_sheets_is_kept_and_can_be_given_again(user_file, tmp_path):
    setting = setting_of(user_file, tmp_path / "run", save_total_limit=5, report_to="tensorboard")
    request = setting.ready(3, QUIET)
    assert request is not None
    assert (request.plan.global_batch, request.job.optimizer, request.options.keep_checkpoints) == (8, "sgd", 5)
    assert request.options.report_to == ("tensorboard",)
    assert all(stage.state_sharding is StateSharding.NONE for stage in request.plan.stages)
    again = setting_of(user_file, tmp_path / "again", plan=tmp_path / "run" / "plan.json").ready(3, QUIET)
    assert again is not None
    assert again.plan.stages == request.plan.stages
    moved = tmp_path / "elsewhere" / "mine.py"
    moved.parent.mkdir()
    moved.write_text(user_file.read_text())
    found = setting_of(moved, tmp_path / "moved", plan=tmp_path / "run" / "plan.json").ready(3, QUIET)
    assert found is not None
    assert found.plan.model.source == f"{moved}:build"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda plan: plan["stages"][-1].update(end_unit=plan["stages"][-1]["end_unit"] - 1), "stages end at unit"),
        (lambda plan: plan["model"]["config"].update(width=3), "another .* than the profile: config.width 3"),
    ],
)
def test_a_plan_that_does_not_fit_its_profile_is_refused_as_by_the_commands(user_file, tmp_path, change, says):
    setting_of(user_file, tmp_path / "run").ready(3, QUIET)
    path = tmp_path / "run" / "plan.json"
    plan = json.loads(path.read_text())
    change(plan)
    path.write_text(json.dumps(plan))
    with pytest.raises(PlanError, match=says):
        setting_of(user_file, tmp_path / "other", plan=path).ready(3, QUIET)


def test_a_plan_of_another_model_is_refused(user_file, tmp_path):
    setting_of(user_file, tmp_path / "run").ready(3, QUIET)
    user_file.write_text(user_file.read_text() + "\n# changed\n")
    with pytest.raises(PlanError, match="as it is now: plan again"):
        setting_of(user_file, tmp_path / "other", plan=tmp_path / "run" / "plan.json").ready(3, QUIET)


def test_a_measured_plan_waits_for_devices(user_file, tmp_path):
    model = model_of("gpt2-tiny", None, data=None, tokenizer=None, sequence_length=None)
    arguments = spantrain.TrainingArguments(output_dir=tmp_path, max_steps=1)
    setting = Setting(model, arguments, cluster="laptop", plan=None, optimizer=None, measure=True)
    assert setting.ready(1, QUIET) is None
    assert len(setting.cluster.devices) == 6
    with pytest.raises(ConfigError, match="neither a file nor one of the presets"):
        Setting(model, arguments, cluster="labtop", plan=None, optimizer=None, measure=True)


def test_the_folder_of_a_run_is_said_or_made_up(user_file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert setting_of(user_file, "").out.parts[0] == "runs"
    assert setting_of(user_file, "here").out.name == "here"


def test_a_folder_with_a_run_is_taken_only_where_that_is_meant(user_file, tmp_path):
    folder = tmp_path / "run" / "checkpoint" / "step-2"
    folder.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"holds a run already \(checkpoint/step-2\).*overwrite_output_dir=True"):
        setting_of(user_file, tmp_path / "run").take_folder()
    with pytest.raises(ConfigError, match="holds a run already"):
        setting_of(user_file, tmp_path / "run", resume_from_checkpoint=tmp_path / "other").take_folder()
    for resume in (True, tmp_path / "other" / ".." / "run"):
        setting_of(user_file, tmp_path / "run", resume_from_checkpoint=resume).take_folder()
    assert folder.exists()
    setting_of(user_file, tmp_path / "run", overwrite_output_dir=True).take_folder()
    assert not folder.exists()


FEATURES = """
import torch


class Features(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("directions", torch.randn(8, 8))
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x @ self.directions)))


def build():
    return Features(), (torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)), torch.nn.functional.cross_entropy
"""


@pytest.fixture
def begun(tmp_path):
    """A run that has a checkpoint at its begin, of a model with random numbers that are no parameters."""
    file = tmp_path / "features.py"
    file.write_text(FEATURES)
    spec = model_on_data(f"{file}:build")
    arguments = spantrain.TrainingArguments(output_dir=tmp_path / "run", max_steps=3, train_batch_size=8, seed=7)
    request = Setting(spec, arguments, cluster=None, plan=None, optimizer=None, measure=False).ready(3, QUIET)
    (tmp_path / "weights").mkdir()
    save_file(dict(whole_model(spec, seed=7).module.named_parameters()), tmp_path / "weights" / "model.safetensors")
    manifest = Manifest(
        step=0, model=spec, plan=request.plan, job=request.job, profile=request.profile_path, losses=(),
        ledger=SampleLedger(),
    )  # fmt: skip
    return spec, write_weights(find_weights(tmp_path / "weights", spec), tmp_path / "run", manifest)


def test_buffers_come_back_as_they_were_in_the_run(begun):
    spec, folder = begun
    found, wanted = state_of(folder, spec), whole_model(spec, seed=7).module.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_a_run_does_not_go_on_with_another_profile(begun, tmp_path):
    run, functions = tmp_path / "run", (begun[0].source,)
    assert resumed_run(run, 3, run, functions=functions).profile.model == begun[0]
    profile = run / "profile.json"
    profile.write_text(profile.read_text().replace('"created": "', '"created": "1'))
    with pytest.raises(ProfileError, match=r"is not the profile that .* was made from .*; put the old one back"):
        resumed_run(run, 3, run, functions=functions)
