"""A tensor-parallel group whose members are threads of one process: the fake of those in processes."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from spantrain.models.tensor_parallel.group import TensorGroup, summed

T = TypeVar("T")


class ThreadGroup(TensorGroup):
    """Members in threads of one process."""

    def __init__(self, barrier: threading.Barrier, laid_down: list[Tensor | None], rank: int) -> None:
        """Use `together`, which makes all members at once: they lay tensors down and take up the others'."""
        self._barrier = barrier
        self._laid_down = laid_down
        self.rank = rank
        self.size = barrier.parties
        self.operations: list[str] = []
        """What was called, in order, with the tensor's shape."""

    @classmethod
    def together(cls, size: int) -> list["ThreadGroup"]:
        """Return the members of one group."""
        barrier, laid_down = threading.Barrier(size), list[Tensor | None]([None] * size)
        return [cls(barrier, laid_down, rank) for rank in range(size)]

    def all_reduce(self, tensor: Tensor) -> None:
        """Add the members' tensors in place, in the order of ranks."""
        self.operations.append(f"all_reduce{list(tensor.shape)}")
        parts = self._exchange(tensor.clone())
        assert all(part.shape == tensor.shape for part in parts), f"unlike shapes: {[part.shape for part in parts]}"
        tensor.copy_(summed(parts))

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Return the members' tensors behind each other along `dim`."""
        self.operations.append(f"all_gather{list(tensor.shape)}")
        parts = self._exchange(tensor.clone())
        assert [part.shape[dim] for part in parts] == list(sizes), f"sizes {sizes}, got {[p.shape for p in parts]}"
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Return the own piece along `dim` of the sum, added in the order of ranks."""
        self.operations.append(f"reduce_scatter{list(tensor.shape)}")
        parts = self._exchange(tensor.clone())
        assert all(part.shape == tensor.shape for part in parts), f"unlike shapes: {[part.shape for part in parts]}"
        assert sum(sizes) == tensor.shape[dim], f"sizes {sizes} of {tensor.shape[dim]}"
        return summed([part.split_with_sizes(list(sizes), dim)[self.rank] for part in parts])

    def leave(self) -> None:
        """Give up: members that wait for this one fail at once."""
        self._barrier.abort()

    def _exchange(self, tensor: Tensor | None) -> list[Tensor]:
        self._laid_down[self.rank] = tensor
        self._barrier.wait()
        parts = [part for part in self._laid_down if part is not None]
        self._barrier.wait()
        if len(parts) != (0 if tensor is None else self.size):
            raise RuntimeError(f"{len(parts)} of {self.size} members wait for an operation, the others have ended")
        return parts


def run_members(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `work` once for each member of a group of threads, at once; return the results by rank.

    Raises:
        Exception: what the first member that failed by itself raised.
    """
    members = ThreadGroup.together(size)

    def one(member: ThreadGroup) -> T:
        try:
            found = work(member)
            member._exchange(None)  # all have come to their end
            return found
        except BaseException:
            member.leave()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(one, member) for member in members]
        errors = [error for error in (future.exception() for future in running) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in running]
