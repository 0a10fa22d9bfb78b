"""Evaluates and predicts with the whole model in this process, on the weights of a checkpoint."""

import difflib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np
import psutil
import torch
from torch import Tensor

from spantrain.core.quantities import format_bytes
from spantrain.core.records import Record
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.build import unit_source, whole_parameters
from spantrain.models.data.dataset import Dataset
from spantrain.models.data.user import UserSamples, batch_of, samples_of, wanted_names
from spantrain.models.sources import hf_length
from spantrain.models.tracing.batch import LABEL_NAMES, LabelLoss, ModelBatch, WholeMeans, picked
from spantrain.models.tracing.check import called_on
from spantrain.models.tracing.factory import sample_at, what_was_raised
from spantrain.models.tracing.model import cut_model
from spantrain.models.tracing.source import Loaded, load_model
from spantrain.models.tracing.transformers_classes import library_inputs
from spantrain.models.units import EACH, IGNORED_LABEL, counted_labels

__all__ = ["EvalPrediction", "PredictionOutput"]

_BATCH = 8
"""Samples at once."""


class EvalPrediction(NamedTuple):
    """What `compute_metrics` is given: outputs and labels of all samples, in order, as NumPy arrays."""

    predictions: Any
    """`(samples, ...)`, or a tuple of such where the model returns several tensors; rows that are shorter than others
    are padded with -100."""
    label_ids: Any
    """The same; None where samples have no labels."""


class PredictionOutput(NamedTuple):
    """What `Trainer.predict` returns."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, float]


class TrainerParts(TypedDict, total=False):
    """What a trainer may be given besides, by the names that people know from the transformers library."""

    eval_dataset: object
    """A data set in this process, which `evaluate` takes if it is given none, and training every `eval_steps`."""
    data_collator: Callable[[list[Any]], Mapping[str, Any]]
    """Makes a batch of samples; goes with a data set in this process."""
    processing_class: Any
    """A tokenizer or the like with `save_pretrained`: saved beside the model; pads samples that are dictionaries, of a
    data set in this process, where there is no `data_collator`."""
    peft_config: object
    """A `peft.LoraConfig`, or `r=8,alpha=16,targets=q_proj+v_proj`: in an `hf:` model, train such adapters alone."""
    compute_metrics: Callable[[EvalPrediction], Mapping[str, float]]
    preprocess_logits_for_metrics: Callable[[Any, Tensor | None], Any]
    """Makes less of a batch's outputs before they are gathered."""


_ELSEWHERE = {"train_dataset": "data", "optimizers": "optimizer"}
"""What the transformers library's trainer takes, and what it is here."""


def checked_parts(parts: TrainerParts) -> TrainerParts:
    """Return what a trainer was given besides; what is None is left out.

    Raises:
        ConfigError: there is no such thing, or it is of another kind.
    """
    known = tuple(TrainerParts.__annotations__)
    problems = []
    for name, value in parts.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            problems.append(f"there is no {name}; it is {_ELSEWHERE.get(name) or (near or [', '.join(known)])[0]}")
        elif name == "processing_class" and value is not None and not hasattr(value, "save_pretrained"):
            problems.append(f"{name}: a {type(value).__name__} has no save_pretrained; a name of files is `tokenizer`")
        elif not (value is None or callable(value) or name in ("eval_dataset", "peft_config", "processing_class")):
            problems.append(f"{name}: a {type(value).__name__} is no function")
    if problems:
        raise ConfigError("Trainer: " + "; ".join(problems))
    return cast(TrainerParts, {name: value for name, value in parts.items() if value is not None})


class CollatedSamples:
    """A data set whose samples are made batches by a function of the user's, or padded by their tokenizer."""

    digest = ""
    """Nobody else reads it."""

    def __init__(self, samples: Any, spec: ModelSpec, parts: TrainerParts, *, trains: bool) -> None:
        """Collate these samples; to train, to the shapes that the model was planned and followed with."""
        if not hasattr(samples, "__len__") or len(samples) == 0:
            raise ConfigError(f"data: a {type(samples).__name__} without `__len__`, or without samples")
        self._samples, self._spec = samples, spec
        self._names = wanted_names(spec)
        self._trains, example = trains, unit_source(spec).batch() if trains else None
        self._source = "data_collator" if "data_collator" in parts else "processing_class"
        processor = parts.get("processing_class")
        lengths = dict(zip(example.names, example.inputs, strict=False)) if example else {}
        main = None if processor is None else lengths.get(processor.model_input_names[0])
        self._collator = parts.get("data_collator") or _padding(processor, None if main is None else main.shape[1])
        self._last: tuple[tuple[int, ...], ModelBatch] | None = None

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def has_labels(self) -> bool:
        """Whether batches have labels."""
        return self._batch([0]).labels is not None

    def inputs(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Return the inputs of a batch."""
        return self._batch(indices).inputs

    def labels(self, indices: Sequence[int]) -> Tensor:
        """Return the labels of a batch."""
        labels = self._batch(indices).labels
        if labels is None:
            raise ConfigError(f"{self._source}: its batches have no labels; add them, under the key `labels`")
        return labels

    def _batch(self, indices: Sequence[int]) -> ModelBatch:
        key = tuple(indices)
        if self._last is None or self._last[0] != key:
            samples = [self._known(sample_at(self._samples, index, "data")) for index in key]
            made = _collated(self._collator, samples, self._source)
            batch = batch_of(made, self._spec, source=self._source, trains=self._trains)
            if batch.samples != len(key):
                raise ConfigError(f"{self._source}: made {batch.samples} samples of {len(key)}; make one of each")
            self._last = key, batch
        return self._last[1]

    def _known(self, sample: Any) -> Any:
        """Leave out what of a sample the model does not take, such as its text."""
        if self._names is None or not isinstance(sample, Mapping):
            return sample
        return {name: value for name, value in sample.items() if name in (*self._names, *LABEL_NAMES)}


def rows_of(
    samples: Any, spec: ModelSpec, parts: TrainerParts, *, trains: bool = False
) -> "UserSamples | CollatedSamples":
    """Return a data set in this process as steps read it.

    Raises:
        ConfigError: it has no length, or no samples.
    """
    if "data_collator" in parts or _is_padded(samples, parts.get("processing_class")):
        return CollatedSamples(samples, spec, parts, trains=trains)
    return samples_of(samples, spec, trains=trains)


def _is_padded(samples: Any, processor: Any) -> bool:
    """Whether samples are padded by what processes them, as the transformers library's trainer does."""
    if processor is None or not hasattr(samples, "__len__"):
        return False
    from transformers import PreTrainedTokenizerBase, SequenceFeatureExtractor

    if not isinstance(processor, PreTrainedTokenizerBase | SequenceFeatureExtractor):
        return False
    first = sample_at(samples, 0, "data") if len(samples) else None
    return isinstance(first, Mapping) and processor.model_input_names[0] in first


def example_row(name: str, samples: Any, parts: TrainerParts, sequence_length: int | None) -> object:
    """Return the first sample of a data set or a stream as `hf:FOLDER` is to read all: collated, or padded.

    Raises:
        ConfigError: it cannot be read, collated or padded.
    """
    at_once = not hasattr(samples, "__getitem__")
    found = next(iter(samples), None) if at_once else sample_at(samples, 0, "data") if len(samples) else None
    processor, collator = parts.get("processing_class"), parts.get("data_collator")
    pads = collator is None and _is_padded([found], processor)
    if not isinstance(found, Mapping) or not (collator or pads):
        return found
    names = library_inputs(name)
    found = {key: value for key, value in found.items() if key in (*names, *LABEL_NAMES)}
    if pads:
        collator = _padding(processor, hf_length(name, sequence_length) if "input_ids" in found else None)
    batch = _collated(collator, [found, found], "processing_class" if pads else "data_collator")
    return {key: tensor[0] for key, tensor in batch.items()} if isinstance(batch, Mapping) else None


def _padding(processor: Any, length: int | None) -> Any:
    """Return what pads samples: to a length, or to each other."""
    from transformers import DataCollatorWithPadding

    how = {} if length is None else {"padding": "max_length", "max_length": length}
    return DataCollatorWithPadding(processor, **how)


def _collated(collator: Any, samples: list[Any], source: str) -> Any:
    try:
        return collator(samples)
    except Exception as error:
        fields = [one for one in samples if isinstance(one, Mapping)]
        names = fields[0] if fields else ()
        unlike = [name for name in names if len({np.size(one.get(name, ())) for one in fields}) > 1]
        which = f" ({', '.join(unlike)} are of unlike lengths)" if unlike else ""
        length = getattr(collator, "max_length", None)
        to = f" to {length}, the length of the example batch" if length else ""
        raise ConfigError(
            f"{source}: raised {what_was_raised(error)}{which}; pad (labels by {IGNORED_LABEL}) or truncate in the "
            f"data set{to}, or give a data_collator that can, such as transformers' DataCollatorForSeq2Seq(tokenizer)"
        ) from error


class WholeModel(Record):
    """A whole model on this process's processor or GPU."""

    loaded: Loaded
    device: torch.device

    @classmethod
    def of(cls, spec: ModelSpec, state: Mapping[str, Tensor]) -> "WholeModel":
        """Build the model with these parameters and buffers."""
        if spec.family in ("factory", "hf"):
            loaded = replace(load_model(spec, seed=0), batch=cut_model(spec).whole.batch)
        else:
            module, batch = unit_source(spec).unsplit(seed=0)
            loaded = Loaded(module=module, batch=batch, loss=LabelLoss())
        loaded.module.load_state_dict(state)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return cls(loaded=replace(loaded, module=loaded.module.to(device).eval()), device=device)

    def run(self, data: Dataset, parts: TrainerParts, *, prefix: str, gather: bool) -> PredictionOutput:
        """Run all samples in order; return outputs and labels if they are to be gathered, and metrics.

        Args:
            data: the samples.
            parts: what is done with outputs.
            prefix: what names of metrics begin with, before an underscore.
            gather: whether outputs are wanted; `compute_metrics` wants them, too.
        """
        begun_s, loss_sum, count = time.monotonic(), 0.0, len(data)
        labelled = getattr(data, "has_labels", True)
        compute = parts.get("compute_metrics") if labelled else None
        gathered: list[tuple[Any, Tensor | None]] = []
        batches = [range(lo, min(lo + _BATCH, count)) for lo in range(0, count, _BATCH)]
        counted = None
        if labelled and (number := self.loaded.batch.counted) is not None:  # as if all samples were one step
            counted = _counted_of(data, batches, number).to(self.device)
        for indices in batches:
            loss, outputs, labels = self._batch(data, indices, counted, labelled=labelled)
            loss_sum += loss
            if gather or compute is not None:
                less = parts.get("preprocess_logits_for_metrics")
                kept = outputs if less is None else less(outputs, labels)
                here = tuple(entry.cpu() for entry in kept) if isinstance(kept, tuple) else kept.cpu()
                told = None if labels is None or getattr(data, "unlabelled", False) else labels.cpu()
                gathered.append((here, told))
        found = EvalPrediction(*_joined(gathered)) if gathered else EvalPrediction(None, None)
        seconds = max(time.monotonic() - begun_s, 1e-9)
        metrics = {"loss": loss_sum / count} if labelled else {}
        own: object = compute(found) if compute else {}
        if not isinstance(own, Mapping) or not all(
            hasattr(one, "__float__") and np.asarray(one).size == 1 for one in own.values()
        ):
            raise ConfigError(
                f"compute_metrics: returned {own!r}; wanted a dict of numbers: one name for each of several"
            )
        metrics |= {name.removeprefix(f"{prefix}_"): float(np.asarray(value).item()) for name, value in own.items()}
        metrics |= {"runtime": seconds, "samples_per_second": count / seconds}
        named = {f"{prefix}_{name}": value for name, value in metrics.items()}
        return PredictionOutput(found.predictions, found.label_ids, named)

    def _batch(
        self, data: Dataset, indices: range, counted: Tensor | None, *, labelled: bool
    ) -> tuple[float, Any, Tensor | None]:
        inputs = tuple(tensor.to(self.device) for tensor in data.inputs(indices))
        labels = data.labels(indices).to(self.device) if labelled else None
        batch = replace(self.loaded.batch, inputs=inputs, labels=labels)
        means = None if labels is None or counted is None else WholeMeans(labels, counted)
        with torch.no_grad(), nullcontext() if means is None else means:
            result = called_on(self.loaded, batch)
            if labels is None:
                return 0.0, _outputs(result), None
            loss = self.loaded.loss
            loss_sum = loss(picked(loss, result, "evaluate"), labels, len(indices), means)
        return float(loss_sum), _outputs(result), labels


def _counted_of(data: Dataset, batches: Sequence[range], number: int) -> Tensor:
    """Return `counted_labels` of all samples, for one."""
    count = batches[-1].stop
    counted = [counted_labels(data.labels(indices), 1, number) for indices in batches]
    shares = [len(indices) / count for indices in batches]
    if number != EACH:
        return torch.stack([one * share for one, share in zip(counted, shares, strict=True)]).sum(dim=0)
    each = [one * one.new_tensor((1, share, share)) for one, share in zip(counted, shares, strict=True)]
    return torch.cat(each, dim=1)


def check_fits(spec: ModelSpec) -> None:
    """Refuse a model that this process has no room for.

    Raises:
        ConfigError: it is too large.
    """
    numbers = sum(int(np.prod(parameter.shape)) for parameter in whole_parameters(spec).values())
    wanted, there = 2 * 4 * numbers, psutil.virtual_memory().available
    if wanted > there:
        raise ConfigError(
            f"model {spec.name}: to evaluate or predict, it is put together in this process and needs "
            f"{format_bytes(wanted)}; {format_bytes(there)} are free. Call save_model, and do it on another machine; "
            "eval_steps on data that is given by name or by a function evaluates on the devices that train"
        )


def _outputs(result: Any) -> Any:
    """Return a model's outputs without its loss: a tensor, or a tuple of several."""
    if isinstance(result, Tensor):
        return result
    pairs = result.items() if isinstance(result, Mapping) else enumerate(result)
    found = tuple(value for name, value in pairs if isinstance(value, Tensor) and name != "loss" and value.dim() > 0)
    return found[0] if len(found) == 1 else found


def _joined(batches: Sequence[tuple[Any, Tensor | None]]) -> Iterator[Any]:
    """Yield the outputs of all batches, and their labels."""
    outputs = [entry for entry, _ in batches]
    labels = [entry for _, entry in batches if entry is not None]
    if isinstance(outputs[0], tuple):
        yield tuple(_stacked(column) for column in zip(*outputs, strict=True))
    else:
        yield _stacked(outputs)
    yield _stacked(labels) if labels else None


def _stacked(tensors: Sequence[Tensor]) -> Any:
    widest = max(tensor.shape[1] if tensor.dim() > 1 else 0 for tensor in tensors)
    padded = []
    for tensor in tensors:
        if tensor.dim() > 1 and tensor.shape[1] < widest:
            shape = (tensor.shape[0], widest - tensor.shape[1], *tensor.shape[2:])
            tensor = torch.cat((tensor, tensor.new_full(shape, IGNORED_LABEL)), dim=1)
        padded.append(tensor)
    return torch.cat(padded).float().numpy() if padded[0].is_floating_point() else torch.cat(padded).numpy()
