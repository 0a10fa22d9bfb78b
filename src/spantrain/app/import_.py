"""Import: from a folder of weights to a checkpoint that a run begins with."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from spantrain.config.files import check_tensor_header
from spantrain.core.checkpoint import SampleLedger, StoredFile
from spantrain.core.parts import TensorPart
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.whole import WholeParameter, whole_parameters
from spantrain.runtime.checkpoint.complete import CheckpointSet
from spantrain.runtime.checkpoint.holding import PARAMETER
from spantrain.runtime.checkpoint.manifest import CHECKPOINTS, Manifest
from spantrain.runtime.checkpoint.saver import SavedFile, step_folder, write_device_file
from spantrain.runtime.checkpoint.storage import Disk
from spantrain.runtime.checkpoint.tensor_file import dtype_name

__all__ = ["ImportOutcome", "import_weights"]

_DEVICE = "imported"
_EXAMPLES = "example"
"""Files of examples beside weights begin with this; they hold none."""
_EXACT = (torch.float32, torch.bfloat16, torch.float16)
"""Types that float32 holds exactly."""


@dataclass(frozen=True, kw_only=True)
class ImportOutcome:
    """What was read."""

    run: str
    model: str
    checkpoint: str
    parameters: int
    """Numbers in all."""
    converted: tuple[str, ...]
    """Parameters that were of a shorter type and are float32 now, exactly."""
    ignored: tuple[str, ...]
    """Tensors of the folder that the model has no parameter for, such as buffers."""


def import_weights(folder: Path, spec: ModelSpec, out: Path) -> ImportOutcome:
    """Make a checkpoint at step 0 of the weights in a folder: what `from_pretrained` reads, or `export` wrote.

    Only safetensors files are read. Names are those of the unsplit model; a model without its head's name in front (as
    the library's base models are saved) is understood too.

    Raises:
        ConfigError: there are no such files, or they are damaged, lack parameters, or have others of this name, by
            shape or type; or `out` holds a checkpoint.
    """
    if (out / CHECKPOINTS).exists():
        raise ConfigError(f"{out}: holds checkpoints already; name a new folder with --out")
    tensors = _read(folder)
    found, used = _assigned(folder, tensors, whole_parameters(spec))
    converted = tuple(name for name, tensor in found.items() if tensor.dtype != torch.float32)
    checkpoint = _write(out, spec, {name: tensor.float() for name, tensor in found.items()})
    return ImportOutcome(
        run=str(out),
        model=spec.name,
        checkpoint=str(checkpoint),
        parameters=sum(tensor.numel() for tensor in found.values()),
        converted=converted,
        ignored=tuple(sorted(set(tensors) - used)),
    )


def _read(folder: Path) -> dict[str, Tensor]:
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith(_EXAMPLES))
    if not files:
        raise ConfigError(f"{folder}: holds no *.safetensors; write them with the model's save_pretrained")
    tensors: dict[str, Tensor] = {}
    for path in files:
        check_tensor_header(path)
        try:
            tensors |= load_file(path)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}; copy or save it again") from None
    return tensors


def _assigned(
    folder: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, WholeParameter]
) -> tuple[dict[str, Tensor], set[str]]:
    """Return the tensor of each parameter, and the names that they and their copies have in the folder."""
    found: dict[str, Tensor] = {}
    used: set[str] = set()
    problems = []
    left_out = _prefix_left_out(tensors, wanted)
    for name, parameter in wanted.items():
        there = [own for own in (name.removeprefix(left_out), *parameter.other_names) if own in tensors]
        used.update(there)
        if not there:
            problems.append(f"{name} is missing")
        elif tuple(tensors[there[0]].shape) != parameter.shape:
            problems.append(f"{there[0]} has shape {list(tensors[there[0]].shape)}, wanted {list(parameter.shape)}")
        elif tensors[there[0]].dtype not in _EXACT:
            problems.append(f"{there[0]} has type {dtype_name(tensors[there[0]].dtype)}, wanted float32 or shorter")
        else:
            found[name] = tensors[there[0]]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ConfigError(f"{folder}: holds another model than --model: {'; '.join(problems[:3])}{more}")
    return found, used


def _prefix_left_out(tensors: Mapping[str, Tensor], wanted: Iterable[str]) -> str:
    """Return what stands before most names of the model and before none in the folder; empty if there is no such."""
    ((most, _),) = Counter(name.partition(".")[0] + "." for name in wanted).most_common(1)
    return "" if any(name.startswith(most) for name in tensors) else most


def _write(out: Path, spec: ModelSpec, weights: Mapping[str, Tensor]) -> Path:
    def describe(saved: SavedFile, files: Mapping[str, StoredFile]) -> Manifest:
        return Manifest(
            step=saved.step, model=spec, plan=None, job=None, profile="", losses=(),
            ledger=SampleLedger(), files=files,
        )  # fmt: skip

    tensors = {PARAMETER + name: tensor.contiguous() for name, tensor in weights.items()}
    parts = {name: TensorPart(full_shape=tuple(tensor.shape)) for name, tensor in tensors.items()}
    try:
        name, file = write_device_file(Disk(), step_folder(out / CHECKPOINTS, 0), _DEVICE, tensors, parts)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror}; choose another place") from None
    complete = CheckpointSet(out, (_DEVICE,), keep=1, describe=describe)
    folder = complete.on_saved(SavedFile(step=0, name=name, file=file, scalars={}))
    assert folder is not None, "one device is all"
    return folder
