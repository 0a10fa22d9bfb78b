"""Devices that exchange tensors: one alone, or a process group of torch. Tests have groups of threads."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from spantrain.models.tensor_parallel.group import TensorGroup, summed
from spantrain.runtime.gradients.rings import SiteRing, blaming_peers

T = TypeVar("T")


class MemberGroup(TensorGroup):
    """Devices that exchange tensors in more ways than tensor-parallel modules need; as it stands, one device too."""

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], None]:  # noqa: ARG002
        """Begin to add the members' tensors, of equal shapes, in place; return what waits until that is done."""
        return lambda: None

    def begin_reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Callable[[], Tensor]:  # noqa: ARG002
        """Begin to sum flat tensors that are alike, of which each member gets so many elements behind each other.

        Returns:
            What waits, and returns the own elements; the tensor may be anything then.
        """
        return lambda: tensor

    def begin_all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Callable[[], Tensor]:  # noqa: ARG002
        """Begin to lay the members' flat tensors, of so many elements each, behind each other.

        Returns:
            What waits, and returns all of them; not counted as an exchange, as others go on beside.
        """
        return lambda: tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Replace a tensor by that of one member."""

    def announce(self, numbers: Tensor) -> None:
        """Replace a tensor on the processor by the leader's; not counted as an exchange, since others wait for it."""

    def send(self, tensor: Tensor, target: int) -> None:  # noqa: ARG002
        """Send a contiguous tensor to one member, which receives it; where there is one."""
        raise AssertionError("a group of one sends nothing")

    def receive(self, tensor: Tensor, source: int) -> None:  # noqa: ARG002
        """Fill a contiguous tensor with what one member sends; where there is one."""
        raise AssertionError("a group of one receives nothing")

    def forget_exchanges(self) -> None:
        """Begin to count exchanges anew."""

    @property
    def exchanging_s(self) -> float:
        """Own seconds in exchanges since they were forgotten, waiting for others included."""
        return 0.0

    def exchanged_s(self) -> float:
        """Return the seconds of all exchanges since they were forgotten; all members ask together.

        Who comes last to an exchange waits for nobody, so its time is the network's alone, if its process had a
        processor all the while. Each exchange therefore counts as the shortest that any member saw of any exchange of
        its kind and size among them.
        """
        return 0.0


class TorchMembers(MemberGroup):
    """A process group of torch: Gloo, or NCCL for what lies on CUDA devices.

    Operations raise `PeerLostError` where another member went away.
    """

    def __init__(self, group: ProcessGroup, *, spread: bool = False) -> None:
        """Take a group that exists; its owner destroys it.

        Are members in several sites, it is `spread`: what is begun goes round a ring of our own
        (`runtime.gradients.rings`).
        """
        self.process_group = group
        self.rank, self.size = group.rank(), group.size()
        self._ring = SiteRing(group) if spread and not self.on_cards and self.size > 1 else None
        self._seconds: dict[tuple[str, int], list[float]] = {}
        """Of exchanges by kind and bytes, with the wait for other members; on CUDA only what it takes to queue."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the members."""
        with self._timed("all_reduce", tensor.nbytes):
            dist.all_reduce(tensor, group=self.process_group)

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to replace a tensor by its sum over the members; not counted as an exchange, as others go on beside."""
        if self._ring is not None:
            return self._ring.begin_all_reduce(tensor)
        return _begun(lambda: dist.all_reduce(tensor, group=self.process_group, async_op=True), lambda: None)

    def begin_reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to bring each member its elements of the sum: they exchange them and add them in the order of ranks."""
        if self._ring is not None:
            return self._ring.begin_sum(tensor, sizes)
        own = sizes[self.rank]
        received = tensor.new_empty(self.size * own)
        sent, group = (received, tensor, [own] * self.size, list(sizes)), self.process_group
        return _begun(
            lambda: dist.all_to_all_single(*sent, group=group, async_op=True),
            lambda: summed(received.view(self.size, own).unbind()),
        )

    def begin_all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to lay the members' flat tensors behind each other; shorter ones travel padded to the longest."""
        if self._ring is not None:
            return self._ring.begin_gather(tensor, sizes)
        sent = _padded(tensor, max(sizes))
        received = [torch.empty_like(sent) for _ in sizes]
        return _begun(
            lambda: dist.all_gather(received, sent, group=self.process_group, async_op=True),
            lambda: torch.cat([part[:length] for part, length in zip(received, sizes, strict=True)]),
        )

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Return the members' tensors behind each other; shorter ones travel padded to the longest."""
        longest = max(sizes)
        sent = _padded(tensor.movedim(dim, 0), longest)
        received = [torch.empty_like(sent) for _ in sizes]
        # By the bytes of all parts, which members name alike, those too that give nothing.
        with self._timed("all_gather", sum(sizes) * sent.nbytes // max(1, longest)):
            dist.all_gather(received, sent, group=self.process_group)
        parts = [part[:length].movedim(0, dim) for part, length in zip(received, sizes, strict=True)]
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Return the own piece of the members' sum: they exchange pieces and add them in the order of ranks."""
        sent = tensor.movedim(dim, 0).contiguous()
        own = sizes[self.rank]
        received = sent.new_empty(self.size * own, *sent.shape[1:])
        with self._timed("reduce_scatter", tensor.nbytes):
            dist.all_to_all_single(received, sent, [own] * self.size, list(sizes), group=self.process_group)
        return summed(received.view(self.size, own, *sent.shape[1:]).unbind()).movedim(0, dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Replace a tensor by that of one member."""
        with self._timed("broadcast", tensor.nbytes):
            dist.broadcast(tensor, group=self.process_group, group_src=source)

    def announce(self, numbers: Tensor) -> None:
        """Replace a tensor on the processor by the leader's."""
        with blaming_peers():
            dist.broadcast(numbers, group=self.process_group, group_src=0)

    def send(self, tensor: Tensor, target: int) -> None:
        """Send a contiguous tensor to one member; Gloo sends from the processor's memory only."""
        with blaming_peers():
            dist.send(tensor if self.on_cards else tensor.cpu(), group=self.process_group, group_dst=target)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous tensor with what one member sends."""
        landing = tensor if self.on_cards else tensor.cpu()
        with blaming_peers():
            dist.recv(landing, group=self.process_group, group_src=source)
        if landing is not tensor:
            tensor.copy_(landing)

    def forget_exchanges(self) -> None:
        """Begin to count exchanges anew."""
        self._seconds.clear()

    @property
    def exchanging_s(self) -> float:
        """Own seconds in exchanges, waiting for others included."""
        return sum(map(sum, self._seconds.values()))

    def exchanged_s(self) -> float:
        """Return the seconds of all exchanges since they were forgotten; all members ask together."""
        if not self._seconds:
            return 0.0  # for all of them: they exchange the same, in the same order
        counts = torch.tensor([len(seconds) for seconds in self._seconds.values()], dtype=torch.float64)
        shortest = torch.tensor([min(seconds) for seconds in self._seconds.values()], dtype=torch.float64)
        with blaming_peers():
            dist.all_reduce(shortest, dist.ReduceOp.MIN, group=self.process_group)
        self._seconds.clear()
        return float((counts * shortest).sum())

    def close(self) -> None:
        """End the threads of its ring."""
        if self._ring is not None:
            self._ring.close()

    @property
    def on_cards(self) -> bool:
        """Whether tensors on CUDA devices go as they lie."""
        return "nccl" in dist.get_backend_config(self.process_group)

    @contextmanager
    def _timed(self, kind: str, size_bytes: int) -> Iterator[None]:
        start_s = time.perf_counter()
        with blaming_peers():
            yield
        self._seconds.setdefault((kind, size_bytes), []).append(time.perf_counter() - start_s)


def _begun(begin: Callable[[], Any], come: Callable[[], T]) -> Callable[[], T]:
    """Begin an exchange; return what waits for it and returns what has come."""
    with blaming_peers():
        work = begin()

    def wait() -> T:
        with blaming_peers():
            work.wait()
        return come()

    return wait


def _padded(tensor: Tensor, length: int) -> Tensor:
    """Return a tensor with zeros behind it up to a length, contiguous."""
    if tensor.shape[0] < length:
        tensor = torch.cat([tensor, tensor.new_zeros(length - tensor.shape[0], *tensor.shape[1:])])
    return tensor.contiguous()
