"""Models of the transformers library by their configuration, with example batches; the library is imported late."""

import contextlib
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from spantrain.config.files.problems import shortened
from spantrain.core.units import ModelSpec, TensorSpec
from spantrain.errors import ConfigError
from spantrain.formats.codec import DTYPE_CODES
from spantrain.formats.tensor_bytes import dtype_name
from spantrain.models.adapters import adapted
from spantrain.models.sources import hf_class, hf_configuration, image_shape
from spantrain.models.tracing.batch import LABEL_NAMES, LABELS_NAME, ModelBatch, split_batch

_MAX_PARTS = 400_000
"""Modules and parameters of one model: five times as many as hundreds of experts in dozens of layers have."""
_EXAMPLES = 2
_MAX_NUMBERS = 2**28
"""In a tensor of the example batch."""
_TOKENS = ("input_ids", "decoder_input_ids")


def library_class(where: str, name: str) -> Any:
    """Return a class of the transformers library; `where` begins the message.

    Raises:
        ConfigError: it has no such model.
    """
    import transformers

    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ConfigError(f"{where}: the transformers library {transformers.__version__} has no {name}")
    return found


def library_inputs(name: str) -> tuple[str, ...]:
    """Return what the forward of the class that `hf:PATH` names takes, by name; labels, where it hands on all else.

    Raises:
        ConfigError: as `hf_spec`; or it names no class of the library.
    """
    kind = hf_class(name)
    if not kind:
        raise ConfigError(f"model {name}: its configuration names no class: give `architectures` there")
    given = inspect.signature(library_class(f"model {name}", kind).forward).parameters.values()
    named = tuple(one.name for one in given if one.kind is not one.VAR_KEYWORD)[1:]
    return named if LABELS_NAME in named or len(named) + 1 == len(given) else (*named, LABELS_NAME)


def own_rows(name: str, sample: object) -> tuple[TensorSpec, ...]:
    """Return what of a sample of the user's own the class of `hf:FOLDER` takes; nothing unless it is a dictionary.

    Raises:
        ConfigError: there is no such class, or the sample has nothing for it.
    """
    if not isinstance(sample, Mapping):
        return ()
    taken = library_inputs(name)
    fields = {key: sample[key] for key in taken if key in sample and key != LABELS_NAME}
    if not fields:
        raise ConfigError(
            f"data: samples have {', '.join(map(str, sample)) or 'nothing'}, and {hf_class(name)} of {name} takes "
            f"{', '.join(taken)}; give some of these (tokens as input_ids)"
        )
    labels = [sample[key] for key in LABEL_NAMES if key in sample and LABELS_NAME in taken]
    return tuple(_row(key, value) for key, value in (*fields.items(), *((LABELS_NAME, one) for one in labels[:1])))


def _row(name: str, value: object) -> TensorSpec:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"data: {name} of a sample is no tensor ({error}); leave it out, or make it one") from None
    return TensorSpec(
        name=name, shape_per_sample=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), bytes_per_sample=tensor.nbytes,
        requires_grad=False,
    )  # fmt: skip


def library_model(spec: ModelSpec) -> tuple[nn.Module, float, tuple[str, ...]]:
    """Build the class that a configuration names, of the transformers library only.

    Return also what the loss of its routers counts, and what is left out.
    """
    import transformers

    fields = hf_configuration(spec)
    name, kind = fields["architectures"][0], fields.pop("model_type")
    model_class = library_class(f"model {spec.name}", name)
    reads = "pixel_values" if spec.objective == "classify" else "input_ids"
    own: str = getattr(model_class, "main_input_name", reads)
    if own != reads and not spec.rows:
        raise ConfigError(
            f"model {spec.name}: {name} reads {own}, and without data of your own only models of text and classifiers "
            "of images are known here; give rows by the names that its forward takes, or write a function that returns "
            "it with an example batch, and give FILE.py:FUNCTION"
        )
    try:
        configuration = transformers.AutoConfig.for_model(kind, **fields)
        if hasattr(configuration, "use_cache"):
            configuration.use_cache = False
        configuration.return_dict = True
        with _bounded(f"model {spec.name}"):
            made: nn.Module = adapted(spec, model_class(configuration))
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        raise ConfigError(f"model {spec.name}: the library cannot build {name} from this: {error}") from error
    if spec.rows:  # its own loss counts all
        return made, 0.0, ()
    routed = getattr(configuration, "output_router_logits", False)
    pair = getattr(configuration, "is_encoder_decoder", False)
    counted = routed and not pair and hasattr(configuration, "router_aux_loss_coef")
    weight = float(configuration.router_aux_loss_coef) if counted else 0.0
    return made, weight, ("the library's loss of the router is left out",) if routed and not counted else ()


def library_batch(spec: ModelSpec) -> ModelBatch:
    """Return an example batch: of what rows of the user's own have, or of what the objective wants.

    Raises:
        ConfigError: no tensor is of such a type, or so large.
    """
    if spec.rows:
        fields = hf_configuration(spec)
        sizes = [part.get("vocab_size") for part in (fields, fields.get("text_config")) if isinstance(part, Mapping)]
        known = max((size for size in sizes if isinstance(size, int)), default=1)
        example = {tensor.name: _example(tensor, known) for tensor in spec.rows}
        return split_batch(example, source=f"model {spec.name}")
    if spec.objective == "classify":
        images = torch.zeros(_EXAMPLES, *image_shape(hf_configuration(spec)))
        return ModelBatch(inputs=(images,), names=("pixel_values",), labels=torch.zeros(_EXAMPLES, dtype=torch.int64))
    assert spec.sequence_length is not None
    length = spec.sequence_length
    if spec.objective != "continue":
        tokens = torch.zeros(_EXAMPLES, length, dtype=torch.int64)
        if spec.chat.packing:
            halves = torch.arange(length) % (length - length // 2)
            inputs = (tokens, halves.repeat(_EXAMPLES, 1))
            return ModelBatch(inputs=inputs, names=("input_ids", "position_ids"), labels=tokens)
        return ModelBatch(inputs=(tokens,), names=("input_ids",), labels=tokens)
    read = torch.zeros(_EXAMPLES, length // 2, dtype=torch.int64)
    written = torch.zeros(_EXAMPLES, length - length // 2, dtype=torch.int64)
    return ModelBatch(inputs=(read, written), names=("input_ids", "decoder_input_ids"), labels=written)


def _example(tensor: TensorSpec, known: int) -> Tensor:
    """Return numbers such as samples may have: tokens that are unlike and mean nothing special, no padding, noise."""
    shape = (_EXAMPLES, *tensor.shape_per_sample)
    if tensor.dtype not in DTYPE_CODES or math.prod(shape) > _MAX_NUMBERS:
        raise ConfigError(f"rows: {tensor.name} has numbers of type {shortened(tensor.dtype)} in shape {shape[1:]}")
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if dtype.is_floating_point:
        return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    number = torch.arange(math.prod(shape)).reshape(shape)
    if tensor.name in _TOKENS:
        # The first and the last of a vocabulary are those with a meaning.
        number = known // 3 + number % max(1, known // 3)
    elif tensor.name == "position_ids":
        number = torch.arange(shape[-1]).expand(shape).clone()
    else:
        # Nothing is masked, and of several labels none means that nothing is there, as 0 does in sounds.
        ones = "mask" in tensor.name or (tensor.name == LABELS_NAME and tensor.shape_per_sample)
        number = torch.full(shape, int(bool(ones)))
    return number.to(dtype)


@contextlib.contextmanager
def _bounded(what: str) -> Iterator[None]:
    """Refuse to build a model of more modules than any that is known; `what` begins the message.

    Raises:
        ConfigError: it has more.
    """
    made = itertools.count(1)

    def count(_owner: nn.Module, _name: str, _part: nn.Module | nn.Parameter | None) -> None:
        if next(made) > _MAX_PARTS:
            raise ConfigError(f"{what}: has more than {_MAX_PARTS} modules and parameters; its configuration is wrong")

    hooks = [register_module_module_registration_hook(count), register_module_parameter_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Keep the library from drawing weights."""
    from transformers import PreTrainedModel

    drawing = PreTrainedModel.initialize_weights
    PreTrainedModel.initialize_weights = lambda _self, *_, **__: None
    try:
        yield
    finally:
        PreTrainedModel.initialize_weights = drawing
