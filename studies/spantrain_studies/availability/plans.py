"""Our planner's answers for any devices that are present, each question asked once: for our policy and for rivals."""

from dataclasses import replace

from spantrain.app.planning.protection import keepers_wait_s, light_change, with_keepers
from spantrain.app.simulation.availability import goes_ahead
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.cost.memory import MemoryCost
from spantrain.errors import InfeasiblePlanError, PlanError
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.engine.predict import predict
from spantrain.planner.request import Constraints, JobSpec
from spantrain.sim.availability import GoesAhead
from spantrain_studies.availability.likeness import HostSymmetry, with_names

DISK_BYTES_PER_S = 1e9
"""At which every device writes its part of a checkpoint, all of them side by side: an assumption."""
_NOWHERE = 10**6


def write_s(profile: Profile, optimizer: str, stages: list[range]) -> float:
    """Return the seconds in which a checkpoint is written: each stage by one device."""
    memory = MemoryCost(profile, optimizer)
    return max(memory.state_bytes(units) for units in stages) / DISK_BYTES_PER_S


class OwnPlans:
    """Plans of live runs (`sim.availability.Plans`), asked once for all sets of devices that are alike.

    As in `planner.present.full_plan`, devices that come get the planner's answer or a light change, what is better.
    Steps wait for checkpoints, too, where they are written (`checkpoint_every` steps).
    """

    def __init__(self, profile: Profile, job: JobSpec) -> None:
        self.profile, self.job, self.likeness = profile, job, HostSymmetry(profile.cluster)
        self.checkpoint_every: int | None = None
        """Steps from one checkpoint to the next; None: none is written."""
        self.losses: int | None = 1
        """What `--protect` stands for: so many losses at once; None: auto."""
        self._others: dict[int, OwnPlans] = {}
        self._best: dict[object, Plan | None] = {}
        self._light: dict[object, tuple[Plan, str] | None] = {}
        self._seconds: dict[object, tuple[float, float, float]] = {}

    def of_batch(self, samples: int) -> "OwnPlans":
        """Return the plans of the same job with another global batch."""
        if samples not in self._others:
            self._others[samples] = OwnPlans(self.profile, replace(self.job, global_batch=samples))
        return self._others[samples]

    def best(self, present: frozenset[str]) -> Plan | None:
        """Return the planner's plan for these devices; None: none fits."""
        there = {name: (0 if name in present else 1,) for name in self.profile.cluster.device_by_name}
        names = self.likeness.renamed(there)
        key = frozenset(names[name] for name in present)
        if key not in self._best:
            out = tuple(name for name in there if name not in key)
            try:
                options = PlanOptions(constraints=Constraints(leave_out=out))
                self._best[key] = make_plan(self.profile, self.job, options).plan if key else None
            except (InfeasiblePlanError, PlanError):
                self._best[key] = None
        found = self._best[key]
        return None if found is None else with_names(found, {alias: name for name, alias in names.items()})

    def light(self, plan: Plan, present: frozenset[str]) -> tuple[Plan, str] | None:
        """Return the light change and its phrase."""
        found = self._lightly(plan, present)
        return None if found is None else (self.protected(found[0]), found[1])

    def full(self, plan: Plan, present: frozenset[str]) -> tuple[Plan, str] | None:
        """Return the planner's answer, or the light change where its steps are shorter."""
        planned, light = self.best(present), self._lightly(plan, present)
        if planned is None or (light is not None and self.calm_step_s(light[0]) < self.calm_step_s(planned)):
            return None if light is None else (self.protected(light[0]), light[1])
        return self.protected(planned), f"planned anew on {len(planned.devices)} devices"

    def protected(self, plan: Plan) -> Plan:
        """Return a plan with keepers."""
        return with_keepers(plan, self.profile, self.job.optimizer, self.losses)

    def ahead(self, before: Plan, after: Plan) -> GoesAhead | None:
        """Return how a change takes place whose state goes ahead; None where that is not worth the while."""
        steps_s = self.step_s(before), self.step_s(after)
        return goes_ahead(self.profile, self.job.optimizer, before, after, steps_s)

    def calm_step_s(self, plan: Plan) -> float:
        """Return the predicted seconds of a step without keepers and checkpoints."""
        return self._told(plan)[0]

    def step_s(self, plan: Plan) -> float:
        """Return the predicted seconds of a step with its wait for keepers and its part of writing checkpoints."""
        step_s, wait_s, written_s = self._told(plan)
        return step_s + wait_s + (written_s / self.checkpoint_every if self.checkpoint_every else 0.0)

    def write_s(self, plan: Plan) -> float:
        """Return the seconds in which a checkpoint is written."""
        return self._told(plan)[2]

    def _told(self, plan: Plan) -> tuple[float, float, float]:
        key = (plan.stages, plan.schedule, plan.hints)
        if key not in self._seconds:
            self._seconds[key] = (
                predict(plan, self.profile).step_s,
                keepers_wait_s(plan, self.profile),
                write_s(self.profile, self.job.optimizer, [stage.units for stage in plan.stages]),
            )
        return self._seconds[key]

    def _lightly(self, plan: Plan, present: frozenset[str]) -> tuple[Plan, str] | None:
        place = {name: index for index, name in enumerate(plan.devices)}
        marks = {
            name: (place.get(name, _NOWHERE), 0 if name in present else 1)
            for name in self.profile.cluster.device_by_name
        }
        names = self.likeness.renamed(marks)
        there, asked = frozenset(names[name] for name in present), with_names(plan, names)
        key = (asked.stages, asked.hints, there)
        if key not in self._light:
            try:
                new = light_change(asked, self.profile, there, optimizer=self.job.optimizer, losses=self.losses)
                self._light[key] = (new.plan, new.how)
            except (InfeasiblePlanError, PlanError):
                self._light[key] = None
        found = self._light[key]
        back = {alias: name for name, alias in names.items()}
        return None if found is None else (with_names(found[0], back), found[1])
