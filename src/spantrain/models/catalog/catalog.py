"""Models by name: family, size and data as a `ModelSpec`, and what a family of them is (no torch needed)."""

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from spantrain.config.files.problems import shortened
from spantrain.core.units import MAX_SEQUENCE, ModelSpec, TensorSpec
from spantrain.errors import ConfigError
from spantrain.models.sources import factory_spec, hf_spec, is_factory

if TYPE_CHECKING:
    from torch import nn

    from spantrain.models.units import UnitModule

IMAGE_CHANNELS = 3
IMAGE_SIDE = 32
_MAX_BLOCKS = 4096
_MAX_STAGES = 16
_MAX_DEPTH = 16.0
"""How many times the blocks of the smallest one of a family there may be."""

ConfigValue = int | float | str | tuple[int, ...]


def _gpt2(name: str, sequence_length: int, *, positions: int, hidden: int, layers: int, heads: int) -> ModelSpec:
    config: dict[str, ConfigValue] = {
        # The published sizes keep the published vocabulary, so that the tied embedding costs what it costs there.
        "vocab_size": 50257 if positions == 1024 else 256,
        "n_positions": positions,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        # GPT-2's own GELU (tanh form) as one operation: the same values, and a block holds two fifths less for W.
        "activation_function": "gelu_pytorch_tanh",
    }
    return ModelSpec(name=name, family="gpt2", config=config, dataset="stdlib-text", sequence_length=sequence_length)


def _bert(
    name: str, sequence_length: int, *, vocabulary: int, positions: int, hidden: int, layers: int, heads: int
) -> ModelSpec:
    config = {
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }
    return ModelSpec(
        name=name,
        family="bert",
        config=config,
        dataset="stdlib-text",
        sequence_length=sequence_length,
        objective="masked-byte",
    )


def _image(name: str, family: str, **config: ConfigValue) -> ModelSpec:
    config["num_labels"] = 10
    return ModelSpec(name=name, family=family, config=config, dataset="digits", objective="classify")


_FULL = (256, 512, 1024, 2048)
_SPECS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            _gpt2("gpt2-tiny", 64, positions=64, hidden=64, layers=12, heads=4),
            _gpt2("gpt2-mini", 128, positions=128, hidden=192, layers=12, heads=6),
            _gpt2("gpt2-small", 512, positions=1024, hidden=768, layers=12, heads=12),
            _gpt2("gpt2-medium", 512, positions=1024, hidden=1024, layers=24, heads=16),
            _gpt2("gpt2-large", 512, positions=1024, hidden=1280, layers=36, heads=20),
            _gpt2("gpt2-xl", 512, positions=1024, hidden=1600, layers=48, heads=25),
            _bert("bert-small-tiny", 64, vocabulary=264, positions=64, hidden=64, layers=8, heads=4),
            _bert("bert-small", 128, vocabulary=30522, positions=512, hidden=512, layers=4, heads=8),
            _bert("bert-base", 128, vocabulary=30522, positions=512, hidden=768, layers=12, heads=12),
            _image("resnet-tiny", "resnet", embedding_size=16, hidden_sizes=(32, 64, 128), depths=(3, 4, 4)),
            _image("resnet-50", "resnet", embedding_size=64, hidden_sizes=_FULL, depths=(3, 4, 6, 3)),
            _image("resnet-101", "resnet", embedding_size=64, hidden_sizes=_FULL, depths=(3, 4, 23, 3)),
            _image(
                "efficientnet-tiny",
                "efficientnet",
                width_coefficient=0.25,
                depth_coefficient=1.0,
                hidden_dim=320,
                kernel_sizes=(3, 3, 5, 3, 5),
                in_channels=(32, 16, 24, 40, 80),
                out_channels=(16, 24, 40, 80, 112),
                strides=(1, 2, 2, 1, 1),
                num_block_repeats=(1, 2, 2, 3, 2),
                expand_ratios=(1, 6, 6, 6, 6),
            ),
            _image("efficientnet-b0", "efficientnet", width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280),
            _image(
                "efficientnet-b1",
                "efficientnet",
                width_coefficient=1.0,
                depth_coefficient=1.1,
                hidden_dim=1280,
                depthwise_padding=(16,),
            ),
        )
    }
)
MODEL_NAMES: tuple[str, ...] = tuple(_SPECS)


def is_text(spec: ModelSpec) -> bool:
    """Whether the model reads bytes (otherwise: images)."""
    return spec.objective != "classify"


def resolve_model(
    name: str, *, sequence_length: int | None = None, data_given: bool = False, rows: tuple[TensorSpec, ...] = ()
) -> ModelSpec:
    """Return the model of that name, at another sequence length if one is given; of `rows` see `hf_spec`.

    Hyphens may be left out; `gpt2` is GPT-2 small. `hf:PATH` is a transformers configuration, and `FILE.py:FUNCTION` or
    `package.module:function` a function of the user's that returns a model; it is not called here.

    Raises:
        ConfigError: no such model (near matches are named), or a length that it cannot have.
    """
    if is_factory(name):
        if sequence_length is not None:
            raise ConfigError(f"model {name}: sequence length {sequence_length}: its factory says so")
        return factory_spec(name)
    if name.startswith("hf:"):
        spec = hf_spec(name, sequence_length=sequence_length, data_given=data_given, rows=rows)
        if rows:
            return spec
    else:
        spec = _named(name)
    if sequence_length is None:
        return spec
    if not is_text(spec):
        why = f"sequence length {sequence_length} cannot be used: this model reads images; leave it out"
        raise ConfigError(f"model {name}: {why}")
    if not 2 <= sequence_length <= MAX_SEQUENCE:
        raise ConfigError(f"model {name}: sequence length must be from 2 to {MAX_SEQUENCE}, got {sequence_length}")
    if name.startswith("hf:"):
        return spec
    field = "n_positions" if spec.family == "gpt2" else "max_position_embeddings"
    positions = spec.config[field]
    assert isinstance(positions, int)
    config = {**spec.config, field: max(positions, sequence_length)}
    return replace(spec, config=config, sequence_length=sequence_length)


def _named(name: str) -> ModelSpec:
    known = {spec_name.replace("-", ""): spec for spec_name, spec in _SPECS.items()}
    spec = _SPECS["gpt2-small"] if name == "gpt2" else known.get(name.replace("-", ""))
    if spec is None:
        near = difflib.get_close_matches(name, MODEL_NAMES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"model: no model named {name!r}; {hint}Models: {', '.join(MODEL_NAMES)}; or hf:PATH, or FILE.py:FUNCTION"
        )
    return spec


def unit_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of a model's units in order: prefixes of their parameters in the unsplit model.

    Raises:
        ConfigError: no such family, or its configuration lacks what says how many blocks there are.
    """
    if spec.family not in _CHAINS:
        raise ConfigError(f"model {spec.name}: no family {spec.family!r}; families: {', '.join(_CHAINS)}")
    first, blocks, last = _CHAINS[spec.family]
    return (first, *blocks(spec), last)


def _resnet_blocks(spec: ModelSpec) -> tuple[str, ...]:
    stages = enumerate(_counts(spec, "depths"))
    return tuple(name for stage, depth in stages for name in _numbered(f"resnet.encoder.stages.{stage}.layers", depth))


def _efficientnet_blocks(spec: ModelSpec) -> tuple[str, ...]:
    repeats = _counts(spec, "num_block_repeats", (1, 2, 2, 3, 3, 4, 1))
    depth = spec.config.get("depth_coefficient")
    if isinstance(depth, bool) or not isinstance(depth, int | float) or not 0 < depth <= _MAX_DEPTH:
        raise _wrong(spec, "depth_coefficient", f"a number above 0, up to {_MAX_DEPTH}")
    return _numbered("efficientnet.encoder.blocks", sum(math.ceil(depth * repeat) for repeat in repeats))


_CHAINS: Mapping[str, tuple[str, Callable[[ModelSpec], tuple[str, ...]], str]] = MappingProxyType(
    {
        "gpt2": ("transformer", lambda spec: _numbered("transformer.h", _count(spec, "n_layer")), "lm_head"),
        "bert": (
            "bert.embeddings",
            lambda spec: _numbered("bert.encoder.layer", _count(spec, "num_hidden_layers")),
            "cls",
        ),
        "resnet": ("resnet.embedder", _resnet_blocks, "classifier"),
        "efficientnet": ("efficientnet.embeddings", _efficientnet_blocks, "classifier"),
    }
)
"""By family: names of the first unit, the blocks and the last unit."""
CATALOG_FAMILIES = frozenset(_CHAINS)


def _numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.{index}" for index in range(count))


def _count(spec: ModelSpec, field: str) -> int:
    value = spec.config.get(field)
    if type(value) is not int or not 1 <= value <= _MAX_BLOCKS:
        raise _wrong(spec, field, f"a whole number from 1 to {_MAX_BLOCKS}")
    return value


def _counts(spec: ModelSpec, field: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
    values = spec.config.get(field, default)
    given = values if isinstance(values, tuple | list) and 1 <= len(values) <= _MAX_STAGES else (0,)
    if not all(type(value) is int and 1 <= value <= _MAX_BLOCKS for value in given):
        raise _wrong(spec, field, f"1 to {_MAX_STAGES} whole numbers from 1 to {_MAX_BLOCKS}")
    return tuple(given)


def _wrong(spec: ModelSpec, field: str, wanted: str) -> ConfigError:
    got = shortened(repr(spec.config.get(field)))
    return ConfigError(f"model {spec.name}: its configuration's {field} must be {wanted}, got {got}; plan again")


class CatalogFamily(ABC):
    """The parts of one model, made by hand, each family's in a class of its own."""

    whole: str
    """The transformers library's class of the unsplit model."""
    head: type[Any]
    """Of the unit behind the blocks, with the loss; made of its name and the configuration."""

    def __init__(self, spec: ModelSpec) -> None:
        self.config = self.configuration(spec)
        self.blocks = len(unit_names(spec)) - 2

    @staticmethod
    @abstractmethod
    def configuration(spec: ModelSpec) -> Any:
        """Return the transformers configuration: without dropout."""

    @abstractmethod
    def first(self, name: str) -> "UnitModule":
        """Build the unit before the blocks; its weights are to be drawn by `initialize`, as those of the others."""

    @abstractmethod
    def block(self, index: int) -> "nn.Module":
        """Build a block."""

    @abstractmethod
    def initialize(self, unit: "UnitModule") -> None:
        """Draw the weights of a unit."""
