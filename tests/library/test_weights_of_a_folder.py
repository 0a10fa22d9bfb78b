"""`Trainer("hf:FOLDER")` with weights in the folder: they are what it begins with, and what is not done is told."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import spantrain
from spantrain.core.span import Span
from spantrain.errors import ConfigError
from spantrain.models.data.choice import model_on_data
from spantrain.models.data.dataset import open_dataset
from spantrain.models.randomness.draws import seeded
from spantrain.models.sampler import Sampler
from spantrain.models.units import sample_losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BATCH, STEPS, RATE, SEED = 4, 2, 0.01, 5


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model whose loss tells its weights: those of its head are forty times as large as new ones."""
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, attention_dropout=0.2,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def plain_torch(folder: Path) -> list[float]:
    """What a loop over the same samples gives, from the same weights, with the same dropout."""
    spec = model_on_data(f"hf:{folder}")
    data = open_dataset(spec)
    sampler = Sampler(dataset_size=len(data), global_batch=BATCH, seed=SEED)
    model = transformers.LlamaForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        indices = sampler.indices(step, Span(0, BATCH))
        optimizer.zero_grad()
        with seeded(model, seed=SEED, step=step):
            loss = sample_losses(model(*data.inputs(indices)).logits, data.labels(indices)).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_it_begins_with_them_and_says_so(folder, tmp_path, capfd):
    arguments = spantrain.TrainingArguments(
        output_dir=tmp_path / "run", max_steps=STEPS, train_batch_size=BATCH, learning_rate=RATE, seed=SEED,
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1,
    )  # fmt: skip
    outcome = spantrain.Trainer(f"hf:{folder}", args=arguments, measure=False).fit()
    assert outcome.losses == pytest.approx(plain_torch(folder), rel=1e-4)
    assert outcome.losses[0] > 8, "not those of new weights"
    assert outcome.left_out == ()
    said = capfd.readouterr().err
    assert f"Weights of {folder}: " in said
    assert "Not as the model was given" not in said
    assert said.index("Weights of") < said.index(f"step 1/{STEPS}")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["weights"], record["left_out"]) == (outcome.weights, [])
    with pytest.raises(ConfigError, match=r"holds a run already .*overwrite_output_dir=True"):
        spantrain.Trainer(f"hf:{folder}", args=arguments, measure=False).fit()


def test_what_of_the_model_is_not_done_is_said_first(tmp_path, capfd):
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=10)
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path / "model")
    arguments = spantrain.TrainingArguments(
        output_dir=tmp_path / "run", max_steps=1, train_batch_size=BATCH, batch_norm="frozen", logging_steps=1
    )
    outcome = spantrain.Trainer(f"hf:{tmp_path / 'model'}", args=arguments, measure=False).fit()
    (left_out,) = outcome.left_out
    said = capfd.readouterr().err
    assert said.index(f"Not as the model was given: {left_out}") < said.index("step 1/1")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["left_out"] == [left_out]
