"""Units without weights of their own: for a device that takes them over from others while a run goes on."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from spantrain.core.units import ModelSpec
from spantrain.models.build import build_units, is_unedited
from spantrain.models.units import UnitModule

_DRAWS = ("bernoulli_", "normal_", "uniform_")
"""Operations that fill a tensor at random, in place."""


class _WithoutDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves tensors as they are that were to be filled at random, by this thread."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, unless it draws."""
        if func.overloadpacket.__name__ in _DRAWS:
            return args[0]
        return func(*args, **(kwargs or {}))


def blank_units(spec: ModelSpec, indices: Iterable[int], *, seed: int) -> list[UnitModule]:
    """Build units whose parameters hold anything; what is no parameter (masks, frozen statistics) is as ever.

    Of the catalog's families nothing is drawn. An unedited model may draw what is no parameter, by the rules of its
    author: it is built as `build_units` does, from the same seed.

    Raises:
        ValueError: an index is out of range.
        ConfigError: an unedited model cannot be built or followed.
    """
    if is_unedited(spec):
        return build_units(spec, indices, seed=seed)
    with _WithoutDraws():  # type: ignore[no-untyped-call]
        return build_units(spec, indices, seed=seed)
