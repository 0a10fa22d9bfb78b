"""One device's actions in a step: those that its policy wants, or those that its leader tells."""

from collections.abc import Callable
from functools import partial

from spantrain.adaptation.local import LocalAdapter
from spantrain.core.plan import Plan
from spantrain.devices.base import ComputeDevice
from spantrain.models.execution.stage import NamesFinal
from spantrain.runtime.gradients.stage_sums import Messenger
from spantrain.runtime.staleness.driver import StaleDriver
from spantrain.runtime.step.driver import StepDriver
from spantrain.runtime.step.emulation import emulated_unit_seconds
from spantrain.runtime.step.following import Follower, Followers
from spantrain.runtime.step.recorder import StepRecorder
from spantrain.runtime.step.stage_member import StageMember
from spantrain.runtime.step.work import DeviceClock, Feed, ReplicaWork, UnitTimes
from spantrain.schedule.dispatch.machine import Machine
from spantrain.schedule.dispatch.policies import TwoSteps
from spantrain.schedule.registry import make_policy, replica_tasks
from spantrain.transport.mailbox.mailbox import MailboxLike


class StageActions:
    """Runs the actions of one device's steps, as a leader or as a follower."""

    def __init__(
        self,
        *,
        plan: Plan,
        name: str,
        member: StageMember,
        device: ComputeDevice,
        mailbox: MailboxLike,
        feed: Feed,
        recorder: StepRecorder,
        check_abort: Callable[[], None],
        local: LocalAdapter | None = None,
    ) -> None:
        """Take part in a plan; of a member with a second set of weights, two steps run at once (`StaleDriver`)."""
        work = ReplicaWork(
            executor=member.executor,
            second=member.second,
            feed=feed,
            is_first=member.stage_index == 0,
            is_last=member.stage_index == len(plan.stages) - 1,
        )
        clock = _clock(plan, name, member, device)
        group = member.groups.replica
        self._leading: tuple[StepDriver, Machine] | None = None
        if not member.leads:
            self._follower = Follower(
                group=group,
                work=work,
                clock=clock,
                stage=member.stage_index,
                samples=_samples(plan, name),
                recorder=recorder,
                check_abort=check_abort,
            )
            return
        policy, make_driver = _deciding(plan, name, two=member.second is not None)
        driver = make_driver(
            plan=plan,
            name=name,
            work=work,
            clock=clock,
            mailbox=mailbox,
            followers=Followers(group, device.torch_device),
            recorder=recorder,
            check_abort=check_abort,
            local=local,
        )
        self._leading = driver, policy

    @property
    def driver(self) -> StepDriver | None:
        """Who talks to other stages; None on a follower."""
        return self._leading[0] if self._leading else None

    @property
    def messenger(self) -> Messenger | None:
        """Who carries messages of a step's end; None on a follower."""
        return self.driver.errands if isinstance(self.driver, StaleDriver) else self.driver

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


def _deciding(plan: Plan, name: str, *, two: bool) -> tuple[Machine, Callable[..., StepDriver]]:
    """Return a leader's decision machine, and what makes its driver: of one step, or of two at once."""
    stage_index, replica_index = plan.place(name)
    task = replica_tasks(plan)[stage_index][replica_index]
    policy = make_policy(plan.schedule, task)
    if not two:
        return policy, StepDriver
    return policy, partial(StaleDriver, two_steps=TwoSteps((policy, make_policy(plan.schedule, task))))


def _samples(plan: Plan, name: str) -> int:
    """Return how many samples of each step a device's replica has."""
    stage, replica = plan.place(name)
    return sum(span.size for span in plan.stages[stage].replica_spans(replica))


def _clock(plan: Plan, name: str, member: StageMember, device: ComputeDevice) -> DeviceClock:
    cluster = plan.cluster
    stage = plan.stages[member.stage_index]
    units = [member.graph.units[index] for index in stage.units]
    recompute = [unit - stage.first_unit for unit in stage.recompute]
    emulated = any(cluster.device_by_name[other].emulated for other in member.replica.devices)
    by_unit = emulated_unit_seconds(cluster, name, member.shares, plan.dtype, units, recompute=recompute)
    return DeviceClock(
        device=device,
        seconds=lambda op, samples: None if by_unit is None else sum(by_unit(op, samples)),
        unit_times=None if by_unit is None else UnitTimes(seconds=by_unit, names=member.executor.names_by_unit),
        group=member.groups.replica if emulated and len(member.replica.devices) > 1 else None,
    )
