"""What a plan does over time where devices are lost: samples that stay, with what each loss costs (`plan --mtbf`).

Parcae (NSDI 2024) calls that liveput. Here a loss costs what a simulated run with that loss has done less than a calm
one: detection, the step under way or all behind the newest checkpoint, the move of state, the lower speed until the
device is back, and the change back (`sim.availability`). What keepers cost is part of each step.
"""

from collections.abc import Mapping, Sequence

from spantrain.app.planning.protection import with_keepers
from spantrain.app.simulation.availability import LivePlans, hours_of, mtbf_of
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.quantities import format_seconds, format_speed
from spantrain.core.records import Record
from spantrain.errors import ConfigError
from spantrain.planner.engine.outcome import Prefer
from spantrain.planner.request import Evaluation
from spantrain.sim.availability import AvailabilityEvent, AvailabilityRun, detect_s

_REPAIR_H, _CHECKPOINT_H = 1 / 6, 1 / 6
"""How long a device is away, and what lies between two checkpoints, where nothing is said of it."""
_SETTLES_S = 120.0
"""Behind its return, until all is as before."""
_MOST = 12
"""Plans whose losses are simulated; those whose own speed is not over the best's expected one need not be."""
_SHOWN = 3
_PROTECTIONS: Mapping[str, int | None] = {"auto": None, "one": 1}


class Liveput(Record):
    """What a plan is expected to do."""

    samples_per_s: float
    calm_samples_per_s: float
    """Without losses."""
    lost_s: Mapping[str, float]
    """What one loss of a device costs, in seconds of calm training."""
    protect: str
    """What `--protect` is best with it."""


class LossReckoner:
    """Reckons what losses cost; each question is asked once."""

    def __init__(self, hours: Mapping[str, float], profile: Profile, optimizer: str) -> None:
        """`hours`: by kind or site, `mtbf` for all others, `repair` and `checkpoint`."""
        self._hours, self._profile, self._optimizer = hours, profile, optimizer
        self.repair_s = 3600 * hours.get("repair", _REPAIR_H)
        self.checkpoint_s = 3600 * hours.get("checkpoint", _CHECKPOINT_H)
        self._light = {name: LivePlans(profile, optimizer, losses) for name, losses in _PROTECTIONS.items()}

    def rate(self, device: str) -> float:
        """Return the losses of a device in a second."""
        return 1 / (3600 * mtbf_of(self._profile.cluster.device_by_name[device], self._hours))

    def at_most(self, plan: Plan, evaluation: Evaluation) -> float:
        """Return what a plan is expected to do at most: each loss costs its detection and half a step at least."""
        least_s = detect_s(alone=False) + evaluation.step_s / 2
        return evaluation.samples_per_s / (1 + sum(self.rate(name) for name in plan.devices) * least_s)

    def liveput(self, plan: Plan) -> Liveput:
        """Return what a plan is expected to do, with the protection that suits it best."""
        kept = {name: with_keepers(plan, self._profile, self._optimizer, own) for name, own in _PROTECTIONS.items()}
        names = [name for name in kept if name == "auto" or kept[name] != kept["auto"]]
        return max((self._liveput(kept[name], name) for name in names), key=lambda one: one.samples_per_s)

    def _liveput(self, plan: Plan, protect: str) -> Liveput:
        plans = _AsPlanned(plan, self._light[protect])
        step_s = plans.step_s(plan)
        by_place: dict[object, float] = {}
        lost_s = {}
        for name in plan.devices:
            place = self._place(plan, name)
            if place not in by_place:
                by_place[place] = self._lost_s(plan, plans, step_s, name)
            lost_s[name] = by_place[place]
        calm = plan.global_batch / step_s
        share = 1 / (1 + sum(self.rate(name) * own_s for name, own_s in lost_s.items()))
        return Liveput(samples_per_s=calm * share, calm_samples_per_s=calm, lost_s=lost_s, protect=protect)

    def _place(self, plan: Plan, name: str) -> object:
        """Return what devices have in common whose losses cost the same."""
        device, crew = self._profile.cluster.device_by_name[name], plan.crew_of(name)
        own = crew.first.replicas[crew.replica_index(name)]
        kept = tuple(index for index, other in enumerate(plan.stages) if name in other.keepers)
        return device.kind, device.site, crew.numbers, own.sample_share, len(own.devices), own.devices[0] == name, kept

    def _lost_s(self, plan: Plan, plans: "_AsPlanned", step_s: float, name: str) -> float:
        """Simulate a run with one loss, halfway between two checkpoints and in mid-step."""
        every = max(1, round(self.checkpoint_s / step_s))
        struck_s = (every // 2 + 0.5) * step_s
        until_s = struck_s + self.repair_s + _SETTLES_S + 4 * step_s
        run = AvailabilityRun(plan, self._profile, plans, self._optimizer, every)
        events = (
            AvailabilityEvent(at_s=struck_s, device=name, comes=False),
            AvailabilityEvent(at_s=struck_s + self.repair_s, device=name, comes=True),
        )
        run.run(events, until_s)
        return max(0.0, until_s - run.progress * step_s)


class _AsPlanned:
    """Light changes of a plan while a device is away, and the plan itself once all are there: no search."""

    def __init__(self, plan: Plan, light: LivePlans) -> None:
        self._plan, self._all = plan, frozenset(plan.cluster.device_by_name)
        self.light, self.ahead = light.light, light.ahead
        self.step_s, self.calm_step_s = light.step_s, light.calm_step_s

    def full(self, plan: Plan, present: frozenset[str]) -> tuple[Plan, str] | None:
        """Return the plan as it was made, or its light change."""
        return (self._plan, "as planned") if present == self._all else self.light(plan, present)


def preferring(text: str, profile: Profile, optimizer: str) -> Prefer:
    """Return what chooses the plan that is expected to do most, by `HOURS`, `KIND=HOURS` and their like with commas.

    Raises:
        ConfigError: the text says something else.
    """
    pairs = dict(part.partition("=")[::2] if "=" in part else ("mtbf", part) for part in text.split(","))
    if len(pairs) <= text.count(","):
        raise ConfigError(f"--mtbf {text}: says two things of one; give each kind, site or time once")
    hours = hours_of("--mtbf", pairs, profile.cluster, ("mtbf", "repair", "checkpoint"))
    if not hours.keys() - {"repair", "checkpoint"}:
        raise ConfigError(f"--mtbf {text}: give HOURS for all devices, KIND=HOURS or SITE=HOURS for some")
    reckoner = LossReckoner(hours, profile, optimizer)

    def prefer(candidates: Sequence[tuple[Plan, Evaluation]]) -> tuple[int, tuple[str, ...]]:
        found: dict[int, Liveput] = {}
        for index, (plan, evaluation) in enumerate(candidates):
            best = max((one.samples_per_s for one in found.values()), default=0.0)
            if len(found) < _MOST and reckoner.at_most(plan, evaluation) > best:
                found[index] = reckoner.liveput(plan)
        chosen = max(found, key=lambda index: found[index].samples_per_s)
        return chosen, _reasons(reckoner, hours, found, chosen)

    return prefer


def _reasons(
    reckoner: LossReckoner, hours: Mapping[str, float], found: Mapping[int, Liveput], chosen: int
) -> tuple[str, ...]:
    own, fastest = found[chosen], found[0]
    calm, stays = format_speed(fastest.calm_samples_per_s), format_speed(fastest.samples_per_s)
    named = {name: f"{value:g} h" for name, value in hours.items() if name not in ("repair", "checkpoint")}
    others = named.pop("mtbf", "never")
    named["others" if named else ""] = others
    said = ", ".join(f"{name} {own_h}".strip() for name, own_h in named.items())
    beside = "it is the fastest one, too" if chosen == 0 else f"the fastest plan does {calm} and keeps {stays}"
    dear = sorted(own.lost_s, key=lambda name: -own.lost_s[name] * reckoner.rate(name))[:_SHOWN]
    costs = ", ".join(f"{name} {format_seconds(own.lost_s[name])}" for name in dear)
    return (
        f"Devices are lost (mean hours between losses: {said}) and back after {format_seconds(reckoner.repair_s)}: of "
        f"{format_speed(own.calm_samples_per_s)} samples/s {format_speed(own.samples_per_s)} are expected to stay; "
        f"{beside}; {len(found)} plans were weighed.",
        f"A loss costs, in seconds of training: {costs} (those that cost most over time); checkpoints every "
        f"{format_seconds(reckoner.checkpoint_s)}. Train it with --protect {own.protect}.",
    )
