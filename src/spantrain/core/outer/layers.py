"""What the outer optimizer's shards hold: layers of named parameters, each on one shard, in runs as even as can be.

Streaming DiLoCo (Douillard et al., 2025) cuts a model into fragments that are exchanged at different steps; the better
of its two ways is kept: every so many-th layer is of one fragment. Decided here: a fragment has a layout of its own, in
which its layers are numbered anew, with a run on every shard, so that each of its pushes goes to all shards.

A layer is what is sent in one transfer, and updated together. Di-PS, 3.1: transfers are ordered by the layer; the
paper's layers are those of its transformers. Kept: that. Decided here: names alone say which layer a parameter is of,
and layers stand in the order of their names with numbers read as numbers, so that clusters which cut, wrap or order the
model differently come to the same layers. A block, as `model.layers.3`, is a layer, or several where it is large;
blocks are never put together, since a pipeline's cut may run between them.
"""

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from spantrain.core.records import Record
from spantrain.errors import UsageError
from spantrain.formats.codec import DTYPE_BYTES, BlockCodec
from spantrain.formats.registry import WireFormat

PARAMETER_TYPES: Mapping[str, int] = {name: DTYPE_BYTES[name] for name in ("bfloat16", "float16", "float32", "float64")}
"""Types that parameters may have, and bytes of one number."""
LAYER_TYPES: Mapping[str, int] = {**PARAMETER_TYPES, "uint8": DTYPE_BYTES["uint8"]}
"""Types that tensors of a layer may be sent as, and bytes of one number; uint8: codes of rounded numbers."""
PIECE_NUMBERS = 2**16
"""Numbers of a parameter that are rounded at once; what is sent is their codes and scales, piece after piece."""

MAX_DIMENSIONS, MAX_NAME_BYTES, MAX_PARAMETERS = 16, 512, 8192
"""Of a parameter, of its name, and of a layer."""
_TOO_MANY_BYTES = 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """A parameter by name: clusters may cut the model differently, the name is the same everywhere."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a parameter needs a name, got none; name it as the model's state dict does")
        if len(self.name.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"parameter {self.name:.60}...: a name has at most {MAX_NAME_BYTES} bytes")
        if len(self.shape) > MAX_DIMENSIONS:
            raise ValueError(
                f"parameter {self.name}: at most {MAX_DIMENSIONS} dimensions are sent, got {len(self.shape)}"
            )
        if any(size < 1 for size in self.shape):
            raise ValueError(f"parameter {self.name}: sizes must be at least 1, got shape {self.shape}")
        if self.dtype not in LAYER_TYPES:
            raise ValueError(f"parameter {self.name}: dtype must be one of {', '.join(LAYER_TYPES)}, got {self.dtype}")
        if self.size_bytes >= _TOO_MANY_BYTES:
            raise ValueError(f"parameter {self.name}: no machine holds shape {self.shape}")

    @property
    def numbers(self) -> int:
        """How many it has."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of its numbers."""
        return self.numbers * LAYER_TYPES[self.dtype]

    def sent_as(self, wire_format: WireFormat) -> "ParameterSpec":
        """Describe what its pseudo-gradient is sent as: itself, unless a format makes it smaller.

        >>> one = ParameterSpec(name="w", shape=(16, 16))
        >>> for wire_format in (WireFormat.NATIVE, WireFormat.BFLOAT16, WireFormat.INT8, WireFormat.INT4):
        ...     sent = one.sent_as(wire_format)
        ...     print(sent.dtype, sent.shape, sent.size_bytes)
        float32 (16, 16) 1024
        bfloat16 (16, 16) 512
        uint8 (260,) 260
        uint8 (136,) 136
        """
        codec = wire_format.codec
        dtype = codec.sent_type(self.dtype)
        if not isinstance(codec, BlockCodec) or dtype == self.dtype:
            return replace(self, dtype=dtype)
        pieces, rest = divmod(self.numbers, PIECE_NUMBERS)
        size_bytes = pieces * codec.entries(PIECE_NUMBERS) + codec.entries(rest)
        return replace(self, shape=(size_bytes,), dtype=dtype) if size_bytes < self.size_bytes else self


class Layer(Record):
    """Parameters that are sent in one transfer and updated together."""

    name: str
    parameters: tuple[ParameterSpec, ...]

    def __post_init__(self) -> None:
        if not self.name or not self.parameters:
            raise ValueError(f"a layer needs a name and parameters, got {self}")
        wrong = [f"{one.name}: {one.dtype}" for one in self.parameters if one.dtype not in PARAMETER_TYPES]
        if wrong:
            raise ValueError(
                f"layer {self.name}: parameters must be of {', '.join(PARAMETER_TYPES)}, got {', '.join(wrong[:8])}"
            )
        if len(self.parameters) > MAX_PARAMETERS or self.size_bytes >= _TOO_MANY_BYTES:
            raise ValueError(
                f"layer {self.name}: at most {MAX_PARAMETERS} parameters, of less than 2^63 bytes in all, are one "
                f"layer, got {len(self.parameters)} of {self.size_bytes} bytes; make smaller layers"
            )

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all its parameters."""
        return sum(parameter.size_bytes for parameter in self.parameters)

    def sent_as(self, wire_format: WireFormat) -> tuple[ParameterSpec, ...]:
        """Describe what its pseudo-gradients are sent as."""
        return tuple(parameter.sent_as(wire_format) for parameter in self.parameters)


class ShardRun(Record):
    """A shard, and the layers `first` up to, not including, `end` that it holds."""

    shard: str
    first: int
    end: int

    def __post_init__(self) -> None:
        if not self.shard or not 0 <= self.first < self.end:
            raise ValueError(f"a shard needs a name and 0 <= first < end, got {self}")

    @property
    def layers(self) -> range:
        """Indices of its layers."""
        return range(self.first, self.end)


class ShardLayout(Record):
    """All layers of the model, and which shard holds which; every layer once, in order.

    >>> weight = ParameterSpec(name="0.weight", shape=(2, 3))
    >>> bias = ParameterSpec(name="1.bias", shape=(3,))
    >>> layout = ShardLayout(
    ...     layers=(Layer(name="0", parameters=(weight,)), Layer(name="1", parameters=(bias,))),
    ...     runs=(ShardRun(shard="s0", first=0, end=1), ShardRun(shard="s1", first=1, end=2)))
    >>> layout.shards, layout.shard_of(1), layout.size_bytes
    (('s0', 's1'), 's1', 36)
    """

    layers: tuple[Layer, ...]
    runs: tuple[ShardRun, ...]

    def __post_init__(self) -> None:
        begins, ends = [run.first for run in self.runs], [run.end for run in self.runs]
        if [*begins, len(self.layers)] != [0, *ends]:
            raise ValueError(f"runs must hold each of {len(self.layers)} layers once and in order, got {self.runs}")
        _check_names("shard", [run.shard for run in self.runs])
        _check_names("layer", [layer.name for layer in self.layers])
        _check_names("parameter", [one.name for layer in self.layers for one in layer.parameters])

    @property
    def shards(self) -> tuple[str, ...]:
        """Names, in the order of their layers."""
        return tuple(run.shard for run in self.runs)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(layer.size_bytes for layer in self.layers)

    @cached_property
    def _shard_of(self) -> tuple[str, ...]:
        return tuple(run.shard for run in self.runs for _ in run.layers)

    def shard_of(self, layer: int) -> str:
        """Return the shard that holds a layer."""
        return self._shard_of[layer]

    def layers_of(self, shard: str) -> range:
        """Return the layers that a shard holds.

        Raises:
            KeyError: there is no such shard.
        """
        return {run.shard: run.layers for run in self.runs}[shard]


def _check_names(what: str, names: list[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise ValueError(f"each {what} must be there once, got {', '.join(twice)} more than once")


def divide(layers: Sequence[Layer], shards: Sequence[str], *, fragments: int = 1) -> ShardLayout:
    """Cut layers into one run for each shard, so that the largest has as few bytes as it can.

    Each run has a layer of each fragment at least. (Di-PS, 3: each server manages several layers; the paper does not
    say which.)

    Raises:
        ValueError: there are fewer layers than shards, or than all their fragments, or no shards.

    >>> from spantrain.core.outer.layers import ParameterSpec
    >>> layers = [Layer(name=f"{k}", parameters=(ParameterSpec(name=f"{k}.w", shape=(n,)),))
    ...           for k, n in enumerate((8, 1, 1, 3, 3))]
    >>> [list(run.layers) for run in divide(layers, ("s0", "s1")).runs]
    [[0], [1, 2, 3, 4]]
    """
    if not 1 <= len(shards) <= len(layers):
        raise ValueError(
            f"each shard needs a layer at least: got {len(shards)} shards for {len(layers)} layers; "
            f"use 1 to {len(layers)} shards"
        )
    if len(layers) < fragments * len(shards):
        raise ValueError(
            f"each of {len(shards)} shards needs a layer of each of {fragments} fragments at least: got {len(layers)} "
            f"layers; use 1 to {len(layers) // len(shards)} fragments"
        )
    sums = [0, *accumulate(layer.size_bytes for layer in layers)]
    low, high = max(upto - first for first, upto in zip(sums, sums[fragments:], strict=False)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _ends(sums, len(shards), middle, fragments)[-1] == len(layers):
            high = middle
        else:
            low = middle + 1
    ends = _ends(sums, len(shards), low, fragments)
    firsts = (0, *ends[:-1])
    runs = (ShardRun(shard=shard, first=k, end=end) for shard, k, end in zip(shards, firsts, ends, strict=True))
    return ShardLayout(layers=tuple(layers), runs=tuple(runs))


def _ends(sums: Sequence[int], shards: int, capacity_bytes: int, least: int) -> list[int]:
    """Return where runs end that are as long as a capacity lets them be, with `least` layers left for each further one.

    A run has so many itself: the capacity is no less than theirs.
    """
    ends: list[int] = []
    first = 0
    for later in reversed(range(shards)):
        fits = bisect_right(sums, sums[first] + capacity_bytes) - 1
        first = min(fits, len(sums) - 1 - least * later)
        ends.append(first)
    return ends


def fragment_layers(layers: Sequence[Layer], fragment: int, fragments: int) -> tuple[Layer, ...]:
    """Return the layers of a fragment: of three, layers 0, 3, 6, ... are of the first."""
    return tuple(layers[fragment::fragments])


def fragment_layouts(layout: ShardLayout, fragments: int) -> tuple[ShardLayout, ...]:
    """Return the layout of each fragment; one fragment is the whole.

    Raises:
        ValueError: a shard has fewer layers than there are fragments.

    >>> from spantrain.core.outer.layers import ParameterSpec
    >>> layers = [Layer(name=f"{k}", parameters=(ParameterSpec(name=f"{k}.w", shape=(1,)),)) for k in range(5)]
    >>> for one in fragment_layouts(divide(layers, ("s0", "s1"), fragments=2), 2):
    ...     print([layer.name for layer in one.layers], [(run.shard, run.first, run.end) for run in one.runs])
    ['0', '2', '4'] [('s0', 0, 2), ('s1', 2, 3)]
    ['1', '3'] [('s0', 0, 1), ('s1', 1, 2)]
    """
    short = [run.shard for run in layout.runs if len(run.layers) < fragments]
    if short:
        raise ValueError(
            f"{', '.join(short)} would hold fewer layers than there are fragments, {fragments}; use fewer fragments"
        )
    return tuple(
        ShardLayout(
            layers=fragment_layers(layout.layers, number, fragments),
            runs=tuple(
                # So many layers of the fragment are before the run's first, and before its end.
                ShardRun(
                    shard=run.shard, first=-((number - run.first) // fragments), end=-((number - run.end) // fragments)
                )
                for run in layout.runs
            ),
        )
        for number in range(fragments)
    )


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
