"""Weights out and in: a run's checkpoint to a folder for others, a folder of weights to a checkpoint to begin with."""

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

from spantrain.app.weight_folder import STATISTICS, FoundWeights, find_weights, unused_weights
from spantrain.config.files.problems import shortened
from spantrain.core.checkpoint import SampleLedger, StoredFile
from spantrain.core.records import Record
from spantrain.core.shares import TensorPart
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError, UsageError
from spantrain.formats.precision import EXPORTED
from spantrain.models.adapters import HEAD, LORA, base_name
from spantrain.models.build import UnsplitModel, whole_model, whole_parameters
from spantrain.models.data.choice import tokenizer_file, with_own_functions
from spantrain.models.tracing.model import partly_drawn
from spantrain.runtime.checkpoint.holding import BUFFER, PARAMETER
from spantrain.runtime.checkpoint.manifest import CheckpointSet, Manifest, final_checkpoint, read_manifest
from spantrain.runtime.checkpoint.saver import CHECKPOINTS, write_device_file
from spantrain.runtime.checkpoint.tensor_file import Disk, TensorFiles, step_folder
from spantrain.runtime.control.requests import SavedFile
from spantrain.runtime.redistribution.exchange import ExchangeGroup
from spantrain.runtime.redistribution.transfer import TensorExchange

_SHARD = "5GB"
_CONFIGURATION = "config.json"
_OWN = ("model", "pytorch_model", "tf_model", "flax_model", "adapter_", "example.", "training_args", "optimizer.")
"""What names of files with weights begin with, or of those that are written here."""
_BESIDES = (".json", ".jinja", ".txt", ".model", ".md", ".tiktoken")
_TOKENS = ("tokenizer", "special_tokens", "added_tokens", "chat_template", "vocab", "merges")
EXAMPLE_FILE = "example.safetensors"
"""What went in and what came out when it was exported: `examples/load_exported.py` compares."""


class ExportOutcome(Record):
    """What was written."""

    folder: str
    model: str
    steps: int
    """Done when the checkpoint was saved."""
    parameters: int
    """Numbers in all."""
    size_bytes: int
    """Size of the weights' files."""
    loads_with: str
    """`transformers`, `peft` (adapters alone), or `safetensors` of a model that the library does not know."""
    logits_sha256: str
    """Digest of the output for the example input, as float32; empty where none could be made."""
    untrained: tuple[str, ...]
    """Parameters that the model has and does not use: as they were given, or initialised."""


def export_run(
    run: Path, to: Path, *, functions: Sequence[str] = (), dtype: str = "float32", merge: bool = False
) -> ExportOutcome:
    """Write the weights of a run's final checkpoint, the newest or the best, to a new folder.

    Args:
        run: its folder.
        to: what is written.
        functions: of the user's, as `FILE.py:FUNCTION`, that may be called if the run's model is one of them.
        dtype: one of `formats.precision.EXPORTED`, that weights are rounded to.
        merge: write adapters of `peft` as part of the weights that they adapt, not alone.

    Raises:
        UsageError: there is no such type, or there are no adapters to merge.
        ConfigError: there is no checkpoint, a file of it is damaged or on another machine, the folder holds something,
            or the model is of a function that may not be called.
    """
    if dtype not in EXPORTED:
        raise UsageError(f"--dtype must be one of {', '.join(EXPORTED)}, got {shortened(repr(dtype))}")
    check_new(to)
    folder = final_checkpoint(run)
    manifest = replace(saved := read_manifest(folder), model=with_own_functions(saved.model, functions))
    alone = LORA in manifest.model.config and not merge
    whole, untrained = (_adapters(folder, manifest), ()) if alone else trained_model(folder, manifest)
    partial = to.with_name(f".{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        example, logits_sha256 = _example(whole)
        loads_with, written = _save_as_given(whole.module, manifest.model, partial, dtype=dtype, merge=merge)
        if example:
            save_file(example, partial / EXAMPLE_FILE)
        partial.rename(to)  # in the place of an empty folder, if there is one
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{to}: cannot be written: {why}; choose another place") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return ExportOutcome(
        folder=str(to),
        model=manifest.model.name,
        steps=manifest.step,
        parameters=sum(one.numel() for name, one in written.items() if name not in untrained),
        size_bytes=sum(path.stat().st_size for path in to.glob("*model*.safetensors")),
        loads_with=loads_with,
        logits_sha256=logits_sha256,
        untrained=untrained,
    )


def check_new(folder: Path) -> None:
    """Refuse a folder to write to that holds something.

    Raises:
        ConfigError: it does, or is a file.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: is there already and not empty; name a new folder, or remove it")


def trained_model(folder: Path, manifest: Manifest) -> tuple[UnsplitModel, tuple[str, ...]]:
    """Return the unsplit model with a checkpoint's weights, and its parameters that it does not use.

    Those are as the folder that the model came from has them, or as they are made.

    Raises:
        ConfigError: a file is damaged or on another machine, or the checkpoint is not of the model it names.
    """
    weights, statistics = trained_parameters(folder, manifest), trained_statistics(folder, manifest)
    whole = whole_model(manifest.model, seed=manifest.job.seed if manifest.job else 0)
    with torch.no_grad():
        for name, value in statistics.items():
            whole.module.get_buffer(name).copy_(value)
        for name, value in weights.items():
            whole.module.get_parameter(name).copy_(value)
        filled = {id(whole.module.get_parameter(name)) for name in weights}
        unused = {name: one for name, one in whole.module.named_parameters() if id(one) not in filled}
        kept = {name: one for name, one in whole.module.named_buffers() if name.rpartition(".")[2] in STATISTICS}
        besides = unused | {name: one for name, one in kept.items() if name not in statistics}
        for name, value in unused_weights(manifest.model, besides).items():
            besides[name].copy_(value)
    return whole, tuple(unused)


def _adapters(folder: Path, manifest: Manifest) -> UnsplitModel:
    """Return the model of a folder with a checkpoint's adapters; its own weights, which may be many, are not read."""
    own = manifest.model
    names = [name for name in whole_parameters(own) if HEAD in name or base_name(own, name) is None]
    module = partly_drawn(own, names, seed=0)
    with torch.no_grad():
        for name, value in trained_parameters(folder, manifest, names).items():
            module.get_parameter(name).copy_(value)
    return UnsplitModel(module=module, inputs={})


def trained_parameters(folder: Path, manifest: Manifest, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return all parameters of a checkpoint, or those of some names, whole, by name.

    Raises:
        ConfigError: a file is damaged or on another machine, or the checkpoint is not of the model it names.
    """
    wanted = {
        PARAMETER + name: tuple(parameter.shape)
        for name, parameter in whole_parameters(manifest.model).items()
        if names is None or name in names
    }
    shapes = _shapes_in(manifest)
    if wrong := [name for name, shape in wanted.items() if shapes.get(name, shape) != shape]:
        raise ConfigError(f"{folder}: is not of model {manifest.model.name}: {', '.join(wrong[:3])} have other shapes")
    return _whole_tensors(folder, manifest, wanted)


def trained_statistics(folder: Path, manifest: Manifest) -> dict[str, Tensor]:
    """Return all running statistics of a checkpoint, whole, by name.

    Raises:
        ConfigError: a file is damaged or on another machine.
    """
    held = {name: shape for name, shape in _shapes_in(manifest).items() if name.startswith(BUFFER)}
    return _whole_tensors(folder, manifest, held)


def _shapes_in(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    return {name: stored.part.full_shape for file in manifest.files.values() for name, stored in file.tensors.items()}


def _whole_tensors(folder: Path, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    group = ExchangeGroup(own="here", peers=(), nearness=lambda _peer: 0)
    exchange = TensorExchange(group, manifest.files, TensorFiles(folder, manifest.files), None)
    found = exchange.run({name: TensorPart(full_shape=shape) for name, shape in shapes.items()})
    return {name.partition("/")[2]: tensor for name, tensor in found.items()}


def _example(whole: UnsplitModel) -> tuple[dict[str, Tensor], str]:
    """Return an input and what the model makes of it, and the digest of the latter; nothing where there is none."""
    if not whole.inputs:
        return {}, ""
    try:
        with torch.no_grad():
            result = whole.module(**whole.inputs)
    except (ValueError, RuntimeError, TypeError, AttributeError):  # it wants labels, too
        return {}, ""
    logits = getattr(result, "logits", result)
    if not isinstance(logits, Tensor):
        return {}, ""
    logits = logits.float().contiguous()
    inputs = {name: tensor.contiguous() for name, tensor in whole.inputs.items()}
    return {**inputs, "logits": logits}, hashlib.sha256(logits.numpy().tobytes()).hexdigest()


def _save_as_given(
    module: nn.Module, spec: ModelSpec, folder: Path, *, dtype: str, merge: bool
) -> tuple[str, Mapping[str, Tensor]]:
    """Write a model as its class would; return what loads it, and the parameters that were written.

    Adapters of `peft` are written alone, or with `merge` as part of the weights. Of the folder that the model came from
    everything is copied that is no weights; its `use_cache` is put back.

    Args:
        module: with the weights; used up.
        spec: of the model.
        folder: to be made.
        dtype: one of `formats.precision.EXPORTED`, that weights are rounded to.
        merge: add adapters to the weights that they adapt.

    Raises:
        UsageError: there are no adapters to merge.
        OSError, SafetensorError: it cannot be written.
    """
    from transformers import PreTrainedModel

    # Of a model without adapters, the library need not be there.
    adapters = type(module).__module__.startswith("peft.") and hasattr(module, "merge_and_unload")
    if merge and not adapters:
        raise UsageError(f"--merge: model {spec.name} has no adapters of peft to be merged; leave it out")
    for tensor in filter(torch.is_floating_point, (*module.parameters(), *module.buffers())):
        tensor.data = tensor.to(getattr(torch, dtype))
    model: Any = module
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
        return "peft", load_file(folder / "adapter_model.safetensors")
    return "transformers" if isinstance(model, PreTrainedModel) else "safetensors", dict(model.named_parameters())


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


_DEVICE = "imported"


class ImportOutcome(Record):
    """What was read."""

    run: str
    model: str
    checkpoint: str
    parameters: int
    """Numbers in all."""
    ignored: tuple[str, ...]
    """Tensors of the folder that the model has no parameter for, such as buffers."""


def import_weights(folder: Path, spec: ModelSpec, out: Path) -> ImportOutcome:
    """Make a checkpoint at step 0 of the weights in a folder: what `from_pretrained` reads, or `export` wrote.

    Raises:
        ConfigError: as `find_weights`; or `out` holds a checkpoint, or cannot be written.
    """
    if (out / CHECKPOINTS).exists():
        raise ConfigError(f"{out}: holds checkpoints already; name a new folder with --out")
    found = find_weights(folder, spec)
    no_run = Manifest(step=0, model=spec, plan=None, job=None, profile="", losses=(), ledger=SampleLedger())
    checkpoint = write_weights(found, out, no_run)
    return ImportOutcome(
        run=str(out), model=spec.name, checkpoint=str(checkpoint), parameters=found.parameters, ignored=found.ignored
    )


def write_weights(found: FoundWeights, out: Path, manifest: Manifest) -> Path:
    """Write a checkpoint at step 0 of weights, with what the manifest says of the run; return its folder.

    Raises:
        ConfigError: a file is damaged, or `out` cannot be written.
    """
    tensors = {PARAMETER + name: tensor.contiguous() for name, tensor in found.read().items()}
    seed = manifest.job.seed if manifest.job else 0
    if found.adapters:
        begun = partly_drawn(manifest.model, found.adapters, seed=seed)
        tensors |= {PARAMETER + name: begun.get_parameter(name).detach().contiguous() for name in found.adapters}
    tensors |= {BUFFER + name: tensor.contiguous() for name, tensor in found.read_statistics().items()}
    parts = {name: TensorPart(full_shape=tuple(tensor.shape)) for name, tensor in tensors.items()}
    try:
        name, file = write_device_file(Disk(), step_folder(out / CHECKPOINTS, 0), _DEVICE, tensors, parts)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}; choose another place") from None

    def describe(_saved: SavedFile, files: Mapping[str, StoredFile]) -> Manifest:
        return replace(manifest, files=files)

    complete = CheckpointSet(out, (_DEVICE,), keep=1, describe=describe)
    folder = complete.on_saved(SavedFile(step=0, name=name, file=file, scalars={}))
    assert folder is not None, "one device is all"
    return folder
