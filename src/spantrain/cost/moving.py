"""What a change of plan moves: parameters and optimizer state, from who holds them to who is to hold them."""

from collections import defaultdict
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

    What no holder has is reckoned over the fastest link to the device. Ways are used side by side; what goes one after
    the other over the same way adds up, and what several devices of a site lack crosses it once.
    """
    network, units, place = NetworkCost(profile), profile.graph.units, profile.cluster.device_by_name
    total, size_by_pair, crossed = 0, defaultdict[tuple[str, str], int](int), set[tuple[int, str]]()
    had = {
        name: {unit for stage in held.stages if name in (*stage.devices, *stage.keepers) for unit in stage.units}
        for name in holders
    }
    for stage in after.stages:
        parts = {name: len(replica.devices) for replica in stage.replicas for name in replica.devices}
        for name, count in (parts | dict.fromkeys(stage.keepers, 1)).items():
            for index in set(stage.units) - had.get(name, set()):
                size = round(state_bytes(units[index], optimizer) / count)
                total += size
                others = [one for one in had if index in had[one] and one != name] or [
                    one for one in place if one != name
                ]
                giver = min(others, key=lambda one: network.transfer_seconds(one, name, size), default=name)
                if count == 1 and place[giver].site != place[name].site:
                    if (index, place[name].site) in crossed:
                        continue
                    crossed.add((index, place[name].site))
                size_by_pair[giver, name] += size
    ways = defaultdict[str, float](float)
    for (giver, name), size in size_by_pair.items():
        ways[network.shared_link(giver, name)] += network.transfer_seconds(giver, name, size)
    return max(ways.values(), default=0.0), total
