"""What the outer optimizer's shards hold: layers of named parameters, each on one shard, in contiguous runs."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

__all__ = ["LAYER_TYPES", "Layer", "ParameterSpec", "ShardLayout", "ShardRun"]

LAYER_TYPES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Types that parameters may have, and bytes of one number."""


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """A parameter by name: clusters may cut the model differently, the name is the same everywhere."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a parameter needs a name, got none; name it as the model's state dict does")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"parameter {self.name}: sizes must be at least 1, got shape {self.shape}")
        if self.dtype not in LAYER_TYPES:
            raise ValueError(f"parameter {self.name}: dtype must be one of {', '.join(LAYER_TYPES)}, got {self.dtype}")

    @property
    def size_bytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * LAYER_TYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Parameters that are sent in one transfer and updated together."""

    name: str
    parameters: tuple[ParameterSpec, ...]

    def __post_init__(self) -> None:
        if not self.name or not self.parameters:
            raise ValueError(f"a layer needs a name and parameters, got {self}")

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all its parameters."""
        return sum(parameter.size_bytes for parameter in self.parameters)


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
        if [k for run in self.runs for k in run.layers] != list(range(len(self.layers))):
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
