"""Weights that the transformers library stores by other names than its models have, or in other pieces."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from spantrain.app.weight_folder import find_weights
from spantrain.errors import ConfigError
from spantrain.models.data.choice import model_on_data

pytestmark = pytest.mark.models

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {"vocab_size": 300, "max_position_embeddings": 16}
MODELS = {
    "renamed": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=10)
    ),
    "one renamed": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL, **TEXT)),
    "experts apart": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, **TEXT, num_key_value_heads=2, num_local_experts=4)
    ),
    "shared by modules": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            **TEXT,
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_they_are_what_the_library_reads(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    found = find_weights(tmp_path, model_on_data(f"hf:{tmp_path}"))
    read, wanted = found.read(), dict(type(model).from_pretrained(tmp_path).named_parameters(remove_duplicate=False))
    assert len(read) == len(list(model.parameters()))
    assert all(torch.equal(tensor, wanted[own]) for own, tensor in read.items())
    assert found.parameters == sum(tensor.numel() for tensor in read.values())
    assert bool(found.joined) is (name == "experts apart")


def test_what_is_in_no_piece_is_missing(tmp_path: Path) -> None:
    MODELS["experts apart"]().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    gone = next(name for name in tensors if name.endswith("input_layernorm.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=f"holds another model than --model: {gone} is missing"):
        find_weights(tmp_path, model_on_data(f"hf:{tmp_path}")).read()


def test_pieces_of_another_shape_or_type_are_refused(tmp_path: Path) -> None:
    MODELS["experts apart"]().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    piece = next(name for name in tensors if ".experts.1." in name)
    for changed, told in (
        (tensors[piece][:1].clone(), "the transformers library cannot read it"),
        (tensors[piece].to(torch.float64), "has type F64, wanted float32 or shorter"),
    ):
        save_file({**tensors, piece: changed}, file, {"format": "pt"})
        with pytest.raises(ConfigError, match=told):
            find_weights(tmp_path, model_on_data(f"hf:{tmp_path}")).read()
