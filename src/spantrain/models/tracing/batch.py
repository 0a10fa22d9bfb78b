"""Example batches, divided into inputs and labels; and losses, summed over samples so that any cut gives the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from spantrain.core.records import Record
from spantrain.errors import ConfigError
from spantrain.models.units import COUNTED, EACH, IGNORED_LABEL, LABELS, Rows, counted_labels

LABELS_NAME = "labels"
LABEL_NAMES = (LABELS_NAME, "label", "label_ids")
"""What samples may call their labels, as the transformers library has it."""


class ModelBatch(Record):
    """A batch, divided into what the model is given and what its output is compared with."""

    inputs: tuple[Tensor, ...]
    names: tuple[str | None, ...]
    """The keyword under which the model takes each input; None: by position."""
    labels: Tensor | None
    labels_name: str | None = None
    """The keyword of the labels."""
    has_labels: bool = False
    """Whether labels are a part of the batch; otherwise the model predicts its own input."""
    weighs: bool = False
    """Whether its loss counts labels unlike: by weights of classes, or leaves out others than those of -100."""

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.inputs[0].shape[0]

    @property
    def rows(self) -> Rows:
        """What units may read of it as of a whole step; labels that nobody gave are zeros."""
        labels = torch.zeros(self.samples, dtype=torch.int64) if self.labels is None else self.labels
        rows = {**dict(enumerate(self.inputs)), LABELS: labels}
        return (
            rows if self.counted is None else {**rows, self.counted: counted_labels(labels, self.samples, self.counted)}
        )

    @property
    def counted(self) -> int | None:
        """The number in `rows` of what labels of a step count together; None: each sample's count alike."""
        if self.labels is None or self.labels.is_floating_point():
            return None
        return EACH if self.weighs else COUNTED if self.labels.dim() > 1 else None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "ModelBatch":
        """Return it with every tensor changed."""
        labels = None if self.labels is None else change(self.labels)
        return replace(self, inputs=tuple(map(change, self.inputs)), labels=labels)

    def resized(self, samples: int) -> "ModelBatch":
        """Return a batch of so many samples: the first ones, over and over."""
        rows = torch.arange(samples) % self.samples
        return self.mapped(lambda tensor: tensor[rows.to(tensor.device)])


def call_named(model: Callable[..., Any], tensors: Mapping[int, Tensor], names: Mapping[int, str | None]) -> Any:
    """Return what a model makes of tensors, given the keyword of each by number; None: it goes in by position."""
    named = {name: tensors[number] for number, name in names.items() if name is not None}
    return model(*(tensors[number] for number, name in names.items() if name is None), **named)


def split_batch(batch: Any, *, source: str) -> ModelBatch:
    """Divide a batch into inputs and labels.

    A dictionary's entries are the model's keyword arguments, its `labels` are the labels. Of a tuple with two tensors
    or more the last one is the labels. A tensor alone is both (a model that predicts its own input).

    Raises:
        ConfigError: it is something else, has no tensors, or tensors with unequal numbers of samples.
    """
    if isinstance(batch, Tensor):
        found = ModelBatch(inputs=(batch,), names=(None,), labels=batch)
    elif isinstance(batch, Mapping):
        names = tuple(name for name in batch if name != LABELS_NAME)
        found = ModelBatch(
            inputs=tuple(batch[name] for name in names),
            names=names,
            labels=batch.get(LABELS_NAME),
            labels_name=LABELS_NAME,
            has_labels=LABELS_NAME in batch,
        )
    elif isinstance(batch, Sequence) and not isinstance(batch, str):
        inputs = tuple(batch[:-1]) if len(batch) > 1 else tuple(batch)
        labels = batch[-1] if len(batch) > 0 else None
        found = ModelBatch(inputs=inputs, names=(None,) * len(inputs), labels=labels, has_labels=len(batch) > 1)
    else:
        raise ConfigError(f"{source}: the batch is a {type(batch).__name__}; wanted a tensor, tuple or dict of tensors")
    tensors = [*found.inputs, *(() if found.labels is None else (found.labels,))]
    if not found.inputs or not all(isinstance(tensor, Tensor) for tensor in tensors):
        kinds = ", ".join(type(tensor).__name__ for tensor in tensors) or "nothing"
        raise ConfigError(f"{source}: the batch holds {kinds}; wanted tensors only, at least one besides the labels")
    counts = {tuple(tensor.shape[:1]) for tensor in tensors}
    if len(counts) > 1 or counts == {()} or (0,) in counts:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError(f"{source}: tensors of the batch have shapes {shapes}; the first dimension is the samples")
    return found


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model compares with the labels of the tokens behind: transformers' causal loss, also behind adapters.

    The rule is that of `transformers.Trainer`, and the classes that it forgets: GPT-2 and others by their older name.
    """
    model = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model  # type: ignore[operator]
    if not hasattr(model, "loss_type") or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    name = type(model).__name__
    if name.endswith("LMHeadModel"):
        return not name.startswith("XLNet")
    return LOSS_MAPPING.get(str(model.loss_type)) is ForCausalLMLoss


_MEANS = (functional.cross_entropy, functional.nll_loss)
_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def _mean_of(func: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments by name of a cross-entropy that is a mean over numbered labels; None: it is none."""
    if func not in _MEANS:
        return None
    call = {"weight": None, "ignore_index": IGNORED_LABEL, **dict(zip(_ARGUMENTS, args, strict=False)), **given}
    target, old = call.get("target"), (call.get("size_average"), call.get("reduce"))
    plain = call.get("reduction", "mean") == "mean" and old == (None, None)
    return call if plain and isinstance(target, Tensor) and not target.is_floating_point() else None


class LabelsWeighed(TorchFunctionMode):
    """Sees whether cross-entropies count labels unlike: by weights of classes, or leave out others than -100."""

    seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        call = _mean_of(func, args, kwargs or {})
        self.seen |= call is not None and (call["weight"] is not None or call["ignore_index"] != IGNORED_LABEL)
        return func(*args, **(kwargs or {}))


class WholeMeans(TorchFunctionMode):
    """Has means of cross-entropies over counted labels be those over the whole step, of which some samples are here.

    A mean over what is here would depend on how a batch is cut, where samples count unlike numbers of labels, or labels
    of unlike weights. So the sum over what is here is divided by what a sample of the step counts on average, times the
    samples that are here: over all samples of the step, this adds up to what the model makes of all of them at once.
    """

    def __init__(self, labels: Tensor, counted: Tensor | None, known: dict[int, int] | None = None) -> None:
        """Take the labels that are here, and `models.units.counted_labels` of the step; None: all count alike.

        `known` is kept from forward to forward of a model: which labels its means are over, by their number in a
        forward. To compare labels, the host has to wait for the device.
        """
        super().__init__()
        self._labels = labels
        self._behind = labels[:, 1:] if labels.dim() > 1 else labels[:0]
        self._counted = counted
        self._known = {} if known is None else known
        self._means = 0
        self.made = False
        """Whether there was such a mean; or one over samples, of which each counts its own labels."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or another mean."""
        self.made |= func is functional.ctc_loss
        call = None if self._counted is None else _mean_of(func, args, kwargs or {})
        if call is not None and not call["target"].is_meta:
            per_sample = self._per_sample(call)
            if per_sample is not None:
                self.made = True
                return func(**{**call, "reduction": "sum"}) / (per_sample * self._labels.shape[0])
        return func(*args, **(kwargs or {}))

    def _per_sample(self, call: Mapping[str, Any]) -> Tensor | None:
        """Return what a sample of the step counts on average; None: it is no mean over labels as they are here."""
        number, self._means = self._means, self._means + 1
        target, padded = call["target"].flatten(), functional.pad(self._behind, (0, 1), value=IGNORED_LABEL)
        shifted = [labels.flatten().to(target) for labels in (self._labels, self._behind, padded)]
        kind = self._known.get(number)
        if kind is not None and shifted[kind].shape == target.shape:
            # Others, such as some that the model has replaced by now, are meant over what is here.
            return torch.where((target == shifted[kind]).all(), self._mean(call, min(kind, 1)), self._here(call))
        same = [
            kind
            for kind, labels in enumerate(shifted)
            if target.shape == labels.shape and (is_fake(target) or torch.equal(target, labels))
        ]
        if len(same) == 1:
            self._known[number] = same[0]
        return self._mean(call, min(same[0], 1)) if same else self._fitting(call)

    def _here(self, call: Mapping[str, Any]) -> Tensor:
        """Return what the labels here count on average."""
        target, weight = call["target"].flatten(), call["weight"]
        kept = target != call["ignore_index"]
        each = kept if weight is None else kept * weight[torch.where(kept, target, 0)]
        average: Tensor = each.sum() / self._labels.shape[0]
        return average

    def _mean(self, call: Mapping[str, Any], column: int) -> Tensor:
        """Return what a sample's labels count on average, of all or of those behind the first."""
        assert self._counted is not None
        weight, ignored = call["weight"], call["ignore_index"]
        if self._counted.dim() == _OF_ALL:
            if weight is not None or ignored != IGNORED_LABEL:
                raise ConfigError(
                    "the loss counts labels unlike (weights of classes, ignore_index), and did not of the example "
                    "batch: have it do that always"
                )
            return self._counted[0, column]
        numbers, kept = self._counted[0, :, 0].long(), self._counted[0, :, 0] != ignored
        counts = self._counted[0, :, 1 + column]
        total: Tensor = (counts * kept * (1 if weight is None else weight[torch.where(kept, numbers, 0)])).sum()
        return total

    def _fitting(self, call: Mapping[str, Any]) -> Tensor | None:
        """Return what a sample counts, where labels are in another order, or made of those here in another way."""
        target, ignored = call["target"], call["ignore_index"]
        counts = [(some != ignored).sum() for some in (self._labels, self._behind)]
        here = (target != ignored).sum()
        whole = call["weight"] is None and target.numel() in (self._labels.numel(), self._behind.numel())
        fitting = [self._mean(call, column) for column, count in enumerate(counts) if whole and count == here]
        if len(fitting) > 1 and fitting[0] != fitting[1]:
            raise ConfigError(
                "no sample of a micro-batch counts its first label, and others of the step do: whether the model does "
                f"too cannot be told; set the first label of every sample to {IGNORED_LABEL}, or of none"
            )
        return fitting[0] if fitting else None


_OF_ALL = 2
"""Dimensions of what is counted of all labels together."""


class LabelLoss:
    """Cross-entropy of logits, the mean over the counted labels of a step; with the loss of a mixture's router."""

    def __init__(self, router_weight: float = 0.0) -> None:
        """Count the router's loss by a weight; 0: there is none."""
        self.router_weight = router_weight

    def __call__(
        self,
        result: tuple[Tensor, ...],
        labels: Tensor | None,
        samples: int,
        means: WholeMeans | None = None,  # noqa: ARG002 - it is active
    ) -> Tensor:
        """Return the loss of logits `(samples, ..., classes)`, besides the router's, and labels `(samples, ...)`."""
        assert labels is not None
        logits, *routers = result
        loss = functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL)
        return (loss + sum(self.router_weight * one for one in routers)) * samples


class MeanLoss:
    """A mean over samples, or a number for each of them, made a sum.

    A mean over all labels of a batch is one over samples only if all of them count as many labels, or by `WholeMeans`.
    """

    def __init__(self) -> None:
        self._counted: dict[torch.Size, int] = {}

    def __call__(self, loss: Tensor, labels: Tensor | None, samples: int, means: WholeMeans | None = None) -> Tensor:
        """Return the sum.

        Raises:
            ConfigError: the loss has another shape, or samples have unlike numbers of counted labels.
        """
        if loss.dim() == 0:
            if means is not None and not means.made:
                self._check_counts(labels)
            return loss * samples
        if loss.shape != torch.Size([samples]):
            raise ConfigError(
                f"the loss has shape {tuple(loss.shape)} for {samples} samples; wanted one number for each sample, or "
                "a scalar that is their mean"
            )
        return loss.sum()

    def _check_counts(self, labels: Tensor | None) -> None:
        """Compare with all labels of this shape so far."""
        if labels is None or labels.is_floating_point() or labels.is_meta:
            return
        counts = (labels != IGNORED_LABEL).reshape(labels.shape[0], -1).sum(dim=1)
        first = self._counted.setdefault(labels.shape[1:], int(counts[0]))
        other = counts[counts != first]
        if len(other) > 0:
            raise ConfigError(
                f"samples count {first} and {int(other[0])} labels (those of {IGNORED_LABEL} are not counted), so the "
                "mean over a batch would depend on how it is cut: compute it by torch's cross_entropy of the labels as "
                "they are, or have the factory return a loss of each sample: (module, example_batch, loss)"
            )


class OwnLoss(MeanLoss):
    """What the model computed itself."""


class FunctionLoss(MeanLoss):
    """A user's function of the model's outputs and the labels."""

    def __init__(self, function: Callable[[Any, Tensor | None], Tensor]) -> None:
        super().__init__()
        self._function = function

    def __call__(self, result: Any, labels: Tensor | None, samples: int, means: WholeMeans | None = None) -> Tensor:
        """Return what the function returns as a sum."""
        loss = self._function(result, labels)
        if not isinstance(loss, Tensor):
            raise ConfigError(f"the loss function returned a {type(loss).__name__}; wanted a tensor")
        return super().__call__(loss, labels, samples, means)


Loss = LabelLoss | OwnLoss | FunctionLoss
"""Makes a scalar, summed over samples, of what a model returned; `means` is active and None where a step is whole."""


def taken_names(batch: ModelBatch, loss: Loss) -> dict[int, str | None]:
    """Return the keyword of each tensor that a model is given, by its number in `Rows`; None: it goes in by position.

    Labels are among them if it computes its own loss of them.
    """
    takes_labels = isinstance(loss, OwnLoss) and batch.has_labels and batch.labels is not None
    return dict(enumerate(batch.names)) | ({LABELS: batch.labels_name} if takes_labels else {})


def picked(loss: Loss, result: Any, source: str) -> Any:
    """Return what of a model's outputs the loss is made of."""
    if isinstance(loss, LabelLoss):
        routers = (result.aux_loss,) if loss.router_weight else ()
        if None in routers:
            raise ConfigError(f"{source}: gives no aux_loss of its routers: set output_router_logits to false")
        return (result.logits, *routers)
    if not isinstance(loss, OwnLoss):
        return result
    own = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", result)
    if isinstance(own, tuple | list):  # (logits, loss), say
        scalars = [one for one in own if isinstance(one, Tensor) and one.dim() == 0 and one.is_floating_point()]
        own = scalars[0] if len(scalars) == 1 else None
    if not isinstance(own, Tensor) or own.dim() > 1 or not own.is_floating_point():
        raise ConfigError(
            f"{source}: the model's output has no `loss` (a scalar mean over samples), nor is it a tuple with one "
            "scalar in it: return one, or have the factory return a loss function too: (module, example_batch, loss)"
        )
    return own
