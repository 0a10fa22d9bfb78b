"""Begins an order with what its devices still hold of the order before: after a loss, or with other devices.

What each holds is told to all others, parameters and optimizer state by their names in the unsplit model; what a device
lacks comes from the nearest that has it. All have the same committed step (`runtime.coordinator.barrier.CommitPoint`).
"""

from collections.abc import Mapping

from spantrain.core.records import Record
from spantrain.errors import WorkerError
from spantrain.recovery.protection import is_whole
from spantrain.runtime.channels import DriverChannel
from spantrain.runtime.checkpoint.holding import PARAMETER
from spantrain.runtime.control.orders import GiveOrder, TrainOrder
from spantrain.runtime.redistribution.exchange import group_of
from spantrain.runtime.redistribution.transfer import TensorExchange
from spantrain.runtime.step.context import WorkerContext
from spantrain.runtime.worker.plan_part import PlanPart
from spantrain.runtime.worker.switch import Held, LocalTensorSource, describe, fill


class LeftState(Record):
    """What a device holds at the end of an order."""

    part: PlanPart | None
    """Its groups are closed; parameters, statistics and optimizer are those after the last committed step. None: it
    had no part in the plan that ran."""
    scalars: Mapping[str, float]
    """As a checkpoint keeps them."""
    kept: tuple[Held, ...] = ()
    """What it keeps for other stages, or took ahead of what it has now."""

    @property
    def held(self) -> tuple[Held, ...]:
        """All of it, its own part first."""
        return (*([self.part] if self.part else []), *self.kept)


def carry_on(
    here: WorkerContext, left: LeftState | None, after: PlanPart, order: TrainOrder
) -> tuple[int, dict[str, float]]:
    """Fill what is new here, and give others what they lack; return the bytes that came, and a run's scalars.

    Raises:
        WorkerError: what is needed here is held by none of the devices.
        PeerLostError: one of them went away.
        Interrupted: the order was ended.
        ProtocolError: another device sends something else than it should.
    """
    before = left.part if left else None
    source = LocalTensorSource.of(here.name, left.held if left else (), left.scalars if left else {})
    post = after.post(here, order.first_step)
    group = group_of(after.plan.cluster, here.name, (*after.plan.devices, *order.givers))
    files = describe(source.held, takers=group.peers, givers=group.peers, post=post)
    held = {name for file in files.values() for name in file.tensors}
    lacking = sorted(name for name in after.holding.parameters if PARAMETER + name not in held)
    if lacking:
        raise WorkerError(f"{here.name}: {lacking[0]} (and {len(lacking) - 1} more) is held by no device any more")
    stage = after.plan.stages[after.member.stage_index]
    alike = [replica.devices[0] for replica in stage.replicas] if is_whole(stage) else []
    received_bytes = fill(before, after, group, files, source, post, alike)
    scalars = next((dict(file.scalars) for _, file in sorted(files.items()) if file.scalars), {})
    return received_bytes, scalars


def give(name: str, left: LeftState | None, order: GiveOrder, post: DriverChannel) -> None:
    """Give what is held to devices that go on without this one.

    Raises:
        PeerLostError, Interrupted, ProtocolError: as `carry_on`.
    """
    source = LocalTensorSource.of(name, left.held if left else (), left.scalars if left else {})
    group = group_of(order.plan.cluster, name, tuple(peer.name for peer in order.peers))
    files = describe(source.held, takers=group.peers, givers=group.peers, post=post)
    TensorExchange(group, files, source, post, in_memory=True).run({})
