"""The groups of a stage's devices that compute or sum together, one set of them for each generation.

    world    all devices of the stage, replica by replica
    replica  the device's tensor-parallel group, its leader first
    ring     those of different replicas that this device sums gradients with (`cost.replicas.rings_of`)

A group of one needs no network (`runtime.gradients.members`). Before they form groups, devices meet at a store that the
first of them holds.
"""

import datetime
import socket
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Store, TCPStore

from spantrain.core.plan import Plan, Stage
from spantrain.core.records import Record
from spantrain.cost.replicas import rings_of
from spantrain.cost.sums import carrier_between
from spantrain.errors import PeerLostError
from spantrain.runtime.gradients.members import MemberGroup, TorchMembers
from spantrain.runtime.gradients.rings import blaming_peers

_REACH = datetime.timedelta(seconds=30)
"""How long to try to reach a store that is open."""


class StageGroups(Record):
    """The groups that one device belongs to."""

    world: MemberGroup
    replica: MemberGroup
    ring: MemberGroup
    """A group of one where the device's parts are summed by its leader."""
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
        if isinstance(self.ring, TorchMembers):
            self.ring.close()
        if isinstance(self.world, TorchMembers):
            _leave()


class StageRanks(Record):
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
        return StageGroups(world=MemberGroup(), replica=MemberGroup(), ring=MemberGroup(), parts_meet=True)
    assert store is not None, "the devices of a stage need a store to meet at"
    timeout = datetime.timedelta(seconds=timeout_s)
    with blaming_peers("another device of this stage cannot be reached"), ExitStack() as undo:
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
    ranks = next((ranks for ranks in layout.rings if rank in ranks), ())
    sites = {plan.cluster.device_by_name[stage.devices[one]].site for one in ranks}
    assert dist.group.WORLD is not None
    return StageGroups(
        world=TorchMembers(dist.group.WORLD),
        replica=_member(own),
        ring=_member(formed[ranks] if ranks else None, spread=len(sites) > 1),
        parts_meet=layout.parts_meet,
        in_first_replica=rank in layout.replicas[0],
        statistics=TorchMembers(statistics) if statistics is not None else None,
    )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _connect(group: ProcessGroup, torch_device: torch.device) -> None:
    """Have the members connect now, where all of them are there for it, and not in the first step."""
    several = "," in dist.get_backend_config(group)
    carriers = [torch.device("cpu"), torch_device] if several else [torch_device]
    for device in carriers:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def _formed(ranks: tuple[int, ...], size: int, timeout: datetime.timedelta) -> ProcessGroup | None:
    if len(ranks) == 1:
        return None
    if len(ranks) == size:
        return dist.group.WORLD
    group = dist.new_group(list(ranks), timeout=timeout)
    return group if isinstance(group, ProcessGroup) else None


def _member(group: ProcessGroup | None, *, spread: bool = False) -> MemberGroup:
    return MemberGroup() if group is None else TorchMembers(group, spread=spread)


def hold_store(address: str) -> TCPStore:
    """Open a store on a free port of one address only; left alone, torch would listen on all of the machine's."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((address, 0), family=family) as listener:
        port = listener.getsockname()[1]
        return TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=_REACH, master_listen_fd=listener.detach()
        )


def reach_store(host: str, port: int) -> Store:
    """Connect to a store that another device holds.

    Raises:
        PeerLostError: it does not answer.
    """
    try:
        return TCPStore(host, port, is_master=False, timeout=_REACH)
    except RuntimeError as error:
        raise PeerLostError(f"the first device of this stage does not answer at {host}:{port}: {error}") from error
