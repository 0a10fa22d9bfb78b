"""Data that people have: text under a tokenizer, lines of JSON, saved data sets, folders of pictures."""

import json
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from spantrain.errors import ConfigError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.choice import vocabulary_size, with_data
from spantrain.models.data.dataset import open_dataset

LENGTH = 8


@pytest.fixture
def tokenizer_path(tmp_path):
    """Byte pairs learnt from one sentence."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<eos>", "[MASK]"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the network is slow and the devices are not alike"] * 8, trainer)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def lines_path(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {number} has text"}) + "\n" for number in range(64)))
    return path


def spec_of(model="gpt2-tiny", *, length=LENGTH, vocabulary=None, **chosen):
    spec = resolve_model(model, sequence_length=length)
    if vocabulary is not None:
        spec = type(spec)(**{**vars(spec), "config": {**spec.config, "vocab_size": vocabulary}})
    return with_data(spec, **chosen)


def tokens_of(data) -> list[list[int]]:
    return data.inputs(range(len(data)))[0].tolist()


def test_what_lies_at_a_path_tells_its_kind(tmp_path, lines_path):
    (tmp_path / "notes.txt").write_text("text")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    assert spec_of(data=str(lines_path)).dataset == f"jsonl:{lines_path}"
    assert spec_of(data=str(tmp_path / "notes.txt")).dataset == f"text:{tmp_path}/notes.txt"
    assert spec_of(data=str(saved)).dataset == f"hf:{saved}"
    assert spec_of(data=f"text:{lines_path}").dataset == f"text:{lines_path}"
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "one.PNG").write_bytes(b"")
    assert with_data(resolve_model("resnet-tiny"), data=str(tmp_path)).dataset == f"images:{tmp_path}"
    assert spec_of(data="stdlib-text").dataset == "stdlib-text"


def test_a_folder_may_be_called_like_a_kind(tmp_path, monkeypatch):
    """It is read, and not the folder that it lies in."""
    monkeypatch.chdir(tmp_path)
    for name in ("text", "images", "rows"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("text")
        assert spec_of(data=name).dataset == f"text:{tmp_path / name}"
    assert spec_of(data="text:text").dataset == f"text:{tmp_path / 'text'}"
    for nothing in ("", "text:", "jsonl:"):
        with pytest.raises(ConfigError, match=f"data '{nothing}': names no path"):
            spec_of(data=nothing)


def test_what_a_model_cannot_read_is_refused(tmp_path, lines_path):
    with pytest.raises(ConfigError, match="does not exist"):
        spec_of(data="nowhere")
    with pytest.raises(ConfigError, match="reads images"):
        with_data(resolve_model("resnet-tiny"), data=str(lines_path))
    with pytest.raises(ConfigError, match="reads text"):
        spec_of(data=f"images:{tmp_path}")
    with pytest.raises(ConfigError, match="this model reads text, and this is images"):
        spec_of(data="digits")
    with pytest.raises(ConfigError, match="this model reads images, and this is text"):
        with_data(resolve_model("resnet-tiny"), data="stdlib-text")
    with pytest.raises(ConfigError, match="is no name of a function"):
        spec_of(data="data.py:not a name")
    with pytest.raises(ConfigError, match=r"nowhere\.py does not exist"):
        spec_of(data="nowhere.py:build")


def test_a_tokenizer_must_fit_the_model(tokenizer_path, tmp_path):
    size = vocabulary_size(tokenizer_path)
    assert size == Tokenizer.from_file(str(tokenizer_path / "tokenizer.json")).get_vocab_size()
    with pytest.raises(ConfigError, match=rf"vocabulary has {size} tokens, but gpt2-tiny has 256"):
        spec_of(tokenizer=tokenizer_path)
    assert spec_of(tokenizer=tokenizer_path, vocabulary=size).tokenizer == str(tokenizer_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"there is no .*tokenizer\.json"):
        spec_of(tokenizer=tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a file of the tokenizers library"):
        spec_of(tokenizer=tmp_path)
    with pytest.raises(ConfigError, match="reads images"):
        with_data(resolve_model("resnet-tiny"), tokenizer=tokenizer_path)


def test_lines_of_json_are_documents(lines_path):
    data = open_dataset(spec_of(data=str(lines_path)))
    held_out = open_dataset(spec_of(data=str(lines_path)), held_out=True)
    text = bytes(byte for row in tokens_of(data) for byte in row)
    assert text.startswith(b"document")
    first = "".join(f"document {number} has text\n" for number in range(64) if number % 16 != 15).encode()
    assert tokens_of(data)[1] == list(first[LENGTH + 1 : 2 * LENGTH + 1])
    assert tokens_of(held_out)[0] == list(b"document")
    assert len(data) > 10 * len(held_out)


def test_a_tokenizer_reads_lines_and_marks_their_ends(lines_path, tokenizer_path):
    known = Tokenizer.from_file(str(tokenizer_path / "tokenizer.json"))
    spec = spec_of(data=str(lines_path), tokenizer=tokenizer_path, vocabulary=280)
    data = open_dataset(spec)
    expected = [
        *known.encode("document 0 has text", add_special_tokens=False).ids,
        known.token_to_id("<eos>"),
        *known.encode("document 1 has text", add_special_tokens=False).ids,
    ]
    rows = [
        [*row, label[-1]] for row, label in zip(tokens_of(data), data.labels(range(len(data))).tolist(), strict=True)
    ]
    assert [token for row in rows for token in row][: len(expected)] == expected


def test_a_masked_model_takes_the_tokenizers_own_mask(lines_path, tokenizer_path):
    spec = spec_of("bert-small-tiny", data=str(lines_path), tokenizer=tokenizer_path, vocabulary=280)
    mask = Tokenizer.from_file(str(tokenizer_path / "tokenizer.json")).token_to_id("[MASK]")
    data = open_dataset(spec)
    (tokens,) = data.inputs([0, 1])
    assert torch.equal(tokens == mask, data.labels([0, 1]) != -100)


def test_token_ids_are_taken_as_they_are(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [number] * 9}) + "\n" for number in range(32)))
    data = open_dataset(spec_of(data=str(path)))
    assert tokens_of(data) == [[number] * 8 for number in range(32) if number % 16 != 15]
    path.write_text(json.dumps({"input_ids": [300] * 900}) + "\n")
    with pytest.raises(ConfigError, match="has the number 300, but the model's vocabulary ends at 255"):
        open_dataset(spec_of(data=str(path)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "has no documents"),
        ('{"text": "a"}\nno json\n', "line 2: is not valid JSON"),
        ("[1]\n", "line 1: is no JSON object"),
        ('{"body": "a"}\n', "has body; wanted one of"),
        ('{"text": "a"}\n{"txt": "b"}\n', "line 2 has no 'text'"),
        ('{"input_ids": [1, -1]}\n', "line 1: 'input_ids' must be a list of whole numbers"),
        ('{"text": "short"}\n', "too short"),
    ],
)
def test_lines_that_cannot_be_read_are_named(tmp_path, content, says):
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        open_dataset(spec_of(data=str(path)))


def test_a_saved_data_set_needs_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match="pip install datasets"):
        open_dataset(spec_of(data=f"hf:{tmp_path}"))


def test_a_folder_that_the_library_did_not_write_is_named(tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds no data set that `datasets` saved: wanted dataset_dict\.json or"):
        spec_of(data=f"hf:{tmp_path}")


class Rows(list):
    """What the library returns for one split, as far as it is used."""

    def __init__(self, rows):
        super().__init__(rows)
        self.column_names = list(rows[0])
        self._fingerprint = "f"

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


class Splits(dict):
    """The library's DatasetDict."""


@pytest.fixture
def saved(monkeypatch, tmp_path):
    """Have the library find these rows, or splits of rows, in a folder."""

    def put(found):
        library = types.ModuleType("datasets")
        library.load_from_disk = lambda path: found  # type: ignore[attr-defined]
        library.DatasetDict = Splits  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", library)
        (tmp_path / "state.json").write_text("{}")
        return f"hf:{tmp_path}"

    return put


def test_a_saved_data_sets_rows_and_splits_are_read(saved):
    texts = Rows([{"text": f"text number {number}"} for number in range(40)])
    assert len(open_dataset(spec_of(data=saved(texts)))) > 40
    splits = Splits(train=Rows([{"text": "training"}] * 9), validation=Rows([{"text": "held out"}]))
    spec = spec_of(data=saved(splits))
    assert bytes(tokens_of(open_dataset(spec))[0]) == b"training"
    assert bytes(tokens_of(open_dataset(spec, held_out=True))[0]) == b"held out"
    with pytest.raises(ConfigError, match="no `train`"):
        open_dataset(spec_of(data=saved(Splits(test=texts))))


def test_a_saved_data_set_of_pictures(saved):
    rows = Rows([{"image": Image.new("RGB", (4, 4), (number * 20,) * 3), "label": number % 3} for number in range(12)])
    spec = with_data(resolve_model("resnet-tiny"), data=saved(rows))
    data, held_out = open_dataset(spec), open_dataset(spec, held_out=True)
    assert (len(data), len(held_out)) == (10, 2)
    assert held_out.labels([0, 1]).tolist() == [5 % 3, 11 % 3]
    assert held_out.inputs([0])[0].flatten()[0].item() == pytest.approx(100 / 127.5 - 1)


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures"
    for number, name in enumerate(("cats", "dogs")):
        (folder / name).mkdir(parents=True)
        for index in range(9):
            pixels = np.full((5, 7, 3), 100 * number + index, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


def test_pictures_of_classes(pictures):
    spec = with_data(resolve_model("resnet-tiny"), data=str(pictures))
    data, held_out = open_dataset(spec), open_dataset(spec, held_out=True)
    assert (len(data), len(held_out)) == (15, 3)
    (images,), labels = data.inputs(range(15)), data.labels(range(15))
    assert images.shape == (15, 3, 32, 32)
    shades = ((images[:, 0, 0, 0] + 1) * 127.5).round().long()
    assert torch.equal(shades // 100, labels)
    held_out_shades = ((held_out.inputs(range(3))[0][:, 0, 0, 0] + 1) * 127.5).round().long()
    assert not set(shades.tolist()) & set(held_out_shades.tolist())
    assert data.digest == open_dataset(spec).digest != held_out.digest


def test_pictures_that_cannot_be_read_are_named(pictures, tmp_path):
    spec = with_data(resolve_model("resnet-tiny"), data=str(pictures))
    few = type(spec)(**{**vars(spec), "config": {**spec.config, "num_labels": 1}})
    with pytest.raises(ConfigError, match="has 2 classes, but the model tells 1 apart"):
        open_dataset(few)
    damaged = min(pictures.rglob("*.png"))
    damaged.write_bytes(damaged.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=rf"{damaged}: not a picture that pillow reads \(.+\); remove it"):
        open_dataset(spec)
    for path in pictures.rglob("*.png"):
        path.write_bytes(b"no picture")
    with pytest.raises(ConfigError, match="not a picture"):
        open_dataset(spec).inputs([0])
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="has no images: wanted a folder for each class"):
        with_data(resolve_model("resnet-tiny"), data=str(empty))
    with pytest.raises(ConfigError, match="no pictures"):
        open_dataset(replace(spec, dataset=f"images:{empty}"))
