"""Groups of threads in one process: the fake of `runtime.gradients.members`, for tests of stages."""

import queue
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from spantrain.core.plan import Stage
from spantrain.runtime.gradients.groups import StageGroups, group_ranks
from spantrain.runtime.gradients.members import MemberGroup
from testing.models.thread_group import ThreadGroup
from testing.patience import PATIENCE_S

Mail = Mapping[tuple[int, int], queue.SimpleQueue[Tensor]]


class ThreadMembers(ThreadGroup):
    """One member's view of a group of threads."""

    mail: Mail
    """By sender and receiver."""
    exchanging_s = 0.0

    @classmethod
    def meet(cls, size: int) -> "list[MemberGroup]":
        """Return the members of one group; one alone needs no others."""
        if size == 1:
            return [MemberGroup()]
        members = [member for member in cls.together(size) if isinstance(member, cls)]
        mail: Mail = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size) if a != b}
        for member in members:
            member.mail = mail
        return list(members)

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Replace a tensor by its sum at once; there is nothing to wait for."""
        self.all_reduce(tensor)
        return lambda: None

    def begin_reduce_scatter(self, tensor: Tensor, sizes: Sequence[int]) -> Callable[[], Tensor]:
        """Return the own elements of the sum at once; there is nothing to wait for."""
        own = self.reduce_scatter(tensor, sizes, 0)
        return lambda: own

    def begin_all_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Callable[[], Tensor]:
        """Return the members' tensors behind each other at once; there is nothing to wait for."""
        whole = self.all_gather(tensor, sizes, 0)
        return lambda: whole

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Replace a tensor by that of one member."""
        found = self._exchange(tensor.clone())[source]
        assert found.shape == tensor.shape, f"unlike shapes: {tuple(found.shape)}, {tuple(tensor.shape)}"
        assert found.dtype == tensor.dtype, f"unlike types: {found.dtype}, {tensor.dtype}"
        tensor.copy_(found)

    def announce(self, numbers: Tensor) -> None:
        """Replace a tensor by the leader's."""
        self.broadcast(numbers)

    def send(self, tensor: Tensor, target: int) -> None:
        """Send a tensor to one member."""
        self.mail[self.rank, target].put(tensor.clone())

    def receive(self, tensor: Tensor, source: int) -> None:
        """Fill a tensor with what one member sends."""
        found = self.mail[source, self.rank].get(timeout=PATIENCE_S)
        assert found.shape == tensor.shape, f"unlike shapes: {tuple(found.shape)}, {tuple(tensor.shape)}"
        tensor.copy_(found)

    def forget_exchanges(self) -> None:
        """Do nothing: threads have no network."""

    def exchanged_s(self) -> float:
        """Return nothing: threads have no network."""
        return 0.0


def thread_groups(stage: Stage, *, joined: bool = False) -> dict[str, StageGroups]:
    """Return the groups of all devices of a stage, by device."""
    layout = group_ranks(stage)
    found: dict[tuple[int, ...], dict[int, MemberGroup]] = {}
    for ranks in (tuple(range(len(stage.devices))), *layout.replicas, *layout.rings):
        if ranks not in found:
            found[ranks] = dict(zip(ranks, ThreadMembers.meet(len(ranks)), strict=True))
    alone = MemberGroup()
    statistics = ThreadMembers.meet(len(stage.devices)) if joined and len(stage.replicas) > 1 else None
    groups = {}
    for rank, device in enumerate(stage.devices):
        ring = next((ranks for ranks in layout.rings if rank in ranks), ())
        replica = next(ranks for ranks in layout.replicas if rank in ranks)
        groups[device] = StageGroups(
            world=found[tuple(range(len(stage.devices)))][rank],
            replica=found[replica][rank],
            ring=found[ring][rank] if ring else alone,
            parts_meet=layout.parts_meet,
            in_first_replica=rank in layout.replicas[0],
            statistics=statistics[rank] if statistics else None,
        )
    return groups
