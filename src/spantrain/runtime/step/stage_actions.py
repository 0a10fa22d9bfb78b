"""One device's actions in a step: those that its policy wants, or those that its leader tells."""

from spantrain.core.plan import Plan
from spantrain.models.execution.stage import NamesFinal
from spantrain.runtime.step.channels import Messenger
from spantrain.runtime.step.driver import StepDriver
from spantrain.runtime.step.emulation import emulated_unit_seconds
from spantrain.runtime.step.following import Follower, Followers
from spantrain.runtime.step.stage_member import StageMember
from spantrain.runtime.step.work import DeviceClock, Feed, ReplicaWork, UnitTimes
from spantrain.runtime.worker.context import WorkerContext
from spantrain.schedule.dispatch.machine import Machine
from spantrain.schedule.dispatch.policies import TwoSteps
from spantrain.schedule.registry import make_policy, replica_tasks


class StageActions:
    """Runs the actions of one device's steps, as a leader or as a follower."""

    def __init__(self, here: WorkerContext, plan: Plan, member: StageMember) -> None:
        """Take part in a plan; of a member with a second set of weights, two steps run at once."""
        work = ReplicaWork(
            executor=member.executor,
            second=member.second,
            feed=here.feed,
            is_first=member.stage_index == 0,
            is_last=member.stage_index == len(plan.stages) - 1,
        )
        clock, group = _clock(here, plan, member), member.groups.replica
        self._leading: tuple[StepDriver, Machine] | None = None
        if not member.leads:
            self._follower = Follower(here, plan, group=group, work=work, clock=clock)
            return
        stage_index, replica_index = plan.place(here.name)
        task = replica_tasks(plan)[stage_index][replica_index]
        policy = make_policy(plan.schedule, task)
        two_steps = TwoSteps((policy, make_policy(plan.schedule, task))) if member.second is not None else None
        driver = StepDriver(
            here,
            plan,
            work=work,
            clock=clock,
            followers=Followers(group, here.device.torch_device),
            local=here.adapters.under(plan),
            two_steps=two_steps,
        )
        self._leading = driver, policy

    @property
    def driver(self) -> StepDriver | None:
        """Who talks to other stages; None on a follower."""
        return self._leading[0] if self._leading else None

    @property
    def messenger(self) -> Messenger | None:
        """Who carries messages of a step's end; None on a follower."""
        return (self.driver.deferred or self.driver) if self.driver else None

    def run_step(self, step: int, final: NamesFinal | None = None) -> float | None:
        """Run all actions of a step; return the loss sum of the last stage's leaders.

        `final` is told which gradients are final, while the step's last backward runs here.
        """
        if self._leading:
            driver, policy = self._leading
            return driver.run_step(step, policy, final)
        self._follower.run_step(step, final)
        return None

    def evaluate(self, step: int, feed: Feed) -> float | None:
        """Pass a held-out batch forward; return the loss sum of the last stage's leaders."""
        if self._leading:
            return self._leading[0].evaluate(step, feed)
        self._follower.evaluate(feed)
        return None


def _clock(here: WorkerContext, plan: Plan, member: StageMember) -> DeviceClock:
    cluster = plan.cluster
    stage = plan.stages[member.stage_index]
    units = [member.graph.units[index] for index in stage.units]
    recompute = [unit - stage.first_unit for unit in stage.recompute]
    emulated = any(cluster.device_by_name[other].emulated for other in member.replica.devices)
    by_unit = emulated_unit_seconds(cluster, here.name, member.shares, plan.dtype, units, recompute=recompute)
    return DeviceClock(
        device=here.device,
        seconds=lambda op, samples: None if by_unit is None else sum(by_unit(op, samples)),
        unit_times=None if by_unit is None else UnitTimes(seconds=by_unit, names=member.executor.names_by_unit),
        group=member.groups.replica if emulated and len(member.replica.devices) > 1 else None,
    )
