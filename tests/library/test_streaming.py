"""Streams as data: read in their order, begun again at their end, gone on with where a run goes on."""

import importlib.util
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import IterableDataset

import spantrain
from spantrain.app.training.resume import Resume
from spantrain.core.checkpoint import CheckpointContent, SampleLedger
from spantrain.errors import ConfigError
from spantrain.library.streaming import Shuffled, Streamed, is_stream
from spantrain.models.build import whole_model
from spantrain.models.data.choice import model_on_data, with_loss


class Numbers(IterableDataset):
    """So many rows an epoch, which say which epoch it is."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch, self.read = count, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.count):
            self.read += 1
            yield 100 * self.epoch + number


class Skipping(Numbers):
    """The same, and can go to a row without reading those before."""

    def skip(self, count: int):
        return islice(range(100 * self.epoch, 100 * self.epoch + self.count), count, None)


@pytest.mark.parametrize("kind", [Numbers, Skipping])
@pytest.mark.parametrize("left", [0, 3, 5, 7, 13])
def test_what_was_dealt_is_skipped_across_epochs(kind, left):
    whole = list(islice(Streamed(Numbers(5), None, {})._from(0), 30))
    assert whole[4:7] == [4, 100, 101]
    assert list(islice(Streamed(kind(5), None, {})._from(left), 12)) == whole[left : left + 12]


def test_one_that_can_skip_reads_none_of_them():
    source = Skipping(50)
    assert next(Streamed(source, None, {})._from(40)) == 40
    assert source.read == 0


class Stateful(Numbers):
    """The same, which says where it is, as the datasets library's streams do."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.state, self.begins_at = None, 0

    def state_dict(self):
        return {"epoch": self.epoch, "examples": {"next": self.state, "shards": [None]}}

    def load_state_dict(self, state):
        self.set_epoch(state["epoch"])
        self.begins_at = state["examples"]["next"]

    def __iter__(self):
        first, self.begins_at = self.begins_at, 0
        for number in range(first, self.count):
            self.read, self.state = self.read + 1, number + 1
            yield 100 * self.epoch + number


def resumed_at(folder, samples: int) -> Resume:
    content = CheckpointContent(step=samples)
    return Resume(folder=folder, content=content, losses=(), ledger=SampleLedger().extended(0, 1))


@pytest.mark.parametrize("dealt", [3, 5, 7, 13])
def test_a_position_that_a_stream_knows_is_taken_up_without_reading(dealt, tmp_path):
    """At the end of an epoch, too; and by a stream that has forgotten it, by reading."""
    whole = list(islice(Streamed(Numbers(5), None, {})._from(0), 30))
    first = Streamed(Stateful(5), None, {})
    first.begin(1, 0, None)
    for _ in range(dealt):
        next(first._samples)
    first._dealt = dealt
    first.saved(tmp_path)
    for folder, read in ((tmp_path, 6), (tmp_path / "none", dealt + 6)):
        again = Streamed(Stateful(5), None, {})
        again.begin(1, 0, resumed_at(folder, dealt))
        again._source.read = 0
        assert list(islice(again._samples, 6)) == whole[dealt : dealt + 6]
        assert again._source.read == read
    wrong = Streamed(Stateful(5), None, {})
    wrong.begin(1, 0, resumed_at(tmp_path, dealt + 1))
    assert list(islice(wrong._samples, 2)) == whole[dealt + 1 : dealt + 3]


def test_a_position_that_is_not_the_streams_is_named(tmp_path):
    (tmp_path / "stream.json").write_text('{"samples": 2, "epoch": 0, "state": {"other": 1}}')
    stream = Streamed(Stateful(5), None, {})
    stream.begin(1, 0, resumed_at(tmp_path, 2))
    with pytest.raises(ConfigError, match=r"load_state_dict raised KeyError: .*or remove stream.json"):
        next(stream._samples)


def test_a_state_that_is_no_json_is_not_kept(tmp_path):
    class Odd(Stateful):
        def state_dict(self):
            return {0: self.state}

    stream = Streamed(Odd(5), None, {})
    stream.begin(1, 0, None)
    next(stream._samples)
    stream.saved(tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_a_stream():
    assert is_stream(Numbers(3))
    assert is_stream(iter([1]))
    assert not any(map(is_stream, ([1], "text", None, print, torch.utils.data.TensorDataset(torch.zeros(2)))))
    assert Shuffled(range(7)).size == 7


def plain_losses(mine: ModuleType, user_file: Path, batches: Sequence[int]) -> list[float]:
    """Return the losses of plain torch on the stream, by batches of these sizes."""
    torch.manual_seed(0)
    model = whole_model(with_loss(model_on_data(f"{user_file}:build"), f"{user_file}:loss"), seed=3).module
    stream, losses = [mine.Samples(20)[index % 20] for index in range(sum(batches))], []
    for batch in batches:
        rows, stream = stream[:batch], stream[batch:]
        inputs, labels = (torch.stack(column) for column in zip(*rows, strict=True))
        loss = mine.loss(model(inputs), labels).mean()
        losses.append(float(loss.detach()))
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.data -= 0.05 * gradient
    return losses


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_training_on_a_stream_resumed_under_another_batch_is_plain_torch(user_file, monkeypatch, tmp_path):
    found = importlib.util.spec_from_file_location("mine", user_file)
    mine = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "mine", mine)
    found.loader.exec_module(mine)

    class Rows(Stateful):
        """Of which a run that goes on reads no sample again."""

        def __init__(self) -> None:
            super().__init__(20)

        def __iter__(self):
            return (mine.Samples(20)[number % 100] for number in super().__iter__())

    def trainer(batch: int, steps: int, **given) -> spantrain.Trainer:
        arguments = spantrain.TrainingArguments(
            output_dir=tmp_path / "run", max_steps=steps, train_batch_size=batch, lr_scheduler_type="constant",
            learning_rate=0.05, max_grad_norm=0.0, logging_steps=0, seed=3, **given,
        )  # fmt: skip
        plan = {"plan": tmp_path / "plan" / "plan.json"} if given else {}
        return spantrain.Trainer(mine.build, mine.loss, source, "sgd", args=arguments, measure=False, **plan)

    source = Rows()
    first = trainer(12, 3).train()
    other = spantrain.TrainingArguments(output_dir=tmp_path / "plan", max_steps=1, train_batch_size=8, logging_steps=0)
    spantrain.Trainer(mine.build, mine.loss, Rows(), "sgd", args=other, measure=False).train()
    source = Rows()
    outcome = trainer(8, 6, resume_from_checkpoint=True).train()
    assert source.read == 24
    assert outcome.losses == pytest.approx(plain_losses(mine, user_file, (12, 12, 12, 8, 8, 8)), rel=1e-4)
    assert outcome.losses[:3] == first.losses
    with pytest.raises(ConfigError, match="give max_steps"):
        trainer(8, -1).train()
    once = spantrain.Trainer(
        mine.build, mine.loss, iter([mine.Samples(20)[0]] * 9), "sgd", measure=False,
        args=spantrain.TrainingArguments(output_dir=tmp_path / "once", max_steps=5, train_batch_size=4),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="no samples for step 3: it has ended"):
        once.train()
