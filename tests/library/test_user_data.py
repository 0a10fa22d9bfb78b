"""Data from users' functions: samples, held-out parts, the order of a model's inputs; workers call only their own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spantrain.errors import ConfigError
from spantrain.library.streaming import Shuffled, rows_here
from spantrain.models.build import build_units, whole_model
from spantrain.models.data.choice import model_on_data, user_functions, with_loss, with_own_functions
from spantrain.models.data.dataset import open_dataset
from spantrain.models.data.user import batch_of, samples_of


def spec_of(user_file, build="build", data=None):
    spec = model_on_data(f"{user_file}:{build}", data=None if data is None else f"{user_file}:{data}")
    return spec if build == "build_named" else with_loss(spec, f"{user_file}:loss")


def test_a_functions_samples_are_trained_on_and_its_held_out_ones_kept_apart(user_file):
    spec = spec_of(user_file, data="samples")
    data, held_out = open_dataset(spec), open_dataset(spec, held_out=True)
    assert (len(data), len(held_out)) == (48, 8)
    (rows,), labels = data.inputs([3, 4]), data.labels([3, 4])
    assert rows.shape == (2, 8)
    assert torch.equal(rows[:, :4].argmax(dim=1), labels)
    assert data.digest == open_dataset(spec).digest != held_out.digest


def test_fields_go_to_the_inputs_of_their_name(user_file):
    """In whatever order a sample has them, and what the model does not take is left out."""
    spec = spec_of(user_file, "build_named", "few_samples")
    data, held_out = open_dataset(spec), open_dataset(spec, held_out=True)
    assert (len(data), len(held_out)) == (30, 2)
    values, shift = data.inputs([0, 1, 2])
    assert torch.equal(values[:, :4], shift)
    batch = {"labels": torch.zeros(3), "shift": shift, "values": values}
    assert torch.equal(batch_of(batch, spec, source="step 0").inputs[0], values)
    with pytest.raises(ConfigError, match="step 0: has labels, shift, but the model takes values"):
        batch_of({"labels": torch.zeros(3), "shift": shift}, spec, source="step 0")


def test_a_factorys_example_batch_is_its_data_without_other(user_file):
    spec = spec_of(user_file)
    data = open_dataset(spec)
    assert (spec.dataset, len(data), len(data.digest)) == ("example", 2, 64)
    assert torch.equal(data.inputs([1, 0, 1])[0], torch.zeros(3, 8))
    with pytest.raises(ConfigError, match="only models from a function"):
        open_dataset(replace(model_on_data("gpt2-tiny"), dataset="example"))


def test_data_in_this_process_need_a_length_and_one_shape(user_file):
    spec = spec_of(user_file)
    ragged = samples_of([(torch.zeros(8), 0), (torch.zeros(7), 1)], spec)
    assert ragged.labels([0, 1]).tolist() == [0, 1]
    with pytest.raises(ConfigError, match=r"shapes \(7,\) and \(8,\); bring all to one"):
        ragged.inputs([0, 1])
    with pytest.raises(ConfigError, match="without samples"):
        samples_of([], spec)


def test_lengths_unlike_the_example_batchs_are_refused_where_parts_are_trained(user_file, tmp_path):
    """A part may have the length as a number; the whole model reads any."""
    spec, longer = spec_of(user_file), [(torch.zeros(9), 0)] * 4
    assert samples_of(longer, spec).inputs([0])[0].shape == (1, 9)
    says = r"input 0 has \[9\] numbers a sample, but the example batch .* \[8\]: pad or truncate"
    with pytest.raises(ConfigError, match=f"data: {says}"):
        samples_of(longer, spec, trains=True).inputs([0])
    with pytest.raises(ConfigError, match=f"step 3: {says}"):
        batch_of((torch.zeros(2, 9), torch.zeros(2)), spec, source="step 3", trains=True)
    (tmp_path / "text").write_text("words " * 100)
    with pytest.raises(ConfigError, match=says.replace("9", "12")):
        open_dataset(replace(spec, dataset=f"text:{tmp_path / 'text'}", sequence_length=12))


def test_a_loader_of_batches_is_no_data_set(user_file):
    loader = torch.utils.data.DataLoader([(torch.zeros(8), 0)] * 4, batch_size=2)
    with pytest.raises(ConfigError, match=r"a DataLoader gives batches, .* the data set in it \(loader.dataset\)"):
        rows_here(loader)
    assert rows_here(loader.dataset) is loader.dataset


class Turned:
    """A row and what is to be made of it, both with the sign that each reading draws anew."""

    reads = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.reads += 1
        row = torch.full((8,), float(index + 1)) * (-1) ** self.reads
        return row, row.clone()


def test_inputs_and_labels_are_of_one_reading_of_a_sample(user_file):
    samples = Turned()
    data = samples_of(samples, spec_of(user_file))
    dealer = Shuffled(data)
    dealer.begin(5, seed=0, resume=None)
    read = samples.reads
    for step in range(3):
        (rows,), labels = dealer.batch(step)
        assert torch.equal(rows, labels)
    assert samples.reads == read + 15


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("broken", r"the function raised RuntimeError: no data today \(.*mine\.py:\d+ in broken\)"),
        ("nothing", "raised TypeError"),
        ("leaving", r"the function raised SystemExit: 4 \(.*mine\.py:\d+ in leaving\)"),
        ("missing", "there is no function missing; functions there: .*samples"),
    ],
)
def test_functions_that_fail_are_named_with_the_place(user_file, data, says):
    with pytest.raises(ConfigError, match=says):
        open_dataset(spec_of(user_file, data=data))


def test_a_sample_that_fails_is_named_with_its_number(user_file):
    data = open_dataset(spec_of(user_file, data="torn"))
    with pytest.raises(ConfigError, match=r"sample 1 raised KeyError: 1 \(.*mine\.py:\d+ in __getitem__\)"):
        data.inputs([0, 1])


def test_a_loss_function_is_part_of_the_model(user_file, tmp_path):
    spec = spec_of(user_file)
    assert user_functions(spec)[-1] == f"{user_file}:loss"
    assert isinstance(whole_model(spec, seed=0).module, torch.nn.Sequential)
    user_file.write_text(user_file.read_text() + "\n# changed\n")
    with pytest.raises(ConfigError, match="is not the file"):
        whole_model(spec, seed=0)
    with pytest.raises(ConfigError, match="has its own loss"):
        with_loss(model_on_data("gpt2-tiny"), f"{user_file}:loss")


def test_a_worker_calls_only_functions_that_it_was_started_with(user_file):
    """An order names files of another machine; the worker's own of that name is called, or none."""
    spec = spec_of(user_file, data="samples")
    own = [function.replace(str(user_file.parent), "/mine") for function in user_functions(spec)]
    found = with_own_functions(spec, own)
    assert found.dataset == "/mine/mine.py:samples"
    assert found.config["loss"] == "/mine/mine.py:loss"
    for missing in own:
        with pytest.raises(ConfigError, match="which this program was not started with"):
            with_own_functions(spec, [function for function in own if function != missing])
    assert with_own_functions(model_on_data("gpt2-tiny"), []) == model_on_data("gpt2-tiny")


def test_numbers_out_of_range_are_named():
    """Before they are sent, where the model says how many it knows."""
    spec = model_on_data("gpt2-tiny")
    tokens = torch.zeros(2, spec.sequence_length, dtype=torch.int64)
    ignored = tokens.clone().fill_(-100)
    assert batch_of((tokens, ignored), spec, source="step 3").samples == 2
    with pytest.raises(ConfigError, match=r"step 3: the labels have numbers from 256 to 256, but .* knows 0 to 255"):
        batch_of((tokens, tokens + 256), spec, source="step 3")
    with pytest.raises(ConfigError, match=r"step 3: the inputs have numbers from -1 to -1"):
        batch_of((tokens - 1, tokens), spec, source="step 3")


def _tokens():
    return torch.arange(65) % 200


@pytest.mark.parametrize(
    ("model", "sample", "says"),
    [
        (
            "gpt2-tiny",
            (torch.rand(3, 32, 32), 1),
            r"input_ids are torch\.float32 of shape \[3, 32, 32\], but gpt2-tiny",
        ),
        (
            "gpt2-tiny",
            (_tokens()[:32], _tokens()[1:33]),
            r"shape \[32\], .* takes .* \[64\].* or give --sequence-length",
        ),
        ("gpt2-tiny", (_tokens()[:-1], _tokens()[1:33]), r"labels are torch\.int64 of shape \[32\]"),
        ("gpt2-tiny", (_tokens()[:-1] * 6, _tokens()[1:]), "the inputs have numbers from 0 to 378, but .* 0 to 255"),
        ("gpt2-tiny", {"input_ids": "words", "labels": _tokens()[1:]}, "input_ids is a str that is no tensor"),
        (
            "gpt2-tiny",
            {"ids": _tokens()[:-1], "labels": _tokens()[1:]},
            "has ids, labels, but the model takes input_ids",
        ),
        ("resnet-tiny", (torch.rand(1, 32, 32), 1), r"pixel_values are .* \[1, 32, 32\], but .* \[3, 32, 32\]"),
        ("resnet-tiny", (torch.rand(3, 32, 32).double(), 1), r"pixel_values are torch\.float64"),
        ("resnet-tiny", (torch.rand(3, 32, 32), 10), "the labels have numbers from 10 to 10, but .* knows 0 to 9"),
    ],
)
def test_samples_that_a_model_of_the_catalogue_cannot_take_are_refused(model, sample, says):
    """By name and number, before its units fail on them."""
    spec = model_on_data(model)
    with pytest.raises(ConfigError, match=f"data: .*{says}"):
        samples_of([sample], spec, trains=True)


def test_other_fields_of_a_sample_are_left_out_of_a_model_of_the_catalogue():
    sample = {"text": "words", "labels": _tokens()[1:], "attention_mask": _tokens()[1:], "input_ids": _tokens()[:-1]}
    (rows,) = samples_of([sample], model_on_data("gpt2-tiny"), trains=True).inputs([0])
    assert torch.equal(rows[0], sample["input_ids"])


def test_a_label_that_the_loss_has_no_row_for_is_named_with_the_function(user_file):
    last = build_units(spec_of(user_file), seed=0)[-1]
    with pytest.raises(ConfigError, match=r"Target 9 is out of bounds\. \(.*mine\.py:\d+ in loss\).*out of range"):
        last(torch.zeros(2, 8), torch.tensor([0, 9]))


@pytest.mark.parametrize(
    "inputs",
    [(torch.zeros(4, 8), torch.zeros(4, 8)), (torch.zeros(4, 8, dtype=torch.int64),), (torch.zeros(4),)],
    ids=["one too many", "of another type", "of fewer dimensions"],
)
def test_a_batch_unlike_the_example_is_refused(user_file, inputs):
    """Before it is sent: a tensor too many would be left out without a word, another type fail on a worker."""
    spec, labels = spec_of(user_file), torch.zeros(4, dtype=torch.int64)
    assert batch_of((torch.zeros(4, 8), labels), spec, source="step 0").samples == 4
    with pytest.raises(ConfigError, match=r"step 0: the inputs are .* example batch has torch\.float32 in 2"):
        batch_of((*inputs, labels), spec, source="step 0")


def test_a_file_that_trains_while_it_is_imported_is_refused(tmp_path):
    """Each worker that imports it would start workers, and so on."""
    file = tmp_path / "unguarded.py"
    file.write_text(
        "import torch, spantrain\n"
        "def build():\n"
        "    return torch.nn.Linear(8, 4), torch.zeros(2, 8)\n"
        f"spantrain.Trainer(build, measure=False, args=spantrain.TrainingArguments(output_dir={str(tmp_path / 'run')!r}"
        ", max_steps=1)).fit()\n"
    )
    with pytest.raises(ConfigError, match=r"unguarded\.py starts training while it is imported.*__main__"):
        whole_model(model_on_data(f"{file}:build"), seed=0)
    assert not (tmp_path / "run").exists()


def test_tokens_as_their_own_labels_are_refused_where_the_loss_does_not_shift_them():
    """As transformers' trainer wants them: its models shift them. Those from a configuration do not, here."""
    spec = model_on_data(f"hf:{Path(__file__).parents[2] / 'examples' / 'llama-tiny'}", sequence_length=8)
    tokens = torch.arange(8)
    follow = torch.cat((tokens[1:], torch.tensor([-100])))
    assert len(samples_of([{"input_ids": tokens, "labels": follow}], spec)) == 1
    for labels in (tokens, torch.cat((torch.tensor([-100, -100]), tokens[2:]))):
        with pytest.raises(ConfigError, match=r"labels are the tokens themselves; .* shift them by one"):
            samples_of([{"input_ids": tokens, "labels": labels}], spec)
    with pytest.raises(ConfigError, match="step 0: the labels are the tokens themselves"):
        batch_of({"input_ids": tokens[None], "labels": tokens[None]}, spec, source="step 0")
