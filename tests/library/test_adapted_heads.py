"""Adapters in classifiers of the library: the head, which begins with random numbers, is trained beside them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import spantrain
from spantrain.app.weights import export_run
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.adapters import LoraForm, with_lora
from spantrain.models.build import whole_parameters
from spantrain.models.data.choice import model_on_data
from spantrain.models.graph import build_graph
from spantrain.models.tracing.source import load_model, with_or_without_numbers
from testing.models.zoo.trial import EQUAL, largest_error, planned

SIZES = {
    "vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "num_labels": 3,
    "dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2,
    "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
TOKENS = 6


def row(kind: str) -> dict[str, Any]:
    labels = torch.randint(0, 3, (TOKENS if "Token" in kind else 1,)).squeeze(0)
    if kind.startswith("ViT"):
        return {"pixel_values": torch.randn(3, 16, 16), "labels": labels}
    words = {"input_ids": torch.randint(3, 60, (TOKENS,))}
    if "Question" in kind:
        return words | {"start_positions": torch.randint(0, 3, ()), "end_positions": torch.randint(3, TOKENS, ())}
    return words | {"labels": labels}


def saved(kind: str, folder: Path) -> list[dict[str, Any]]:
    torch.manual_seed(4)
    sizes = SIZES | ({"image_size": 16, "patch_size": 8} if kind.startswith("ViT") else {})
    sizes |= {"num_labels": 2} if "Question" in kind else {}
    config = getattr(transformers, f"{kind.partition('For')[0]}Config")(**sizes)
    getattr(transformers, kind)(config).save_pretrained(folder)
    return [row(kind) for _ in range(8)]


def adapted_spec(folder: Path, sample: dict[str, Any], text: str = "r=2,targets=query+value") -> ModelSpec:
    return with_lora(model_on_data(f"hf:{folder}", sample=sample), LoraForm.parse(text))


@pytest.mark.parametrize(
    ("kind", "targets", "head"),
    [
        ("BertForSequenceClassification", "query+value", "classifier"),
        ("RobertaForTokenClassification", "query+value", "classifier"),
        ("BertForQuestionAnswering", "query+value", "qa_outputs"),
        ("Qwen2ForSequenceClassification", "q_proj", "score"),
        ("ViTForImageClassification", "q_proj", "classifier"),
        ("DistilBertForSequenceClassification", "q_lin", "pre_classifier classifier"),
        ("DebertaForSequenceClassification", "all-linear", "pooler classifier"),
    ],
)
def test_a_classifiers_head_is_trained_exactly_beside_adapters(kind, targets, head, tmp_path):
    rows = saved(kind, tmp_path / "model")
    spec = adapted_spec(tmp_path / "model", rows[0], f"r=2,targets={targets}")
    graph = build_graph(spec)
    whole = load_model(spec, seed=0)
    trained = {name for name, one in whole.module.named_parameters() if one.requires_grad and ".lora_" not in name}
    assert {name.split(".")[2] for name in trained} == set(head.split())
    assert largest_error(spec, graph, planned(spec, graph, 2), whole) < EQUAL
    assert {name for name in whole_parameters(spec) if ".original_module." in name} == trained


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "target", "head"),
    [
        ("BertForSequenceClassification", "query", "classifier"),
        ("DistilBertForSequenceClassification", "q_lin", "pre_classifier"),
    ],
)
def test_a_head_goes_with_its_adapters_and_into_what_is_merged(kind, target, head, tmp_path):
    import peft

    rows = saved(kind, tmp_path / "model")
    given = getattr(transformers, kind).from_pretrained(tmp_path / "model")
    trainer = spantrain.Trainer(
        f"hf:{tmp_path / 'model'}",
        data=rows,
        peft_config=peft.LoraConfig(r=2, target_modules=[target], task_type="SEQ_CLS"),
        args=spantrain.TrainingArguments(output_dir=tmp_path / "run", max_steps=2, learning_rate=0.1, logging_steps=0),
        measure=False,
    )
    trainer.train()
    export_run(tmp_path / "run", tmp_path / "alone")
    export_run(tmp_path / "run", tmp_path / "merged", merge=True)
    words = torch.stack([one["input_ids"] for one in rows])
    alone = peft.PeftModel.from_pretrained(given, tmp_path / "alone").eval()
    merged = getattr(transformers, kind).from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        wanted = trainer.model.eval()(input_ids=words).logits
        torch.testing.assert_close(alone(input_ids=words).logits, wanted)
        torch.testing.assert_close(merged(input_ids=words).logits, wanted)
    before = getattr(transformers, kind).from_pretrained(tmp_path / "model").get_submodule(head).weight
    assert float((merged.get_submodule(head).weight - before).detach().abs().max()) > 0.01


def test_a_head_is_left_as_it_is_where_peft_is_told_of_no_task():
    import peft

    assert LoraForm.of(peft.LoraConfig(task_type="TOKEN_CLS")).trains_head
    assert not LoraForm.of(peft.LoraConfig()).trains_head


def test_a_model_of_which_peft_knows_no_targets_is_refused_before_it_has_weights(tmp_path, monkeypatch):
    sizes = {**SIZES, "vocab_size": 256}
    transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes)).save_pretrained(tmp_path)
    monkeypatch.setattr("spantrain.models.tracing.source.load_model", None)
    spec = with_lora(model_on_data(f"hf:{tmp_path}"), LoraForm.parse("r=2"))
    names = r"o_proj\+qkv_proj\+gate_up_proj\+down_proj"
    with pytest.raises(
        ConfigError, match=rf"lora: targets: of Phi3ForCausalLM peft knows none; .*all-linear.* {names}"
    ):
        with_or_without_numbers(spec, lambda *_: None)
    with pytest.raises(ConfigError, match=rf"lora: targets: .*nowhere.* {names}"):
        with_or_without_numbers(
            with_lora(model_on_data(f"hf:{tmp_path}"), LoraForm.parse("targets=nowhere")), lambda *_: None
        )
