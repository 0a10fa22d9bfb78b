"""The members of a tensor-parallel group: what they add and put together, really or among threads.

What crosses a tensor-parallel group in a forward and in a backward pass, as functions that autograd knows.

They are f and g of Shoeybi et al., "Megatron-LM" (2019, section 3), the pair that Korthikanti et al. put in their place
for slices of a sequence (2022, section 4.2.2), and gathering of what all use alike. None of them takes a parameter, so
that the weights' half of a backward pass (W) holds no operation of the group (but for `positions`): I, or a full
backward, has them all, in an order that depends on the graph alone, which is the same on all members.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from spantrain.errors import PeerLostError

T = TypeVar("T")


class TensorGroup(Protocol):
    """One member's view of its group. All members call the same operations in the same order."""

    @property
    def rank(self) -> int:
        """The member's place in the group."""

    @property
    def size(self) -> int:
        """Number of members."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Add the members' tensors, of equal shapes, in place; every member gets the same bits."""

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Return the members' tensors behind each other along `dim`; `sizes` are their lengths there, by rank."""

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Return the own piece along `dim` of the sum of the members' tensors; `sizes` are those of all, by rank."""


class TorchGroup:
    """Members in processes of their own, joined by torch.distributed: Gloo, or NCCL between CUDA devices."""

    def __init__(self, process_group: ProcessGroup, *, rank: int, size: int) -> None:
        """Take a group that exists; its owner destroys it."""
        self._process_group = process_group
        self.rank = rank
        self.size = size
        self.spent_s = 0.0
        """Seconds inside of its operations, with the wait for other members; on CUDA only what it takes to queue."""
        self.calls = 0
        """Number of operations."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Add the members' tensors in place.

        Raises:
            PeerLostError: another member went away.
        """
        self._timed(lambda: dist.all_reduce(tensor, group=self._process_group))

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Return the members' tensors behind each other; shorter ones travel padded to the longest.

        Raises:
            PeerLostError: another member went away.
        """
        longest = max(sizes)
        sent = tensor.movedim(dim, 0)
        if sent.shape[0] < longest:
            sent = torch.cat([sent, sent.new_zeros(longest - sent.shape[0], *sent.shape[1:])])
        sent = sent.contiguous()
        received = [torch.empty_like(sent) for _ in sizes]
        self._timed(lambda: dist.all_gather(received, sent, group=self._process_group))
        parts = [part[:length].movedim(0, dim) for part, length in zip(received, sizes, strict=True)]
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Return the own piece of the sum: members exchange pieces and add them in the order of ranks.

        Raises:
            PeerLostError: another member went away.
        """
        sent = tensor.movedim(dim, 0).contiguous()
        own = sizes[self.rank]
        received = sent.new_empty(self.size * own, *sent.shape[1:])
        self._timed(
            lambda: dist.all_to_all_single(received, sent, [own] * self.size, list(sizes), group=self._process_group)
        )
        return _summed(received.view(self.size, own, *sent.shape[1:]).unbind()).movedim(0, dim)

    def _timed(self, operation: Callable[[], object]) -> None:
        start_s = time.perf_counter()
        try:
            operation()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PeerLostError(f"another member of this tensor-parallel group went away: {error}") from error
        self.spent_s += time.perf_counter() - start_s
        self.calls += 1


class _Meeting:
    """Where threads of one group lay down their tensors and take up the others'."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.laid_down: list[Tensor] = [torch.empty(0)] * size


class ThreadGroup:
    """Members in threads of one process: the fake, for tests and for trying a division without processes."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        """Use `together`, which makes all members at once."""
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.barrier.parties
        self.operations: list[str] = []
        """What was called, in order, with the tensor's shape."""

    @classmethod
    def together(cls, size: int, *, timeout_s: float = 60.0) -> list["ThreadGroup"]:
        """Return the members of one group; a member that waits longer for another gives up."""
        meeting = _Meeting(size, timeout_s)
        return [cls(meeting, rank) for rank in range(size)]

    def all_reduce(self, tensor: Tensor) -> None:
        """Add the members' tensors in place, in the order of ranks."""
        self.operations.append(f"all_reduce{list(tensor.shape)}")
        parts = self._exchange(tensor.clone())
        assert all(part.shape == tensor.shape for part in parts), f"unlike shapes: {[part.shape for part in parts]}"
        tensor.copy_(_summed(parts))

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
        return _summed([part.split_with_sizes(list(sizes), dim)[self.rank] for part in parts])

    def leave(self) -> None:
        """Give up: members that wait for this one fail at once."""
        self._meeting.barrier.abort()

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._meeting.laid_down[self.rank] = tensor
        self._meeting.barrier.wait()
        parts = list(self._meeting.laid_down)
        self._meeting.barrier.wait()
        return parts


def _summed(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors, added in their order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def run_members(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """Run `work` once for each member of a group of threads and return the results by rank.

    Raises:
        Exception: what the first member that failed by itself raised.
    """
    members = ThreadGroup.together(size)

    def one(member: ThreadGroup) -> T:
        finished = False
        try:
            result = work(member)
            finished = True
            return result
        finally:
            if not finished:
                member.leave()

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(one, member) for member in members]
        errors = [error for error in (future.exception() for future in running) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in running]


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.group.all_reduce(total)
        return total, None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup) -> Tensor:  # noqa: ARG004 - the signature is torch's
        total = tensor.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004 - the signature is torch's
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,  # noqa: ARG004 - what the gradient is of
        gathered: tuple[Tensor],
        group: TensorGroup,
        sizes: Sequence[int],
        dim: int,
        used_by_parts: bool,
    ) -> Tensor:
        # In a tuple, so that torch takes it for a result and not for an argument that is handed on.
        ctx.group, ctx.sizes, ctx.dim, ctx.used_by_parts = group, sizes, dim, used_by_parts
        return gathered[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        if ctx.used_by_parts:
            own = ctx.group.reduce_scatter(gradients[0], ctx.sizes, ctx.dim)
        else:
            own = _piece(gradients[0], ctx.group, ctx.sizes, ctx.dim)
        return own, None, None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int, sums: bool) -> Tensor:
        ctx.group, ctx.sizes, ctx.dim = group, sizes, dim
        return group.reduce_scatter(tensor, sizes, dim) if sums else _piece(tensor, group, sizes, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.group.all_gather(gradients[0], ctx.sizes, ctx.dim), None, None, None, None


def _piece(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return a copy of the member's own piece."""
    own = tensor.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank])
    return own.clone(memory_format=torch.contiguous_format)


def sum_gradients(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Return the tensor, which all members have and each uses in part; its gradient is summed over the group."""
    copied: Tensor = _SumGradients.apply(tensor, group)  # type: ignore[no-untyped-call]
    return copied


def sum_parts(tensor: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum of the members' tensors, which all of them use in the same way."""
    total: Tensor = _SumParts.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


def gather_parts(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the members' tensors behind each other; each member computes another part from it."""
    return _gathered(tensor, group.all_gather(tensor.detach(), sizes, dim), group, sizes, dim, used_by_parts=True)


def gather_same(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the members' tensors behind each other; every member computes the same from it."""
    return _gathered(tensor, group.all_gather(tensor.detach(), sizes, dim), group, sizes, dim, used_by_parts=False)


def gather_both(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> tuple[Tensor, Tensor]:
    """Return what `gather_parts` and what `gather_same` would, gathered once."""
    whole = group.all_gather(tensor.detach(), sizes, dim)
    parts = _gathered(tensor, whole, group, sizes, dim, used_by_parts=True)
    return parts, _gathered(tensor, whole.view_as(whole), group, sizes, dim, used_by_parts=False)


def _gathered(
    tensor: Tensor, whole: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int, *, used_by_parts: bool
) -> Tensor:
    found: Tensor = _Gather.apply(tensor, (whole,), group, sizes, dim, used_by_parts)  # type: ignore[no-untyped-call]
    return found


def scatter_parts(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the own piece along `dim` of the sum of the members' tensors."""
    own: Tensor = _Scatter.apply(tensor, group, sizes, dim, True)  # type: ignore[no-untyped-call]
    return own


def scatter_same(tensor: Tensor, group: TensorGroup, sizes: Sequence[int], dim: int) -> Tensor:
    """Return the own piece along `dim` of a tensor that all members have."""
    own: Tensor = _Scatter.apply(tensor, group, sizes, dim, False)  # type: ignore[no-untyped-call]
    return own


class InputCopy:
    """`sum_gradients`, once for a tensor that several modules of a unit read.

    Queries, keys and values, or a gate and what it gates, read one tensor. Their gradients are added first and
    summed over the group once.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        self._tensor: Tensor | None = None
        self._copied: Tensor | None = None

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return the tensor's copy; the one made before, if this very tensor came last."""
        if self._copied is None or self._tensor is not tensor:
            self._tensor, self._copied = tensor, sum_gradients(tensor, self._group)
        return self._copied

    def forget(self) -> None:
        """Let go of the tensor: a unit's pass is over."""
        self._tensor = self._copied = None
