"""`hf:FOLDER` on rows of the user's own: any class of the library reads what is in them, and its own loss is learnt."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import spantrain
from spantrain.app.weights import export_run
from spantrain.config.artefacts import read_plan
from spantrain.core.span import Span
from spantrain.errors import ConfigError
from spantrain.library import evaluation
from spantrain.models.build import unit_names
from spantrain.models.data.choice import model_on_data
from spantrain.models.data.dataset import open_dataset
from spantrain.models.data.user import samples_of
from spantrain.models.graph import build_graph
from spantrain.models.sampler import Sampler
from spantrain.models.tracing.source import load_model
from spantrain.models.tracing.transformers_classes import own_rows
from testing.models.zoo.trial import EQUAL, largest_error, planned

TOKENS, WORDS, STEPS, BATCH, RATE = 12, 60, 3, 8, 0.01
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
SOUND = {
    "vocab_size": 20, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False, "layerdrop": 0.0,
}  # fmt: skip


def tokens(count: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, WORDS, (count,))


def text() -> dict[str, Any]:
    """A text with padding before it, as decoders have it; and a column that no model takes."""
    row, padded = tokens(), int(torch.randint(0, 5, ()))
    mask = (torch.arange(TOKENS) >= padded).long()
    return {"input_ids": row, "attention_mask": mask, "labels": row.masked_fill(mask == 0, -100), "text": "so"}


def classed() -> dict[str, Any]:
    return {**text(), "labels": int(torch.randint(0, 3, ()))}


def answered() -> dict[str, Any]:
    """Where in a text an answer is: under names of its own, in the place of labels."""
    ends = {"start_positions": int(torch.randint(0, 6, ())), "end_positions": int(torch.randint(6, 12, ()))}
    return {"input_ids": tokens(), "token_type_ids": torch.zeros(TOKENS, dtype=torch.int64), **ends}


def pair() -> dict[str, Any]:
    """What is read and what is to be written, of unlike lengths; what a decoder is told is made by the model."""
    return {"input_ids": tokens(), "attention_mask": torch.ones(TOKENS, dtype=torch.int64), "labels": tokens(5)}


def sound() -> dict[str, Any]:
    return {"input_values": torch.randn(400), "labels": torch.randint(1, 19, (4,))}


def picture() -> dict[str, Any]:
    return {"pixel_values": torch.randn(3, 16, 16), "label": int(torch.randint(0, 5, ()))}


KINDS = {
    "Qwen2ForCausalLM": (transformers.Qwen2Config, {**SIZES, "num_key_value_heads": 2}, text),
    "BertForSequenceClassification": (transformers.BertConfig, {**SIZES, "num_labels": 3}, classed),
    "RobertaForTokenClassification": (transformers.RobertaConfig, {**SIZES, "num_labels": WORDS}, text),
    "BertForQuestionAnswering": (transformers.BertConfig, SIZES, answered),
    "T5ForConditionalGeneration": (
        transformers.T5Config,
        {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
        pair,
    ),
    "Wav2Vec2ForCTC": (transformers.Wav2Vec2Config, SOUND, sound),
    "ViTForImageClassification": (
        transformers.ViTConfig,
        {**SIZES, "image_size": 16, "patch_size": 4, "num_labels": 5},
        picture,
    ),
}  # fmt: skip


def saved(kind: str, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """Write a model with weights of its own; return its name, and rows for it."""
    torch.manual_seed(4)
    config, sizes, row = KINDS[kind]
    getattr(transformers, kind)(config(**sizes)).save_pretrained(folder)
    return f"hf:{folder}", [row() for _ in range(24)]


@pytest.mark.parametrize("kind", KINDS)
def test_any_class_is_cut_exactly_into_what_it_makes_of_its_rows(kind, tmp_path):
    name, rows = saved(kind, tmp_path / "model")
    spec = model_on_data(name, sample=rows[0])
    graph = build_graph(spec)
    whole = load_model(spec, seed=0)
    assert largest_error(spec, graph, planned(spec, graph, 3), whole) < EQUAL
    data = samples_of(rows, spec)
    taken = dict(zip(whole.batch.names, data.inputs([2, 5]), strict=True)) | {"labels": data.labels([2, 5])}
    assert set(taken) == {"label" if one == "labels" else one for one in rows[0]} - {"text", "label"} | {"labels"}
    assert all(torch.equal(taken[one][1], torch.as_tensor(rows[5][one])) for one in rows[0] if one in taken)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "is_object"), [("BertForQuestionAnswering", True), ("T5ForConditionalGeneration", False)]
)
def test_it_trains_as_transformers_does_on_the_same_rows(kind, is_object, tmp_path):
    """From a folder's weights or an object's; and all of them come out again, under every name that the library has."""
    name, rows = saved(kind, tmp_path / "model")
    arguments = spantrain.TrainingArguments(
        output_dir=tmp_path / "run", max_steps=STEPS, train_batch_size=BATCH, learning_rate=RATE, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=0, dropout="off", logging_steps=0,
    )  # fmt: skip
    given = getattr(transformers, kind).from_pretrained(tmp_path / "model") if is_object else name
    trainer = spantrain.Trainer(given, data=rows, eval_dataset=rows[:5], args=arguments, measure=False)
    losses = trainer.train().losses
    model = getattr(transformers, kind).from_pretrained(tmp_path / "model").eval()
    optimizer, sampler = (
        torch.optim.SGD(model.parameters(), lr=RATE),
        Sampler(dataset_size=24, global_batch=BATCH, seed=arguments.seed),
    )

    def loss_of(some: list[dict[str, Any]]) -> torch.Tensor:
        return model(**{key: torch.stack([torch.as_tensor(row[key]) for row in some]) for key in some[0]}).loss

    for step, loss in enumerate(losses):
        optimizer.zero_grad()
        wanted = loss_of([rows[index] for index in sampler.indices(step, Span(0, BATCH))])
        assert loss == pytest.approx(float(wanted.detach()), rel=1e-5)
        wanted.backward()
        optimizer.step()
    state = trainer.state_dict()
    assert all(torch.allclose(state[name], value, atol=1e-6) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert trainer.evaluate()["eval_loss"] == pytest.approx(float(loss_of(rows[:5])), rel=1e-5)
    trainer.save_model(tmp_path / "saved")
    again = getattr(transformers, kind).from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.allclose(again[name], value, atol=1e-6) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_a_parameter_that_is_not_used_stays_as_the_folder_has_it(tmp_path):
    name, rows = saved("Wav2Vec2ForCTC", tmp_path / "model")
    arguments = spantrain.TrainingArguments(output_dir=tmp_path / "run", max_steps=1, train_batch_size=4)
    spantrain.Trainer(name, data=rows, args=arguments, measure=False).train()
    export_run(tmp_path / "run", tmp_path / "saved")
    given, there = (
        transformers.Wav2Vec2ForCTC.from_pretrained(tmp_path / folder).wav2vec2.masked_spec_embed
        for folder in ("model", "saved")
    )
    assert torch.equal(given, there)


def test_what_does_not_fit_is_said_before_anything_is_made(tmp_path):
    name, rows = saved("Qwen2ForCausalLM", tmp_path / "model")
    spec = model_on_data(name, sample=rows[0])
    assert (spec.objective, spec.sequence_length) == ("own", TOKENS)
    follow = [{**row, "labels": torch.roll(row["input_ids"], -1)} for row in rows]
    with pytest.raises(ConfigError, match=r"data: the labels are the tokens that follow, and the loss .* once more"):
        samples_of(follow, spec)
    with pytest.raises(ConfigError, match=r"samples have words, and Qwen2ForCausalLM of .* takes input_ids, attention"):
        model_on_data(name, sample={"words": "many"})
    with pytest.raises(ConfigError, match=r"data: labels of a sample is no tensor .*'str'"):
        model_on_data(name, sample={**rows[0], "labels": "positive"})
    with pytest.raises(ConfigError, match=f"sequence length 8: its data have {TOKENS} tokens"):
        model_on_data(name, sample=rows[0], sequence_length=8)
    with pytest.raises(ConfigError, match="sequence length 64: wanted 2 to 32"):
        model_on_data(name, sample={"input_ids": tokens(64)})


def test_a_class_that_only_rows_suit_is_refused_without_them_and_says_so(tmp_path):
    name, _ = saved("BertForSequenceClassification", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"BertForSequenceClassification .* give rows of your own"):
        model_on_data(name)


def test_labels_are_taken_by_what_hands_on_all_else(tmp_path):
    """Where the library writes a class's forward without them, for whoever it derives from."""
    fields = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert [one.name for one in own_rows(f"hf:{tmp_path}", {"label": 2, "input_ids": [3, 4], "text": "so"})] == [
        "input_ids", "labels",
    ]  # fmt: skip


def test_a_functions_rows_are_looked_at_and_tuples_are_read_as_ever(tmp_path):
    name, _ = saved("BertForSequenceClassification", tmp_path / "model")
    file = tmp_path / "mine.py"
    file.write_text(
        "def rows():\n"
        "    return [{'input_ids': [n, n + 1, n + 2], 'label': n % 3} for n in range(32)]\n"
        "def pairs():\n"
        "    return [([n, n + 1], [n + 1, n + 2]) for n in range(32)]\n"
    )
    spec = model_on_data(name, data=f"{file}:rows")
    assert [(one.name, one.shape_per_sample) for one in spec.rows] == [("input_ids", (3,)), ("labels", ())]
    decoder, rows = saved("Qwen2ForCausalLM", tmp_path / "decoder")
    assert not model_on_data(decoder, data=f"{file}:pairs").rows
    assert len(model_on_data(decoder, data=f"{file}:pairs", sample=rows[0]).rows) == 3


def test_an_object_is_written_where_no_other_run_is(tmp_path):
    torch.manual_seed(4)
    config, sizes, row = KINDS["BertForSequenceClassification"]
    model, rows = transformers.BertForSequenceClassification(config(**sizes)), [row() for _ in range(8)]
    arguments = spantrain.TrainingArguments(output_dir=tmp_path / "run", max_steps=1)
    (tmp_path / "run" / "given").mkdir(parents=True)
    (tmp_path / "run" / "given" / "model-00001-of-00002.safetensors").write_bytes(b"of another")
    trainer = spantrain.Trainer(model, data=rows, args=arguments, measure=False)
    assert [path.name for path in (tmp_path / "run" / "given").glob("*.safetensors")] == ["model.safetensors"]
    assert trainer.output_dir == tmp_path / "run"
    there = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "run" / "given").state_dict()
    assert all(torch.equal(there[name], value) for name, value in model.state_dict().items())
    peft = pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"a PeftModel has adapters, .* peft_config=LoraConfig"):
        spantrain.Trainer(peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"])), data=rows)
    (tmp_path / "run" / "trace.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds a run already \(trace.json\).*overwrite_output_dir=True"):
        spantrain.Trainer(model, data=rows, args=arguments, measure=False)


def own_model(kind: str) -> tuple[transformers.PreTrainedModel, list[dict[str, Any]]]:
    """Return a model that is an object, and rows for it."""
    torch.manual_seed(4)
    config, sizes, row = KINDS[kind]
    return getattr(transformers, kind)(config(**sizes)), [row() for _ in range(24)]


@pytest.mark.slow
def test_what_is_frozen_in_an_object_stays_as_it_is(tmp_path):
    """The head alone is trained, and of the embeddings positions; as plain PyTorch would."""
    model, rows = own_model("BertForSequenceClassification")
    model.bert.requires_grad_(False)
    model.bert.embeddings.position_embeddings.requires_grad_(True)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    arguments = spantrain.TrainingArguments(
        output_dir=tmp_path / "run", max_steps=2, train_batch_size=8, weight_decay=0.1, logging_steps=0
    )
    trainer = spantrain.Trainer(model, data=rows, args=arguments, measure=False)
    trainer.train()
    there = trainer.state_dict()
    assert {name for name, value in model.state_dict().items() if not torch.equal(there[name], value)} == trained
    loaded = load_model(read_plan(tmp_path / "run" / "plan.json").model, seed=0).module
    assert {name for name, parameter in loaded.named_parameters() if parameter.requires_grad} == trained


def _no_dropout(model):
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda model: setattr(model, "classifier", torch.nn.Identity()),
            r"classifier is Identity\(\) in the object, and L",
        ),
        (_no_dropout, r"bert.embeddings.dropout is Dropout\(p=0.0, .*change the configuration instead"),
        (
            lambda model: model.bert.register_forward_hook(lambda *_: None),
            r"bert is BertModel\(\), hooks in the object",
        ),
        (lambda model: model.classifier.weight.register_hook(lambda one: one), r"classifier is .*, hooks of weight in"),
        (
            lambda model: setattr(model, "loss_function", lambda **_: None),
            "it is BertForS.*, _loss_function in the obj",
        ),
        (lambda model: model.requires_grad_(False), "has no parameter that requires gradients"),
    ],
    ids=["another head", "dropout", "a hook", "a hook of a parameter", "a loss", "nothing to train"],
)
def test_what_the_folder_of_an_object_would_not_keep_is_refused(change, says, tmp_path):
    model, rows = own_model("BertForSequenceClassification")
    change(model)
    arguments = spantrain.TrainingArguments(output_dir=tmp_path / "run", max_steps=1)
    with pytest.raises(ConfigError, match=says):
        spantrain.Trainer(model, data=rows, args=arguments, measure=False).train()


def test_what_changes_no_number_of_an_object_is_no_matter(tmp_path):
    model, rows = own_model("BertForSequenceClassification")
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.resize_token_embeddings(WORDS + 7)
    model(**{name: torch.as_tensor(value)[None] for name, value in rows[0].items() if name != "text"})
    arguments = spantrain.TrainingArguments(output_dir=tmp_path / "run", max_steps=1)
    spantrain.Trainer(model, data=rows, args=arguments, measure=False)


def test_a_configuration_with_numbers_that_json_has_not_is_read(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": WORDS, "head_dim": 16, "num_heads": 4}
    config = transformers.Mamba2Config(**sizes, state_size=8, n_groups=1)
    transformers.Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    row = text()
    assert unit_names(model_on_data(f"hf:{tmp_path}", sample={"input_ids": row["input_ids"], "labels": row["labels"]}))


@pytest.mark.parametrize("named", [False, True], ids=["by the class", "by name"])
def test_rows_in_files_are_samples_and_some_are_held_out(named, tmp_path):
    name, _ = saved("BertForSequenceClassification", tmp_path / "model")
    folder = tmp_path / "reviews"
    folder.mkdir()
    for part, count in (("train", 32), ("test", 3)):
        lines = [json.dumps({"input_ids": [5, 6, n], "label": n % 3, "text": "so"}) for n in range(3, 3 + count)]
        (folder / f"{part}.jsonl").write_text("\n".join(lines))
    spec = model_on_data(name, data=f"rows:{folder}" if named else str(folder))
    data, held_out = open_dataset(spec), open_dataset(spec, held_out=True)
    assert (len(data), len(held_out)) == (32, 3)
    assert data.inputs([0, 2])[0].tolist() == [[5, 6, 3], [5, 6, 5]]
    assert held_out.labels([1]).tolist() == [1]
    alone = model_on_data(name, data=f"rows:{folder / 'train.jsonl'}")
    assert [len(open_dataset(alone, held_out=part)) for part in (False, True)] == [30, 2]
    with pytest.raises(ConfigError, match="rows are read by classes of hf:FOLDER"):
        model_on_data("gpt2-tiny", data=f"rows:{folder}")
    for more, says in (('{"input_ids": [5, 6], "label": 1}', "has shape"), ('{"input_ids": [5, 6, 7]}', "is missing")):
        (folder / "test.jsonl").write_text(lines[0] + "\n" + more)
        with pytest.raises(ConfigError, match=rf"test\.jsonl, line 2: .* {says}.*pad or cut all to one"):
            open_dataset(spec)
    (folder / "none.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has no rows"):
        model_on_data(name, data=f"rows:{folder / 'none.jsonl'}")


def test_what_pads_or_collates_says_what_rows_are_like(tmp_path):
    """A tokenizer pads to the length that is asked for; of a stream only the first sample is looked at."""
    name, _ = saved("BertForSequenceClassification", tmp_path / "model")
    rows = [{"input_ids": [5] * count, "label": 1, "text": "so"} for count in (4, 7, 5)]

    def collated(samples):
        assert all("text" not in one for one in samples)
        padded = [one["input_ids"] + [2] * (9 - len(one["input_ids"])) for one in samples]
        return {"input_ids": torch.tensor(padded), "labels": torch.tensor([one["label"] for one in samples])}

    sample = evaluation.example_row(name, rows, {"data_collator": collated}, None)
    assert model_on_data(name, sample=sample).sequence_length == 9
    fitting = spantrain.Trainer(name, data=iter(rows), args=spantrain.TrainingArguments(max_steps=1), measure=False)
    assert [len(one["input_ids"]) for one in fitting._rows] == [4, 7, 5]


@pytest.mark.parametrize("changed", [{"dtype": "load"}, {"shape_per_sample": [2**20, 2**20], "bytes_per_sample": 8}])
def test_a_plans_rows_make_nothing_large_or_strange(changed, tmp_path):
    from spantrain.config.files.json_codec import from_json, to_json
    from spantrain.core.units import ModelSpec

    name, rows = saved("Qwen2ForCausalLM", tmp_path / "model")
    plain = json.loads(json.dumps(to_json(model_on_data(name, sample=rows[0]))))
    plain["rows"][0] |= changed
    with pytest.raises(ConfigError, match=r"rows: input_ids has numbers of type"):
        load_model(from_json(ModelSpec, plain, "plan.json"), seed=0)
