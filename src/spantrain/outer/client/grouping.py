"""Parameters by name, put together into layers: what is sent in one transfer, and updated together.

Di-PS, 3.1: transfers are ordered by the layer; the paper's layers are those of its transformers. Kept: that. Decided
here: names alone say which layer a parameter is of, and layers stand in the order of their names with numbers read as
numbers, so that clusters which cut, wrap or order the model differently come to the same layers. A block, as
`model.layers.3`, is a layer, or several where it is large; blocks are never put together, since a pipeline's cut may
run between them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from spantrain.core.outer.layers import PARAMETER_TYPES, Layer, ParameterSpec
from spantrain.errors import UsageError

LAYER_BYTES = 16 * 2**20
"""A block with more is several layers: small enough to share shards evenly, large enough for a link far away."""

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What DistributedDataParallel, torch.compile, FSDP and activation checkpoints put into names."""


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers of the model have put into it.

    >>> plain_name("module.h.0._orig_mod.weight"), plain_name("weight")
    ('h.0.weight', 'weight')
    """
    *path, last = name.split(".")
    return ".".join([*(part for part in path if part not in _WRAPPERS), last])


def block_of(name: str) -> str:
    """Return the block that a parameter is of: up to its first number, else the module that owns it.

    >>> block_of("model.layers.3.attention.q.weight"), block_of("model.norm.weight"), block_of("scale")
    ('model.layers.3', 'model.norm', 'scale')
    """
    path = name.split(".")[:-1]
    numbers = [index for index, part in enumerate(path) if part.isdecimal()]
    return ".".join(path[: numbers[0] + 1] if numbers else path) or name


def spec_of(name: str, tensor: Tensor) -> ParameterSpec:
    """Describe a parameter; of one that is divided among processes, the whole.

    Raises:
        ValueError: it is empty, or of a type that cannot be averaged.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in PARAMETER_TYPES:
        raise ValueError(f"parameter {name}: dtype must be one of {', '.join(PARAMETER_TYPES)}, got {dtype}")
    return ParameterSpec(name=name, shape=tuple(tensor.shape), dtype=dtype)


def group_layers(parameters: Iterable[ParameterSpec], *, layer_bytes: int = LAYER_BYTES) -> tuple[Layer, ...]:
    """Return layers: blocks, those of more bytes cut between parameters; one large parameter stays whole.

    >>> names = ("h.10.w", "h.2.w", "h.2.b", "out.w")
    >>> [(layer.name, [one.name for one in layer.parameters])
    ...  for layer in group_layers(ParameterSpec(name=name, shape=(4,)) for name in names)]
    [('h.2', ['h.2.b', 'h.2.w']), ('h.10', ['h.10.w']), ('out', ['out.w'])]
    """
    blocks: dict[str, list[ParameterSpec]] = {}
    for one in sorted(parameters, key=lambda one: (_by_number(block_of(one.name)), _by_number(one.name))):
        blocks.setdefault(block_of(one.name), []).append(one)
    return tuple(layer for block, inside in blocks.items() for layer in _cut(block, inside, layer_bytes))


def _by_number(name: str) -> list[tuple[bool, int, str]]:
    """Return what names are ordered by: `h.2` comes before `h.10`."""
    parts = [part for part in re.split(r"(\d+)|\.", name) if part]
    return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _cut(block: str, inside: Sequence[ParameterSpec], layer_bytes: int) -> list[Layer]:
    pieces: list[list[ParameterSpec]] = [[]]
    for one in inside:
        if pieces[-1] and sum(other.size_bytes for other in pieces[-1]) + one.size_bytes > layer_bytes:
            pieces.append([])
        pieces[-1].append(one)
    names = [block] if len(pieces) == 1 else [f"{block}/{number}" for number in range(len(pieces))]
    return [Layer(name=name, parameters=tuple(piece)) for name, piece in zip(names, pieces, strict=True)]


def named_layers(parameters: Iterable[ParameterSpec], names: Mapping[str, Sequence[str]]) -> tuple[Layer, ...]:
    """Return layers as somebody wants them: parameters' names by the layer's.

    Raises:
        UsageError: a parameter is in none, in several, or is not there.
    """
    specs = {one.name: one for one in parameters}
    wanted = [name for inside in names.values() for name in inside]
    problems = [
        *(f"{name} is in no layer" for name in specs if name not in wanted),
        *(f"{name} is in {wanted.count(name)} layers" for name in sorted(set(wanted)) if wanted.count(name) > 1),
        *(f"there is no parameter {name}" for name in wanted if name not in specs),
        *(f"layer {layer} is empty" for layer, inside in names.items() if not inside),
    ]
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise UsageError(f"layers: {'; '.join(problems[:4])}{more}; each parameter must be in one layer")
    return tuple(Layer(name=layer, parameters=tuple(specs[name] for name in inside)) for layer, inside in names.items())
