"""Data sets: samples from the index alone, training and held-out parts apart, clear refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spantrain.errors import ConfigError
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.data.choice import model_on_data
from spantrain.models.data.dataset import open_dataset
from spantrain.models.data.text import BYTE_MASK, read_windows

LENGTH = 16


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(np.random.default_rng(0).integers(0, 256, size=17 * 64, dtype=np.uint8)))
    return path


def text_data(path, model="gpt2-tiny", *, held_out=False):
    return open_dataset(model_on_data(model, data=path and str(path), sequence_length=LENGTH), held_out=held_out)


def test_data_next_byte_labels_are_the_inputs_moved_by_one(text):
    data = text_data(text)
    (tokens,), labels = data.inputs([0, 5]), data.labels([0, 5])
    assert tokens.shape == labels.shape == (2, LENGTH)
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert bytes(tokens[0].tolist()) == text.read_bytes()[:LENGTH]


def test_data_masked_bytes_are_the_labels_and_nothing_else_is(text):
    masked, plain = text_data(text, "bert-small-tiny"), text_data(text)
    indices = list(range(len(masked)))
    (tokens,), labels = masked.inputs(indices), masked.labels(indices)
    (original,) = plain.inputs(indices)
    hidden = tokens == BYTE_MASK
    assert hidden.sum(dim=1).unique().tolist() == [round(0.15 * LENGTH)]
    assert torch.equal(labels != -100, hidden)
    assert torch.equal(torch.where(hidden, labels, tokens), original)
    assert hidden.any(dim=0).all(), "every position is masked in some sample"


@pytest.mark.parametrize("model", ["gpt2-tiny", "bert-small-tiny", "resnet-tiny"])
def test_data_samples_do_not_depend_on_their_company(model):
    data = open_dataset(resolve_model(model))
    (together,) = data.inputs([3, 1, 4])
    for row, index in enumerate([3, 1, 4]):
        assert torch.equal(together[row], data.inputs([index])[0][0])
        assert torch.equal(data.labels([3, 1, 4])[row], data.labels([index])[0])


def test_data_standard_library_is_enough_and_parts_are_apart():
    training = read_windows("stdlib-text", 64, held_out=False)
    held_out = read_windows("stdlib-text", 64, held_out=True)
    assert len(training) > 10_000
    assert len(held_out) > 500
    common = {row.tobytes() for row in training.rows} & {row.tobytes() for row in held_out.rows}
    assert len(common) < 0.01 * len(held_out)  # equal text can stand in two files


def test_data_few_files_hold_out_the_end_and_many_files_whole_files(tmp_path, text):
    training, held_out = text_data(text), text_data(text, held_out=True)
    assert (len(training), len(held_out)) == (60, 4)
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(32):
        (folder / f"{number:02}.txt").write_bytes(bytes([number]) * 17)
    (reserved,) = text_data(folder, held_out=True).inputs([0, 1])
    assert reserved[:, 0].tolist() == [15, 31]
    assert len(text_data(folder)) == 30


def test_data_digits_are_normalized_and_parts_are_apart():
    spec = resolve_model("resnet-tiny")
    training, held_out = open_dataset(spec), open_dataset(spec, held_out=True)
    assert len(training) + len(held_out) == 1797
    (images,) = training.inputs(range(256))
    assert images.shape == (256, 3, 32, 32)
    assert images.dtype == torch.float32
    assert abs(images.mean().item()) < 0.1
    assert set(training.labels(range(256)).tolist()) == set(range(10))


def test_data_missing_short_and_unknown_are_refused(tmp_path, text):
    spec = model_on_data("gpt2-tiny", data=str(text))
    text.unlink()
    with pytest.raises(ConfigError, match="does not exist on this machine"):
        open_dataset(spec)
    text.write_text("too little")
    with pytest.raises(ConfigError, match=r"too short: its training part has no whole window of 65 bytes"):
        open_dataset(spec)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="the folder has no files"):
        text_data(empty)
    with pytest.raises(ConfigError, match="no data set named 'wikitext'"):
        read_windows("wikitext", 8, held_out=False)


@settings(deadline=None, max_examples=30)
@given(indices=st.lists(st.integers(0, 59), min_size=1, max_size=8), length=st.integers(2, 40))
def test_data_masks_have_a_fixed_number_of_positions(tmp_path_factory, indices, length):
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(bytes(range(256)) * 16)
    data = open_dataset(model_on_data("bert-small-tiny", data=str(path), sequence_length=length))
    counted = (data.labels(indices) != -100).sum(dim=1)
    assert counted.unique().tolist() == [max(1, round(0.15 * length))]


@pytest.mark.parametrize("model", ["gpt2-tiny", "bert-small-tiny", "resnet-tiny"])
def test_data_digest_tells_data_apart(model):
    spec = resolve_model(model)
    training, again, held_out = (open_dataset(spec, held_out=part).digest for part in (False, False, True))
    assert training == again != held_out
    assert len(training) == 64
