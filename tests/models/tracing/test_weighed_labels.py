"""Losses that count labels unlike: the same for any cut, as plain PyTorch gives for the whole step at once."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from spantrain.errors import ConfigError
from spantrain.library.evaluation import WholeModel
from spantrain.models.build import build_units
from spantrain.models.catalog.catalog import resolve_model
from spantrain.models.graph import build_graph
from spantrain.models.tracing.model import cut_model
from spantrain.models.tracing.source import Loaded, load_model
from spantrain.models.units import COUNTED, EACH, LABELS, counted_labels, loss_of
from testing.models import weighed_models
from testing.models.zoo.trial import largest_error, planned

FILE = Path(weighed_models.__file__)
EXACT = (
    "weights",
    "weights_and_smoothing",
    "weights_of_likelihoods",
    "some_left_out",
    "some_left_out_by_minus_one",
    "words",
    "words_without_padding",
    "words_behind",
    "pixels",
)


def whole_of(name: str) -> Loaded:
    spec = resolve_model(f"{FILE}:{name}")
    cut = cut_model(spec).whole
    return replace(load_model(spec, seed=0), trains=cut.trains, batch=cut.batch)


@pytest.mark.parametrize("name", EXACT)
def test_losses_and_gradients_are_those_of_the_whole_step(name: str) -> None:
    spec = resolve_model(f"{FILE}:{name}")
    graph = build_graph(spec)
    assert not graph.fewest_samples(range(len(graph.units)))
    assert largest_error(spec, graph, planned(spec, graph, 3), whole_of(name)) < 1e-5


@pytest.mark.parametrize(("name", "others"), [("weights_of_one_class", range(5)), ("words_without_padding", range(3))])
def test_what_the_example_batch_does_not_show_is_counted_too(name: str, others: range) -> None:
    """As in `Trainer(data=...)`: all samples of the example are alike, and those of a step are not."""
    loaded, units = whole_of(name), build_units(resolve_model(f"{FILE}:{name}"), seed=0)
    assert loaded.batch.labels is not None
    labels = torch.arange(loaded.batch.labels.numel()).reshape(loaded.batch.labels.shape) % 5
    labels[0] = others[-1]
    batch = replace(loaded.batch, labels=labels)
    spans = (slice(0, 1), slice(1, 4), slice(4, 8))
    with torch.no_grad():
        outputs = loaded.module(*batch.inputs, *([labels] if batch.has_labels and name.startswith("words") else []))
        wanted = (
            outputs[1]
            if isinstance(outputs, tuple)
            else functional.cross_entropy(outputs, labels, weighed_models.WEIGHTS)
        )
        found = sum(float(loss_of(units, {n: row[span] for n, row in batch.rows.items()})) for span in spans)
    assert found / batch.samples == pytest.approx(float(wanted), rel=1e-6)


def test_weights_that_come_up_later_are_refused() -> None:
    units = build_units(resolve_model(f"{FILE}:weighs_many"), seed=0)
    assert COUNTED in units[-1].reads
    few, many = (torch.full((samples, 6), 3) for samples in (2, 6))
    counted = counted_labels(many, len(many))
    assert float(loss_of(units, {0: few, LABELS: few, COUNTED: counted}).detach()) > 0
    with pytest.raises(ConfigError, match=r"counts labels unlike .* did not of the example batch"):
        loss_of(units, {0: many, LABELS: many, COUNTED: counted})


def test_each_number_of_a_step_is_told_with_every_span() -> None:
    labels = torch.tensor([[3, -1], [3, 255], [-1, 3]])
    wanted = [[-1.0, 2 / 3, 1 / 3], [3.0, 1.0, 1 / 3], [255.0, 1 / 3, 1 / 3]]
    assert torch.allclose(counted_labels(labels, 2, EACH), torch.tensor([wanted, wanted]))
    classes = counted_labels(labels[:, 0], 1, EACH)
    assert torch.allclose(classes, torch.tensor([[[-1.0, 1 / 3, 0.0], [3.0, 2 / 3, 0.0]]]))


@pytest.mark.parametrize("name", ["weights", "pixels", "words"])
def test_evaluation_by_batches_weighs_as_one_batch_does(name: str) -> None:
    loaded, rolled = whole_of(name), torch.arange(24) * 5 % 8
    inputs, labels = (tensor[rolled] for tensor in (loaded.batch.inputs[0], loaded.batch.labels))
    labels[16:] = labels[16].clone()

    class Rows:
        def __len__(self) -> int:
            return len(labels)

        def inputs(self, indices: range) -> tuple[torch.Tensor, ...]:
            return (inputs[list(indices)],)

        def labels(self, indices: range) -> torch.Tensor:
            return labels[list(indices)]

    with torch.no_grad():
        made = loaded.module(inputs, *([labels] if name == "words" else []))
        wanted = made[1] if name == "words" else loaded.loss(made, labels, 24) / 24
    found = WholeModel(loaded=loaded, device=torch.device("cpu")).run(Rows(), {}, prefix="eval", gather=False)
    assert found.metrics["eval_loss"] == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("keeps_a_mean", r"not do the same every time.* it writes into 0\.mean, 1\.mean, and goes by that"),
        ("takes_slopes", r"takes gradients by torch\.func\.grad"),
        (
            "weighs_a_part_of_the_model",
            r"the loss function uses 0\.0\.weight of the model, which other devices may have",
        ),
        (
            "loss_with_a_parameter",
            r"the loss function uses parameters of its own, which nobody trains; return the loss f",
        ),
    ],
)
def test_what_cannot_be_is_told_by_its_cause(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_graph(resolve_model(f"{FILE}:{name}"))


def test_labels_by_another_name_are_told_to_count_in_each_micro_batch() -> None:
    """Also where the example batch leaves none out."""
    found = build_graph(resolve_model(f"{FILE}:labels_by_another_name")).units[-1].whole_micro_batch
    assert found is not None
    assert "the batch names none `labels`" in found.why


@pytest.mark.parametrize("name", ["mean_of_words_by_hand", "mean_of_chosen_words", "mean_of_words_replaced"])
def test_means_that_leave_words_out_by_hand_are_told_and_are_of_a_micro_batch(name: str) -> None:
    """Though no sample of the example batch shows it; and after batches that left none out."""
    spec = resolve_model(f"{FILE}:{name}")
    found = build_graph(spec).units[-1].whole_micro_batch
    assert found is not None
    assert "mean over labels that are not 0" in found.why
    units, loaded = build_units(spec, seed=0), whole_of(name)
    with torch.no_grad():
        for labels in (loaded.batch.labels, torch.arange(48).reshape(8, 6) % 5):
            batch = replace(loaded.batch, labels=labels)
            for span in (slice(0, 3), slice(3, 8)):
                rows = {number: row[span] for number, row in batch.rows.items()}
                wanted = loaded.loss(loaded.module(rows[0]), rows[LABELS], len(rows[0]))
                assert float(loss_of(units, rows)) == pytest.approx(float(wanted), rel=1e-6)
