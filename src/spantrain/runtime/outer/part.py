"""A device's part in an outer optimizer, where the whole run is one of its clusters.

Di-PS, 3.1: workers with the first data-parallel rank send and get the layers of their pipeline rank, the others get
them from those. Kept: that. Here the first device of each stage moves the stage's layers; all others do their part
where copies are taken and versions come, behind the same step (`runtime.outer.parameters`). Optimizer state stays each
cluster's own. Where steps overlap (`schedule.dispatch.two_steps`), the newest weights are the parameters: those that
the update at a step's end has made, and that no step works on yet. A version goes into these; a step that is under way
keeps its own weights, and its gradients update the version's, one step late as all gradients are.
"""

import time
from collections.abc import Callable

from spantrain.core.outer.stages import OuterCluster, StageMeeting, StageReport
from spantrain.core.plan import Plan
from spantrain.outer.client.replica import ClusterCopy
from spantrain.outer.pipeline.connect import lead_stages, work_as_stage, worker_name
from spantrain.outer.pipeline.copy import carry_out
from spantrain.outer.pipeline.leader import StageLeader
from spantrain.outer.pipeline.worker import StageWorker
from spantrain.runtime.outer.layers import StageLayers, leader_of, stage_layers
from spantrain.runtime.outer.parameters import StageParameters
from spantrain.runtime.worker.plan_part import OwnPart, Surroundings

_START_S = 30.0
"""How long to wait, before the first step, for the newest version or until this cluster brings the first."""
_FINISH_S = 60.0
"""How long to wait, behind the last step, for the version with all that was learned."""
_SLICE_S = 0.25

Meet = Callable[[StageReport | None], StageMeeting]
"""Comes to the next meeting outside of steps."""


class OuterPart:
    """Takes part at the boundaries of steps; all devices of the run do the same there."""

    def __init__(self, cluster: OuterCluster, here: Surroundings, part: OwnPart, meet: Meet, *, step: int) -> None:
        """Begin to connect before a step; nothing is waited for but the other devices of the run.

        Raises:
            UsageError: address or token are none.
        """
        self._cluster, self._here, self._meet = cluster, here, meet
        plan = part.plan
        self._tokens = plan.global_batch * (plan.model.sequence_length or 1)
        self.notices: list[str] = []
        """What is to be told at the end."""
        found = stage_layers(plan, here.graph)
        self._parameters = StageParameters(found, here, part, step)
        self._copy = ClusterCopy(self._parameters)
        self._end = self._connected(plan, part.member.stage_index, found) if self._parameters.leads else None

    def hold(self, part: OwnPart) -> None:
        """From now on this is what the device has; the same devices lead the same units."""
        self._parameters.hold(part)

    def _connected(self, plan: Plan, stage: int, found: StageLayers) -> StageLeader | StageWorker | None:
        if stage not in found.by_stage:
            return None
        own, cluster = found.by_stage[stage], self._cluster
        if stage != found.leader:
            return work_as_stage(cluster, found.layers, self._copy, name=worker_name(cluster.cluster, stage), own=own)
        others = {
            leader_of(plan, other): (worker_name(cluster.cluster, other), layers)
            for other, layers in found.by_stage.items()
            if other != stage
        }
        return lead_stages(cluster, found.layers, self._copy, own=own, others=others)

    def close(self) -> None:
        """Leave: what was not pushed is this cluster's own."""
        end, self._end = self._end, None
        if end is not None:
            end.close()

    # Behind a step.

    def report(self) -> StageReport | None:
        """Count the step that ends; say how far this stage is, if this device leads one."""
        if isinstance(self._end, StageLeader):
            self._end.step(self._tokens)
        return self._end.report() if self._end else None

    def follow(self, meeting: StageMeeting, step: int, *, at_end: bool = True) -> None:
        """Do what the leader orders, at the end of a step, or before it."""
        self._parameters.come_to(step, at_end=at_end)
        if self._end:
            self._end.follow(meeting)
        else:
            carry_out(self._copy, meeting.order, {})

    # Outside of steps.

    def begin(self, step: int) -> None:
        """Wait, before a step, for the newest version, or until this cluster brings the first; not for long."""
        if not self._until(lambda leader: leader.has_begun, _START_S, step, everything=False):
            self._note(f"no version came within {_START_S:.0f} s: trains by itself until the master is in reach")

    def finish(self, step: int) -> None:
        """Push what is left, and wait for the version with it; not for ever."""
        if not self._until(lambda leader: leader.has_given_all, _FINISH_S, step, everything=True):
            self._note(f"the last push was in no version after {_FINISH_S:.0f} s")
        if isinstance(self._end, StageLeader):
            metrics = self._end.session.meter.read()
            skipped = sum(metrics.skipped.values())
            self._note(f"version {metrics.version}, {metrics.outer_rounds} rounds, {skipped} of no use")

    def _until(self, over: Callable[[StageLeader], bool], limit_s: float, step: int, *, everything: bool) -> bool:
        """Meet until the leader says that it is over; return False on the leader if it came to its limit."""
        deadline_s = time.monotonic() + limit_s
        while True:
            self._here.check_abort()
            end, reached = self._end, True
            heard = end.heard if end else 0
            report = None
            if isinstance(end, StageLeader):
                reached = over(end)
                report = end.report(everything=everything, over=reached or time.monotonic() >= deadline_s)
            elif end:
                report = end.report()
            meeting = self._meet(report)
            self.follow(meeting, step, at_end=False)
            if meeting.order.over:
                return reached
            if end:
                end.wait(heard, _SLICE_S)

    def _note(self, text: str) -> None:
        self.notices.append(f"outer optimizer, cluster {self._cluster.cluster}: {text}")
