"""Export: from a run's checkpoint to a folder that the transformers library loads, or a plain state dict."""

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from spantrain.core.shares import TensorPart
from spantrain.errors import ConfigError
from spantrain.models.whole import WholeModel, whole_model, whole_parameters
from spantrain.runtime.checkpoint.holding import PARAMETER
from spantrain.runtime.checkpoint.manifest import Manifest, latest_checkpoint, read_manifest
from spantrain.runtime.checkpoint.tensor_file import TensorFiles
from spantrain.runtime.redistribution.transfer import ExchangeGroup, TensorExchange
from spantrain.runtime.worker.user_functions import with_own_functions

EXAMPLE_FILE = "example.safetensors"
"""What went in and what came out when it was exported: `examples/load_exported.py` compares."""
_MODEL_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class ExportOutcome:
    """What was written."""

    folder: str
    model: str
    steps: int
    """Done when the checkpoint was saved."""
    parameters: int
    """Numbers in all."""
    size_bytes: int
    """Of the weights' files."""
    loads_with: str
    """`transformers`, or `safetensors` of a model that the library does not know."""
    logits_sha256: str
    """Of the output for the example input, as float32; empty where none could be made."""
    untrained: tuple[str, ...]
    """Parameters that the model has and does not use: they are as they were initialised."""


def export_run(run: Path, to: Path, *, functions: Sequence[str] = ()) -> ExportOutcome:
    """Write the weights of a run's newest checkpoint to a new folder.

    `functions` of the user's, as `FILE.py:FUNCTION`, may be called if the run's model is one of them.

    Raises:
        ConfigError: there is no checkpoint, a file of it is damaged or on another machine, the folder holds something,
            or the model is of a function that may not be called.
    """
    check_new(to)
    folder = latest_checkpoint(run)
    manifest = manifest_with(read_manifest(folder), functions)
    weights = trained_parameters(folder, manifest)
    whole = whole_model(manifest.model, seed=manifest.job.seed if manifest.job else 0)
    untrained = _fill(whole.module, weights)
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        loads_with = _write(whole.module, partial)
        logits_sha256 = _write_example(whole, partial)
        if to.exists():
            to.rmdir()
        partial.rename(to)
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{to}: cannot be written: {why}; choose another place") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return ExportOutcome(
        folder=str(to),
        model=manifest.model.name,
        steps=manifest.step,
        parameters=sum(tensor.numel() for tensor in weights.values()),
        size_bytes=sum(path.stat().st_size for path in to.glob("model*.safetensors")),
        loads_with=loads_with,
        logits_sha256=logits_sha256,
        untrained=untrained,
    )


def manifest_with(manifest: Manifest, functions: Sequence[str]) -> Manifest:
    """Return a manifest with these functions of the user's in the place of those that its model names.

    Raises:
        ConfigError: it names one that is not among them.
    """
    return replace(manifest, model=with_own_functions(manifest.model, functions))


def check_new(folder: Path) -> None:
    """Refuse a folder to write to that holds something.

    Raises:
        ConfigError: it does, or is a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is there already and not empty; name a new folder, or remove it")


def trained_parameters(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return all parameters of a checkpoint, whole, by name.

    Raises:
        ConfigError: a file is damaged or on another machine, or the checkpoint is not of the model it names.
    """
    wanted = {
        PARAMETER + name: TensorPart(full_shape=parameter.shape)
        for name, parameter in whole_parameters(manifest.model).items()
    }
    shapes = {name: stored.part.full_shape for file in manifest.files.values() for name, stored in file.tensors.items()}
    wrong = [name for name, part in wanted.items() if name in shapes and shapes[name] != part.full_shape]
    if wrong:
        raise ConfigError(f"{folder}: is not of model {manifest.model.name}: {', '.join(wrong[:3])} have other shapes")
    group = ExchangeGroup(own="here", peers=(), nearness=lambda _peer: 0)
    found = TensorExchange(group, manifest.files, TensorFiles(folder, manifest.files), None).run(wanted)
    return {name.removeprefix(PARAMETER): tensor for name, tensor in found.items()}


def _fill(module: nn.Module, weights: dict[str, Tensor]) -> tuple[str, ...]:
    """Give a model its trained weights; return the names of parameters that there are none for."""
    filled = set()
    with torch.no_grad():
        for name, value in weights.items():
            parameter = module.get_parameter(name)
            parameter.copy_(value)
            filled.add(id(parameter))
    return tuple(name for name, parameter in module.named_parameters() if id(parameter) not in filled)


def _write(module: nn.Module, folder: Path) -> str:
    """Write configuration and weights; return what loads them."""
    from transformers import PreTrainedModel

    folder.mkdir(parents=True)
    if isinstance(module, PreTrainedModel):
        module.save_pretrained(folder)
        return "transformers"
    save_model(module, str(folder / _MODEL_FILE))
    return "safetensors"


def _write_example(whole: WholeModel, folder: Path) -> str:
    """Write an input and what the model makes of it; return the digest of the latter."""
    if not whole.inputs:
        return ""
    with torch.no_grad():
        result = whole.module(**whole.inputs)
    logits = getattr(result, "logits", result)
    if not isinstance(logits, Tensor):
        return ""
    logits = logits.float().contiguous()
    inputs = {name: tensor.contiguous() for name, tensor in whole.inputs.items()}
    save_file({**inputs, "logits": logits}, folder / EXAMPLE_FILE)
    return hashlib.sha256(logits.numpy().tobytes()).hexdigest()
