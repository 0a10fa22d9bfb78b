"""One device's actions in a step: those that its policy wants, or those that its leader tells."""

from collections.abc import Callable

from spantrain.core.plan import Plan
from spantrain.models.device import Device
from spantrain.policy.adapter.choice import make_local
from spantrain.policy.dispatch import DispatchPolicy, make_policy
from spantrain.policy.tasks import replica_tasks
from spantrain.runtime.driver import StepDriver
from spantrain.runtime.emulation import emulated_group_seconds
from spantrain.runtime.following import Follower, Followers
from spantrain.runtime.recorder import Recorder
from spantrain.runtime.stage_member import StageMember
from spantrain.runtime.work import DeviceClock, Feed, ReplicaWork
from spantrain.transport.interface import MailboxLike

__all__ = ["StageActions"]


class StageActions:
    """Runs the actions of one device's steps, as a leader or as a follower."""

    def __init__(
        self,
        *,
        plan: Plan,
        schedule: str,
        name: str,
        member: StageMember,
        device: Device,
        mailbox: MailboxLike,
        feed: Feed,
        recorder: Recorder,
        check_abort: Callable[[], None],
        adapter: str = "off",
    ) -> None:
        work = ReplicaWork(
            executor=member.executor,
            feed=feed,
            is_first=member.stage_index == 0,
            is_last=member.stage_index == len(plan.stages) - 1,
        )
        clock = _clock(plan, name, member, device)
        group = member.groups.replica
        self._leading: tuple[StepDriver, DispatchPolicy] | None = None
        if not member.leads:
            self._follower = Follower(
                group=group,
                work=work,
                clock=clock,
                stage=member.stage_index,
                recorder=recorder,
                check_abort=check_abort,
            )
            return
        driver = StepDriver(
            plan=plan,
            name=name,
            work=work,
            clock=clock,
            mailbox=mailbox,
            followers=Followers(group, device.torch_device),
            recorder=recorder,
            check_abort=check_abort,
            local=make_local(adapter, plan, name),
        )
        stage_index, replica_index = plan.place(name)
        task = replica_tasks(plan, schedule=schedule)[stage_index][replica_index]
        self._leading = driver, make_policy(schedule, task)

    @property
    def driver(self) -> StepDriver | None:
        """Who talks to other stages; None on a follower."""
        return self._leading[0] if self._leading else None

    def run_step(self, step: int) -> float | None:
        """Run all actions of a step; return the loss sum of the last stage's leaders."""
        if self._leading:
            driver, policy = self._leading
            return driver.run_step(step, policy)
        self._follower.run_step()
        return None

    def evaluate(self, step: int, feed: Feed) -> float | None:
        """Pass a held-out batch forward; return the loss sum of the last stage's leaders."""
        if self._leading:
            return self._leading[0].evaluate(step, feed)
        self._follower.evaluate(feed)
        return None


def _clock(plan: Plan, name: str, member: StageMember, device: Device) -> DeviceClock:
    cluster = plan.cluster
    stage = plan.stages[member.stage_index]
    units = [member.graph.units[index] for index in stage.units]
    recompute = [unit - stage.first_unit for unit in stage.recompute]
    emulated = any(cluster.device_by_name[other].emulated for other in member.replica.devices)
    return DeviceClock(
        device=device,
        seconds=emulated_group_seconds(cluster, name, member.shares, plan.dtype, units, recompute=recompute),
        group=member.groups.replica if emulated and len(member.replica.devices) > 1 else None,
    )
