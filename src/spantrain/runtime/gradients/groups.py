"""The groups of a stage's devices that compute or sum together, one set of them for each generation.

    world    all devices of the stage, replica by replica
    replica  the device's tensor-parallel group, its leader first
    ring     those of different replicas that this device sums gradients with (`cost.replicas.rings_of`)

A group of one needs no network: `SingleMember`. Tests have groups of threads.
"""

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Store

from spantrain.core.plan import Plan, Stage
from spantrain.cost.replicas import rings_of
from spantrain.cost.sums import carrier_between
from spantrain.errors import PeerLostError
from spantrain.models.tensor_parallel.group import TensorGroup, summed


class MemberGroup(TensorGroup, Protocol):
    """Devices that exchange tensors, all of them in the same order; what tensor-parallel modules need, and more."""

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to add the members' tensors, of equal shapes, in place; return what waits until that is done."""

    def begin_reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to sum flat tensors that are alike, of which each member gets so many elements behind each other.

        Returns:
            What waits, and returns the own elements; the tensor may be anything then.
        """

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Replace a tensor by that of one member."""

    def announce(self, numbers: Tensor) -> None:
        """Replace a tensor on the processor by the leader's; not counted as an exchange, since others wait for it."""

    def send(self, tensor: Tensor, target: int) -> None:
        """Send a contiguous tensor to one member, which receives it."""

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous tensor with what one member sends."""

    def forget_exchanges(self) -> None:
        """Begin to count exchanges anew."""

    @property
    def exchanging_s(self) -> float:
        """Own seconds in exchanges since they were forgotten, waiting for others included."""

    def exchanged_s(self) -> float:
        """Return the seconds of all exchanges since they were forgotten; all members ask together.

        Who comes last to an exchange waits for nobody, so its time is the network's alone, if its process had a
        processor all the while. Each exchange therefore counts as the shortest that any member saw of any exchange of
        its kind and size among them.
        """


class SingleMember:
    """A group of one."""

    rank = 0
    size = 1
    exchanging_s = 0.0

    def all_reduce(self, tensor: Tensor) -> None:
        """Leave the tensor: it is its own sum."""

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], None]:  # noqa: ARG002
        """Leave the tensor; there is nothing to wait for."""
        return lambda: None

    def begin_reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Callable[[], Tensor]:  # noqa: ARG002
        """Return what returns the tensor: it is its own sum, and all of it the own part."""
        return lambda: tensor

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:  # noqa: ARG002
        """Return the tensor: it is all there is."""
        return tensor

    def reduce_scatter(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:  # noqa: ARG002
        """Return the tensor: it is its own sum, and all of it is the own piece."""
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Leave the tensor."""

    def announce(self, numbers: Tensor) -> None:
        """Leave the numbers."""

    def send(self, tensor: Tensor, target: int) -> None:  # noqa: ARG002
        """Never asked for: there is nobody to send to."""
        raise AssertionError("a group of one sends nothing")

    def receive(self, tensor: Tensor, source: int) -> None:  # noqa: ARG002
        """Never asked for: there is nobody who sends."""
        raise AssertionError("a group of one receives nothing")

    def forget_exchanges(self) -> None:
        """Do nothing: none take time."""

    def exchanged_s(self) -> float:
        """Return nothing: none take time."""
        return 0.0


class TorchMembers:
    """A process group of torch: Gloo, or NCCL for what lies on CUDA devices.

    Operations raise `PeerLostError` where another member went away.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Take a group that exists; its owner destroys it."""
        self.process_group = group
        self.rank, self.size = group.rank(), group.size()
        self._seconds: dict[tuple[str, int], list[float]] = {}
        """Of exchanges by kind and bytes, with the wait for other members; on CUDA only what it takes to queue."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the members."""
        with self._timed("all_reduce", tensor.nbytes):
            dist.all_reduce(tensor, group=self.process_group)

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to replace a tensor by its sum over the members; not counted as an exchange, as others go on beside."""
        with _blaming_peers():
            work = dist.all_reduce(tensor, group=self.process_group, async_op=True)

        def wait() -> None:
            with _blaming_peers():
                work.wait()

        return wait

    def begin_reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to bring each member its elements of the sum: they exchange them and add them in the order of ranks."""
        own = sizes[self.rank]
        received = tensor.new_empty(self.size * own)
        with _blaming_peers():
            work = dist.all_to_all_single(
                received, tensor, [own] * self.size, list(sizes), group=self.process_group, async_op=True
            )

        def wait() -> Tensor:
            with _blaming_peers():
                work.wait()
            return summed(received.view(self.size, own).unbind())

        return wait

    def all_gather(self, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
        """Return the members' tensors behind each other; shorter ones travel padded to the longest."""
        longest = max(sizes)
        sent = tensor.movedim(dim, 0)
        if sent.shape[0] < longest:
            sent = torch.cat([sent, sent.new_zeros(longest - sent.shape[0], *sent.shape[1:])])
        sent = sent.contiguous()
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
        with _blaming_peers():
            dist.broadcast(numbers, group=self.process_group, group_src=0)

    def send(self, tensor: Tensor, target: int) -> None:
        """Send a contiguous tensor to one member; Gloo sends from the processor's memory only."""
        with _blaming_peers():
            dist.send(tensor if self._takes_cards else tensor.cpu(), group=self.process_group, group_dst=target)

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous tensor with what one member sends."""
        landing = tensor if self._takes_cards else tensor.cpu()
        with _blaming_peers():
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
        with _blaming_peers():
            dist.all_reduce(shortest, dist.ReduceOp.MIN, group=self.process_group)
        self._seconds.clear()
        return float((counts * shortest).sum())

    @property
    def _takes_cards(self) -> bool:
        return "nccl" in dist.get_backend_config(self.process_group)

    @contextmanager
    def _timed(self, kind: str, size_bytes: int) -> Iterator[None]:
        start_s = time.perf_counter()
        with _blaming_peers():
            yield
        self._seconds.setdefault((kind, size_bytes), []).append(time.perf_counter() - start_s)


@contextmanager
def _blaming_peers(what: str = "another device of this stage went away") -> Iterator[None]:
    """A collective that fails does so because another member went away: it is that one that should be named."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerLostError(f"{what}: {error}") from error


def broadcast_bytes(group: MemberGroup, content: bytes, torch_device: torch.device, *, source: int = 0) -> bytes:
    """Give every member the bytes of one."""
    if group.size == 1:
        return content
    size = torch.tensor([len(content)], dtype=torch.int64, device=torch_device)
    group.broadcast(size, source)
    data = torch.zeros(int(size), dtype=torch.uint8, device=torch_device)
    if group.rank == source:
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    group.broadcast(data, source)
    return data.cpu().numpy().tobytes()


@dataclass(frozen=True, kw_only=True)
class StageGroups:
    """The groups that one device belongs to."""

    world: MemberGroup
    replica: MemberGroup
    ring: MemberGroup
    """`SingleMember` where the device's parts are summed by its leader."""
    parts_meet: bool
    """Whether replicas hold the same parts, member by member: then every member sums its own."""
    in_first_replica: bool = True
    statistics: MemberGroup | None = None
    """All devices of the stage again, to exchange statistics of batches inside of actions, beside sums of gradients;
    None: they do not."""

    def abort(self) -> None:
        """Give up what is under way in the groups, from another thread; they are of no use afterwards."""
        groups = (self.world, self.replica, self.ring, self.statistics)
        for group in {group.process_group for group in groups if isinstance(group, TorchMembers)}:
            if "nccl" in dist.get_backend_config(group):
                group.abort()  # Gloo cannot; its waits end with their connections (`runtime.worker.watch`)

    def close(self) -> None:
        """Leave the groups; they end with their generation."""
        if isinstance(self.world, TorchMembers):
            _leave()


@dataclass(frozen=True, kw_only=True)
class StageRanks:
    """Ranks in the world of a stage."""

    replicas: tuple[tuple[int, ...], ...]
    rings: tuple[tuple[int, ...], ...]
    parts_meet: bool


def group_ranks(stage: Stage) -> StageRanks:
    """Return who belongs together, by position among the stage's devices."""
    position = {device: rank for rank, device in enumerate(stage.devices)}
    rings = rings_of(stage)
    return StageRanks(
        replicas=tuple(tuple(position[device] for device in replica.devices) for replica in stage.replicas),
        rings=tuple(tuple(position[device] for device in ring.devices) for ring in rings),
        parts_meet=all(len(replica.devices) == len(rings) for replica in stage.replicas) if rings else True,
    )


def open_groups(
    plan: Plan,
    stage_index: int,
    device: str,
    *,
    store: Store | None,
    torch_device: torch.device,
    timeout_s: float,
    joined: bool = False,
) -> StageGroups:
    """Meet the other devices of the stage at a store and form all groups; where `joined`, one for statistics too.

    Raises:
        PeerLostError: one of them did not come, or went away.
    """
    stage = plan.stages[stage_index]
    rank, size = stage.devices.index(device), len(stage.devices)
    layout = group_ranks(stage)
    if size == 1:
        return StageGroups(world=SingleMember(), replica=SingleMember(), ring=SingleMember(), parts_meet=True)
    assert store is not None, "the devices of a stage need a store to meet at"
    timeout = datetime.timedelta(seconds=timeout_s)
    with _blaming_peers("another device of this stage cannot be reached"), ExitStack() as undo:
        undo.callback(_leave)
        carrier = carrier_between([plan.cluster.device_by_name[name] for name in stage.devices])
        dist.init_process_group(carrier, store=store, rank=rank, world_size=size, timeout=timeout)
        # All devices form all groups in the same order, as torch wants it; those of others give nothing to use.
        formed = {ranks: _formed(ranks, size, timeout) for ranks in (*layout.replicas, *layout.rings)}
        statistics = dist.new_group(timeout=timeout) if joined and len(stage.replicas) > 1 else None
        assert not isinstance(statistics, int)
        for group in (dist.group.WORLD, *formed.values(), statistics):
            if group is not None:
                _connect(group, torch_device)
        undo.pop_all()
    own = next(formed[ranks] for ranks in layout.replicas if rank in ranks)
    ring = next((formed[ranks] for ranks in layout.rings if rank in ranks), None)
    assert dist.group.WORLD is not None
    return StageGroups(
        world=TorchMembers(dist.group.WORLD),
        replica=_member(own),
        ring=_member(ring),
        parts_meet=layout.parts_meet,
        in_first_replica=rank in layout.replicas[0],
        statistics=TorchMembers(statistics) if statistics is not None else None,
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _connect(group: ProcessGroup, torch_device: torch.device) -> None:
    """Have the members connect now, where all of them are there for it, and not in the first step."""
    carriers = [torch.device("cpu"), torch_device] if "nccl" in dist.get_backend_config(group) else [torch_device]
    for device in carriers:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def _formed(ranks: tuple[int, ...], size: int, timeout: datetime.timedelta) -> ProcessGroup | None:
    if len(ranks) == 1:
        return None
    if len(ranks) == size:
        return dist.group.WORLD
    group = dist.new_group(list(ranks), timeout=timeout)
    return group if isinstance(group, ProcessGroup) else None


def _member(group: ProcessGroup | None) -> MemberGroup:
    return SingleMember() if group is None else TorchMembers(group)
