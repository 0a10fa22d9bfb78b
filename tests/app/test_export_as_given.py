"""A folder goes in, is trained, and comes out as its library writes it; adapters alone, or merged."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers

from spantrain.app.training.requests import first_weights
from spantrain.app.weights import export_run, import_weights, write_weights
from spantrain.core.checkpoint import SampleLedger
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError, UsageError
from spantrain.models.adapters import LoraForm, with_lora
from spantrain.models.build import build_units
from spantrain.models.data.choice import model_on_data
from spantrain.models.units import parameter_names
from spantrain.runtime.checkpoint.manifest import Manifest, read_manifest

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


def lora_spec(folder: Path, text: str = "r=4,alpha=8,targets=q_proj+down_proj") -> ModelSpec:
    return with_lora(model_on_data(f"hf:{folder}"), LoraForm.parse(text))


def test_units_of_an_adapted_model_make_their_own_parameters_only(folder):
    spec = lora_spec(folder)
    whole = {name: one for unit in build_units(spec, seed=5) for name, one in named(unit)}
    trained = {name for name, one in whole.items() if one.requires_grad}
    assert trained == {name for name in whole if ".lora_" in name}
    assert len(trained) == 4 * 2 * 2
    (own,) = build_units(spec, [2], seed=5)
    assert dict(named(own)).keys() == {name for name in whole if ".layers.1." in name}
    assert all(torch.equal(one, whole[name]) for name, one in named(own))
    ups = [one for name, one in whole.items() if "lora_B" in name]
    downs = [one for name, one in whole.items() if "lora_A" in name]
    assert all(not one.any() for one in ups)
    assert all(one.std() > 0.01 for one in downs)
    assert len({float(one.detach().sum()) for one in downs}) == len(downs)


def named(unit):
    return [(full, unit.get_parameter(local)) for local, full in parameter_names(unit).items()]


@pytest.mark.parametrize("merge", [False, True])
def test_adapters_begin_on_the_folders_weights_and_come_out(folder, merge, tmp_path, monkeypatch):
    spec = lora_spec(folder)
    begins = first_weights(spec, from_scratch=False)
    assert begins.text.endswith("16 of adapters begin as they are made")
    assert not begins.found.ignored
    checkpoint = write_weights(
        begins.found,
        tmp_path / "run",
        Manifest(step=0, model=spec, plan=None, job=None, profile="", losses=(), ledger=SampleLedger()),
    )
    manifest = read_manifest(checkpoint)
    assert {name.removeprefix("parameter/") for file in manifest.files.values() for name in file.tensors} == {
        name for unit in build_units(spec, seed=0) for name, _ in named(unit)
    }
    if not merge:  # nobody who has no room for the base needs it
        monkeypatch.setattr("spantrain.app.weights.whole_model", None)
    with warnings.catch_warnings():  # of libraries among themselves nobody is told
        warnings.simplefilter("error", FutureWarning)
        outcome = export_run(tmp_path / "run", tmp_path / "out", merge=merge)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = logits(base)
    assert (tmp_path / "out/tokenizer_config.json").exists()
    if merge:
        assert outcome.loads_with == "transformers"
        found = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
        torch.testing.assert_close(found, wanted)
        assert outcome.parameters == base.num_parameters()
        return
    assert outcome.loads_with == "peft"
    assert outcome.parameters == sum(
        one.numel() for unit in build_units(spec, seed=0) for name, one in named(unit) if ".lora_" in name
    )
    assert not (tmp_path / "out/model.safetensors").exists()
    settings = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(folder)
    assert (settings["r"], settings["task_type"]) == (4, "CAUSAL_LM")
    # An adapter begins with nothing added.
    import peft  # here: it takes a second, which all test workers would wait for

    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(base, tmp_path / "out")), wanted)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("r=0", "r must be from 1 to 65536, got 0"),
        ("rank=4", "'rank=4' is not understood; wanted e.g. r=8"),
        ("r=4,r=5", "'r=5' is not understood"),
        ("alpha=nan", "alpha is 'nan'|lora_alpha must be a finite number"),
        ("dropout=1", "lora_dropout must be at least 0 and less than 1, got 1"),
        ("targets=q_proj+", "target_modules must be names of modules"),
        ("rslora=2", "use_rslora must be true or false, got 2"),
    ],
)
def test_adapters_that_are_none_are_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        LoraForm.parse(text)


def test_what_cannot_be_adapted_is_refused(folder):
    with pytest.raises(ConfigError, match="gpt2-tiny is not from a folder"):
        with_lora(model_on_data("gpt2-tiny"), LoraForm())
    with pytest.raises(ConfigError, match=r"Target modules .*nowhere.* not found"):
        build_units(lora_spec(folder, "targets=nowhere"), seed=0)


def test_a_configuration_of_peft_is_the_same_as_the_text():
    import peft

    given = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    assert LoraForm.of(given) == LoraForm.parse("r=4,alpha=8,targets=down_proj+q_proj")
    with pytest.raises(ConfigError, match="peft_config: bias cannot be set here"):
        LoraForm.of(peft.LoraConfig(bias="all"))
    with pytest.raises(ConfigError, match="a IA3Config is not done here"):
        LoraForm.of(peft.IA3Config())


def test_a_quantized_base_is_refused_by_name(folder):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"load_in_4bit": True}}))
    with pytest.raises(
        ConfigError, match=r"config.json has a quantization_config: quantized weights .* give the folder"
    ):
        model_on_data(f"hf:{folder}")
