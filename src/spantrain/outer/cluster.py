"""A cluster's side of the arithmetic: where its round began, what it pushed, and a new version under what it did since.

Di-PS, 2.1 and 3.2. Kept: after an update the cluster goes on from the new version. Decided here: a push is start minus
now (see `policy.outer.master`), and where the paper has the cluster wait it trains on, while its push waits for an
update and while a version comes; what it did meanwhile is put on top of the new version, and goes into its next push. A
push that came to nothing stays part of the next. So nothing is lost and nothing counted twice, however long an exchange
takes.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from spantrain.errors import ProtocolError
from spantrain.outer.numerics import Tensors, pseudo_gradient

__all__ = ["ClusterCopy"]


class ClusterCopy:
    """The parameters that a cluster trains, and the two points in time that it must remember of them.

    Takes two copies beside the parameters, on the device that they are on.

    >>> weight = torch.tensor([3.0])
    >>> copy = ClusterCopy({"weight": weight})
    >>> _ = weight.sub_(1.0)
    >>> copy.push()
    {'weight': tensor([1.])}
    >>> _ = weight.sub_(0.5)
    >>> copy.pulled({"weight": torch.tensor([10.0])}, counted=True)
    >>> weight
    tensor([9.5000])
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """Begin a round; the parameters are the ones that are trained, and are changed in place."""
        self._live = dict(parameters)
        self._start = self._copied()
        self._pushed: dict[str, Tensor] | None = None

    def _copied(self) -> dict[str, Tensor]:
        return {name: one.detach().clone() for name, one in self._live.items()}

    def first(self) -> dict[str, Tensor]:
        """Return the parameters themselves, as first parameters for the shards."""
        self._pushed = self._copied()
        return dict(self._pushed)

    def push(self) -> dict[str, Tensor]:
        """Return the pseudo-gradient since the round began; an earlier push that has not ended is part of it."""
        self._pushed = self._copied()
        return pseudo_gradient(self._start, self._pushed)

    def skipped(self) -> None:
        """Note that the push came to nothing: the round goes on from the same start."""
        self._pushed = None

    @torch.no_grad()
    def pulled(self, version: Tensors, *, counted: bool) -> None:
        """Begin a round from a version; `counted` says that the push was part of an update, left out or not.

        Raises:
            ProtocolError: it does not hold these parameters; nothing has changed.
        """
        unlike = sorted(n for n in self._live.keys() | version.keys() if _shape(self._live, n) != _shape(version, n))
        if unlike:
            raise ProtocolError(f"a pulled version differs from the model in {', '.join(unlike)}; nothing was changed")
        since = self._pushed if counted and self._pushed is not None else self._start
        waiting = None if counted else self._pushed
        for name, one in self._live.items():
            new = version[name].detach()
            one.copy_(new + (one - since[name]))
            if waiting is not None:
                waiting[name] = new + (waiting[name] - self._start[name])
            self._start[name] = new.clone()
        self._pushed = waiting


def _shape(tensors: Tensors, name: str) -> object:
    return tuple(tensors[name].shape) if name in tensors else None
