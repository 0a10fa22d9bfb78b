"""What a change of plan asks of each device: what it keeps, what it needs, and who gives it that. Pure.

Two grades of a change at a step boundary. Where a device's stage has the same units, divided in the same way among the
same devices, it keeps all that it holds, and its groups; only policy, routes and tasks are made anew. Where not, what
it lacks comes from devices that held it under the plan before: of each stage that did, one replica, the nearest.
"""

from spantrain.core.plan import Plan, Stage
from spantrain.runtime.checkpoint.restore import group_of
from spantrain.runtime.redistribution.transfer import Group


def keeps_stage(before: Plan, after: Plan, device: str) -> bool:
    """Whether a device has the same units, divided among the same devices in the same way."""
    old, new = _stage_of(before, device), _stage_of(after, device)
    return _layout(old) == _layout(new) and (old.units, old.recompute) == (new.units, new.recompute)


def keeps_groups(before: Plan, after: Plan, device: str) -> bool:
    """Whether a device computes and sums with the same devices."""
    return _layout(_stage_of(before, device)) == _layout(_stage_of(after, device))


def moves_nothing(before: Plan, after: Plan) -> bool:
    """Whether every device keeps what it holds."""
    return all(keeps_stage(before, after, device) for device in after.devices)


def needed_units(before: Plan, after: Plan, device: str) -> tuple[int, ...]:
    """Return the units of which a device lacks something; of those that a group divides otherwise, it may be all."""
    if keeps_stage(before, after, device):
        return ()
    stage_index, replica_index = before.place(device)
    old = before.stages[stage_index]
    held = old.units if len(old.replicas[replica_index].devices) == 1 else ()
    return tuple(unit for unit in _stage_of(after, device).units if unit not in held)


def givers_of(before: Plan, after: Plan, device: str) -> tuple[str, ...]:
    """Return who holds what a device lacks: of each stage that had it, the members of one replica, the nearest."""
    needed = needed_units(before, after, device)
    found: list[str] = []
    for stage in before.stages:
        if any(unit in stage.units for unit in needed):
            found += (name for name in _nearest(before, stage, device) if name != device)
    return tuple(found)


def switch_group(before: Plan, after: Plan, device: str) -> Group:
    """Return those who give a device something or take something from it."""
    givers = set(givers_of(before, after, device))
    takers = {name for name in after.devices if device in givers_of(before, after, name)}
    peers = tuple(name for name in after.devices if name in givers | takers)
    return group_of(after.cluster, device, (device, *peers))


def _nearest(plan: Plan, stage: Stage, device: str) -> tuple[str, ...]:
    """Return the members of the replica that is asked; of those as near, other devices ask other ones."""
    nearness = group_of(plan.cluster, device, plan.devices).nearness
    turn = plan.devices.index(device)
    count = len(stage.replicas)

    def rank(number: int) -> tuple[bool, int, int]:
        members = stage.replicas[number].devices
        return device not in members, nearness(members[0]), (number - turn) % count

    return stage.replicas[min(range(count), key=rank)].devices


def _stage_of(plan: Plan, device: str) -> Stage:
    return plan.stages[plan.place(device)[0]]


def _layout(stage: Stage) -> tuple[tuple[tuple[str, ...], tuple[float, ...]], ...]:
    return tuple((replica.devices, replica.tp_shares) for replica in stage.replicas)
