"""Weights go out as the transformers library wants them, and come in by their names."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from spantrain.app.weights import EXAMPLE_FILE, export_run, import_weights, trained_parameters
from spantrain.core.checkpoint import SampleLedger
from spantrain.core.shares import TensorPart
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.build import build_units, whole_model, whole_parameters
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.choice import model_on_data
from spantrain.models.execution.stage import StageExecutor
from spantrain.runtime.checkpoint.holding import PARAMETER
from spantrain.runtime.checkpoint.manifest import CheckpointSet, Manifest, latest_checkpoint, read_manifest
from spantrain.runtime.checkpoint.saver import write_device_file
from spantrain.runtime.checkpoint.tensor_file import Disk, step_folder
from spantrain.runtime.control.requests import SavedFile
from testing.models.small import small_spec

pytestmark = pytest.mark.checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
FACTORY = """
import torch


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.turn = torch.nn.Parameter(torch.randn(8, dtype=torch.cfloat))
        self.last = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.last((torch.relu(self.norm(self.first(x))) * self.turn).real)


def build():
    batch = (torch.randn(2, 4), torch.tensor([0, 2]))
    return Small(), batch, torch.nn.functional.cross_entropy
"""


def small(family: str, folder: Path) -> ModelSpec:
    match family:
        case "gpt2" | "bert" | "resnet":
            return small_spec(family, layers=2)
        case "efficientnet":
            return resolve_model("efficientnet-tiny")
        case "hf":
            return model_on_data(f"hf:{EXAMPLES / 'llama-tiny'}")
        case _:
            (folder / "mine.py").write_text(FACTORY)
            return model_on_data(f"{folder / 'mine.py'}:build")


def run_of(spec: ModelSpec, run: Path) -> list[torch.nn.Module]:
    """Write a checkpoint of new units' weights in two files, cut somewhere; return the units."""
    units = build_units(spec, seed=3)
    named = StageExecutor(units, is_last=True, global_batch=1).named_parameters()
    half = len(named) // 2

    def describe(saved: SavedFile, files) -> Manifest:
        return Manifest(
            step=saved.step, model=spec, plan=None, job=None, profile="", losses=(),
            ledger=SampleLedger(), files=files,
        )  # fmt: skip

    together = CheckpointSet(run, ["d0", "d1"], keep=1, describe=describe)
    for device, names in (("d0", list(named)[:half]), ("d1", list(named)[half:])):
        tensors = {PARAMETER + name: named[name].detach() for name in names}
        parts = {name: TensorPart(full_shape=tuple(tensor.shape)) for name, tensor in tensors.items()}
        name, file = write_device_file(Disk(), step_folder(run / "checkpoint", 7), device, tensors, parts)
        together.on_saved(SavedFile(step=7, name=name, file=file, scalars={}))
    return units


def logits_of(units: list[torch.nn.Module], inputs: torch.Tensor) -> torch.Tensor:
    """What the units make of inputs, up to the loss."""
    tensors = (inputs,)
    with torch.no_grad():
        for unit in units[:-1]:
            tensors = unit(*tensors)
        return units[-1].logits(*tensors)


@pytest.mark.parametrize("family", ["gpt2", "bert", "resnet", "efficientnet"])
def test_transformers_loads_what_was_trained(family, tmp_path):
    spec = small(family, tmp_path)
    units = run_of(spec, tmp_path / "run")
    outcome = export_run(tmp_path / "run", tmp_path / "hf")
    assert outcome.loads_with == "transformers"
    assert outcome.steps == 7
    assert outcome.untrained == ()
    name = json.loads((tmp_path / "hf/config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, name).from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    example = load_file(tmp_path / "hf" / EXAMPLE_FILE)
    (inputs,) = [tensor for key, tensor in example.items() if key != "logits"]
    with torch.no_grad():
        (key,) = example.keys() - {"logits"}
        logits = model.eval()(**{key: inputs}).logits
    assert torch.allclose(logits, example["logits"], atol=1e-5)
    assert torch.allclose(logits, logits_of(units, inputs), atol=1e-5)
    assert logits.std() > 1e-4, "the weights say something"


def load_exported():
    """The example's main function."""
    found = importlib.util.spec_from_file_location("load_exported", EXAMPLES / "load_exported.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.main


def test_the_example_compares_a_model_from_a_configuration(tmp_path, capsys):
    run_of(small("hf", tmp_path), tmp_path / "run")
    outcome = export_run(tmp_path / "run", tmp_path / "hf")
    assert load_exported()(tmp_path / "hf") == 0
    assert outcome.logits_sha256 in capsys.readouterr().out
    weights = load_file(tmp_path / "hf/model.safetensors")
    first = next(iter(sorted(weights)))
    save_file({**weights, first: weights[first] + 1}, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    assert load_exported()(tmp_path / "hf") == 1


def test_a_factorys_model_goes_out_as_a_state_dict(tmp_path):
    spec = small("factory", tmp_path)
    run_of(spec, tmp_path / "run")
    outcome = export_run(tmp_path / "run", tmp_path / "out", functions=(spec.source,))
    assert outcome.loads_with == "safetensors"
    weights = load_file(tmp_path / "out/model.safetensors")
    module = whole_model(spec, seed=99).module
    module.load_state_dict(weights)
    trained = trained_parameters(
        latest_checkpoint(tmp_path / "run"), read_manifest(latest_checkpoint(tmp_path / "run"))
    )
    assert {name for name, _ in module.named_parameters()} == set(trained)
    assert all(torch.equal(parameter, trained[name]) for name, parameter in module.named_parameters())


@pytest.mark.parametrize("family", ["gpt2", "bert", "resnet", "hf", "factory"])
def test_what_was_exported_comes_in_again(family, tmp_path):
    spec = small(family, tmp_path)
    run_of(spec, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", functions=(spec.source,))
    import_weights(tmp_path / "out", spec, tmp_path / "again")
    before = latest_checkpoint(tmp_path / "run")
    folder = latest_checkpoint(tmp_path / "again")
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.plan, manifest.job) == (0, None, None)
    want, got = trained_parameters(before, read_manifest(before)), trained_parameters(folder, manifest)
    assert got.keys() == want.keys() == whole_parameters(spec).keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_base_model_of_a_short_type_is_understood(tmp_path):
    """As the library saves a model without its head: no prefix, no output layer, sixteen bits."""
    spec = small("gpt2", tmp_path)
    model = whole_model(spec, seed=1).module
    model.transformer.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    outcome = import_weights(tmp_path / "base", spec, tmp_path / "run")
    assert outcome.parameters == sum(math.prod(one.shape) for one in whole_parameters(spec).values())
    folder = latest_checkpoint(tmp_path / "run")
    found = trained_parameters(folder, read_manifest(folder))
    assert torch.equal(found["transformer.wpe.weight"], model.transformer.wpe.weight)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("transformer.ln_f.bias"), "transformer.ln_f.bias is missing"),
        (lambda w: w.update({"transformer.ln_f.bias": torch.zeros(5)}), r"has shape \[5\], wanted \[16\]"),
        (lambda w: w.update({"transformer.ln_f.bias": torch.zeros(16).double()}), "has type F64"),
    ],
    ids=["missing", "shape", "type"],
)
def test_weights_of_another_model_are_refused(change, says, tmp_path):
    spec = small("gpt2", tmp_path)
    run_of(spec, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    weights = load_file(tmp_path / "out/model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "out/model.safetensors")
    with pytest.raises(ConfigError, match=says):
        import_weights(tmp_path / "out", spec, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_nothing_that_is_there_is_overwritten(tmp_path):
    spec = small("gpt2", tmp_path)
    run_of(spec, tmp_path / "run")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        export_run(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    export_run(tmp_path / "run", tmp_path / "hf")
    with pytest.raises(ConfigError, match="holds checkpoints already"):
        import_weights(tmp_path / "hf", spec, tmp_path / "run")


def test_a_folder_without_weights_and_a_torn_file_are_named(tmp_path):
    spec = small("gpt2", tmp_path)
    with pytest.raises(ConfigError, match="holds no"):
        import_weights(tmp_path, spec, tmp_path / "run")
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(ConfigError, match=r"model.safetensors: cannot be read"):
        import_weights(tmp_path, spec, tmp_path / "run")


def test_a_checkpoint_whose_file_is_elsewhere_is_not_exported_by_half(tmp_path):
    spec = small("gpt2", tmp_path)
    run_of(spec, tmp_path / "run")
    folder = latest_checkpoint(tmp_path / "run")
    name = next(name for name, file in read_manifest(folder).files.items() if file.device == "d1")
    (folder / name).unlink()
    with pytest.raises(ConfigError, match=rf"{name} \(device d1 wrote it\)"):
        export_run(tmp_path / "run", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
