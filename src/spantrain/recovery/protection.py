"""Who keeps a copy of what else would be lost with a device: the choice. Pure.

In Asteroid (3.4) a stage that one device has is backed up by the next one of the pipeline, from time to time. Here a
keeper follows each step, by the gradients that the stage has summed (`runtime.worker.keeping.stages`): a loss costs
the step under way and no more.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from spantrain.core.plan import Plan, Stage

_OWN: Mapping[str, str] = {}


def protected(
    plan: Plan, losses: int, kept_bytes: Sequence[int], room: Mapping[str, float], memory_of: Mapping[str, str] = _OWN
) -> Plan:
    """Return a plan with as many keepers as it takes for so many losses at once, as far as there is room.

    Stages whose tensors are divided have none: no device holds one whole. All stages of a device have the same.

    Args:
        plan: keepers that it has are forgotten.
        losses: of devices, that shall cost no more than the step under way.
        kept_bytes: what a copy of each crew's state takes (`core.plan.Crew`).
        room: bytes that each memory has left.
        memory_of: the memory in which a device keeps copies, where it is not its own and so of the device's name.
    """
    left, kept = dict(room), Counter[str]()
    by_stage: dict[int, tuple[str, ...]] = {}
    for index, crew in enumerate(plan.crews):
        stage, keepers = crew.first, list[str]()
        while is_whole(stage) and len(keepers) + len(stage.replicas) <= losses:
            able = [
                name
                for name in plan.leaders
                if name not in stage.devices
                and name not in keepers
                and left[memory_of.get(name, name)] >= kept_bytes[index]
            ]
            if not able:
                break
            chosen = min(able, key=lambda name: _distance(plan, crew.numbers[0], keepers, name, kept))
            keepers.append(chosen)
            left[memory_of.get(chosen, chosen)] -= kept_bytes[index]
            kept[chosen] += 1
        by_stage |= dict.fromkeys(crew.numbers, tuple(keepers))
    return plan.with_keepers([by_stage[number] for number in range(len(plan.stages))])


def survived(stage: Stage) -> int:
    """Return how many losses at once a stage's state survives, whichever they are."""
    return len(stage.keepers) + (0 if stage.divides_state else len(stage.replicas) - 1)


def is_whole(stage: Stage) -> bool:
    """Whether each of a stage's devices holds all of it, with itself."""
    return not stage.divides_state and not stage.divides_tensors and not stage.offloads


def _distance(
    plan: Plan, index: int, keepers: Sequence[str], name: str, kept: Mapping[str, int]
) -> tuple[bool, bool, int, int]:
    """Return how ill a device suits as a keeper: a host is lost as a whole, a site's own network is the fastest.

    Then who keeps least, then the next one behind in the pipeline, whose end is followed by its beginning.
    """
    place, stage = plan.cluster.device_by_name, plan.stages[index]
    hosts = {place[other].host for other in (*stage.devices, *keepers)}
    behind = (plan.crew_of(name).numbers[0] - index) % len(plan.stages)
    return place[name].host in hosts, place[name].site != place[stage.devices[0]].site, kept[name], behind
