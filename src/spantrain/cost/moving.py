"""What a change of plan moves: parameters and optimizer state, from who holds them to who is to hold them."""

from collections.abc import Collection

from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.units import Unit
from spantrain.core.update.optimizers import STATE_COPIES
from spantrain.cost.network import NetworkCost


def state_bytes(unit: Unit, optimizer: str) -> int:
    """Return the bytes of a unit's parameters and of what the optimizer keeps of those that are trained."""
    return unit.parameter_bytes + round(unit.trained_bytes * STATE_COPIES[optimizer])


def moved(profile: Profile, optimizer: str, held: Plan, holders: Collection[str], after: Plan) -> tuple[float, int]:
    """Return seconds and bytes until all devices of a plan hold their units, each from its nearest holder.

    What no holder has is reckoned over the fastest link to the device. Devices are served side by side.
    """
    network, units = NetworkCost(profile), profile.graph.units
    names, longest_s, total = tuple(profile.cluster.device_by_name), 0.0, 0
    had = {
        name: {unit for stage in held.stages if name in (*stage.devices, *stage.keepers) for unit in stage.units}
        for name in holders
    }
    for stage in after.stages:
        parts = {name: len(replica.devices) for replica in stage.replicas for name in replica.devices}
        for name, count in (parts | dict.fromkeys(stage.keepers, 1)).items():
            took_s = 0.0
            for index in set(stage.units) - had.get(name, set()):
                size = round(state_bytes(units[index], optimizer) / count)
                givers = [one for one in had if index in had[one]] or names
                took_s += min((network.transfer_seconds(one, name, size) for one in givers if one != name), default=0.0)
                total += size
            longest_s = max(longest_s, took_s)
    return longest_s, total
