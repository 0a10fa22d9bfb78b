"""A folder goes in, is trained, and comes out as its library writes it; adapters alone, or merged."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from spantrain.app.weights import export_run, import_weights
from spantrain.errors import UsageError
from spantrain.models.data.choice import model_on_data

pytestmark = pytest.mark.checkpoint

SIZES = {
    "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16,
}  # fmt: skip
BESIDES = {
    "tokenizer.json": "{}",
    "tokenizer_config.json": '{"a": 1}',
    "special_tokens_map.json": "{}",
    "chat_template.jinja": "{{ x }}",
    "generation_config.json": '{"temperature": 0.5, "do_sample": true}',
}
INPUTS = torch.arange(12).reshape(2, 6)


@pytest.fixture
def folder(tmp_path) -> Path:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    for name, text in BESIDES.items():
        (tmp_path / "model" / name).write_text(text)
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"old")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    return tmp_path / "model"


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=INPUTS).logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_comes_out_as_it_went_in(folder, dtype, tmp_path):
    import_weights(folder, model_on_data(f"hf:{folder}"), tmp_path / "run")
    outcome = export_run(tmp_path / "run", tmp_path / "out", dtype=dtype)
    assert outcome.loads_with == "transformers"
    out, wanted = tmp_path / "out", transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    assert model.dtype == getattr(torch, dtype)
    # Weights were of sixteen bits: rounding them again changes nothing.
    assert torch.equal(logits(model.float()), logits(wanted))
    for name, text in BESIDES.items():
        assert (out / name).read_text() == text
    assert not (out / "pytorch_model.bin").exists()
    given, found = (json.loads((one / "config.json").read_text()) for one in (folder, out))
    assert found.pop("dtype") == dtype
    given.pop("dtype")
    assert found == given


def test_what_cannot_be_written_so_is_refused(folder, tmp_path):
    import_weights(folder, model_on_data(f"hf:{folder}"), tmp_path / "run")
    with pytest.raises(UsageError, match="--dtype must be one of float32, bfloat16, float16, got 'int8'"):
        export_run(tmp_path / "run", tmp_path / "out", dtype="int8")
    with pytest.raises(UsageError, match="has no adapters of peft to be merged"):
        export_run(tmp_path / "run", tmp_path / "out", merge=True)
    assert not (tmp_path / "out").exists()
