"""Runs a plan for a few steps on a virtual clock, with the policies that the runtime uses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from spantrain.adaptation.local import LocalAdapter
from spantrain.core.action import Action, Direction, produces
from spantrain.core.messages import Arrived, MessageKey
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.core.span import Span
from spantrain.core.speed import SpeedTrace
from spantrain.core.trace import Trace
from spantrain.cost.held_sizes import HeldSizes
from spantrain.errors import ScheduleError, UsageError
from spantrain.schedule.dispatch.policies import Task
from spantrain.schedule.dispatch.several import AnyMachine, SharedTask
from spantrain.schedule.layout import Router, neighbour
from spantrain.schedule.registry import make_machine, replica_tasks
from spantrain.sim.costs import StepCosts
from spantrain.sim.network import Network
from spantrain.sim.record import DeviceMemory, MemoryLog, TraceRecorder
from spantrain.sim.replica import SharedReplica, SimulatedReplica, World
from spantrain.sim.sums import LastAction, end_of_step
from spantrain.sim.transfers import TransferCost, VirtualClock


class SimulationOptions(Record):
    """How to simulate."""

    trace: bool = True
    """Whether to collect intervals and flows; planners that try many plans need none."""
    split_backward: bool | None = None
    """Whether backwards run as I and W; None: as the schedule has it."""
    held_sizes: Mapping[str, HeldSizes] = field(default_factory=dict)
    """By device: what things are in bytes; when given (for all devices of the plan), memory is counted over time."""
    device_speed: Mapping[str, SpeedTrace] = field(default_factory=dict)
    """By leader of a replica: how its speed changes over time."""
    link_speed: Mapping[str, SpeedTrace] = field(default_factory=dict)
    """By link, named as the costs name it (`lab->office`): how its bandwidth changes over time."""
    spares_links: bool = False
    """Whether links may be named, too, that the plan does not use."""
    clock_offset_s: Mapping[str, float] = field(default_factory=dict)
    """By leader of a replica: how far its own clock is ahead. Policies are told the time of their device's clock."""
    local: Mapping[str, LocalAdapter] = field(default_factory=dict)
    """By leader of a replica: its adapter, which hears of messages and may re-cut its micro-batches."""
    shared: Callable[[SharedTask, str], AnyMachine] | None = None
    """Makes what decides for a device with several stages, by its leader; None: as the schedule has it."""


class SimulationResult(Record):
    """What a plan would do, in the steady state (the last step that was simulated)."""

    step_s: float
    """From one step to the next, all included."""
    pipeline_s: float
    """From a step's first start to the end of its last action."""
    samples_per_s: float
    bubble_ratio: Mapping[str, float]
    """By device: the part of the step in which it waits."""
    utilisation: Mapping[str, float]
    """By device: the part of the step in which it computes."""
    peak_in_flight: Mapping[str, int]
    """By device: the most samples held at once, up to W."""
    link_bytes: Mapping[tuple[str, str], int]
    """Bytes that a device sends another in one step."""
    orders: Mapping[str, tuple[Action, ...]]
    """What the leader of each replica ran, in order."""
    trace: Trace
    memory: Mapping[str, DeviceMemory] = field(default_factory=dict)
    """By device, over all steps; empty when no sizes were given."""
    step_ends_s: tuple[float, ...] = ()
    """When all devices had come to the barrier of each step, since the first one's begin."""

    @property
    def peak_bytes(self) -> dict[str, int]:
        """By device: the most bytes held at once; empty when no sizes were given."""
        return {device: memory.peak_bytes for device, memory in self.memory.items()}


def simulate(
    plan: Plan, costs: StepCosts, *, steps: int = 3, options: SimulationOptions | None = None
) -> SimulationResult:
    """Run a plan's policies on a virtual clock.

    Raises:
        UsageError: there is no such schedule; options name a device or a link that the plan does not use.
        PlanError: an in-flight limit is too small for a static order.
        ScheduleError: the pipeline stops; the message says what every replica waits for.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return Simulation(plan, costs, options or SimulationOptions()).run(steps)


_Pair = tuple[str, str]


@dataclass(slots=True, eq=False)
class _SampleMessage:
    """Samples on their way."""

    direction: Direction
    stage: int
    step: int
    span: Span
    made_s: float
    """When the action began that made it."""
    route: _Pair
    target: SimulatedReplica
    transfer: TransferCost


class Simulation:
    """A plan at work on a virtual clock, step by step; `sim.stale` lets steps overlap."""

    sums_overlap = True
    """Whether buckets of gradients are summed beside the last backward, where costs say when they may be."""

    def __init__(self, plan: Plan, costs: StepCosts, options: SimulationOptions) -> None:
        self._plan = plan
        self._costs = costs
        self._clock = VirtualClock()
        self._network = Network(self._clock, speeds=options.link_speed)
        self._router = Router(plan)
        self._recorder = TraceRecorder(on=options.trace)
        self._link_bytes: dict[tuple[str, str], int] = {}
        self._transfers: dict[
            tuple[str, str, Direction, int, int], tuple[TransferCost, SimulatedReplica, tuple[str, str]]
        ] = {}
        """By sender, receiver, direction, samples and stage: what it takes, who gets it, and the pair."""
        self._options = options
        self._stages = self._replicas()
        self._by_leader = {replica.leader: replica for stage in self._stages for replica in stage}
        self._shared = plan.interleaved
        self._check_devices()
        self._memory = MemoryLog(options.held_sizes) if options.held_sizes else None
        self._world = World(clock=self._clock, recorder=self._recorder, memory=self._memory, deliver=self._deliver)

    def _replicas(self) -> tuple[tuple[SimulatedReplica, ...], ...]:
        tasks = replica_tasks(self._plan, split_backward=self._options.split_backward)
        by_stage = {
            number: tuple(self._replica(one.devices, task) for one, task in zip(crew.first.replicas, row, strict=True))
            for crew, row in zip(self._plan.crews, tasks, strict=True)
            for number in crew.numbers[:1]
        }
        firsts = {number: crew.numbers[0] for crew in self._plan.crews for number in crew.numbers}
        return tuple(by_stage[firsts[number]] for number in range(len(self._plan.stages)))

    def _replica(self, devices: tuple[str, ...], task: Task) -> SimulatedReplica:
        options, leader = self._options, devices[0]
        if isinstance(task, SharedTask) and options.shared is not None:
            machine: AnyMachine = options.shared(task, leader)
        else:
            machine = make_machine(self._plan.schedule, task)
        return (SharedReplica if isinstance(task, SharedTask) else SimulatedReplica)(
            devices,
            machine,
            self._costs.action_s,
            self._costs.action_overhead_s,
            speed=options.device_speed.get(leader),
            clock_offset_s=options.clock_offset_s.get(leader, 0.0),
            local=options.local.get(leader),
        )

    def _check_devices(self) -> None:
        named = {what: set(getattr(self._options, what)) for what in ("device_speed", "clock_offset_s", "local")}
        for what, leaders in named.items():
            unknown = sorted(leaders - set(self._by_leader))
            if unknown:
                raise UsageError(f"{what}: no replica is led by {', '.join(unknown)}; {', '.join(self._by_leader)} are")
        missing = sorted(set(self._plan.devices) - set(self._options.held_sizes))
        if self._options.held_sizes and missing:
            raise UsageError(f"held_sizes: nothing is said of {', '.join(missing)}; give all devices of the plan")

    def _check_links(self) -> None:
        unused = sorted(set(self._options.link_speed) - set(self._network.links))
        if unused and not self._options.spares_links:
            raise UsageError(
                f"link_speed: the plan sends nothing over {', '.join(unused)}; it uses {', '.join(self._network.links)}"
            )

    def run(self, steps: int) -> SimulationResult:
        """Run so many steps; return the figures of the last one."""
        ready_s = dict.fromkeys(self._by_leader, 0.0)
        begun_s = committed_s = pipeline_s = 0.0
        ends_s: list[float] = []
        for step in range(steps):
            begun_s = committed_s
            pipeline_s = self._pipeline(step, ready_s)
            committed_s = self._commit(step)
            ends_s.append(committed_s)
            ready_s = self._update(step, committed_s)
        # After a barrier, all steps are alike but the first one, which no update precedes.
        self._check_links()
        first_update_s = max(self._costs.optimizer_s(leader) for leader in self._by_leader) if steps == 1 else 0.0
        return self._result(committed_s - begun_s + first_update_s, pipeline_s, tuple(ends_s))

    def _pipeline(self, step: int, ready_s: Mapping[str, float]) -> float:
        """Run all actions of a step; return the seconds from first to last."""
        self._link_bytes.clear()
        # A link may have been waited for after the last message had gone.
        self._clock.back_to(min(ready_s.values()))
        for leader, replica in self._by_leader.items():
            self._clock.at(ready_s[leader], replica.begin, step, self._world)
        self._clock.run()
        replicas = self._by_leader.values()
        if not all(replica.policy.step_complete for replica in replicas):
            waits = "; ".join(f"{replica.leader} waits for {replica.policy.waiting_for()}" for replica in replicas)
            raise ScheduleError(f"step {step} stopped at {self._clock.now_s:.6g} s: {waits}")
        for replica in replicas:
            replica.end()
        return max(replica.ended_s for replica in replicas) - min(ready_s.values())

    def _commit(self, step: int) -> float:
        """Return when gradients are summed and all devices may update."""
        last = [[LastAction(one.leader, *one.last_of(stage)) for one in row] for stage, row in enumerate(self._stages)]
        committed_s, sums = end_of_step(last, self._costs, overlap=self.sums_overlap)
        for index, (start_s, end_s) in sums.items():
            self._recorder.computed(self._plan.stages[index].devices, "gradient sum", step, start_s, end_s, lane="sum")
        return committed_s

    def _update(self, step: int, start_s: float) -> dict[str, float]:
        """Return when each replica has updated its parameters."""
        ready_s = {
            leader: replica.work_ends_s(start_s, self._costs.optimizer_s(leader))
            for leader, replica in self._by_leader.items()
        }
        for leader, replica in self._by_leader.items():
            if ready_s[leader] > start_s:
                replica.busy_s += ready_s[leader] - start_s
                self._recorder.computed(replica.devices, "update", step, start_s, ready_s[leader])
        return ready_s

    def _deliver(self, source: str, action: Action, step: int, made_s: float) -> None:
        """Send what an action has produced to those who need it."""
        direction = produces(action, len(self._stages))
        if direction is None:
            return
        for target, part in self._router.destinations(action.stage, direction, action.span):
            if target == source:
                self._hand_over(source, direction, action.stage, step, part)
                continue
            for span in self._by_leader[source].pieces(target, part):
                key = (source, target, direction, span.hi - span.lo, action.stage)
                known = self._transfers.get(key)
                if known is None:
                    transfer = self._costs.transfer(source, target, direction, action.stage, span)
                    known = self._transfers[key] = (transfer, self._by_leader[target], (source, target))
                transfer, receiver, route = known
                self._link_bytes[route] = self._link_bytes.get(route, 0) + transfer.size_bytes
                message = _SampleMessage(direction, action.stage, step, span, made_s, route, receiver, transfer)
                self._network.send(source, target, transfer, partial(self._arrived, message))

    def _arrived(self, message: _SampleMessage, start_s: float, sent_s: float) -> None:
        """Give a message to the replica that it is for."""
        if self._world.is_watched:
            self._note(message, start_s, sent_s)
        if self._options.local:
            (source, target), transfer = message.route, message.transfer
            known_s = self._clock.now_s + transfer.latency_s
            self._by_leader[source].hear_sent(target, transfer.size_bytes, message.span.size, start_s, known_s)
            message.target.hear_received(message.direction, message.span.size, self._clock.now_s)
        event = Arrived(message.direction, message.span)
        if self._shared and isinstance(message.target, SharedReplica):
            event = replace(event, stage=neighbour(message.stage, message.direction))
        message.target.arrive(message.step, event, self._world)

    def _hand_over(self, device: str, direction: Direction, stage: int, step: int, span: Span) -> None:
        """Give samples to the next stage of the same device, which takes no time."""
        event = Arrived(direction, span, neighbour(stage, direction))
        self._by_leader[device].arrive(step, event, self._world)

    def _note(self, message: _SampleMessage, start_s: float, sent_s: float) -> None:
        """Keep what a trace and the memory over time show of a message."""
        source, target = message.route
        transfer = message.transfer
        if self._options.trace:
            here = self._plan.stages[message.stage]
            cut = (here.end_unit if message.direction is Direction.FORWARD else here.first_unit) - 1
            key = MessageKey(self._plan.generation, message.step, message.direction.value, cut, message.span)
            self._recorder.carried(message.route, key, transfer.size_bytes, (start_s, sent_s), self._clock.now_s)
        if self._memory is not None:
            forward = message.direction is Direction.FORWARD
            self._memory.sent(source, transfer.size_bytes, message.made_s, sent_s, forward=forward, stage=message.stage)
            self._memory.received(target, transfer.size_bytes, start_s + transfer.latency_s)

    def _result(self, step_s: float, pipeline_s: float, step_ends_s: tuple[float, ...]) -> SimulationResult:
        replicas = self._by_leader.values()
        busy = {
            device: replica.busy_s / step_s if step_s else 1.0 for replica in replicas for device in replica.devices
        }
        return SimulationResult(
            step_s=step_s,
            pipeline_s=pipeline_s,
            samples_per_s=self._plan.global_batch / step_s if step_s else float("inf"),
            bubble_ratio={device: 1.0 - ratio for device, ratio in busy.items()},
            utilisation=busy,
            peak_in_flight={device: replica.peak_held for replica in replicas for device in replica.devices},
            link_bytes=dict(self._link_bytes),
            orders={replica.leader: tuple(replica.order) for replica in replicas},
            trace=self._recorder.trace(),
            memory=self._memory_by_device(),
            step_ends_s=step_ends_s,
        )

    def _memory_by_device(self) -> dict[str, DeviceMemory]:
        if self._memory is None:
            return {}
        return {
            device: self._memory.of(device, replica.leader)
            for replica in self._by_leader.values()
            for device in replica.devices
        }
