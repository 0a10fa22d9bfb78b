"""The members of a tensor-parallel group: what they add and put together; those in processes are the runtime's own.

What crosses the group in a forward and in a backward pass are functions that autograd knows: f and g of Shoeybi et al.,
"Megatron-LM" (2019, section 3), the pair that Korthikanti et al. put in their place for slices of a sequence (2022,
section 4.2.2), and gathering of what all use alike. None of them takes a parameter, so that the weights' half of a
backward pass (W) holds no operation of the group (but for `OwnHeadsOfBias`): I, or a full backward, has them all, in an
order that depends on the graph alone, which is the same on all members.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Work = Callable[[Tensor], Tensor]


class TensorGroup:
    """One member's view of its group. All members call the same operations in the same order.

    As it stands, a group of one device, whose tensors are their own sums and all there is.
    """

    rank = 0
    """The member's place in the group."""
    size = 1
    """Number of members."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Add the members' tensors, of equal shapes, in place; every member gets the same bits."""

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:  # noqa: ARG002
        """Return the members' tensors behind each other along `dim`; `sizes` are their lengths there, by rank."""
        return tensor

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:  # noqa: ARG002
        """Return the own piece along `dim` of the sum of the members' tensors; `sizes` are those of all, by rank."""
        return tensor


class ThreadGroup(TensorGroup):
    """Members in threads of one process: the fake, for tests and for trying a division without processes."""

    turn: "threading.Lock | None" = None
    """Whoever has it runs, up to where members meet; None: all run at once."""

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
        self._wait()
        parts = [part for part in self._laid_down if part is not None]
        self._wait()
        if len(parts) != (0 if tensor is None else self.size):
            raise RuntimeError(f"{len(parts)} of {self.size} members wait for an operation, the others have ended")
        return parts

    def _wait(self) -> None:
        """Wait for the others, whose turn it is."""
        if self.turn is None:
            self._barrier.wait()
            return
        self.turn.release()
        try:
            self._barrier.wait()
        finally:
            self.turn.acquire()


def summed(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, added in their order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def run_members(size: int, work: Callable[[ThreadGroup], T], *, in_turns: bool = False) -> list[T]:
    """Run `work` once for each member of a group of threads, at once or in turns; return the results by rank.

    Raises:
        Exception: what the first member that failed by itself raised.
    """
    members, turn = ThreadGroup.together(size), threading.Lock() if in_turns else None

    def one(member: ThreadGroup) -> T:
        member.turn = turn
        try:
            with turn or nullcontext():
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


class _Crossing(torch.autograd.Function):
    """One operation forward, and another one on the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Work, back: Work) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _crossing(tensor: Tensor, there: Work, back: Work) -> Tensor:
    return _Crossing.apply(tensor, there, back)  # type: ignore[no-untyped-call, no-any-return]


def _sum(tensor: Tensor, group: TensorGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total


def _piece(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return a copy of the member's own piece."""
    return tensor.split_with_sizes(list(sizes), dim)[group.rank].clone(memory_format=torch.contiguous_format)


def sum_parts(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum of the members' tensors, which all of them use in the same way."""
    return _crossing(tensor, lambda part: _sum(part, group), lambda gradient: gradient)


def gather_parts(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the members' tensors behind each other; each member computes another part from it."""
    whole = group.all_gather(tensor.detach(), sizes, dim)
    return _crossing(tensor, lambda _: whole, lambda gradient: group.reduce_scatter(gradient, sizes, dim))


def gather_same(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the members' tensors behind each other; every member computes the same from it."""
    whole = group.all_gather(tensor.detach(), sizes, dim)
    return _crossing(tensor, lambda _: whole, lambda gradient: _piece(gradient, group, sizes, dim))


def gather_both(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> tuple[Tensor, Tensor]:
    """Return what `gather_parts` and what `gather_same` would, gathered once."""
    whole = group.all_gather(tensor.detach(), sizes, dim)
    parts = _crossing(tensor, lambda _: whole, lambda gradient: group.reduce_scatter(gradient, sizes, dim))
    same = whole.view_as(whole)
    return parts, _crossing(tensor, lambda _: same, lambda gradient: _piece(gradient, group, sizes, dim))


def scatter_parts(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the own piece along `dim` of the sum of the members' tensors."""
    return _crossing(
        tensor,
        lambda part: group.reduce_scatter(part, sizes, dim),
        lambda gradient: group.all_gather(gradient, sizes, dim),
    )


def scatter_same(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the own piece along `dim` of a tensor that all members have."""
    return _crossing(
        tensor, lambda whole: _piece(whole, group, sizes, dim), lambda gradient: group.all_gather(gradient, sizes, dim)
    )


class InputCopy:
    """A tensor that all members have and each uses in part; its gradient is summed over the group.

    Several modules of a unit read one: queries, keys and values, or a gate and what it gates. Their gradients are added
    first and summed over the group once.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._tensor: Tensor | None = None
        self._copied: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor's copy; the one made before, if this very tensor came last."""
        if self._copied is None or self._tensor is not tensor:
            self._tensor = tensor
            self._copied = _crossing(
                tensor, lambda whole: whole.view_as(whole), lambda gradient: _sum(gradient, self._group)
            )
        return self._copied

    def forget(self) -> None:
        """Let go of the tensor: a unit's pass is over."""
        self._tensor = self._copied = None
