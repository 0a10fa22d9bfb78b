"""What `goodput.py --simulated` compares: cases, contestants with what of them is tuned, and the best of each."""

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import results
from spantrain.app.planning.protection import losses_of
from spantrain.app.profiling.describe import described_profile
from spantrain.app.simulation.availability import events_of
from spantrain.config.cluster_file import load_preset, parse_cluster
from spantrain.core.cluster import Cluster
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.request import JobSpec
from spantrain.sim.availability import AvailabilityEvent, AvailabilityRun
from spantrain_studies.availability.bamboo import Bamboo, designs
from spantrain_studies.availability.chains import Chains
from spantrain_studies.availability.oobleck import Oobleck
from spantrain_studies.availability.plans import OwnPlans
from spantrain_studies.availability.restart import Restart, own_planner
from spantrain_studies.availability.run import Rival, RivalRun
from spantrain_studies.availability.torchft import TorchFt, divisions, groups_of
from spantrain_studies.availability.varuna import grid_planner

OURS = "SpanTrain"
NAMES = (OURS, "restart", "Varuna", "Bamboo", "Oobleck", "torchft")
OPTIMIZER = "adamw"
RATES_H = {"calm": 2.0, "stormy": 0.25}
"""Hours between losses of a device, on average."""
REPAIR_H = 1 / 6
EVERY_S = (60.0, 5.0, 20.0, 180.0, 600.0, 1800.0)
"""Seconds between checkpoints that are tried; the first while all else is tuned."""
PROTECT = ("one", "auto", "none")
"""What of ours is tried: keepers for each stage, for those that need hardly wait for them, for none."""
WORTH = (0.97, 0.8, 0.6)
"""How short steps are to become for devices that come to be taken in: what is tried."""
_DESIGNS = 4
MADE = {
    "three-sites": """
name: three-sites
description: a part of the preset spantrain-setting-1, 4 RTX 4090, 4 RTX 3090 and 4 RTX 3080 in three sites
sites:
  - name: cloud
    network: {bandwidth: 1 Gbit/s, latency: 0.2 ms}
    hosts:
      - {name: cloud, count: 2, backend: emulated, devices: {rtx-4090: 2}}
  - name: edge
    network: {bandwidth: 1 Gbit/s, latency: 0.2 ms}
    hosts:
      - {name: edge, count: 2, backend: emulated, devices: {rtx-3090: 2}}
  - name: end
    network: {bandwidth: 1 Gbit/s, latency: 0.2 ms}
    hosts:
      - {name: end, count: 4, backend: emulated, devices: {rtx-3080: 1}}
links:
  - {between: [cloud, edge], bandwidth: 100 Mbit/s, latency: 20 ms}
  - {between: [cloud, end], bandwidth: 100 Mbit/s, latency: 25 ms}
  - {between: [edge, end], bandwidth: 1 Gbit/s, latency: 5 ms}
""",
    "equal-16": """
name: equal-16
description: 16 equal V100 in one place, one in each host, at 10 Gbit/s
sites:
  - name: zone
    network: {bandwidth: 10 Gbit/s, latency: 0.2 ms}
    hosts:
      - {name: spot, count: 16, backend: emulated, devices: {v100: 1}}
links: []
""",
}
"""Pools that are no preset."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Devices and what they train."""

    name: str
    model: str
    batch: int

    @cached_property
    def cluster(self) -> Cluster:
        """Its devices."""
        return parse_cluster(MADE[self.name], source=self.name) if self.name in MADE else load_preset(self.name)


POOLS = (
    Pool(name="laptop", model="gpt2-tiny", batch=48),
    Pool(name="three-sites", model="gpt2-xl", batch=64),
    Pool(name="equal-16", model="gpt2-xl", batch=128),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What comes of one run."""

    samples: float
    steps_lost: float
    paused_s: float
    restarts: int


@dataclass
class Tuned:
    """A contestant as it did best, by seed."""

    settings: str
    every_s: float
    runs: list[Outcome]
    tried: int = 1

    @property
    def samples(self) -> float:
        """The median."""
        return statistics.median(run.samples for run in self.runs)


Contestant = Callable[[float, list[AvailabilityEvent]], Outcome]
"""Runs through events with so many seconds between checkpoints."""


def measured_restart_s() -> float:
    """Return the seconds of a stop, a new plan and a start, without the detection: measured by `recovery.py`."""
    measured = json.loads((results.FOLDER / "recovery.json").read_text())["results"].values()
    return statistics.median(
        statistics.median(found["stop_s"]) - float(found["median"]["detect_s"]) for found in measured
    )


@dataclass
class Contest:
    """One pool and all contestants on it; plans are asked for once, whatever the events."""

    pool: Pool
    hours: float
    restart_s: float
    _designed: dict[str, list[tuple[str, Callable[[float], Rival]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.profile = described_profile(self.pool.cluster, resolve_model(self.pool.model))
        self.job = JobSpec(global_batch=self.pool.batch, optimizer=OPTIMIZER)
        self.plans, self.chains = OwnPlans(self.profile, self.job), Chains(self.profile, self.job)
        self.devices = frozenset(self.profile.cluster.device_by_name)

    def events(self, rate: str, seed: int) -> list[AvailabilityEvent]:
        """Return drawn losses and repairs."""
        text = f"mtbf:{RATES_H[rate]},repair:{REPAIR_H},seed:{seed}"
        return events_of(text, self.profile.cluster, self.hours * 3600)

    def possible(self, events: list[AvailabilityEvent]) -> float:
        """Return the samples that the devices present could have done by the planner's plans, with no pause."""
        present, now_s, found = self.devices, 0.0, 0.0
        for event in (*sorted(events, key=lambda event: event.at_s), None):
            at_s = self.hours * 3600 if event is None else event.at_s
            plan = self.plans.best(present) if present else None
            found += (at_s - now_s) * self.pool.batch / self.plans.calm_step_s(plan) if plan is not None else 0.0
            now_s = at_s
            if event is not None:
                present = present | {event.device} if event.comes else present - {event.device}
        return found

    def tuned(self, name: str, traces: list[list[AvailabilityEvent]]) -> Tuned | None:
        """Return a contestant with the settings and the interval that suit these traces best; None: it cannot run."""
        best: Tuned | None = None
        tried = 0
        for settings, run in self._contestants(name):
            found = Tuned(settings, EVERY_S[0], [run(EVERY_S[0], events) for events in traces])
            tried += 1
            if best is None or found.samples > best.samples:
                best, chosen = found, run
        if best is None:
            return None
        for every_s in EVERY_S[1:]:
            found = Tuned(best.settings, every_s, [chosen(every_s, events) for events in traces])
            tried += 1
            best = found if found.samples > best.samples else best
        best.tried = tried
        return best

    def _contestants(self, name: str) -> Iterator[tuple[str, Contestant]]:
        if name == OURS:
            for text in PROTECT:
                yield f"--protect {text}", partial(self._ours, losses_of(text))
            return
        for settings, make in self._rivals(name):
            yield settings, lambda every_s, events, make=make: self._rival(make(every_s), events)

    def _ours(self, losses: int | None, every_s: float, events: list[AvailabilityEvent]) -> Outcome:
        first = self.plans.best(self.devices)
        assert first is not None
        self.plans.losses = losses
        plan = self.plans.protected(first)
        self.plans.checkpoint_every = every = max(1, round(every_s / self.plans.calm_step_s(plan)))
        run = AvailabilityRun(plan, self.profile, self.plans, OPTIMIZER, every)
        run.run(events, self.hours * 3600)
        return Outcome(
            samples=run.steps * self.pool.batch, steps_lost=run.steps_lost, paused_s=sum(run.pause_s.values()),
            restarts=sum("go back" in line for line in run.lines),
        )  # fmt: skip

    def _rival(self, rival: Rival, events: list[AvailabilityEvent]) -> Outcome:
        heard = rival.healed(events) if isinstance(rival, TorchFt) else events
        run = RivalRun(rival, self.devices).run(heard, self.hours * 3600)
        return Outcome(samples=run.samples, steps_lost=run.steps_lost, paused_s=run.paused_s, restarts=run.restarts)

    def _rivals(self, name: str) -> list[tuple[str, Callable[[float], Rival]]]:
        """Return a rival's settings that are tried, each with what makes it."""
        if name not in self._designed:
            self._designed[name] = list(self._made(name))
        return self._designed[name]

    def _made(self, name: str) -> Iterator[tuple[str, Callable[[float], Rival]]]:
        restart_s, plans, chains = self.restart_s, self.plans, self.chains
        if name == "torchft":
            for division in divisions(chains.whole):
                groups = groups_of(plans, division)
                if groups:
                    said = f"{len(groups)} groups of {min(map(len, division))} to {max(map(len, division))}"
                    yield (
                        said,
                        lambda every_s, groups=groups: TorchFt(plans, groups, restart_s=restart_s, every_s=every_s),
                    )
            return
        planners = {"restart": own_planner(plans), "Varuna": grid_planner(chains.whole)}
        grids = designs(chains, self.devices, _DESIGNS) if name == "Bamboo" else []
        for worth in WORTH:
            own: dict[str, Any] = {"restart_s": restart_s, "worth": worth}
            said = f"joins worth {worth}"
            if name in planners:
                planner, writes = planners[name], name == "restart"
                yield (
                    said,
                    lambda every_s, own=own, planner=planner, writes=writes: Restart(
                        plans, planner, every_s=every_s, writes=writes, **own
                    ),
                )
            elif name == "Oobleck":
                yield said, lambda every_s, own=own: Oobleck(chains, every_s=every_s, **own)
            for laid in grids:
                shape = f"{len(laid.slots[0])} pipelines of {len(laid.slots)}, {said}"
                yield shape, lambda every_s, own=own, laid=laid: Bamboo(chains, laid, every_s=every_s, **own)
