"""What a new run's weights begin with: none of a folder are left out without a word."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from spantrain.app.weight_folder import first_weights
from spantrain.app.weights import export_run, import_weights, trained_statistics
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.build import unit_source, whole_parameters
from spantrain.models.data.choice import model_on_data
from spantrain.runtime.checkpoint.manifest import latest_checkpoint, read_manifest

pytestmark = pytest.mark.checkpoint

SIZES = {
    "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def spec_of(folder: Path) -> ModelSpec:
    return model_on_data(f"hf:{folder}")


def test_weights_are_found_and_read(folder):
    begins = first_weights(spec_of(folder), from_scratch=False)
    assert begins.text.startswith(f"Weights of {folder}: ")
    wanted = load_file(folder / "model.safetensors")
    found = begins.found.read()
    assert found.keys() == whole_parameters(spec_of(folder)).keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())


@pytest.mark.parametrize("saved", [".", "config.json"])
def test_a_configuration_alone_begins_with_random_ones_and_says_so(saved, folder):
    if saved == ".":
        (folder / "model.safetensors").unlink()
    begins = first_weights(spec_of(folder / saved), from_scratch=False)
    assert begins.found is None
    assert begins.text.startswith("Random weights: ")


def test_weights_are_left_where_that_is_asked(folder):
    begins = first_weights(spec_of(folder), from_scratch=True)
    assert (begins.found, begins.text) == (None, f"Random weights, from scratch: none are read from {folder}")


def test_weights_that_cannot_be_read_are_refused_with_the_ways_out(folder):
    spec = spec_of(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"has weights in pytorch_model.bin, and only \*.safetensors.*--from-scratch"):
        first_weights(spec, from_scratch=False)
    (folder / "pytorch_model.bin").rename(folder / "training_args.bin")
    assert first_weights(spec, from_scratch=False).found is None


def test_weights_of_another_model_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in weights.items() if "lm_head" not in name}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lm_head.weight is missing; or begin with random weights: --from-scratch"):
        first_weights(spec_of(folder), from_scratch=False)
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ConfigError, match="cannot be read"):
        first_weights(spec_of(folder), from_scratch=False)


def test_a_folder_of_another_machine_is_not_taken_for_one_without_weights(folder):
    with pytest.raises(ConfigError, match="is not on this machine, so it cannot be told whether it has weights"):
        first_weights(replace(spec_of(folder), source="/nowhere/model"), from_scratch=False)


def test_models_of_functions_and_by_name_have_their_own(tmp_path):
    (tmp_path / "mine.py").write_text("def build():\n    raise RuntimeError\n")
    for name in ("gpt2-tiny", f"{tmp_path / 'mine.py'}:build"):
        assert first_weights(model_on_data(name), from_scratch=False).text == ""
        with pytest.raises(ConfigError, match="reads no folder of weights"):
            first_weights(model_on_data(name), from_scratch=True)


def test_running_statistics_of_a_folder_are_begun_with(tmp_path):
    config = transformers.ResNetConfig(num_labels=10, embedding_size=8, hidden_sizes=[16], depths=[2])
    model = transformers.ResNetForImageClassification(config)
    name = "resnet.embedder.embedder.normalization.running_mean"
    model.get_buffer(name).add_(1)
    model.save_pretrained(tmp_path / "trained")
    spec = spec_of(tmp_path / "trained")
    found = first_weights(spec, from_scratch=False).found
    assert found is not None
    assert found.ignored == ()
    import_weights(tmp_path / "trained", spec, tmp_path / "run")
    folder = latest_checkpoint(tmp_path / "run")
    got = trained_statistics(folder, read_manifest(folder))
    assert got.keys() == {name for name, _ in model.named_buffers()}
    assert all(torch.equal(tensor, model.get_buffer(name)) for name, tensor in got.items())
    export_run(tmp_path / "run", tmp_path / "out")
    again = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(again.get_buffer(name), model.get_buffer(name))


def test_statistics_of_what_a_model_does_not_use_come_out_as_they_were(tmp_path):
    """Of the last convolution before the classes, where a picture's parts are told apart instead."""
    torch.manual_seed(2)
    model = transformers.MobileNetV2ForSemanticSegmentation(transformers.MobileNetV2Config(depth_multiplier=0.1))
    name = "mobilenet_v2.conv_1x1.normalization.running_mean"
    model.get_buffer(name).add_(1)
    model.save_pretrained(tmp_path / "trained")
    sample = {"pixel_values": torch.rand(3, 32, 32), "labels": torch.zeros(32, 32, dtype=torch.int64)}
    spec = model_on_data(f"hf:{tmp_path / 'trained'}", sample=sample)
    import_weights(tmp_path / "trained", spec, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    again = transformers.MobileNetV2ForSemanticSegmentation.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("weight", [0.02, 0.0])
def test_a_router_loss_that_a_configuration_asks_for_is_counted(tmp_path, weight):
    fields = {"model_type": "mixtral", **SIZES, "num_local_experts": 2, "output_router_logits": True}
    fields |= {"architectures": ["MixtralForCausalLM"], "router_aux_loss_coef": weight}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert unit_source(spec_of(tmp_path)).to_measure().left_out == ()


def test_a_router_loss_that_is_left_out_is_told(tmp_path):
    fields = {
        "model_type": "switch_transformers",
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
    }
    fields |= {"num_decoder_layers": 2, "num_experts": 2, "vocab_size": 256, "output_router_logits": True}
    fields["architectures"] = ["SwitchTransformersForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert "the library's loss of the router is left out" in unit_source(spec_of(tmp_path)).to_measure().left_out
