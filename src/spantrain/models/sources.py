"""Models that users bring, by name: a transformers configuration, or a function in a file (imports no torch)."""

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spantrain.config.files.parsing import OutOfRange, parse_json
from spantrain.config.files.problems import shortened
from spantrain.config.files.text_files import is_file, read_text
from spantrain.core.units import MAX_SEQUENCE, ModelSpec, TensorSpec
from spantrain.errors import ConfigError

CONFIGURATION = "json"
"""The field of a spec's config that holds a transformers configuration as JSON: workers need no file."""
OWN = "own"
"""The objective of a model that makes its loss itself, or whose factory does."""
DROPOUT = "dropout"
"""The field that says `off` of a model that is trained in evaluation mode."""

_HF = "hf:"
_DEFAULT_SEQUENCE = 128
_MAX_DEFAULT_SEQUENCE = 512
"""Tokens of a sample unless asked otherwise, of models that could take more."""
_SIZES = ("num_labels", "vocab_size")
_POSITIONS = ("n_positions", "max_position_embeddings", "n_ctx", "max_sequence_length")
# Model types whose configurations often name no class, as those saved without a model do.
_CLASSES: Mapping[str, str] = {
    "bert": "BertForMaskedLM",
    "efficientnet": "EfficientNetForImageClassification",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neo": "GPTNeoForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "opt": "OPTForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "resnet": "ResNetForImageClassification",
    "roberta": "RobertaForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
}
_OBJECTIVES: Mapping[str, str] = {
    "ForCausalLM": "next-byte",
    "LMHeadModel": "next-byte",
    "ForMaskedLM": "masked-byte",
    "ForConditionalGeneration": "continue",
    "ForImageClassification": "classify",
}
_COUNTED = ("layer", "depth", "expert")
"""In keys of a configuration that say how many modules there are."""
_MAX_COUNT = 4096
_BYTES = 256
_MASKED_BYTES = 257
_DIGITS = 10
_DIGITS_SHAPE = (3, 32, 32)


def is_factory(name: str) -> bool:
    """Whether a model's name is `FILE.py:FUNCTION` or `package.module:function`."""
    path, separator, function = name.rpartition(":")
    return bool(separator and path) and function.isidentifier() and not name.startswith(_HF)


def look_here() -> None:
    """Have modules of the present folder found, as `python -m spantrain` does: the program has its own in its place."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def factory_file(source: str) -> Path:
    """Return the file that a factory is in.

    Raises:
        ConfigError: there is no such file or module.
    """
    path = source.rpartition(":")[0]
    if path.endswith(".py"):
        if not is_file(Path(path)):
            raise ConfigError(f"model {source}: there is no file {path}")
        return Path(path)
    look_here()
    try:
        found = importlib.util.find_spec(path)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"model {source}: {error}; give FILE.py:FUNCTION or package.module:function") from error
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise ConfigError(f"model {source}: no module {path} here; give FILE.py:FUNCTION or package.module:function")
    return Path(found.origin)


def source_digest(source: str) -> str:
    """Return the SHA-256 of a factory's file."""
    return hashlib.sha256(factory_file(source).read_bytes()).hexdigest()


def factory_spec(name: str) -> ModelSpec:
    """Return the spec of a factory's model; its example batch is its data until other data is named.

    Raises:
        ConfigError: there is no such file or module.
    """
    path, _, function = name.rpartition(":")
    source = f"{Path(path).resolve()}:{function}" if path.endswith(".py") else name
    return ModelSpec(
        name=name,
        family="factory",
        config={},
        dataset="example",
        objective=OWN,
        source=source,
        source_sha256=source_digest(source),
    )


def hf_configuration(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a transformers configuration.

    Raises:
        ConfigError: the spec has none, or one of a model that nobody has, or that names code.
    """
    text, where = spec.config.get(CONFIGURATION), f"model {spec.name}: its configuration"
    fields = parse_json(text, where, constants=True) if isinstance(text, str) else None
    checked = _checked(where, fields, "is not that of a transformers model; plan again")
    _architecture(where, checked)
    return checked


def _architecture(where: str, fields: Mapping[str, Any]) -> str:
    """Return the class that a configuration names, or that is usual for its type; empty if neither is known."""
    classes = fields.get("architectures") or [_CLASSES.get(str(fields["model_type"]), "")]
    if not isinstance(classes, list) or not isinstance(classes[0], str):
        raise ConfigError(f"{where}: architectures must be a list of names, got {shortened(repr(classes))}")
    return classes[0]


def _check_fields(where: str, fields: Mapping[str, Any]) -> None:
    """Refuse code that is named, and numbers that no model has, before anything is made for each of so many layers."""
    waiting: list[tuple[str, Any]] = list(fields.items())
    while waiting:
        key, value = waiting.pop()
        if key == "auto_map" or ("implementation" in key and isinstance(value, str) and "/" in value):
            raise ConfigError(f"{where}: {key} names code to be run, which is not done; use FILE.py:FUNCTION")
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += [(key, one) for one in value]
        elif isinstance(value, OutOfRange):
            raise ConfigError(f"{where}: {key} is {shortened(value.written)}, which is out of range")
        elif isinstance(value, int) and value > _MAX_COUNT and any(word in key for word in _COUNTED):
            raise ConfigError(f"{where}: {key} is {value}; more than {_MAX_COUNT} are in no model")


def image_shape(fields: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return channels, height and width of a transformers image model's inputs; 32 pixels where any size will do."""
    side = fields.get("image_size", 224 if fields.get("model_type") == "vit" else 32)
    if fields.get("model_type") in ("resnet", "efficientnet"):
        side = 32
    height, width = (side, side) if isinstance(side, int) else (side[0], side[1])
    return int(fields.get("num_channels", 3)), int(height), int(width)


def hf_class(name: str) -> str:
    """Return the class that `hf:PATH` names; empty if none.

    Raises:
        ConfigError: as `hf_spec`.
    """
    return _architecture(f"model {name}", _fields(name))


def hf_spec(
    name: str, *, sequence_length: int | None = None, data_given: bool = False, rows: tuple[TensorSpec, ...] = ()
) -> ModelSpec:
    """Return the spec of `hf:PATH`, a transformers configuration (config.json or its folder).

    With `rows`, what samples of the user's own data have, any class will do, and its own loss is learnt.

    Raises:
        ConfigError: no such file, not a configuration, or of a kind of model that is not known here.
    """
    fields = _fields(name)
    architecture = _architecture(f"model {name}", fields)
    objective = objective_of(architecture)
    if rows and architecture:
        objective = OWN
        tokens = [one.shape_per_sample[0] for one in rows if one.name == "input_ids" and one.shape_per_sample]
        if tokens and sequence_length not in (None, tokens[0]):
            raise ConfigError(f"model {name}: sequence length {sequence_length}: its data have {tokens[0]} tokens")
        length = hf_length(name, tokens[0], fields) if tokens else None
    elif objective is None:
        raise ConfigError(
            f"model {name}: architectures {architecture or 'not given'} (model_type {fields['model_type']}): name a "
            f"class ending in {', '.join(_OBJECTIVES)}; give rows of your own, by the names that its forward takes "
            "(rows:PATH, FILE.py:FUNCTION, a data set in Python); or write a function that returns the model"
        )
    else:
        length = None if objective == "classify" else hf_length(name, sequence_length, fields)
    fields["architectures"] = [architecture]
    text = json.dumps(fields, sort_keys=True)
    spec = ModelSpec(
        name=name,
        family="hf",
        # Data is checked against the sizes.
        config={CONFIGURATION: text, **{key: fields[key] for key in _SIZES if isinstance(fields.get(key), int)}},
        dataset="digits" if objective == "classify" else "stdlib-text",
        sequence_length=length,
        objective=objective,
        source=str(Path(name.removeprefix(_HF)).resolve()),
        source_sha256=hashlib.sha256(text.encode()).hexdigest(),
        rows=rows,
    )
    _check_data(spec, fields, data_given=data_given or bool(rows))
    return spec


def objective_of(architecture: str) -> str | None:
    """Return what a class learns from text, or from classes of pictures, as they are; None: it does not."""
    return next((value for ending, value in _OBJECTIVES.items() if architecture.endswith(ending)), None)


def _fields(name: str) -> dict[str, Any]:
    if not name.removeprefix(_HF).strip():
        raise ConfigError(f"model {name!r}: names no path; write hf:PATH (for this folder: hf:.)")
    path = Path(name.removeprefix(_HF))
    file = path / "config.json" if path.is_dir() else path
    wanted = "give a transformers config.json or its folder"
    if not file.exists():
        folder = file.parent
        what = f"folder {folder} has no config.json" if folder.is_dir() else f"there is no folder {folder}"
        if file.name != "config.json":
            what = f"there is no {file}"
        raise ConfigError(f"model {name}: {what}; {wanted} (save_pretrained writes one)")
    where = f"model {name}: {file}"
    # As the library writes numbers that JSON has not.
    text = re.sub(r'\{\s*"__float__":\s*"(-?Infinity|NaN)"\s*\}', r"\1", read_text(file, remedy=wanted))
    fields = parse_json(text, where, remedy=wanted, constants=True)
    fields = _checked(where, fields, f"has no model_type; {wanted}")
    if fields.get("quantization_config"):
        raise ConfigError(
            f"model {name}: {file} has a quantization_config: quantized weights (bitsandbytes, torchao, GPTQ, AWQ) are "
            "not trained on here, with adapters neither; give the folder of the model that was quantized"
        )
    return fields


def _checked(where: str, fields: Any, otherwise: str) -> dict[str, Any]:
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigError(f"{where} {otherwise}")
    _check_fields(where, fields)
    return fields


def hf_length(name: str, wanted: int | None, fields: Mapping[str, Any] | None = None) -> int:
    """Return how many tokens a sample of `hf:PATH` has where its data do not say, or so many as are wanted.

    Raises:
        ConfigError: as `hf_spec`.
    """
    fields = fields or _fields(name)
    # RoBERTa's family counts positions from two.
    unused = 2 if fields["model_type"] in ("camembert", "roberta", "xlm-roberta") else 0
    given = [fields[key] - unused for key in _POSITIONS if type(fields.get(key)) is int]
    if given and not 2 <= given[0] <= MAX_SEQUENCE:
        raise ConfigError(f"model {name}: its configuration has {given[0]} positions; 2 to {MAX_SEQUENCE} are wanted")
    if wanted is None:
        return min(_MAX_DEFAULT_SEQUENCE, given[0]) if given else _DEFAULT_SEQUENCE
    if not 2 <= wanted <= MAX_SEQUENCE or (given and wanted > given[0]):
        raise ConfigError(f"model {name}: sequence length {wanted}: wanted 2 to {given[0] if given else 'any number'}")
    return wanted


def _check_data(spec: ModelSpec, fields: Mapping[str, Any], *, data_given: bool) -> None:
    """Refuse a model that is too small for the data it is trained on unless other data is given."""
    if data_given:
        return
    if spec.objective == "classify":
        classes = fields.get("num_labels", len(fields.get("id2label") or "ab"))
        if classes < _DIGITS:
            raise ConfigError(
                f"model {spec.name}: has {classes} classes, and the handwritten digits need {_DIGITS}: set num_labels, "
                "or give data of your own"
            )
        if image_shape(fields) != _DIGITS_SHAPE:
            channels, height, width = image_shape(fields)
            raise ConfigError(
                f"model {spec.name}: reads images of {channels}x{height}x{width}, and the handwritten digits are "
                "3x32x32: set image_size to 32, or give data of your own (images:FOLDER)"
            )
        return
    size = fields.get("vocab_size")
    least = _MASKED_BYTES if spec.objective == "masked-byte" else _BYTES
    if isinstance(size, int) and size < least:
        raise ConfigError(
            f"model {spec.name}: vocab_size is {size}, and text read as bytes needs {least} at least: change it, or "
            "give a tokenizer and data of your own"
        )
