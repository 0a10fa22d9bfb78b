"""Export, import and resuming from the command line: what is said, and wrong input that changes nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from spantrain.config.artefacts import profile_of_plan, read_plan, reference_to_profile, write_plan, write_profile
from spantrain.core.checkpoint import SampleLedger
from spantrain.core.job import TrainJob
from spantrain.core.shares import TensorPart
from spantrain.models.build import whole_model
from spantrain.models.catalog.catalog import resolve_model
from spantrain.runtime.checkpoint.holding import PARAMETER
from spantrain.runtime.checkpoint.manifest import CheckpointSet, Manifest, latest_checkpoint
from spantrain.runtime.checkpoint.saver import write_device_file
from spantrain.runtime.checkpoint.tensor_file import Disk, step_folder
from spantrain.runtime.control.requests import SavedFile

pytestmark = pytest.mark.checkpoint

MODEL = "gpt2-tiny"


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """What the transformers library saves."""
    folder = tmp_path_factory.mktemp("weights")
    whole_model(resolve_model(MODEL), seed=1).module.save_pretrained(folder)
    return folder


@pytest.fixture
def plan_path(spantrain, profile_path, tmp_path) -> Path:
    path = tmp_path / "plan.json"
    ended = spantrain("plan", profile_path, "--global-batch", 8, "--strategy", "single-device", "--out", path)
    assert ended.code == 0, ended.err
    return path


@pytest.fixture
def run(plan_path, weights, tmp_path) -> Path:
    """A run of three steps, as its folder would be."""
    folder = tmp_path / "run"
    plan = read_plan(plan_path)
    tensors = {PARAMETER + name: tensor for name, tensor in load_file(weights / "model.safetensors").items()}
    parts = {name: TensorPart(full_shape=tuple(tensor.shape)) for name, tensor in tensors.items()}
    name, file = write_device_file(Disk(), step_folder(folder / "checkpoint", 3), plan.devices[0], tensors, parts)

    def describe(saved: SavedFile, files) -> Manifest:
        return Manifest(
            step=3, model=plan.model, plan=plan, job=TrainJob(steps=3), profile="", losses=(3.0,) * 3,
            ledger=SampleLedger().extended(0, plan.global_batch), files=files,
        )  # fmt: skip

    together = CheckpointSet(folder, [plan.devices[0]], keep=2, describe=describe)
    together.on_saved(SavedFile(step=3, name=name, file=file, scalars={}))
    return folder


def refused(ended, *says: str) -> None:
    assert ended.code == 2, ended.err
    assert ended.out == ""
    assert "Traceback" not in ended.err
    plain = " ".join(ended.err.replace("│", " ").split())
    for text in says:
        assert text in plain, plain


def content_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_weights_come_in_and_go_out(spantrain, weights, tmp_path):
    imported = spantrain("import", weights, "--model", MODEL, "--out", tmp_path / "run", "--json")
    assert imported.code == 0, imported.err
    said = json.loads(imported.out)
    assert (said["model"], said["ignored"]) == (MODEL, [])
    exported = spantrain("export", tmp_path / "run", "--to", tmp_path / "hf", "--json")
    assert exported.code == 0, exported.err
    said = json.loads(exported.out)
    assert (said["loads_with"], said["steps"], said["untrained"]) == ("transformers", 0, [])
    before, after = load_file(weights / "model.safetensors"), load_file(tmp_path / "hf/model.safetensors")
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def test_what_to_do_next_is_said(spantrain, weights, tmp_path):
    imported = spantrain("import", weights, "--model", MODEL, "--out", tmp_path / "run")
    assert f"spantrain train --resume {tmp_path / 'run'} --plan PLAN" in imported.out
    exported = spantrain("export", tmp_path / "run", "--to", tmp_path / "hf")
    assert f"examples/load_exported.py {tmp_path / 'hf'}" in exported.out


def test_export_of_what_is_no_run(spantrain, tmp_path):
    refused(spantrain("export", tmp_path / "none", "--to", tmp_path / "hf"), "holds no checkpoint", "--out")
    assert not (tmp_path / "hf").exists()


def test_export_to_a_folder_that_holds_something(spantrain, run, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/notes.txt").write_text("mine")
    refused(spantrain("export", run, "--to", tmp_path / "hf"), "not empty")
    assert (tmp_path / "hf/notes.txt").read_text() == "mine"


def test_import_of_another_model(spantrain, weights, tmp_path):
    ended = spantrain("import", weights, "--model", "gpt2-mini", "--out", tmp_path / "run")
    refused(ended, "another model than --model", "transformer.wte.weight has shape [256, 64], wanted [256, 192]")
    assert not (tmp_path / "run").exists()


def test_import_into_a_run_that_is_there(spantrain, weights, run):
    before = content_of(run)
    refused(spantrain("import", weights, "--model", MODEL, "--out", run), "holds checkpoints already")
    assert content_of(run) == before


@pytest.mark.parametrize("damage", ["truncated", "manifest missing", "manifest torn", "of another type"])
def test_resuming_from_what_is_damaged(damage, spantrain, run):
    folder = latest_checkpoint(run)
    (file,) = folder.glob("*.safetensors")
    manifest = folder / "manifest.json"
    match damage:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-100])
            says = (file.name, "changed or damaged")
        case "manifest missing":
            manifest.unlink()
            says = ("no complete checkpoint", "manifest.json is missing")
        case "manifest torn":
            manifest.write_text(manifest.read_text()[:200])
            says = ("manifest.json", "not valid JSON")
        case _:
            save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)
            says = (file.name, "changed or damaged")
    before = content_of(run)
    refused(spantrain("train", "--resume", run, "--steps", 9, "--no-network"), *says)
    assert content_of(run) == before


def test_resuming_under_a_plan_for_another_model(spantrain, run, plan_path, tmp_path):
    plan = read_plan(plan_path)
    model = replace(plan.model, config={**plan.model.config, "n_embd": 128})
    profile_path = tmp_path / "other-profile.json"
    write_profile(replace(profile_of_plan(plan, plan_path), model=model), profile_path)
    reference = reference_to_profile(profile_path, tmp_path / "other.json")
    write_plan(replace(plan, model=model, profile=reference), tmp_path / "other.json")
    before = content_of(run)
    ended = spantrain("train", "--resume", run, "--plan", tmp_path / "other.json", "--steps", 9)
    refused(ended, "not for the model", "n_embd")
    assert content_of(run) == before


def test_an_imported_run_needs_a_plan(spantrain, weights, tmp_path):
    spantrain("import", weights, "--model", MODEL, "--out", tmp_path / "run")
    refused(spantrain("train", "--resume", tmp_path / "run", "--steps", 9), "was imported", "--plan")


def test_options_that_a_checkpoint_says(spantrain, run, plan_path):
    refused(spantrain("train", "--resume", run, "--learning-rate", 1.0), "--learning-rate", "from its checkpoint")
    refused(spantrain("train", plan_path, "--plan", plan_path, "--out", run), "--plan", "--resume")
    refused(spantrain("train", "--resume", run, "--steps", 3), "3 steps done")
    refused(spantrain("train", "--resume", run, "--keep-checkpoints", 0), "keep-checkpoints")
