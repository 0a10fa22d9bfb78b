"""One device's place in a run that takes part in an outer optimizer; in most runs there is none."""

import itertools
from typing import TYPE_CHECKING

from spantrain.core.outer.stages import OuterCluster, StageMeeting, StageReport
from spantrain.core.plan import Plan
from spantrain.runtime.control.requests import OuterCall, StepVerdict
from spantrain.runtime.step.context import WorkerContext
from spantrain.runtime.worker.plan_part import PlanPart

if TYPE_CHECKING:
    from spantrain.runtime.worker.outer_part import OuterPart


class OuterMember:
    """Joins with each part of a plan that has other layers, and leaves with it."""

    def __init__(self, cluster: OuterCluster | None, here: WorkerContext) -> None:
        """`cluster`: as whom the run takes part; None: it takes part in none, and nothing here does anything."""
        self._cluster, self._here = cluster, here
        self._part: OuterPart | None = None
        self.notices: list[str] = []
        """What people are to be told at the end."""
        self._meetings = itertools.count()

    def join(self, part: PlanPart, step: int) -> None:
        """Take part from a step on."""
        if self._cluster is None:
            return
        # Imported here: it takes a while.
        from spantrain.runtime.worker.outer_part import OuterPart

        self._part = OuterPart(self._cluster, self._here, part, self._meet, step=step)
        self._part.begin(step)

    def report(self) -> StageReport | None:
        """Return what is brought to the barrier."""
        return self._part.report() if self._part else None

    def follow(self, step: int, verdict: StepVerdict) -> None:
        """Do behind the update of a step what the outer optimizer's leader orders."""
        if self._part and verdict.outer:
            self._part.follow(verdict.outer, step)

    def finish(self, step: int) -> None:
        """Give what is left, and take the version with it."""
        if self._part:
            self._part.finish(step)

    def leave(self) -> None:
        """Have no part any more."""
        if self._part:
            self.notices += self._part.notices
            self._part.close()
            self._part = None

    def leave_before(self, before: Plan, after: Plan, step: int) -> None:
        """Finish and leave before a change of plan that moves layers: what is under way would end with its stages."""
        if self._part is None:
            return
        from spantrain.runtime.worker.outer_part import moves_layers

        if moves_layers(before, after):
            self.finish(step)
            self.leave()

    def hold(self, part: PlanPart, step: int) -> None:
        """Go on with another part of a plan."""
        if self._part:
            self._part.hold(part)
        else:
            self.join(part, step)

    def _meet(self, report: StageReport | None) -> StageMeeting:
        return self._here.control.ask(OuterCall(number=next(self._meetings), report=report))
