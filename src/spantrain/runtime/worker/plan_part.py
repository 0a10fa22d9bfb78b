"""All that one device has of the plan that runs: its stage's units, their optimizer, its actions and sums."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Stage
from spantrain.core.records import Record
from spantrain.core.shares import StateSharding
from spantrain.devices.base import ComputeDevice
from spantrain.errors import WorkerError
from spantrain.models.execution.held import storage_bytes
from spantrain.models.execution.stage import NamesFinal, StageExecutor
from spantrain.runtime.channels import DriverChannel, MailboxChannel, Messenger
from spantrain.runtime.checkpoint.holding import Holding, holding_of
from spantrain.runtime.gradients.optimizer import build_optimizer, update
from spantrain.runtime.gradients.own_rows import gather_rows
from spantrain.runtime.gradients.stage_sums import StageSum, TiedGradientSums, tied_across_stages
from spantrain.runtime.gradients.unit_shards import UnitShards
from spantrain.runtime.step.context import WorkerContext
from spantrain.runtime.step.driver import StepDriver
from spantrain.runtime.step.emulation import emulated_unit_seconds
from spantrain.runtime.step.following import Follower, Followers
from spantrain.runtime.step.own_stage import StageWork
from spantrain.runtime.step.stage_member import StageMember
from spantrain.runtime.step.work import DeviceClock, Feed, ReplicaWork, UnitTimes
from spantrain.schedule.dispatch.machine import ReplicaTask
from spantrain.schedule.dispatch.policies import TwoSteps
from spantrain.schedule.joint import statistics_spans
from spantrain.schedule.registry import make_machine, make_policy, replica_tasks


class StageActions:
    """Runs the actions of one device's steps, as a leader or as a follower."""

    def __init__(self, here: WorkerContext, plan: Plan, member: StageMember) -> None:
        """Take part in a plan; of a member with a second set of weights, two steps run at once."""
        self._low_weights = [one.low_weights for one in member.chunks]
        stages = {number: _stage_work(here, plan, member, number) for number in member.numbers}
        group = member.groups.replica
        self.driver: StepDriver | None = None
        """Who talks to other stages; None on a follower."""
        if not member.leads:
            (only,) = stages.values()
            self._follower = Follower(here, plan, group=group, work=only.work, clock=only.clock)
            return
        crew = plan.crew_of(here.name)
        task = replica_tasks(plan)[plan.crews.index(crew)][crew.replica_index(here.name)]
        self._policy, two_steps = make_machine(plan.schedule, task), None
        if member.second is not None:
            assert isinstance(task, ReplicaTask), "steps overlap on devices with one stage"
            two_steps = TwoSteps((make_policy(plan.schedule, task), make_policy(plan.schedule, task)))
        self.driver = StepDriver(
            here,
            plan,
            stages=stages,
            followers=Followers(group, here.device.torch_device),
            local=here.adapters.under(plan),
            two_steps=two_steps,
        )

    @property
    def messenger(self) -> Messenger | None:
        """Who carries messages of a step's end; None on a follower."""
        return (self.driver.deferred or self.driver) if self.driver else None

    def run_step(self, step: int, final: NamesFinal | None = None) -> float | None:
        """Run all actions of a step; return the loss sum of the last stage's leaders.

        `final` is told which gradients are final, while the step's last backward runs here.
        """
        for low_weights in self._low_weights:
            low_weights.refresh()
        if self.driver:
            return self.driver.run_step(step, self._policy, final)
        self._follower.run_step(step, final)
        return None

    def evaluate(self, step: int, feed: Feed) -> float | None:
        """Pass a held-out batch forward; return the loss sum of the last stage's leaders."""
        for low_weights in self._low_weights:
            low_weights.refresh()
        if self.driver:
            return self.driver.evaluate(step, feed)
        self._follower.evaluate(feed)
        return None


def _stage_work(here: WorkerContext, plan: Plan, member: StageMember, number: int) -> StageWork:
    chunk = member.chunks[member.numbers.index(number)]
    cluster, stage, own = plan.cluster, plan.stages[number], plan.crew_of(here.name).units
    units = [here.graph.units[index] for index in stage.units]
    recompute = [unit - stage.first_unit for unit in stage.recompute]
    emulated = any(cluster.device_by_name[other].emulated for other in member.replica.devices)
    at = slice(own.index(stage.first_unit), own.index(stage.first_unit) + len(units))
    shares = {name: held[at] for name, held in member.shares.items()}
    by_unit = emulated_unit_seconds(cluster, here.name, shares, plan.dtype, units, recompute=recompute)
    clock = DeviceClock(
        device=here.device,
        seconds=lambda op, samples: None if by_unit is None else sum(by_unit(op, samples)),
        unit_times=None if by_unit is None else UnitTimes(seconds=by_unit, names=chunk.names_by_unit),
        group=member.groups.replica if emulated and len(member.replica.devices) > 1 else None,
        joined=tuple(one for one in (member.groups.statistics, member.shards) if one is not None),
    )
    work = ReplicaWork(
        executors=(chunk,) if member.second is None else (chunk, member.second),
        feed=here.feed,
        is_first=number == 0,
        is_last=number == len(plan.stages) - 1,
    )
    return StageWork(work=work, clock=clock)


class PlanPart(Record):
    """A device's part of one plan."""

    plan: Plan
    member: StageMember
    optimizer: torch.optim.Optimizer
    """Of the member's parameters."""
    holding: Holding
    actions: StageActions
    stage_sum: StageSum
    tied_sums: TiedGradientSums

    @property
    def keeps_rows(self) -> bool:
        """Whether this device has no whole parameter between actions."""
        return self._first.keeps_rows

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """Those that are trained, by name in the unsplit model; one that two units share has the first's name."""
        return trained_of(self.member.named_parameters)

    @property
    def updated(self) -> Mapping[str, torch.nn.Parameter]:
        """What of them this device updates, by the same names; where replicas divide that, rows."""
        if self.holding.own_rows is None:
            return self.parameters
        rows = {id(own.whole): own.rows for own in self.holding.own_rows.values()}
        return {name: rows[id(whole)] for name, whole in self.parameters.items() if id(whole) in rows}

    def commit_statistics(self, executors: Sequence[StageExecutor]) -> None:
        """Bring running statistics up to date by what all replicas of each stage took in a step."""
        groups = self.member.groups
        total = groups.world.begin_all_reduce
        for number, executor in zip(self.member.numbers, executors, strict=True):
            spans = statistics_spans(self.plan.stages[number], joined=groups.statistics is not None)
            executor.statistics.commit(spans, lambda sums: total(sums)(), leads=self.member.leads)

    def take_gradients(self) -> None:
        """Give what this device updates its gradients, of all those that were summed."""
        if self.member.shards is not None:
            self.member.shards.finish()
        for own in (self.holding.own_rows or {}).values():
            gradient = own.whole.grad
            if gradient is not None and own.rows is not own.whole:
                own.rows.grad = own.of(gradient).to(own.rows.device)

    def update(self, job: TrainJob, step: int, grad_norm: float | None) -> None:
        """Do what a step's verdict says with the gradients that are summed; without a norm nothing is updated."""
        update(self.optimizer, job, step, grad_norm)
        self.forget_gradients()

    @property
    def lacks_rows(self) -> bool:
        """Whether the rows that other replicas have updated are to be taken behind each update."""
        return self.holding.own_rows is not None and not self.keeps_rows

    def take_rows(self) -> None:
        """Take the rows that other replicas have updated.

        Raises:
            PeerLostError: another replica went away.
        """
        gather_rows(self.parameters, self.member.groups.ring, self._first.sums)

    def forget_gradients(self) -> None:
        """Drop all of them."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.holding.own_rows is not None:  # it has only rows
            for parameter in self.parameters.values():
                parameter.grad = None

    @property
    def reads_data(self) -> bool:
        """Whether its stage takes inputs or labels."""
        return not {0, len(self.plan.stages) - 1}.isdisjoint(self.member.numbers)

    @property
    def _first(self) -> Stage:
        """The first of its stages, which has what all of them have alike."""
        return self.plan.stages[self.member.stage_index]

    def discard(self) -> None:
        """Drop what is under way in the present step."""
        for executor in self.member.chunks:
            executor.discard()

    def close(self) -> None:
        """Leave the groups and end the thread that sums over them."""
        self.stage_sum.close()
        self.member.groups.close()

    def post(self, here: WorkerContext, step: int, *, at_end: bool = False) -> DriverChannel:
        """Return how an exchange before a step, or at its end, reaches the others, with nothing lost of the step's."""
        address = {"generation": self.plan.generation, "step": step}
        driver = self.actions.messenger if at_end else self.actions.driver
        if driver is not None:
            return DriverChannel(driver, **address)
        return MailboxChannel(here.mailbox, **address, check_abort=here.check_abort)


def trained_of(named: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: own for name, own in named.items() if own.requires_grad}


def make_plan_part(
    here: WorkerContext, plan: Plan, member: StageMember, optimizer: torch.optim.Optimizer, holding: Holding
) -> PlanPart:
    """Make all that a step needs besides the stage's units, their optimizer, and what is held of both.

    It takes a few milliseconds.
    """
    actions, stage = StageActions(here, plan, member), plan.stages[member.stage_index]
    tied = tied_across_stages(plan, member.stage_index, here.graph, member.units)
    whole = [one.parameter for one in tied] if member.rows is not None else []
    stage_sum = StageSum(
        member.groups,
        member.parts,
        levels=member.unlike,
        partial=(*member.partial, *whole),
        division=stage.state_sharding if stage.divides_state else StateSharding.NONE,
        by_unit=member.shards is not None,
        sums=stage.sums,
    )
    tied_sums = TiedGradientSums(
        tied=tied,
        plan=plan,
        stage_index=member.stage_index,
        driver=actions.messenger,
        stage_sum=stage_sum,
        recorder=here.recorder,
    )
    return PlanPart(
        plan=plan,
        member=member,
        optimizer=optimizer,
        holding=holding,
        actions=actions,
        stage_sum=stage_sum,
        tied_sums=tied_sums,
    )


def new_optimizer(here: WorkerContext, plan: Plan, member: StageMember) -> tuple[torch.optim.Optimizer, Holding]:
    """Return a device's optimizer without any state, of what it updates, and what it holds."""
    named = member.named_parameters
    rows = member.rows
    updated = named if rows is None else {name: own.rows for name, own in rows.items()}
    holding = holding_of(plan, here.name, here.graph, named, member.parts.own, member.units, rows)
    return build_optimizer(here.job, updated.values(), updated), holding


def peak_bytes(
    device: ComputeDevice, executors: Sequence[StageExecutor], optimizer: Optimizer, shards: UnitShards | None = None
) -> int:
    """Return the most bytes of tensors since then.

    Where the device counts them, all that was allocated. On the processor, which does not: parameters and buffers, a
    gradient for each that is trained, the optimizer's state, and the most that spans in flight and their messages held
    (`models.execution.held`); what an operation needs while it runs is not in it. Of two executors each counts what the
    other holds, too. Where replicas divide gradients, those of its rows, and what is whole or on its way of units; what
    is in the host's memory is not the device's.
    """
    counted = device.peak_bytes()
    if counted is not None:
        return counted
    parameters = list({id(own): own for one in executors for own in one.named_parameters().values()}.values())
    copies = [copy for one in executors for copy in one.low_weights.copies]
    buffers = [buffer for one in executors for unit in one.units for buffer in unit.buffers()]
    held_bytes = max(one.meter.peak_bytes for one in executors)
    updated: Sequence[torch.nn.Parameter] = parameters
    if shards is not None:
        updated, held_bytes = shards.rows, held_bytes + shards.besides_bytes
        if shards.on_host:
            return storage_bytes([*parameters, *buffers]) + held_bytes
    gradients_bytes = sum(one.nbytes for one in updated if one.requires_grad)
    state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    return storage_bytes([*parameters, *updated, *copies, *buffers, *state]) + gradients_bytes + held_bytes


def check_finite(step: int, values: Mapping[str, float | None]) -> None:
    """Raise a `WorkerError` if one of a step's figures, by what it is, is infinite or no number."""
    for what, value in values.items():
        if value is not None and not math.isfinite(value):
            raise WorkerError(
                f"step {step}: the {what} is {value}; training has diverged, or samples hold such numbers: look for "
                "them, lower --learning-rate, or clip with --max-grad-norm; the last checkpoint is from before"
            )
