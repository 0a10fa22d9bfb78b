"""Plans for a user's model: made by data sheets, taken again, refused for another model."""

import pytest

import spantrain
from spantrain.core.plan import StateSharding
from spantrain.errors import ConfigError, PlanError
from spantrain.library.progress import Progress
from spantrain.library.setting import Setting, model_of

QUIET = Progress((), every=0, stop=lambda: None)


def setting_of(user_file, out, *, plan=None, build="build", loss="loss", **given) -> Setting:
    model = model_of(
        f"{user_file}:{build}",
        f"{user_file}:{loss}",
        data=None,
        tokenizer=None,
        sequence_length=None,
    )
    arguments = spantrain.TrainingArguments(output_dir=out, max_steps=3, train_batch_size=8, **given)
    return Setting.of(model, arguments, cluster=None, plan=plan, optimizer="sgd", measure=False)


def test_a_plan_by_data_sheets_is_kept_and_can_be_given_again(user_file, tmp_path):
    setting = setting_of(user_file, tmp_path / "run", save_total_limit=5, report_to="tensorboard")
    request = setting.ready(3, QUIET)
    assert request is not None
    assert (request.plan.global_batch, request.job.optimizer, request.keep_checkpoints) == (8, "sgd", 5)
    assert request.tensorboard == tmp_path / "run" / "tensorboard"
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


def test_a_plan_of_another_model_is_refused(user_file, tmp_path):
    setting_of(user_file, tmp_path / "run").ready(3, QUIET)
    user_file.write_text(user_file.read_text() + "\n# changed\n")
    with pytest.raises(PlanError, match="as it is now: plan again"):
        setting_of(user_file, tmp_path / "other", plan=tmp_path / "run" / "plan.json").ready(3, QUIET)


def test_a_measured_plan_waits_for_devices(user_file, tmp_path):
    model = model_of("gpt2-tiny", None, data=None, tokenizer=None, sequence_length=None)
    arguments = spantrain.TrainingArguments(output_dir=tmp_path, max_steps=1)
    setting = Setting.of(model, arguments, cluster="laptop", plan=None, optimizer=None, measure=True)
    assert setting.ready(1, QUIET) is None
    assert len(setting.cluster.devices) == 6
    with pytest.raises(ConfigError, match="neither a file nor one of the presets"):
        Setting.of(model, arguments, cluster="labtop", plan=None, optimizer=None, measure=True)


def test_the_folder_of_a_run_is_said_or_made_up(user_file, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert setting_of(user_file, "").out.parts[0] == "runs"
    assert setting_of(user_file, "here").out.name == "here"
