"""Weights in a folder, as the library writes them: where each parameter of a model lies there."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spantrain.config.files.text_files import check_tensor_header
from spantrain.core.names import few
from spantrain.core.records import Record
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.adapters import base_name
from spantrain.models.build import UnsplitParameter, library_names, whole_buffers, whole_parameters, whole_statistics

_OTHER = frozenset({".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".pt", ".pth"})
"""Weights in files that are not read here: most run code when they are."""
_NO_WEIGHTS = ("optimizer", "rng_state", "scaler", "scheduler", "training_args")
"""What such files begin with that a trainer leaves beside weights."""
_EXAMPLES = "example"
"""Files of examples beside weights begin with this; they hold none."""
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""What normalizations call what they keep of batches."""
_EXACT = ("F32", "BF16", "F16")
"""Types that float32 holds exactly, as safetensors names them."""
_COMPLEX = "C64"


class StoredWeight(Record):
    """A tensor in a file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it."""


class FoundWeights(Record):
    """Where the weights of a model lie; not read yet."""

    places: Mapping[str, StoredWeight]
    """By the parameter's name in the model."""
    ignored: tuple[str, ...]
    """Tensors of the folder that the model has no parameter for."""
    adapters: tuple[str, ...]
    """Parameters that the folder's model has not, of adapters: they begin as they are made."""
    statistics: Mapping[str, StoredWeight | Tensor]
    """Running statistics: their places, or what the model is made with, where the folder has none of them."""
    joined: Mapping[str, StoredWeight] = field(default_factory=dict)
    """Parameters that the library puts together of several tensors, as it has them."""
    model: Any = None
    """The library's, which has these."""

    @property
    def parameters(self) -> int:
        """Numbers in all."""
        return sum(math.prod(place.shape) for place in (*self.places.values(), *self.joined.values()))

    def read(self) -> dict[str, Tensor]:
        """Return the parameters by name, in the types that they have there.

        Raises:
            ConfigError: a file is damaged, or the library finds no tensors for a parameter.
        """
        found: dict[str, Tensor] = {}
        for file in dict.fromkeys(place.file for place in self.places.values()):
            with _opened(file) as tensors:
                own = ((name, place) for name, place in self.places.items() if place.file == file)
                found |= {name: tensors.get_tensor(place.name) for name, place in own}
        for folder in {place.file for place in self.joined.values()}:
            try:
                loaded, told = type(self.model).from_pretrained(
                    folder, config=self.model.config, dtype=torch.float32, use_safetensors=True, local_files_only=True,
                    output_loading_info=True,
                )  # fmt: skip
            except (RuntimeError, OSError, ValueError) as error:
                why = str(error).strip().partition("\n")[0]
                raise ConfigError(f"{folder}: the transformers library cannot read it: {why}") from None
            if missing := sorted(told["missing_keys"]):
                raise ConfigError(f"{folder}: holds another model than --model: {missing[0]} is missing")
            found |= {name: loaded.get_parameter(place.name).detach() for name, place in self.joined.items()}
        return found

    def read_statistics(self) -> dict[str, Tensor]:
        """Return the running statistics by name.

        Raises:
            ConfigError: a file is damaged.
        """
        return {name: one if isinstance(one, Tensor) else _read(one) for name, one in self.statistics.items()}


def find_weights(folder: Path, spec: ModelSpec) -> FoundWeights:
    """Find the weights of a model in a folder's safetensors files; nothing else is read.

    Names are those of the unsplit model; a model without its head's name in front (as the library's base models are
    saved) is understood too.

    Raises:
        ConfigError: there are no such files, or they are damaged, lack parameters, or have others of this name, by
            shape or type, or have other buffers than those that the model is made with and keeps.
    """
    tensors = _stored(folder)
    whole = whole_parameters(spec)
    wanted = {name: base for name in whole if (base := base_name(spec, name)) is not None}
    other = library_names(spec, tensors) if not tensors.keys() >= set(wanted.values()) else None
    if other is not None:
        tensors = {other.renamed.get(name, name): place for name, place in tensors.items()}
    # What stands before most names of the model and before none in the folder was left out there.
    ((most, _),) = Counter(base.partition(".")[0] + "." for base in wanted.values()).most_common(1)
    left_out = "" if any(name.startswith(most) for name in tensors) else most
    there = {
        name: (
            base.removeprefix(left_out),
            *(base_name(spec, alias) or alias for alias in whole[name].other_names),
            *(alias.removeprefix(left_out) for alias in (other.shared.get(base, ()) if other else ())),
        )
        for name, base in wanted.items()
    }
    joined = {
        name: StoredWeight(file=folder, name=wanted[name], shape=whole[name].shape, dtype="F32")
        for name, names in there.items()
        if other is not None and other.joined and not any(own in tensors for own in names)
    }
    for place in (tensors[name] for name in (other.joined if other and joined else ())):
        if place.dtype not in _EXACT:  # quantized ones among them
            raise ConfigError(f"{folder}: {place.name} has type {place.dtype}, wanted float32 or shorter")
    found, used = _assigned(folder, tensors, {name: whole[name] for name in wanted if name not in joined}, there)
    statistics, own = _statistics_in(folder, tensors, left_out, spec)
    used |= {name for name, place in tensors.items() if place in statistics.values()}
    ignored = tuple(sorted(set(tensors) - used - (other.joined if other and joined else frozenset())))
    _check_buffers(folder, tensors, ignored, spec)
    return FoundWeights(
        places=found,
        ignored=ignored,
        adapters=tuple(name for name in whole if name not in wanted),
        statistics={**own, **statistics},
        joined=joined,
        model=None if other is None else other.model,
    )


def unused_weights(spec: ModelSpec, unused: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the folder of an `hf:` model has of what the model does not use, by name."""
    folder = Path(spec.source)
    if not unused or spec.family != "hf" or not any(folder.glob("*.safetensors")):
        return {}
    there = _stored(folder)
    places = {name: place for name, place in there.items() if name in unused}
    return {name: _read(place) for name, place in places.items() if place.shape == tuple(unused[name].shape)}


def _statistics_in(
    folder: Path, tensors: Mapping[str, StoredWeight], left_out: str, spec: ModelSpec
) -> tuple[dict[str, StoredWeight], dict[str, Tensor]]:
    """Return the places of running statistics, and those that the model is made with where the folder has none."""
    shapes = whole_statistics(spec)
    names = {name: (base_name(spec, name) or name).removeprefix(left_out) for name in shapes}
    found = {name: tensors[there] for name, there in names.items() if there in tensors}
    if wrong := [name for name, place in found.items() if place.shape != shapes[name]]:
        raise ConfigError(f"{folder}: holds another model than --model: {', '.join(wrong[:3])} have other shapes")
    made = whole_buffers(spec) if found.keys() != shapes.keys() else {}
    return found, {name: made[name] for name in shapes if name not in found}


def _read(place: StoredWeight) -> Tensor:
    with _opened(place.file) as tensors:
        found: Tensor = tensors.get_tensor(place.name)
    return found.float() if found.is_floating_point() else found


def _stored(folder: Path) -> dict[str, StoredWeight]:
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith(_EXAMPLES))
    if not files:
        raise ConfigError(f"{folder}: holds no *.safetensors; write them with the model's save_pretrained")
    found: dict[str, StoredWeight] = {}
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                part = tensors.get_slice(name)
                found[name] = StoredWeight(file=file, name=name, shape=tuple(part.get_shape()), dtype=part.get_dtype())
    return found


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    check_tensor_header(file)
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}; copy or save it again") from None


def _assigned(
    folder: Path,
    tensors: Mapping[str, StoredWeight],
    wanted: Mapping[str, UnsplitParameter],
    names: Mapping[str, tuple[str, ...]],
) -> tuple[dict[str, StoredWeight], set[str]]:
    """Return the place of each parameter, and which of the `names` that it may have there are in the folder."""
    found: dict[str, StoredWeight] = {}
    used: set[str] = set()
    problems = []
    for name, parameter in wanted.items():
        there = [own for own in names[name] if own in tensors]
        used.update(there)
        if not there:
            problems.append(f"{name} is missing")
            continue
        place = tensors[there[0]]
        if place.shape != parameter.shape:
            problems.append(f"{place.name} has shape {list(place.shape)}, wanted {list(parameter.shape)}")
        elif place.dtype not in ((_COMPLEX,) if parameter.is_complex else _EXACT):
            wanted_type = "complex64" if parameter.is_complex else "float32 or shorter"
            problems.append(f"{place.name} has type {place.dtype}, wanted {wanted_type}")
        else:
            found[name] = place
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ConfigError(f"{folder}: holds another model than --model: {'; '.join(problems[:3])}{more}")
    return found, used


def _check_buffers(folder: Path, tensors: Mapping[str, StoredWeight], names: Iterable[str], spec: ModelSpec) -> None:
    """Refuse buffers that would be lost: units have those that the model is made with.

    Running statistics that no unit has are of what the model does not use, as `unused_weights`.
    """
    names = [name for name in names if name.rpartition(".")[2] not in STATISTICS]
    own = whole_buffers(spec) if names else {}
    lost = []
    for name in (name for name in names if name in own):
        with _opened(tensors[name].file) as stored:
            there = stored.get_tensor(tensors[name].name)
        if not torch.equal(there.to(own[name].dtype), own[name]):
            lost.append(name)
    if lost:
        raise ConfigError(
            f"{folder}: {lost[0]} ({len(lost)} such in all) is not what the model is made with, and would be lost; "
            "write a function that returns the model with its weights and buffers, and give FILE.py:FUNCTION"
        )


class FirstWeights(Record):
    """Where weights come from."""

    text: str = ""
    """For people; empty: from where they always come, of a model by name or of a function."""
    found: FoundWeights | None = None
    """To be read; None: they are drawn, or a function of the user's makes them."""


def first_weights(spec: ModelSpec, *, from_scratch: bool) -> FirstWeights:
    """Say what a model's weights begin with; those of an `hf:` folder are looked at, and not read yet.

    Raises:
        ConfigError: the folder has weights that cannot be read, or are of another model, and it was not asked to leave
            them; it is not on this machine; or there are no weights that could be left.
    """
    folder = Path(spec.source)
    if spec.family != "hf":
        if from_scratch:
            raise ConfigError(f"--from-scratch: model {spec.name} reads no folder of weights; leave out the option")
        return FirstWeights()
    if from_scratch or not spec.source:
        return FirstWeights(text=f"Random weights, from scratch: none are read from {folder}")
    ways = "read them with `spantrain import` and go on with --resume, or begin with random ones: --from-scratch"
    if not folder.exists():
        raise ConfigError(
            f"model {spec.name}: {folder} is not on this machine, so it cannot be told whether it has weights; copy it "
            f"here, {ways}"
        )
    if folder.is_file():
        return FirstWeights(text=f"Random weights: {folder} is a configuration alone")
    if any(folder.glob("*.safetensors")):
        try:
            found = find_weights(folder, spec)
        except ConfigError as error:
            raise ConfigError(f"{error}; or begin with random weights: --from-scratch") from None
        return FirstWeights(text=f"Weights of {folder}: {found.parameters} parameters{_besides(found)}", found=found)
    other = [path.name for path in sorted(folder.iterdir()) if path.suffix in _OTHER]
    other = [name for name in other if not name.startswith(_NO_WEIGHTS)]
    if other:
        raise ConfigError(
            f"model {spec.name}: {folder} has weights in {other[0]}, and only *.safetensors are read; write them with "
            f"save_pretrained(..., safe_serialization=True), or {ways}"
        )
    return FirstWeights(text=f"Random weights: {folder} has a configuration and no weights")


def _besides(found: FoundWeights) -> str:
    unused = f"; not used: {few(found.ignored)}" if found.ignored else ""
    adapters = f"; {len(found.adapters)} of adapters begin as they are made" if found.adapters else ""
    return f"{adapters}{unused}"
