"""What the outer optimizer's shards hold: layers of named parameters, each on one shard, in contiguous runs."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from spantrain.formats.codec import DTYPE_BYTES
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
        if not codec.in_rows or dtype == self.dtype:
            return replace(self, dtype=dtype)
        pieces, rest = divmod(self.numbers, PIECE_NUMBERS)
        size_bytes = pieces * codec.entries(PIECE_NUMBERS) + codec.entries(rest)
        return replace(self, shape=(size_bytes,), dtype=dtype) if size_bytes < self.size_bytes else self


@dataclass(frozen=True, kw_only=True)
class Layer:
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


@dataclass(frozen=True, kw_only=True)
class ShardRun:
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


@dataclass(frozen=True, kw_only=True)
class ShardLayout:
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
