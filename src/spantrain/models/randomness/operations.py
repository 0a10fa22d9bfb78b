"""Operations of torch that draw, done with numbers that are given: what torch's own functions call inside."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spantrain.models.randomness.counter import at_least, fractions

if TYPE_CHECKING:
    from spantrain.models.randomness.draws import SeededDraws


class DrawnOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws inside one function of torch."""

    def __init__(self, draws: "SeededDraws") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Do an operation; one that draws otherwise than torch does."""
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **given)
        schema = func._schema
        name = schema.name.removeprefix("aten::")
        named = {entry.name: entry.default_value for entry in schema.arguments}
        named |= dict(zip((entry.name for entry in schema.arguments), args, strict=False)) | given
        if name == "native_dropout":
            return self._dropped(named)
        found = _NUMBERS[name](self._draws, named) if name in _NUMBERS else None
        if found is None:
            self._draws.note_unlike(str(func))
            return func(*args, **given)
        return args[0].copy_(found) if name.endswith("_") else found

    def _dropped(self, named: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        given, chance = named["input"], float(named["p"])
        if named["train"] is False or chance == 0.0:
            return given.clone(), torch.ones_like(given, dtype=torch.bool)
        kept = self._draws.drawn(given.shape, given.device, lambda bits: at_least(bits, chance), like=given)
        return given * kept * (1.0 / (1.0 - chance) if chance < 1.0 else 0.0), kept


def _bernoulli(draws: "SeededDraws", named: Mapping[str, Any]) -> Tensor:
    like, chance = named["self"], named.get("p")
    if isinstance(chance, Tensor) or chance is None:
        chances = like if chance is None else chance
        found = draws.drawn(like.shape, like.device, lambda bits: fractions(bits, torch.float32), like=like)
        return (found < chances).to(like.dtype)
    found = draws.drawn(like.shape, like.device, lambda bits: at_least(bits, 1.0 - chance), like=like)
    return found.to(like.dtype)


def _uniform(draws: "SeededDraws", named: Mapping[str, Any]) -> Tensor:
    shape, device, dtype, like = _wanted(named)
    low, high = named.get("from", 0.0), named.get("to", 1.0)
    found = draws.drawn(shape, device, lambda bits: fractions(bits, dtype), like=like)
    return found if (low, high) == (0.0, 1.0) else found * (high - low) + low


def _normal(draws: "SeededDraws", named: Mapping[str, Any]) -> Tensor | None:
    if "self" not in named and ("mean" in named or "size" not in named):
        return None
    shape, device, dtype, like = _wanted(named)
    mean, deviation = named.get("mean", 0.0), named.get("std", 1.0)
    return draws.drawn(shape, device, lambda numbers: numbers * deviation + mean, like=like, normal=True).to(dtype)


def _whole(draws: "SeededDraws", named: Mapping[str, Any]) -> Tensor | None:
    shape, device, dtype, like = _wanted(named, torch.int64)
    low, high = named.get("low", 0), named.get("high")
    if high is None or isinstance(high, Tensor):
        return None

    def made(bits: Tensor) -> Tensor:
        found: Tensor = low + (((bits.to(torch.int64) & 0xFFFFFFFF) * (high - low)) >> 32)
        return found

    return draws.drawn(shape, device, made, like=like).to(dtype)


def _exponential(draws: "SeededDraws", named: Mapping[str, Any]) -> Tensor:
    shape, device, dtype, like = _wanted(named)
    rate = named.get("lambd", 1.0)

    return draws.drawn(shape, device, lambda bits: _waits(bits) / rate, like=like).to(dtype)


def _waits(bits: Tensor) -> Tensor:
    """Return numbers of the exponential distribution of rate 1."""
    return fractions(bits, torch.float32, above_zero=True).log().neg()


def _chosen(draws: "SeededDraws", named: Mapping[str, Any]) -> Tensor:
    """Return categories by their weights; without repeats the largest of weights over exponential draws."""
    weights = named["self"].to(torch.float32)
    if named.get("replacement"):
        shape = (*weights.shape[:-1], named["num_samples"])
        found = draws.drawn(shape, weights.device, lambda bits: fractions(bits, torch.float32), like=weights)
        sums = weights.cumsum(-1)
        index: Tensor = torch.searchsorted(sums, found * sums[..., -1:], right=True)
        return index

    found = draws.drawn(weights.shape, weights.device, _waits, like=weights)
    chosen: Tensor = (weights / found).topk(named["num_samples"], dim=-1).indices
    return chosen


def _order(draws: "SeededDraws", named: Mapping[str, Any]) -> Tensor:
    dtype, device = named.get("dtype"), torch.device(named.get("device") or torch.get_default_device())
    found = draws.drawn((named["n"],), device, lambda bits: bits)
    return found.argsort(stable=True).to(dtype if isinstance(dtype, torch.dtype) else torch.int64)


def _wanted(
    named: Mapping[str, Any], usual: torch.dtype | None = None
) -> tuple[Sequence[int], torch.device, torch.dtype, Tensor | None]:
    """Return the shape, device and type of what is to be drawn, and the tensor that it is drawn like."""
    like: Tensor | None = named.get("self")
    dtype = named.get("dtype")
    dtype = dtype if isinstance(dtype, torch.dtype) else None  # a default of the schema is a number
    if like is not None:
        return like.shape, named.get("device") or like.device, dtype or like.dtype, like
    device = torch.device(named.get("device") or torch.get_default_device())
    return named["size"], device, dtype or usual or torch.get_default_dtype(), None


_NUMBERS: Mapping[str, Callable[["SeededDraws", Mapping[str, Any]], Tensor | None]] = MappingProxyType(
    {
        "bernoulli": _bernoulli,
        "bernoulli_": _bernoulli,
        "exponential_": _exponential,
        "multinomial": _chosen,
        "normal_": _normal,
        "rand": _uniform,
        "rand_like": _uniform,
        "randint": _whole,
        "randint_like": _whole,
        "randn": _normal,
        "randn_like": _normal,
        "randperm": _order,
        "uniform_": _uniform,
    }
)
"""By name: what an operation would give; None: that is not known."""
