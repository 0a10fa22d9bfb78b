"""What a loss may cost: keepers for what only one device holds (`recovery.protection`), and what is said of them;
and the light change of a plan behind a loss, by what it costs until there is a better one.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator

from spantrain.core.plan import Crew, Plan
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_bytes, format_seconds
from spantrain.cost.memory import MemoryCost
from spantrain.cost.moving import moved
from spantrain.errors import ConfigError
from spantrain.planner.engine.predict import predict
from spantrain.planner.present import NewPlan, light_plan
from spantrain.recovery.protection import is_whole, protected, survived

AUTO = "auto"
_CALM = 0.02
"""Part of a step that a stage may wait for its keepers, where nobody has said how many there are to be."""
_DIVIDED = "its tensors are divided (plan --tensor-parallel none has whole ones)"


def losses_of(text: str) -> int | None:
    """Return how many losses at once `none`, `one` or a number stands for; None for `auto`.

    Raises:
        ConfigError: it is something else.

    >>> losses_of("auto"), losses_of("none"), losses_of("one"), losses_of("2")
    (None, 0, 1, 2)
    """
    known = {AUTO: None, "none": 0, "one": 1}
    if text not in known and not text.isdecimal():
        raise ConfigError(f"--protect {text}: give auto, none, one, or a number of losses at once")
    return known[text] if text in known else int(text)


def with_keepers(plan: Plan, profile: Profile, optimizer: str, losses: int | None) -> Plan:
    """Return a plan with keepers for so many losses at once, where memory has room for them; with none for 0.

    None: for one, and of stages that need hardly wait for them. `optimizer` has the name that `cost.memory` gives it.
    """
    plan = plan.unprotected
    if losses == 0 or len(plan.crews) == 1:
        return plan
    memory = MemoryCost(profile, optimizer, plan.dtype)
    kept_bytes = [memory.state_bytes(crew.units) for crew in plan.crews]
    room, memory_of = room_for_copies(plan, profile, memory)
    found = protected(plan, 1 if losses is None else losses, kept_bytes, room, memory_of)
    if losses is not None or found == plan:
        return found
    most_s = _CALM * predict(plan, profile).step_s
    dear = {number for crew in found.crews if _wait_s(profile, crew) > most_s for number in crew.numbers}
    return found.with_keepers([() if number in dear else one.keepers for number, one in enumerate(found.stages)])


def room_for_copies(plan: Plan, profile: Profile, memory: MemoryCost) -> tuple[dict[str, float], dict[str, str]]:
    """Return the bytes that are left for copies in each memory, and in whose each device would have them.

    Copies lie in host memory: in the device's own if that is the processor's, else in the host's, as the cluster file
    says it; where it says nothing there is no limit.
    """
    cluster, room, memory_of = profile.cluster, dict[str, float](), dict[str, str]()
    for name, peak in memory.plan_peak_bytes(plan).items():
        device = cluster.device_by_name[name]
        host_bytes = cluster.host_by_name[device.host].memory_bytes
        if device.backend == "cpu" or cluster.kind_by_name[device.kind].unified_memory:
            room[name] = device.memory_bytes - peak
        else:
            memory_of[name] = f"host {device.host}"
            room[memory_of[name]] = math.inf if host_bytes is None else host_bytes
    return room, memory_of


def keepers_wait_s(plan: Plan, profile: Profile) -> float:
    """Return how long a step waits at most until gradients are where they are kept: stages send side by side."""
    return max(_wait_s(profile, crew) for crew in plan.crews)


def protected_step_s(plan: Plan, profile: Profile, optimizer: str) -> float:
    """Return the predicted seconds of a step with its wait for keepers."""
    return predict(plan, profile, optimizer=optimizer).step_s + keepers_wait_s(plan, profile)


def about_keepers(plan: Plan, profile: Profile, optimizer: str, losses: int | None) -> Iterator[str]:
    """Say who keeps what of a plan and what that costs, and what would be lost with a device; nothing for 0.

    The arguments are those of `with_keepers`, which gave this plan.
    """
    if losses == 0 or len(plan.devices) == 1:
        return
    step_s = predict(plan, profile).step_s
    kept = [crew for crew in plan.crews if crew.first.keepers]
    if kept:
        who = ", ".join(f"{_named(crew)} by {' and '.join(crew.first.keepers)}" for crew in kept)
        sent = sum(len(crew.first.keepers) * _gradient_bytes(profile, crew) for crew in kept)
        wait_s = keepers_wait_s(plan, profile)
        yield (
            f"Kept twice: {who}; that takes {format_bytes(sent)} of gradients a step, and {format_seconds(wait_s)} at "
            f"most ({wait_s / step_s:.1%})"
        )
        yield from _about_room(plan, profile, optimizer)
    wanted = with_keepers(plan, profile, optimizer, losses or 1)
    for crew, able in zip(plan.crews, wanted.crews, strict=True):
        stage = crew.first
        if survived(stage) >= (losses or 1):
            continue
        why = "no other device has room for it" if is_whole(stage) else _DIVIDED
        if stage.divides_state:
            why = f"its replicas divide its state ({stage.state_sharding.value})"
        if survived(able.first) > survived(stage):
            why = f"a keeper would cost {_wait_s(profile, able) / step_s:.1%} of a step (--protect one)"
        who = f"{_named(crew).capitalize()} ({', '.join(stage.devices)}) survive{'' if crew.several else 's'}"
        yield (
            f"{who} {survived(stage)} of {losses or 1} losses at once: {why}; "
            "beyond, all go back to the newest checkpoint (--checkpoint-every, else one in five minutes)"
        )


def _about_room(plan: Plan, profile: Profile, optimizer: str) -> Iterator[str]:
    """Say whose memory is taken to have room for copies, as nothing is known of it."""
    memory = MemoryCost(profile, optimizer, plan.dtype)
    room, memory_of = room_for_copies(plan, profile, memory)
    kept_bytes = Counter[str]()
    for crew in plan.crews:
        for keeper in crew.first.keepers:
            kept_bytes[memory_of.get(keeper, keeper)] += memory.state_bytes(crew.units)
    unknown = {where: size for where, size in kept_bytes.items() if room[where] == math.inf}
    if unknown:
        yield (
            f"Copies take {format_bytes(max(unknown.values()))} of host memory at most on "
            f"{', '.join(where.removeprefix('host ') for where in unknown)}, which is taken to be there; `memory` of "
            "a host in the cluster file says how much there is"
        )


def _named(crew: Crew) -> str:
    """Return the stages of a crew in words.

    >>> _named(Crew(numbers=(0, 6), stages=()))
    'stages 0 and 6'
    """
    return f"stage{'s' * crew.several} {' and '.join(map(str, crew.numbers))}"


def _gradient_bytes(profile: Profile, crew: Crew) -> int:
    return sum(profile.graph.held_trained_bytes(crew.units))


def _wait_s(profile: Profile, crew: Crew) -> float:
    """Return how long the first device of a crew sends its gradients to all that keep them."""
    links = [profile.link(crew.devices[0], keeper) for keeper in crew.first.keepers]
    size = _gradient_bytes(profile, crew)
    return sum(link.latency_s + link.busy_seconds(size) for link in links if link is not None)


_LASTS = 8
"""Steps that a light change lasts, about: until the planner's answer is there, and what it moves has gone ahead."""


def light_change(
    plan: Plan, profile: Profile, present: Collection[str], *, optimizer: str, losses: int | None
) -> NewPlan:
    """Return the light change of a plan for devices that are left.

    What it moves while all stand still is spread over the steps that it lasts. Steps wait for keepers, too, of which
    there are to be as many as `protection.with_keepers` gives for `losses`.

    Raises:
        PlanError, ProfileError: as `planner.present.light_plan`.
    """

    def besides(after: Plan) -> float:
        move_s, _ = moved(profile, optimizer, plan, present, after)
        return keepers_wait_s(with_keepers(after, profile, optimizer, losses), profile) + move_s / _LASTS

    return light_plan(plan, profile, present, optimizer=optimizer, besides=besides)
