"""Models by name: family, size and data, as a `ModelSpec` (no torch needed)."""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from spantrain.config.files.problems import shortened
from spantrain.core.units import MAX_SEQUENCE, ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.sources import factory_spec, hf_spec, is_factory

IMAGE_CHANNELS = 3
IMAGE_SIDE = 32
_MAX_BLOCKS = 4096
_MAX_STAGES = 16
_MAX_DEPTH = 16.0
"""Times as many blocks as the smallest one of a family has."""

ConfigValue = int | float | str | tuple[int, ...]


def _gpt2(name: str, sequence_length: int, **config: ConfigValue) -> ModelSpec:
    # GPT-2's own GELU (tanh form) as one operation: the same values, and a block holds two fifths less for W.
    config["activation_function"] = "gelu_pytorch_tanh"
    return ModelSpec(name=name, family="gpt2", config=config, dataset="stdlib-text", sequence_length=sequence_length)


def _bert(name: str, sequence_length: int, **config: ConfigValue) -> ModelSpec:
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


def _gpt2_specs() -> tuple[ModelSpec, ...]:
    # The published sizes keep the published vocabulary, so that the tied embedding costs what it costs there.
    return (
        _gpt2("gpt2-tiny", 64, vocab_size=256, n_positions=64, n_embd=64, n_layer=12, n_head=4),
        _gpt2("gpt2-mini", 128, vocab_size=256, n_positions=128, n_embd=192, n_layer=12, n_head=6),
        _gpt2("gpt2-small", 512, vocab_size=50257, n_positions=1024, n_embd=768, n_layer=12, n_head=12),
        _gpt2("gpt2-medium", 512, vocab_size=50257, n_positions=1024, n_embd=1024, n_layer=24, n_head=16),
        _gpt2("gpt2-large", 512, vocab_size=50257, n_positions=1024, n_embd=1280, n_layer=36, n_head=20),
        _gpt2("gpt2-xl", 512, vocab_size=50257, n_positions=1024, n_embd=1600, n_layer=48, n_head=25),
    )


def _bert_size(vocabulary: int, positions: int, hidden: int, layers: int, heads: int) -> dict[str, ConfigValue]:
    return {
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }


def _bert_specs() -> tuple[ModelSpec, ...]:
    return (
        _bert("bert-small-tiny", 64, **_bert_size(264, 64, 64, 8, 4)),
        _bert("bert-small", 128, **_bert_size(30522, 512, 512, 4, 8)),
        _bert("bert-base", 128, **_bert_size(30522, 512, 768, 12, 12)),
    )


def _image_specs() -> tuple[ModelSpec, ...]:
    full = (256, 512, 1024, 2048)
    return (
        _image("resnet-tiny", "resnet", embedding_size=16, hidden_sizes=(32, 64, 128), depths=(3, 4, 4)),
        _image("resnet-50", "resnet", embedding_size=64, hidden_sizes=full, depths=(3, 4, 6, 3)),
        _image("resnet-101", "resnet", embedding_size=64, hidden_sizes=full, depths=(3, 4, 23, 3)),
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


_SPECS: Mapping[str, ModelSpec] = MappingProxyType(
    {spec.name: spec for spec in (*_gpt2_specs(), *_bert_specs(), *_image_specs())}
)
MODEL_NAMES: tuple[str, ...] = tuple(_SPECS)


def is_text(spec: ModelSpec) -> bool:
    """Whether the model reads bytes (otherwise: images)."""
    return spec.objective != "classify"


def resolve_model(
    name: str, *, data_path: Path | None = None, sequence_length: int | None = None, data_given: bool = False
) -> ModelSpec:
    """Return the model of that name, on the user's text and at another sequence length if these are given.

    Hyphens may be left out; `gpt2` is GPT-2 small. `hf:PATH` is a transformers configuration, and `FILE.py:FUNCTION` or
    `package.module:function` a function of the user's that returns a model; it is not called here.

    Raises:
        ConfigError: no such model (near matches are named), or an option that it cannot honour.
    """
    if name.startswith("hf:") or is_factory(name):
        return _unedited(name, data_path, sequence_length, data_given=data_given)
    known = {spec_name.replace("-", ""): spec for spec_name, spec in _SPECS.items()}
    spec = _SPECS["gpt2-small"] if name == "gpt2" else known.get(name.replace("-", ""))
    if spec is None:
        near = difflib.get_close_matches(name, MODEL_NAMES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(
            f"model: no model named {name!r}; {hint}Models: {', '.join(MODEL_NAMES)}; or hf:PATH, or FILE.py:FUNCTION"
        )
    problems = _option_problems(spec, data_path, sequence_length)
    if problems:
        raise ConfigError(f"model {name}: " + "; ".join(problems))
    if sequence_length is not None:
        spec = _with_sequence_length(spec, sequence_length)
    if data_path is not None:
        spec = replace(spec, dataset=f"text:{data_path.resolve()}")
    return spec


def _unedited(name: str, data_path: Path | None, sequence_length: int | None, *, data_given: bool) -> ModelSpec:
    if name.startswith("hf:"):
        spec = hf_spec(name, sequence_length=sequence_length, data_given=data_given or data_path is not None)
        problems = _option_problems(spec, data_path, sequence_length)
    else:
        spec = factory_spec(name)
        options = {"data": data_path, "sequence length": sequence_length}
        problems = [f"{key} {value}: its factory says so" for key, value in options.items() if value is not None]
    if problems:
        raise ConfigError(f"model {name}: " + "; ".join(problems))
    return spec if data_path is None else replace(spec, dataset=f"text:{data_path.resolve()}")


def _option_problems(spec: ModelSpec, data_path: Path | None, sequence_length: int | None) -> list[str]:
    problems = []
    if not is_text(spec):
        if data_path is not None:
            problems.append(f"data {data_path} cannot be used: this model reads images; leave the option out")
        if sequence_length is not None:
            problems.append(f"sequence length {sequence_length} cannot be used: this model reads images; leave it out")
        return problems
    if data_path is not None and not data_path.exists():
        problems.append(f"data {data_path} does not exist; give a text file or a folder of text files")
    if sequence_length is not None and not 2 <= sequence_length <= MAX_SEQUENCE:
        problems.append(f"sequence length must be from 2 to {MAX_SEQUENCE}, got {sequence_length}")
    return problems


def _with_sequence_length(spec: ModelSpec, sequence_length: int) -> ModelSpec:
    field = "n_positions" if spec.family == "gpt2" else "max_position_embeddings"
    positions = spec.config[field]
    assert isinstance(positions, int)
    config = {**spec.config, field: max(positions, sequence_length)}
    return replace(spec, config=config, sequence_length=sequence_length)


@dataclass(frozen=True, kw_only=True)
class _Chain:
    """Names of the first unit, the blocks and the last unit."""

    first: str
    blocks: tuple[str, ...]
    last: str


def unit_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of a model's units in order: prefixes of their parameters in the unsplit model.

    Raises:
        ConfigError: no such family, or its configuration lacks what says how many blocks there are.
    """
    if spec.family not in _CHAINS:
        raise ConfigError(f"model {spec.name}: no family {spec.family!r}; families: {', '.join(_CHAINS)}")
    chain = _CHAINS[spec.family](spec)
    return (chain.first, *chain.blocks, chain.last)


def _gpt2_chain(spec: ModelSpec) -> _Chain:
    blocks = _numbered("transformer.h", _count(spec, "n_layer"))
    return _Chain(first="transformer", blocks=blocks, last="lm_head")


def _bert_chain(spec: ModelSpec) -> _Chain:
    blocks = _numbered("bert.encoder.layer", _count(spec, "num_hidden_layers"))
    return _Chain(first="bert.embeddings", blocks=blocks, last="cls")


def _resnet_chain(spec: ModelSpec) -> _Chain:
    stages = enumerate(_counts(spec, "depths"))
    blocks = [name for i, depth in stages for name in _numbered(f"resnet.encoder.stages.{i}.layers", depth)]
    return _Chain(first="resnet.embedder", blocks=tuple(blocks), last="classifier")


def _efficientnet_chain(spec: ModelSpec) -> _Chain:
    repeats = _counts(spec, "num_block_repeats", (1, 2, 2, 3, 3, 4, 1))
    depth = spec.config.get("depth_coefficient")
    if isinstance(depth, bool) or not isinstance(depth, int | float) or not 0 < depth <= _MAX_DEPTH:
        raise _wrong(spec, "depth_coefficient", f"a number above 0, up to {_MAX_DEPTH}")
    blocks = sum(math.ceil(depth * repeat) for repeat in repeats)
    names = _numbered("efficientnet.encoder.blocks", blocks)
    return _Chain(first="efficientnet.embeddings", blocks=names, last="classifier")


_CHAINS: Mapping[str, Callable[[ModelSpec], _Chain]] = MappingProxyType(
    {"gpt2": _gpt2_chain, "bert": _bert_chain, "resnet": _resnet_chain, "efficientnet": _efficientnet_chain}
)
CATALOG_FAMILIES = frozenset(_CHAINS)


def _numbered(prefix: str, count: int) -> tuple[str, ...]:
    return tuple(f"{prefix}.{index}" for index in range(count))


def _count(spec: ModelSpec, field: str) -> int:
    value = spec.config.get(field)
    if not _is_count(value):
        raise _wrong(spec, field, f"a whole number from 1 to {_MAX_BLOCKS}")
    assert isinstance(value, int)
    return value


def _counts(spec: ModelSpec, field: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
    values = spec.config.get(field, default)
    if not isinstance(values, tuple | list) or not 1 <= len(values) <= _MAX_STAGES or not all(map(_is_count, values)):
        raise _wrong(spec, field, f"1 to {_MAX_STAGES} whole numbers from 1 to {_MAX_BLOCKS}")
    return tuple(values)


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= _MAX_BLOCKS


def _wrong(spec: ModelSpec, field: str, wanted: str) -> ConfigError:
    got = shortened(repr(spec.config.get(field)))
    return ConfigError(f"model {spec.name}: its configuration's {field} must be {wanted}, got {got}; plan again")
