"""The update of the outer optimizer on whole tensors, and snapshots in memory: what the real ones are checked by."""

from collections.abc import Iterable

import torch
from torch import Tensor

from spantrain.outer.rules.registry import OuterRule
from spantrain.outer.shard.numerics import Tensors, step_along, velocity_type
from spantrain.outer.shard.snapshots import ShardVersion, to_keep


def pseudo_gradient(start: Tensors, now: Tensors) -> dict[str, Tensor]:
    """Return start minus now, by name.

    Raises:
        ValueError: they are not of the same names and shapes.
    """
    if start.keys() != now.keys() or any(start[name].shape != now[name].shape for name in start):
        unlike = sorted(name for name in start.keys() | now.keys() if _shape(start, name) != _shape(now, name))
        raise ValueError(f"start and end of a round must hold the same parameters, but differ in {', '.join(unlike)}")
    return {name: start[name].detach() - now[name].detach() for name in start}


def _shape(tensors: Tensors, name: str) -> object:
    return tensors[name].shape if name in tensors else None


def nesterov(
    parameter: Tensor, gradient: Tensor, velocity: Tensor, rule: OuterRule, *, part: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return a new parameter and a new velocity; nothing is changed in place. `part`: of a whole step.

    >>> from spantrain.outer.rules.nesterov import Nesterov
    >>> rule = Nesterov(learning_rate=1.0, momentum=0.0)
    >>> nesterov(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([0.0]), rule)[0]
    tensor([2.])
    """
    faster = gradient.detach().to(velocity_type(parameter.dtype), copy=True).contiguous()
    new = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    step_along(faster, parameter, (velocity,), rule, scale=1.0, part=part, out=new)
    return new, faster


class MemorySnapshots:
    """Keeps versions in memory."""

    def __init__(self, kept: Iterable[ShardVersion] = (), *, keep: int = 4) -> None:
        self._keep = keep
        self._kept = {one.version: one for one in kept}
        self._fragments: dict[int, MemorySnapshots] = {}

    def of_fragment(self, fragment: int) -> "MemorySnapshots":
        """Return where versions of a fragment of the layers are kept; of the first it is this."""
        return self._fragments.setdefault(fragment, MemorySnapshots(keep=self._keep)) if fragment else self

    @property
    def versions(self) -> tuple[int, ...]:
        """Those that are there, from the oldest."""
        return tuple(sorted(self._kept))

    def save(self, version: ShardVersion) -> None:
        """Keep a version, and as many of those before it as fit."""
        self._kept[version.version] = version
        for old in set(self._kept) - set(to_keep(self._kept, self._keep)):
            del self._kept[old]

    def load(self, version: int) -> ShardVersion | None:
        """Return a version, if it is there."""
        return self._kept.get(version)
