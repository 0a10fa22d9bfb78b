"""Restart from checkpoints, what most runs do: all stop, plan anew, and load the newest checkpoint.

Kept: every change stops all; the plan is our planner's for the devices present; processes start again. Devices that
come are taken in where steps get shorter by a factor that is tuned; a checkpoint is written before, so that only losses
cost steps. In its favour: what a checkpoint has can be read by all, wherever the device that wrote it is now, over the
fastest link to each device; the start of processes takes what was measured where all was at hand.
"""

from collections.abc import Callable

from spantrain.core.plan import Plan
from spantrain.cost.moving import moved
from spantrain_studies.availability.plans import OwnPlans, write_s
from spantrain_studies.availability.run import Turn, Work

Planner = Callable[[frozenset[str]], tuple[Plan, float] | None]
"""Returns the plan for devices, and the seconds of its step."""


def own_planner(plans: OwnPlans) -> Planner:
    """Return our planner."""

    def planned(present: frozenset[str]) -> tuple[Plan, float] | None:
        plan = plans.best(present)
        return None if plan is None else (plan, plans.calm_step_s(plan))

    return planned


class Restart:
    """Stops and starts again at every change."""

    def __init__(
        self, plans: OwnPlans, planner: Planner, *, restart_s: float, every_s: float, worth: float, writes: bool = True
    ) -> None:
        """Begin with nothing.

        Args:
            plans: what has the costs.
            planner: whose plans are taken.
            restart_s: from when a loss is known until processes are there, without reading the checkpoint.
            every_s: from one checkpoint to the next.
            worth: a plan with devices that came is taken if its step is at most so long, over the present one's.
            writes: whether all stand still while a checkpoint is written.
        """
        self._plans, self._planner, self._restart_s, self._writes = plans, planner, restart_s, writes
        self.every_s, self._worth = every_s, worth
        self._work: Work | None = None
        self._known: dict[frozenset[str], tuple[Work, float] | None] = {}

    def begin(self, present: frozenset[str]) -> Work | None:
        """Plan for these devices."""
        found = self._planned(present)
        self._work = None if found is None else found[0]
        return self._work

    def lost(self, device: str, present: frozenset[str]) -> Turn:  # noqa: ARG002
        """Go back to the checkpoint on those that are left."""
        return self._again(present, back=True)

    def changed(self, present: frozenset[str]) -> Turn | None:
        """Write a checkpoint and start with the new devices, if steps get short enough."""
        found = self._planned(present)
        if found is None or (self._work is not None and found[0].step_s > self._worth * self._work.step_s):
            return None
        return self._again(present, back=False)

    def _again(self, present: frozenset[str], *, back: bool) -> Turn:
        found, before = self._planned(present), self._work
        if found is None:
            self._work = None
            return Turn(work=None, back=back)
        self._work, read_s = found
        written_s = before.write_s if before is not None and not back else 0.0
        return Turn(work=self._work, pause_s=written_s + self._restart_s + read_s, back=back)

    def _planned(self, present: frozenset[str]) -> tuple[Work, float] | None:
        """Return what would be done on these devices, and the seconds in which they read the checkpoint."""
        if present not in self._known:
            self._known[present] = self._asked(present)
        return self._known[present]

    def _asked(self, present: frozenset[str]) -> tuple[Work, float] | None:
        found = self._planner(present) if present else None
        if found is None:
            return None
        (plan, step_s), profile, optimizer = found, self._plans.profile, self._plans.job.optimizer
        written_s = write_s(profile, optimizer, [stage.units for stage in plan.stages]) if self._writes else 0.0
        work = Work(step_s=step_s, samples=plan.global_batch, devices=frozenset(plan.devices), write_s=written_s)
        return work, moved(profile, optimizer, plan, (), plan)[0]
