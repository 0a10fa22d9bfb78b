"""The processes of a cluster that train one model together: the first decides, all do the same at the same step.

What the first tells the others is a few whole numbers, by a group of its own over Gloo: no accelerator has to wait for
the processor that decides, and nothing is pickled.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """How the processes of a cluster agree: here of one, which has nobody to ask."""

    rank = 0
    size = 1

    def agree(self, numbers: Sequence[int]) -> list[int]:
        """Return the first process's numbers; each process gives as many."""
        told = torch.tensor(numbers, dtype=torch.int64)
        self.share(told)
        return [int(number) for number in told.tolist()]

    def total(self, number: int) -> int:
        """Return the sum of all processes' numbers."""
        return sum(int(text) for text in self.gather(str(number)))

    def share(self, tensor: Tensor) -> None:
        """Make a tensor what it is in the first process; on an accelerator by the cluster's own group."""

    def carry(self, tensor: Tensor, source: int, target: int) -> None:
        """Make a tensor on the processor in one process what it is in another; the others do nothing."""

    def gather(self, text: str) -> list[str]:
        """Return each process's text."""
        return [text]

    def close(self) -> None:
        """Let go of what was made for this."""


class TorchRanks(Ranks):
    """Processes that torch.distributed has brought together."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """Make a group for small messages; every process of `group`, by default all, does so at once."""
        self._group = group or dist.group.WORLD
        self._ranks = dist.get_process_group_ranks(self._group)
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self._small = dist.new_group(self._ranks, backend="gloo", use_local_synchronization=True)

    def share(self, tensor: Tensor) -> None:
        """Make a tensor what it is in the first process; on an accelerator by the cluster's own group."""
        dist.broadcast(tensor, self._ranks[0], group=self._small if tensor.device.type == "cpu" else self._group)

    def carry(self, tensor: Tensor, source: int, target: int) -> None:
        """Make a tensor on the processor in one process what it is in another; the others do nothing."""
        if source != target and self.rank == source:
            dist.send(tensor, self._ranks[target], group=self._small)
        elif source != target and self.rank == target:
            dist.recv(tensor, self._ranks[source], group=self._small)

    def gather(self, text: str) -> list[str]:
        """Return each process's text."""
        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in self._ranks]
        dist.all_gather(sizes, torch.tensor([len(own)]), group=self._small)
        told = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in self._ranks]
        dist.all_gather(told, torch.nn.functional.pad(own, (0, len(told[0]) - len(own))), group=self._small)
        return [one[: int(size)].numpy().tobytes().decode() for one, size in zip(told, sizes, strict=True)]

    def close(self) -> None:
        """Let go of the group for small messages."""
        if dist.is_initialized():
            dist.destroy_process_group(self._small)


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """Return the processes of a group; by default all that torch.distributed knows of, else this one alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return TorchRanks(group) if dist.get_world_size(group) > 1 else Ranks()
