"""A model as the library saves it: configuration, weights or adapters, and what else the folder it came from has."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn

from spantrain.core.units import ModelSpec
from spantrain.errors import UsageError
from spantrain.models.data.choice import tokenizer_file

DTYPES = ("float32", "bfloat16", "float16")
"""In which weights can be written."""
_SHARD = "5GB"
_CONFIGURATION = "config.json"
_OWN = ("model", "pytorch_model", "tf_model", "flax_model", "adapter_", "example.", "training_args", "optimizer.")
"""What names of files with weights begin with, or of those that are written here."""
_BESIDES = (".json", ".jinja", ".txt", ".model", ".md", ".tiktoken")
_TOKENS = ("tokenizer", "special_tokens", "added_tokens", "chat_template", "vocab", "merges")


def save_as_given(module: nn.Module, spec: ModelSpec, folder: Path, *, dtype: str, merge: bool) -> str:
    """Write a model as its class would; return what loads it.

    Adapters of `peft` are written alone, or with `merge` as part of the weights. Of the folder that the model came from
    everything is copied that is no weights; its `use_cache` is put back.

    Args:
        module: with the weights; used up.
        spec: of the model.
        folder: to be made.
        dtype: one of `DTYPES`, that weights are rounded to.
        merge: add adapters to the weights that they adapt.

    Raises:
        UsageError: there are no adapters to merge.
        OSError, SafetensorError: it cannot be written.
    """
    from transformers import PreTrainedModel

    adapters = _is_adapted(module)
    if merge and not adapters:
        raise UsageError(f"--merge: model {spec.name} has no adapters of peft to be merged; leave it out")
    model: Any = module.to(getattr(torch, dtype))
    base = model.get_base_model() if adapters else model
    if merge:
        model, adapters = model.merge_and_unload(), False
    folder.mkdir(parents=True)
    source = _source(spec, base)
    if adapters:
        if source is not None:
            model.active_peft_config.base_model_name_or_path = str(source)
        model.save_pretrained(folder)
    elif isinstance(model, PreTrainedModel):
        if source is not None and hasattr(model.config, "use_cache"):
            given = json.loads((source / _CONFIGURATION).read_text(encoding="utf-8"))
            model.config.use_cache = given.get("use_cache", True)
        model.save_pretrained(folder, max_shard_size=_SHARD)
    else:
        save_model(model, str(folder / "model.safetensors"))
    _copy_besides(spec, source, folder)
    if adapters:
        return "peft"
    return "transformers" if isinstance(model, PreTrainedModel) else "safetensors"


def _is_adapted(module: nn.Module) -> bool:
    # Of a model without adapters, the library need not be there.
    return type(module).__module__.startswith("peft.") and hasattr(module, "merge_and_unload")


def _source(spec: ModelSpec, base: nn.Module) -> Path | None:
    """Return the folder that a model of the library came from, if it is on this machine."""
    given = spec.source if spec.family == "hf" else getattr(base, "name_or_path", "")
    folder = Path(given or "")
    folder = folder.parent if folder.is_file() else folder
    return folder if given and (folder / _CONFIGURATION).is_file() else None


def _copy_besides(spec: ModelSpec, source: Path | None, folder: Path) -> None:
    """Copy what is no weights and was not written; of a tokenizer that was given, its files come first."""
    chosen: list[Path] = []
    if spec.tokenizer and Path(spec.tokenizer).is_file():
        beside = sorted(tokenizer_file(Path(spec.tokenizer)).parent.iterdir())
        chosen += [file for file in beside if file.name.startswith(_TOKENS)]
    chosen += sorted(source.iterdir()) if source is not None else []
    written = {file.name for file in folder.iterdir()} - {"generation_config.json"}
    for file in chosen:
        wanted = file.suffix in _BESIDES and not file.name.startswith(_OWN) and not file.name.endswith(".index.json")
        if wanted and file.is_file() and file.name not in written and file.name != _CONFIGURATION:
            shutil.copyfile(file, folder / file.name)
            written.add(file.name)
