"""Goes over to another plan between two steps: what a device keeps stays where it is, what it lacks comes to it.

All devices do so together, behind the update of a step and before anything of the next one. Messages are the new
generation's from the first on: a peer that is later keeps them until it has gone over as well, and anything of the
generation before is dropped and counted. What moves are parameters and optimizer state, by the names of the unsplit
model, in whatever parts the two plans divide them, and running statistics of normalizations.

What a change of plan asks of each device: what it keeps, what it needs, and who gives it that. Pure.

Two grades of a change at a step boundary. Where a device's stage has the same units, divided in the same way among the
same devices, it keeps all that it holds, and its groups; only policy, routes and tasks are made anew. Where not, what
it lacks comes from devices that held it under the plan before: of each stage that did, one replica, the nearest.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

import torch

from spantrain.core.checkpoint import StoredTensor
from spantrain.core.plan import Crew, Plan, Stage
from spantrain.models.build import blank_units
from spantrain.models.units import UnitModule, tie_parameters
from spantrain.runtime.channels import DriverChannel
from spantrain.runtime.checkpoint.holding import (
    Holding,
    PartTensors,
    described,
    held_tensors,
    holding_of,
    put_back,
    wanted_of,
)
from spantrain.runtime.redistribution.exchange import (
    ExchangeGroup,
    HeldTensors,
    TensorBlock,
    group_of,
    place_of,
    takers_of,
)
from spantrain.runtime.redistribution.transfer import TensorExchange
from spantrain.runtime.step.context import WorkerContext
from spantrain.runtime.step.stage_member import StageMember, build_member
from spantrain.runtime.words import packed_words, read_words
from spantrain.runtime.worker.plan_part import PlanPart, make_plan_part, new_optimizer


def keeps_stage(before: Plan, after: Plan, device: str) -> bool:
    """Whether a device has the same units, divided among the same devices in the same way."""
    old, new = before.crew_of(device), after.crew_of(device)
    return _work_of(old) == _work_of(new) and _layout(old) == _layout(new)


def keeps_groups(before: Plan, after: Plan, device: str) -> bool:
    """Whether a device computes and sums with the same devices."""
    return _layout(before.crew_of(device)) == _layout(after.crew_of(device))


def moves_nothing(before: Plan, after: Plan) -> bool:
    """Whether every device keeps what it holds."""
    return all(keeps_stage(before, after, device) for device in after.devices)


def needed_units(before: Plan, after: Plan, device: str) -> tuple[int, ...]:
    """Return the units of which a device lacks something; of those that a group divides otherwise, it may be all."""
    if keeps_stage(before, after, device):
        return ()
    old, new = before.crew_of(device), after.crew_of(device)
    whole = len(old.first.replicas[old.replica_index(device)].devices) == 1 and not old.first.divides_state
    held = old.units if whole and not new.first.divides_state else ()
    return tuple(unit for unit in new.units if unit not in held)


def givers_of(before: Plan, after: Plan, device: str) -> tuple[str, ...]:
    """Return who holds what a device lacks: of each stage that had it, the members of one replica, the nearest."""
    needed = needed_units(before, after, device)
    found: list[str] = []
    for crew in before.crews:
        if any(unit in crew.units for unit in needed):
            found += (name for name in _nearest(before, crew.first, device) if name != device)
    return tuple(found)


def switch_group(before: Plan, after: Plan, device: str) -> ExchangeGroup:
    """Return those who give a device something or take something from it."""
    givers = set(givers_of(before, after, device))
    takers = {name for name in after.devices if device in givers_of(before, after, name)}
    peers = tuple(name for name in after.devices if name in givers | takers)
    return group_of(after.cluster, device, (device, *peers))


def _nearest(plan: Plan, stage: Stage, device: str) -> tuple[str, ...]:
    """Return the members of the replica that is asked; of those as near, other devices ask other ones.

    All replicas are asked where they divide state.
    """
    if stage.divides_state:
        return stage.devices
    nearness = group_of(plan.cluster, device, plan.devices).nearness
    turn = plan.devices.index(device)
    count = len(stage.replicas)

    def rank(number: int) -> tuple[bool, int, int]:
        members = stage.replicas[number].devices
        return device not in members, nearness(members[0]), (number - turn) % count

    return stage.replicas[min(range(count), key=rank)].devices


def _work_of(crew: Crew) -> list[object]:
    return [(stage.units, stage.recompute, stage.state_sharding) for stage in crew.stages]


def _layout(crew: Crew) -> tuple[tuple[tuple[str, ...], tuple[float, ...]], ...]:
    return tuple((replica.devices, replica.tp_shares) for replica in crew.first.replicas)


_LANE, _SHARED = "switch-held:", "shared-"


class Held(Protocol):
    """Parameters and their optimizer."""

    @property
    def holding(self) -> Holding:
        """Parameters and statistics."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of the parameters."""


class LocalTensorSource:
    """What this device holds, as a source of an exchange."""

    def __init__(self, device: str, tensors: PartTensors, scalars: Mapping[str, float] | None = None) -> None:
        self._tensors = tensors
        self.held = HeldTensors(device=device, scalars=scalars or {}, tensors=described(tensors))

    @classmethod
    def of(cls, device: str, held: Iterable[Held], scalars: Mapping[str, float] | None = None) -> "LocalTensorSource":
        """`held`: its own part of a plan, and what it keeps for others; the first one that has a tensor gives it."""
        tensors: PartTensors = {}
        for one in held:
            tensors = held_tensors(one.holding, one.optimizer, one.holding.parts) | tensors
        return cls(device, tensors, scalars)

    def present(self) -> tuple[str, ...]:
        """Return its own name: all that it holds is one file."""
        return (self.held.device,)

    def read(self, name: str, blocks: Sequence[TensorBlock]) -> list[torch.Tensor]:
        """Return blocks of the unsplit model's tensors."""
        assert name == self.held.device, f"{name} is not here"
        found = [(block.box, *self._tensors[block.tensor]) for block in blocks]
        return [tensor[place_of(box, part)].cpu() for box, tensor, part in found]


def take_over(here: WorkerContext, before: PlanPart, plan: Plan, *, step: int) -> tuple[PlanPart, int]:
    """Make this device's part of a plan of what it and others hold; the mailbox is in the new generation already.

    Args:
        here: what stays.
        before: this device's part of the plan that has run; it is used up.
        plan: of the same devices (`runtime.coordinator.advice.check_change`).
        step: the first one under it.

    Returns:
        The new part, and the bytes that came from other devices.

    Raises:
        PeerLostError, Interrupted: another device went away, or the run was ended.
        ProtocolError: another device sends something else than it should.
    """
    with ExitStack() as undo:
        if keeps_stage(before.plan, plan, here.name):
            # Its stage may have another number, and its replica other shares.
            crew, optimizer = plan.crew_of(here.name), before.optimizer
            replica = crew.first.replicas[crew.replica_index(here.name)]
            member = replace(before.member, numbers=crew.numbers, replica=replica)
            holding = before.holding
            if not moves_nothing(before.plan, plan):  # what it saves of parameters that stages share may be other ones
                named, parts = member.named_parameters, member.parts.own
                holding = holding_of(plan, here.name, here.graph, named, parts, member.units, member.rows)
        else:
            member = _remade(here, before, plan)
            undo.callback(member.groups.close)
            optimizer, holding = new_optimizer(here, plan, member)
        after = make_plan_part(here, plan, member, optimizer, holding)
        received_bytes = _bring(here, before, after, step)
        undo.pop_all()
    return after, received_bytes


def _remade(here: WorkerContext, before: PlanPart, plan: Plan) -> StageMember:
    """Return a member with other units, or other parts of them; those that it had whole and keeps whole are the same.

    Its other parameters hold anything.
    """
    units = kept_units(plan, here.name, before, seed=here.job.seed)
    groups = before.member.groups
    if not keeps_groups(before.plan, plan, here.name):
        groups.close()
        groups = here.open_groups(plan, plan.crew_of(here.name).numbers[0], here.job.joins_statistics)
    with ExitStack() as undo:
        undo.callback(groups.close)
        member = build_member(here, plan, units, groups)
        undo.pop_all()
    return member


def kept_units(plan: Plan, name: str, before: PlanPart | None, *, seed: int) -> list[UnitModule]:
    """Return the units of a device's stage: those that it has whole and keeps whole, else new ones that hold anything.

    Args:
        plan: what runs next.
        name: of the device.
        before: its part of the plan that has run, if it had one.
        seed: of the job.
    """
    crew = plan.crew_of(name)
    replica_index, stage = crew.replica_index(name), crew.first
    known: dict[int, UnitModule] = {}
    # Of divided parameters nothing is whole, and those that are to be are still to be given to others.
    divided = stage.keeps_rows or (before is not None and before.keeps_rows)
    if before and not divided and len(before.member.replica.devices) == 1 == len(stage.replicas[replica_index].devices):
        known = dict(zip(before.plan.crew_of(name).units, before.member.units, strict=True))
    fresh = [unit for unit in crew.units if unit not in known]
    known |= zip(fresh, blank_units(plan.model, fresh, seed=seed), strict=True)
    units = [known[unit] for unit in crew.units]
    tie_parameters(units)
    return units


def _bring(here: WorkerContext, before: PlanPart, after: PlanPart, step: int) -> int:
    """Fill what is new here, and give others what they lack; return the bytes that came from them."""
    if after.optimizer is before.optimizer:
        return 0  # who keeps its stage holds nothing that others lack: each unit is in one stage
    source, post = LocalTensorSource.of(here.name, (before,)), after.post(here, step)
    takers = [taker for taker in after.plan.devices if here.name in givers_of(before.plan, after.plan, taker)]
    givers = givers_of(before.plan, after.plan, here.name)
    files = describe(source.held, takers=takers, givers=givers, post=post)
    group = switch_group(before.plan, after.plan, here.name)
    return fill(before, after, group, files, source, post)


def fill(
    before: PlanPart | None, after: PlanPart, group: ExchangeGroup, files: Mapping[str, HeldTensors],
    source: LocalTensorSource, post: DriverChannel, alike: Sequence[str] = (),
) -> int:  # fmt: skip
    """Take what of a part is new here from those that hold it, and keep the rest; return the bytes that came.

    Args:
        before: this device's part until now, if it had one: what is of it stays as it is.
        after: what is to be filled.
        group: this device and those with which it exchanges.
        files: what each of them holds, by name.
        source: what this device holds.
        post: to the others.
        alike: devices that are to hold the same as this one, where each of the group knows what all hold: those of one
            place take what they lack from afar once, and give it to each other.
    """
    known = {id(tensor) for tensor in before.holding.tensors.values()} if before else set()
    fresh = {name for name, tensor in after.holding.tensors.items() if id(tensor) not in known}
    if before and (before.holding.own_rows is not None or after.holding.own_rows is not None):
        fresh |= {name for name, tensor in after.holding.parameters.items() if tensor.requires_grad}
    arriving = after.holding.of(fresh)
    state = before.optimizer.state if before else {}
    kept = {
        parameter: state[parameter]
        for name, parameter in after.holding.parameters.items()
        if name not in fresh and parameter in state
    }
    wanted, own = wanted_of(arriving, files), group.own
    whole = wanted_of(after.holding, files)
    several, takers = takers_of(group, alike, whole, files)
    exchange = TensorExchange(group, files, source, post, in_memory=True)
    taken = exchange.run({name: part for name, part in wanted.items() if takers.get(name, own) == own})
    received_bytes = exchange.taken_bytes
    if takers:
        near = replace(group, peers=tuple(name for name in several if name != own))
        dtypes = {name: tensor.dtype for file in files.values() for name, tensor in file.tensors.items()}
        stored = {name: StoredTensor(part=whole[name], dtype=dtypes[name]) for name in takers}
        shares = {one: {name: stored[name] for name in takers if takers[name] == one} for one in several}
        there = {one: HeldTensors(device=one, tensors=tensors) for one, tensors in shares.items()}
        here = LocalTensorSource(own, {name: (tensor, wanted[name]) for name, tensor in taken.items()})
        exchange = TensorExchange(near, there, here, post, in_memory=True, lanes=_SHARED)
        taken |= exchange.run({name: part for name, part in wanted.items() if takers.get(name, own) != own})
        received_bytes += exchange.taken_bytes
    put_back(arriving, after.optimizer, taken, kept)
    return received_bytes


def describe(
    own: HeldTensors, *, takers: Sequence[str], givers: Sequence[str], post: DriverChannel
) -> dict[str, HeldTensors]:
    """Tell those that may take from here what there is; hear the same from those that give."""
    for taker in takers:
        post.send(taker, f"{_LANE}{own.device}", packed_words(own))
    return {own.device: own} | {giver: read_held(post.receive(f"{_LANE}{giver}"), giver) for giver in givers}


def read_held(message: torch.Tensor, giver: str) -> HeldTensors:
    """Return what a peer says that it holds."""
    return read_words(HeldTensors, message, giver, "says what it holds")
