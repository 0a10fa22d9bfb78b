"""What comes of a run whose devices leave and come, by a trace of it or one drawn at random."""

import csv
import io
import math
import random
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from spantrain.app.planning.ahead import ahead_of
from spantrain.app.planning.protection import keepers_wait_s, light_change, with_keepers
from spantrain.config.files.parsing import parse_json
from spantrain.config.files.text_files import read_text
from spantrain.config.prices import load_prices
from spantrain.core.cluster import Cluster, Device
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.cost.money import Prices
from spantrain.errors import ConfigError, PlanError
from spantrain.planner.engine.predict import predict
from spantrain.planner.present import full_plan
from spantrain.sim.availability import AvailabilityEvent, AvailabilityRun, GoesAhead, Goodput

_FIELDS = ("time_s", "device", "event")
_REMEDY = "give a CSV file with the columns time_s,device,event or a JSON list of such objects"


def events_of(text: str, cluster: Cluster, until_s: float) -> list[AvailabilityEvent]:
    """Return the events of a file, or those drawn by `mtbf:HOURS[,repair:HOURS][,seed:N][,KIND or SITE:HOURS]`.

    Raises:
        ConfigError: one is wrong; says the file, the line and the field.
    """
    if text.startswith("mtbf:"):
        return _drawn(text, cluster, until_s)
    path = Path(text)
    content = read_text(path, remedy=_REMEDY)
    if path.suffix == ".json":
        rows = parse_json(content, str(path), remedy=_REMEDY)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ConfigError(f"{path}: is no list of objects; {_REMEDY}")
        return [_event(f"{path}, event {index}", row, cluster) for index, row in enumerate(rows, 1)]
    reader = csv.DictReader(io.StringIO(content), strict=True)
    try:
        if tuple(reader.fieldnames or ()) != _FIELDS:
            raise ConfigError(f"{path}, line 1: the columns are {reader.fieldnames}; {_REMEDY}")
        return [_event(f"{path}, line {reader.line_num}", row, cluster) for row in reader]
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}; {_REMEDY}") from None


def _event(where: str, row: dict[str, Any], cluster: Cluster) -> AvailabilityEvent:
    wrong = [str(name) for name in row if name not in _FIELDS] + [name for name in _FIELDS if row.get(name) is None]
    if wrong:
        raise ConfigError(f"{where}, field {wrong[0]}: unknown or missing; {_REMEDY}")
    at_s = _number(f"{where}, field time_s", row["time_s"])
    if row["device"] not in cluster.device_by_name:
        known = ", ".join(cluster.device_by_name)
        raise ConfigError(f"{where}, field device: there is no {row['device']!r} in the cluster; give one of {known}")
    if row["event"] not in ("leaves", "comes"):
        raise ConfigError(f"{where}, field event: must be `leaves` or `comes`, got {row['event']!r}")
    return AvailabilityEvent(at_s=at_s, device=row["device"], comes=row["event"] == "comes")


def _number(where: str, value: object) -> float:
    try:
        found = float(str(value))
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise ConfigError(f"{where}: must be a number, zero or more, got {value!r}")
    return found


def hours_of(option: str, pairs: Mapping[str, str], cluster: Cluster, known: Collection[str]) -> dict[str, float]:
    """Return hours by kind of device, site, or one of some known names.

    Raises:
        ConfigError: there is no such name, or a value is no number over 0.
    """
    allowed = {*known} | {part for one in cluster.devices for part in (one.kind, one.site)}
    found = {}
    for name, value in pairs.items():
        if name not in allowed:
            raise ConfigError(f"{option}, field {name}: unknown; give one of {', '.join(sorted(allowed))}")
        found[name] = _number(f"{option}, field {name}", value)
        if not found[name]:
            raise ConfigError(f"{option}, field {name}: must be more than nothing")
    return found


def mtbf_of(device: Device, hours: Mapping[str, float]) -> float:
    """Return the mean hours between two losses of a device; infinite if nothing is said of it."""
    return hours.get(device.kind, hours.get(device.site, hours.get("mtbf", math.inf)))


def _drawn(text: str, cluster: Cluster, until_s: float) -> list[AvailabilityEvent]:
    """Return losses and repairs with exponentially distributed times, by device."""
    pairs = dict(part.partition(":")[::2] for part in text.split(","))
    if len(pairs) <= text.count(","):
        raise ConfigError(f"--availability {text}: says two things of one; give each kind, site or time once")
    seed = _number("--availability, field seed", pairs.pop("seed", "0"))
    values = {"repair": math.inf} | hours_of("--availability", pairs, cluster, ("mtbf", "repair"))
    draw, events = random.Random(round(seed)), []
    for one in cluster.devices:
        mtbf_h, at_s = mtbf_of(one, values), 0.0
        comes = False
        while True:
            mean_h = values["repair"] if comes else mtbf_h
            at_s += draw.expovariate(1.0) * mean_h * 3600
            if at_s >= until_s:
                break
            events.append(AvailabilityEvent(at_s=at_s, device=one.name, comes=comes))
            comes = not comes
    return events


def goes_ahead(
    profile: Profile, optimizer: str, before: Plan, after: Plan, steps_s: tuple[float, float]
) -> GoesAhead | None:
    """Return how a change takes place whose state goes ahead; the arguments are those of `ahead_of`."""
    found = ahead_of(profile, optimizer, before, after, steps_s)
    if found is None:
        return None
    return GoesAhead(beside_s=found.beside_s, slower_s=found.slower_s, left_s=found.left_s)


class LivePlans:
    """The plans of live runs, each question asked once."""

    def __init__(self, profile: Profile, optimizer: str, losses: int | None) -> None:
        self._profile, self._optimizer, self._losses = profile, optimizer, losses
        self._found: dict[object, tuple[Plan, str] | None] = {}
        self._steps_s: dict[object, float] = {}
        self.light = partial(self._once, partial(light_change, losses=losses))
        self.full = partial(self._once, full_plan)
        """For a plan and the devices present: the light change, and the planner's answer."""

    def _once(self, make: Any, plan: Plan, present: frozenset[str]) -> tuple[Plan, str] | None:
        key = (make, plan.stages, present)
        if key not in self._found:
            try:
                new = make(plan, self._profile, present, optimizer=self._optimizer)
                self._found[key] = self.protected(new.plan), new.how
            except PlanError:
                self._found[key] = None
        return self._found[key]

    def protected(self, plan: Plan) -> Plan:
        """Return a plan with its keepers."""
        return with_keepers(plan, self._profile, self._optimizer, self._losses)

    def ahead(self, before: Plan, after: Plan) -> GoesAhead | None:
        """Return how a change takes place whose state goes ahead; None where that is not worth the while."""
        return goes_ahead(self._profile, self._optimizer, before, after, (self.step_s(before), self.step_s(after)))

    def calm_step_s(self, plan: Plan) -> float:
        """Return the predicted seconds of a step without keepers."""
        key = plan.stages, plan.schedule, plan.hints
        if key not in self._steps_s:
            self._steps_s[key] = predict(plan, self._profile, optimizer=self._optimizer).step_s
        return self._steps_s[key]

    def step_s(self, plan: Plan) -> float:
        """Return the predicted seconds of a step with its wait for keepers."""
        return self.calm_step_s(plan) + keepers_wait_s(plan, self._profile)


def run_availability(
    plan: Plan, profile: Profile, events: list[AvailabilityEvent], until_s: float, optimizer: str,
    checkpoint_every: int | None = None, losses: int | None = 0,
) -> Goodput:  # fmt: skip
    """Return what comes of a run of `until_s` seconds; nothing is measured, so the same input gives the same answer."""
    plans = LivePlans(profile, optimizer, losses)
    run = AvailabilityRun(plans.protected(plan), profile, plans, optimizer, checkpoint_every)
    possible = run.run(events, until_s)
    prices = Prices(profile.cluster, load_prices())
    found = {one.name: prices.of(one) for one in profile.cluster.devices}
    rents = {name: price.usd_per_hour for name, price in found.items() if price is not None and price.is_rented}
    return Goodput(
        samples_per_s=run.steps * plan.global_batch / until_s,
        share=run.steps / possible if possible else 0.0,
        steps=run.steps, steps_lost=run.steps_lost, moved_bytes=run.moved_bytes, pause_s=run.pause_s,
        rent_usd=sum(rents[name] * seconds / 3600 for name, seconds in run.present_s.items())
        if len(rents) == len(found) else None,
        lines=tuple(run.lines),
    )  # fmt: skip
