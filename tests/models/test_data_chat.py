"""Conversations as samples: their fields, templates, which tokens are learnt, padding, packing, and bad rows."""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BloomConfig, LlamaConfig, PreTrainedTokenizerFast

from spantrain.core.units import ChatForm
from spantrain.errors import ConfigError
from spantrain.models.build import unit_source
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.choice import model_on_data, with_data
from spantrain.models.data.conversations import CHAT_TEMPLATES
from spantrain.models.data.dataset import open_dataset

LENGTH = 64
# As Qwen3 writes: thoughts of earlier turns are left out, so that what stood before is written otherwise.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}Q: {{ m.content }}{% endif %}\n{% endfor %}"
)


def turns(number: int, answers: int = 1) -> list[dict[str, str]]:
    return [
        message
        for turn in range(answers)
        for message in (
            {"role": "user", "content": f"what is {number} and {turn}"},
            {"role": "assistant", "content": f"it is {number} " + "so " * (number % 5 + turn)},
        )
    ]


@pytest.fixture
def rows_path(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": turns(number)}) + "\n" for number in range(40)))
    return path


@pytest.fixture
def model_path(tmp_path):
    """A folder of a small LLaMA with a tokenizer that has a chat template, as transformers writes them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_start|>", "<|im_end|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["what is it and so it is"] * 8, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<pad>")
    tokenizer.chat_template = CHAT_TEMPLATES["chatml"]
    folder = tmp_path / "model"
    tokenizer.save_pretrained(str(folder))
    configuration = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    configuration.save_pretrained(str(folder))
    return folder


def bytes_of(path, *, length=LENGTH, **form):
    spec = model_on_data("gpt2-tiny", data=str(path), sequence_length=length)
    return with_data(spec, chat=ChatForm(**{"template": "chatml", **form}))


def text_of(row, labels) -> tuple[str, str]:
    """Return the text of a row of bytes, and what of it is learnt."""
    learnt = bytes(label for label in labels.tolist() if label != -100)
    return bytes(row.tolist()).rstrip(b"\0").decode(), learnt.decode()


def test_answers_alone_are_learnt(rows_path):
    data = open_dataset(bytes_of(rows_path, length=128))
    (tokens,), labels = data.inputs([0, 1]), data.labels([0, 1])
    text, learnt = text_of(tokens[1], labels[1])
    assert text == "<|im_start|>user\nwhat is 1 and 0<|im_end|>\n<|im_start|>assistant\nit is 1 so <|im_end|>\n"
    assert learnt == "it is 1 so <|im_end|>\n"
    assert torch.equal(labels[1][labels[1] != -100], tokens[1].roll(-1)[labels[1] != -100])
    whole = open_dataset(bytes_of(rows_path, length=128, train_on="all"))
    assert text_of(tokens[1], whole.labels([1])[0])[1] == text[1:]
    assert (len(data), len(open_dataset(bytes_of(rows_path, length=128), held_out=True))) == (38, 2)


def test_longer_conversations_are_cut_and_said(rows_path):
    data = open_dataset(bytes_of(rows_path, length=76))
    assert text_of(data.inputs([0])[0][0], data.labels([0])[0])[1] == "it is 0 <|i"
    assert "38 conversations in messages, padded to 76 tokens; 38 cut at the end, 0 left out" in data.note
    with pytest.raises(ConfigError, match="no conversation with an answer in its first 20 tokens"):
        open_dataset(bytes_of(rows_path, length=20))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": turns(3)},
        {
            "conversations": [
                {"from": "human", "value": "what is 3 and 0"},
                {"from": "gpt", "value": turns(3)[1]["content"]},
            ]
        },
        {"prompt": "what is 3 and 0", "completion": turns(3)[1]["content"]},
        {"prompt": turns(3)[:1], "completion": turns(3)[1:]},
        {"instruction": "what is 3 and 0", "input": "", "output": turns(3)[1]["content"]},
    ],
    ids=lambda row: next(iter(row)),
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_forms_are_known_by_their_fields(tmp_path, row, suffix):
    path = tmp_path / f"rows.{suffix}"
    rows = [row] * 3
    path.write_text(json.dumps(rows) if suffix == "json" else "".join(json.dumps(one) + "\n" for one in rows))
    spec = bytes_of(path, length=128)
    assert spec.dataset == f"chat:{path}"
    data = open_dataset(spec)
    assert text_of(data.inputs([0])[0][0], data.labels([0])[0])[1] == "it is 3 so so so <|im_end|>\n"


def test_a_folder_of_files_with_a_held_out_one(tmp_path):
    for name, count in (("train-0", 5), ("train-1", 4), ("test", 3)):
        lines = (json.dumps({"instruction": f"{name} {number}", "output": "so"}) + "\n" for number in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    spec = bytes_of(tmp_path, length=128)
    assert spec.dataset == f"chat:{tmp_path}"
    assert (len(open_dataset(spec)), len(open_dataset(spec, held_out=True))) == (9, 3)


def test_a_models_own_tokenizer_and_template(rows_path, model_path):
    spec = model_on_data(f"hf:{model_path}", data=str(rows_path), sequence_length=LENGTH)
    assert spec.tokenizer == str(model_path / "tokenizer.json")
    data = open_dataset(spec)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(model_path))
    wanted = tokenizer.apply_chat_template(turns(0), return_dict=False)
    (tokens,), labels = data.inputs([0]), data.labels([0])
    assert tokens[0].tolist() == [*wanted, *[tokenizer.pad_token_id] * (LENGTH - len(wanted))]
    assert tokenizer.decode(labels[0][labels[0] != -100]) == f"{turns(0)[1]['content']}<|im_end|>\n"
    (model_path / "chat_template.jinja").unlink()
    with pytest.raises(
        ConfigError, match=r"has no chat template; give --chat-template with a Jinja file, or one of chatml"
    ):
        open_dataset(spec)


@pytest.mark.parametrize(("template", "end"), [(FORGETFUL, "<|im_end|>\n"), (MARKED, "")])
def test_every_answer_is_found_in_templates_that_look_back_or_mark_them(tmp_path, template, end):
    (tmp_path / "own.jinja").write_text(template)
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps({"messages": turns(1, answers=2)}) + "\n") * 2)
    data = open_dataset(bytes_of(path, length=256, template=str(tmp_path / "own.jinja")))
    learnt = text_of(data.inputs([0])[0][0], data.labels([0])[0])[1]
    assert learnt.replace("<think></think>", "") == f"it is 1 so {end}it is 1 so so {end}"


def test_packed_samples_hold_whole_conversations(rows_path, model_path):
    spec = model_on_data(f"hf:{model_path}", data=str(rows_path), sequence_length=128, chat=ChatForm(packing=True))
    data = open_dataset(spec)
    padded = open_dataset(replace(spec, chat=ChatForm()))
    assert len(data) * 2 < len(padded)
    everything = range(len(data))
    (tokens, positions), labels = data.inputs(everything), data.labels(everything)
    # An answer's first token is told by what is before it in its own conversation, and no conversation's first is told.
    assert (labels != -100).sum() == (padded.labels(range(len(padded))) != -100).sum()
    starts = positions == 0
    assert torch.all(labels[:, :-1][starts[:, 1:]] == -100)
    first = [row for row in tokens.tolist() if row.count(0) > 2]
    assert first, "several conversations begin with <|im_start|> in one sample"


def test_a_model_that_does_not_keep_packed_conversations_apart_is_refused(rows_path, model_path, tmp_path):
    packed = {"data": str(rows_path), "sequence_length": 32, "chat": ChatForm(template="chatml", packing=True)}
    unit_source(model_on_data(f"hf:{model_path}", **packed)).to_measure()
    small = BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=2, architectures=["BloomForCausalLM"])
    small.save_pretrained(str(tmp_path / "bloom"))
    with pytest.raises(
        ConfigError, match="does not tell sequences apart by position_ids, so that one changes the loss"
    ):
        unit_source(model_on_data(f"hf:{tmp_path / 'bloom'}", **packed)).to_measure()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}\n', "line 1: nothing of it is learnt: no message has"),
        ('{"messages": []}\n', r"line 1: messages is \[\]; wanted a list of messages"),
        ('{"messages": [{"role": "user", "content": 3}]}\n', r"line 1: messages\[0\]\.content is 3; wanted text"),
        ('{"messages": [{"content": "a"}]}\n', r"messages\[0\]\.role is None; wanted text"),
        ('{"conversations": [{"from": "elf", "value": "a"}]}\n', r"\[0\]\.from is 'elf'; wanted one of human"),
        ('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n', r"line 2: has no 'completion' like the first row"),
        ('{"body": "a"}\n', "line 1: has body, wanted one of: messages; conversations; prompt and completion"),
        ("", "has no conversations"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, content, says):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        open_dataset(bytes_of(f"chat:{path}"))


def test_what_does_not_fit_is_refused(rows_path, tmp_path, model_path):
    with pytest.raises(ConfigError, match="one token after the other"):
        open_dataset(with_data(resolve_model("bert-small-tiny"), data=f"chat:{rows_path}"))
    with pytest.raises(ConfigError, match="packing tells conversations apart by position_ids"):
        open_dataset(bytes_of(rows_path, packing=True))
    with pytest.raises(ConfigError, match="belong to conversations"):
        with_data(resolve_model("gpt2-tiny"), chat=ChatForm(packing=True))
    with pytest.raises(ConfigError, match=r"there is no such file; give a Jinja file, or one of chatml, plain"):
        bytes_of(rows_path, template="nothing.jinja")
    with pytest.raises(ConfigError, match="without a tokenizer there is none; give --chat-template"):
        open_dataset(bytes_of(rows_path, template=""))
    refusing = tmp_path / "refusing.jinja"
    refusing.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="line 1: the chat template cannot write it: roles must alternate"):
        open_dataset(bytes_of(rows_path, template=str(refusing)))
    (tmp_path / "rows.parquet").write_bytes(b"none")
    with pytest.raises(ConfigError, match=r"pip install pyarrow|is no Parquet file"):
        open_dataset(bytes_of(f"chat:{tmp_path / 'rows.parquet'}"))
