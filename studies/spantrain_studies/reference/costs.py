"""A measured run of another framework as a plan of ours with costs, run through the event engine."""

from collections.abc import Mapping
from dataclasses import dataclass

from spantrain.core.action import Action, Direction, Op
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.span import Span, equal_spans
from spantrain.core.units import ModelSpec
from spantrain.cost.memory import HeldBytes, HeldSizes
from spantrain.sim.costs import StepCosts
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate
from spantrain.sim.transfers import TransferCost
from spantrain_studies.reference.layers import LayerCosts
from spantrain_studies.reference.network import Placed, ReferenceNetwork
from spantrain_studies.reference.platform import Platform
from spantrain_studies.reference.types import Reference, ReferenceCase, ReferencePlan, ReferenceReplica


@dataclass(frozen=True, kw_only=True)
class TimeParts:
    """What a step's seconds are made of, as the stage that works longest sees it."""

    compute_s: float
    receive_s: float
    """Messages on their way in, which it waits for, and the host's part of taking them."""
    send_s: float
    """Sends that keep it from its next action."""
    wait_s: float
    """Filling and draining the pipeline, and other stages."""
    gradient_sum_s: float
    update_s: float


@dataclass(frozen=True, kw_only=True)
class ByteParts:
    """What the peak of the fullest device is made of."""

    state_bytes: float
    activation_bytes: float
    message_bytes: float
    workspace_bytes: float
    base_bytes: float


@dataclass(frozen=True, kw_only=True)
class CasePrediction:
    """What our cost model and engine say of a run."""

    step_s: float
    peak_bytes: int
    """Of the fullest device."""
    longest: str
    """Stage and kind of the device that works longest."""
    fullest: str
    over_memory: tuple[str, ...]
    """Stages and kinds of the devices that hold more than they have."""
    time: TimeParts
    memory: ByteParts
    estimated_head: bool
    """Whether the projection to the vocabulary had to be estimated."""


def predict_case(reference: Reference, case: ReferenceCase, platform: Platform) -> CasePrediction:
    """Return what a measured run should take.

    Raises:
        ProfileError: something that the run needs was not measured.
    """
    return predict_plan(reference, case.plan, platform)


def predict_plan(reference: Reference, plan: ReferencePlan, platform: Platform) -> CasePrediction:
    """Return what a plan should take.

    Pipelines of a data-parallel run that are alike do the same at the same time, so each sort of pipeline runs once.
    One device stands for its tensor-parallel group.

    Raises:
        ProfileError: something that the run needs was not measured.
    """
    run = _CaseRun(reference, plan, platform)
    result = simulate(run.plan, run, steps=1, options=run.options)
    return run.prediction(result)


def _pipelines(case: ReferencePlan) -> dict[tuple[ReferenceReplica, ...], int]:
    """Return the sorts of pipelines, each with its first replica's number; a replica feeds that of its own number."""
    found: dict[tuple[ReferenceReplica, ...], int] = {}
    for number in range(case.dp_degree):
        found.setdefault(tuple(stage.replicas[number] for stage in case.stages), number)
    return found


class _CaseRun(StepCosts):
    """The costs of a case, and the plan that they belong to; embedding and head have parameters of their own."""

    def __init__(self, reference: Reference, case: ReferencePlan, platform: Platform) -> None:
        self._case = case
        self._platform = platform
        self._layers = LayerCosts(reference, case.model, platform)
        self._network = ReferenceNetwork(reference)
        self._place: dict[str, tuple[int, int]] = {}
        self.plan = self._plan(reference)
        self.options = SimulationOptions(
            trace=False,
            held_sizes={device: self._held_sizes(device) for device in self.plan.devices},
            send_hold_s={
                (device, direction): self._hold_s(device, direction)
                for device in self.plan.devices
                for direction in Direction
            },
        )

    def action_s(self, device: str, action: Action) -> float:
        """Return the seconds of an action: receiving what it needs, which blocks, and computing."""
        direction = Direction.FORWARD if action.op is Op.FORWARD else Direction.BACKWARD
        return self._compute_s(device, action.op) + self._receive_s(device, direction)

    def transfer(self, source: str, target: str, direction: Direction, stage: int, span: Span) -> TransferCost:
        """Return a message that takes no time by itself: receiving and sending are part of the actions."""
        return TransferCost(
            size_bytes=self._cut_sample_bytes(stage if direction is Direction.FORWARD else stage - 1) * span.size,
            latency_s=0.0,
            occupancy_s=0.0,
            links=(f"{source}->{target}",),
        )

    def gradient_bucket_s(self, stage: int) -> tuple[float, ...]:
        """Return the seconds of the ring sum over all replicas of a stage; all of it is one bucket."""
        layers = self._case.stages[stage].layers
        replicas = self._case.stages[stage].replicas
        size_bytes = max(4.0 * self._layers.parameters(layers, r.tp_degree) * r.tp_degree for r in replicas)
        placed = [self._placed(stage, number) for number in range(len(replicas))]
        return (self._network.ring_sum_s(placed, size_bytes),)

    def optimizer_s(self, device: str) -> float:
        """Return the seconds of a device's update of its parameters."""
        stage, replica = self._of(device)
        return self._layers.update_s(self._case.stages[stage].layers, replica, self._case.micro_batch)

    def prediction(self, result: SimulationResult) -> CasePrediction:
        """Return the figures of the simulated step, with what they are made of."""
        longest = max(self.plan.devices, key=self._busy_s)
        peaks = result.peak_bytes
        fullest = max(peaks, key=lambda device: peaks[device])
        have = {device.name: device.memory_bytes for device in self.plan.cluster.devices}
        return CasePrediction(
            step_s=result.step_s,
            peak_bytes=peaks[fullest],
            longest=self._describe(longest),
            fullest=self._describe(fullest),
            over_memory=tuple(dict.fromkeys(self._describe(name) for name in peaks if peaks[name] > have[name])),
            time=self._time_parts(longest, result),
            memory=self._byte_parts(fullest, result),
            estimated_head=self._layers.head_is_estimated,
        )

    def _plan(self, reference: Reference) -> Plan:
        case, sorts = self._case, _pipelines(self._case)
        stages = []
        for index, stage in enumerate(case.stages):
            names = [f"stage{index}-replica{number}" for number in sorts.values()]
            self._place |= {name: (index, number) for name, number in zip(names, sorts.values(), strict=True)}
            in_flight = min(len(case.stages) - index, case.micro_batches) * case.micro_batch
            stages.append(
                Stage(
                    first_unit=stage.layers.start,
                    end_unit=stage.layers.stop,
                    replicas=tuple(
                        Replica(devices=(name,), sample_share=1.0, in_flight_limit=in_flight) for name in names
                    ),
                    micro_batches=equal_spans(
                        case.micro_batches * case.micro_batch * len(sorts), case.micro_batch * len(sorts)
                    ),
                )
            )
        return Plan(
            cluster=_cluster({name: self._of(name)[1].kind for name in self._place}, reference.memory_bytes),
            model=ModelSpec(name=case.model, family="gpt2", config={}, dataset="none"),
            global_batch=case.micro_batches * case.micro_batch * len(sorts),
            dtype="float32",
            stages=tuple(stages),
            schedule="1f1b",
        )

    def _of(self, device: str) -> tuple[int, ReferenceReplica]:
        stage, number = self._place[device]
        return stage, self._case.stages[stage].replicas[number]

    def _placed(self, stage: int, number: int) -> Placed:
        """Return a replica with its host."""
        return self._case.stages[stage].replicas[number], self._case.hosts[stage][number]

    def _compute_s(self, device: str, op: Op) -> float:
        stage, replica = self._of(device)
        layers, samples = self._case.stages[stage].layers, self._case.micro_batch
        if op is Op.FORWARD:
            return self._layers.forward_s(layers, replica, samples)
        return self._layers.backward_s(layers, replica, samples)

    def _message_s(self, device: str, other_stage: int, *, sends: bool) -> float:
        """Return the seconds of a micro-batch's message to or from the same pipeline's part of another stage."""
        stage, number = self._place[device]
        here, there = self._placed(stage, number), self._placed(other_stage, number)
        size_bytes = self._cut_sample_bytes(min(stage, other_stage)) * self._case.micro_batch
        source, target = (here, there) if sends else (there, here)
        return self._network.transfer_s(source, target, size_bytes)

    def _receive_s(self, device: str, direction: Direction) -> float:
        source = self._neighbour(device, direction, sends=False)
        if source is None:
            return 0.0
        return self._message_s(device, source, sends=False) + self._platform.receive_wait_s

    def _hold_s(self, device: str, direction: Direction) -> float:
        target = self._neighbour(device, direction, sends=True)
        if target is None:
            return 0.0
        stage, replica = self._of(device)
        rank_bytes = self._cut_sample_bytes(min(stage, target)) * self._case.micro_batch / replica.tp_degree
        return self._platform.send_hold_s(self._message_s(device, target, sends=True), rank_bytes)

    def _neighbour(self, device: str, direction: Direction, *, sends: bool) -> int | None:
        """Return the stage that a device sends to, or receives from, in a direction; None at the pipeline's ends."""
        stage, _ = self._place[device]
        up = (direction is Direction.FORWARD) == sends
        other = stage + 1 if up else stage - 1
        return other if 0 <= other < len(self._case.stages) else None

    def _cut_sample_bytes(self, lower_stage: int) -> int:
        stage = self._case.stages[lower_stage]
        return round(self._layers.cut_bytes(stage.layers.stop - 1, min(r.tp_degree for r in stage.replicas)))

    def _held_sizes(self, device: str) -> HeldSizes:
        stage, replica = self._of(device)
        layers, tp = self._case.stages[stage].layers, replica.tp_degree
        last = stage == len(self._case.stages) - 1
        return HeldSizes(
            always=HeldBytes(
                parameter_bytes=round(self._layers.parameters(layers, tp) * self._platform.bytes_per_parameter),
                gradient_bytes=0,
                optimizer_bytes=0,
                framework_bytes=round(self._platform.base_bytes_of(replica.kind) + self._workspace_bytes(device)),
            ),
            activation_bytes_per_sample=round(sum(self._layers.activation_bytes(layer, tp) for layer in layers)),
            input_bytes_per_sample=self._cut_sample_bytes(stage - 1) if stage else 0,
            output_gradient_bytes_per_sample=0 if last else self._cut_sample_bytes(stage),
        )

    def _workspace_bytes(self, device: str) -> float:
        stage, replica = self._of(device)
        largest = max(
            self._layers.activation_bytes(layer, replica.tp_degree) for layer in self._case.stages[stage].layers
        )
        return self._platform.workspace_ratio * largest * self._case.micro_batch

    def _busy_s(self, device: str) -> float:
        parts = self._of_micro_batch(device)
        return sum(parts.values())

    def _of_micro_batch(self, device: str) -> dict[str, float]:
        return {
            "compute_s": self._compute_s(device, Op.FORWARD) + self._compute_s(device, Op.BACKWARD),
            "receive_s": sum(self._receive_s(device, direction) for direction in Direction),
            "send_s": sum(self._hold_s(device, direction) for direction in Direction),
        }

    def _time_parts(self, device: str, result: SimulationResult) -> TimeParts:
        count = self._case.micro_batches
        busy = {name: count * seconds for name, seconds in self._of_micro_batch(device).items()}
        update_s = max(self.optimizer_s(name) for name in self.plan.devices)
        return TimeParts(
            **busy,
            wait_s=result.pipeline_s - sum(busy.values()),
            gradient_sum_s=result.step_s - result.pipeline_s - update_s,
            update_s=update_s,
        )

    def _byte_parts(self, device: str, result: SimulationResult) -> ByteParts:
        held, workspace = result.memory[device].peak, self._workspace_bytes(device)
        return ByteParts(
            state_bytes=held.parameter_bytes,
            activation_bytes=held.activation_bytes,
            message_bytes=held.received_bytes + held.sending_bytes,
            workspace_bytes=workspace,
            base_bytes=held.framework_bytes - workspace,
        )

    def _describe(self, device: str) -> str:
        stage, replica = self._of(device)
        return f"stage {stage}, {replica.kind}"


def _cluster(kind_of: Mapping[str, str], memory_bytes: Mapping[str, int]) -> Cluster:
    """Return devices of which only kind and memory are known; the costs come from the folder, not from data sheets."""
    kinds = tuple(
        DeviceKind(
            name=kind,
            peak_fp16_flop_per_s=1.0,
            peak_fp32_flop_per_s=1.0,
            memory_bytes=memory_bytes[kind],
            memory_bandwidth_bytes_per_s=1.0,
            power_w=0.0,
            source="not known, not used",
        )
        for kind in dict.fromkeys(kind_of.values())
    )
    devices = tuple(
        Device(name=name, kind=kind, host=name, site="cluster", backend="cuda:0", memory_bytes=memory_bytes[kind])
        for name, kind in kind_of.items()
    )
    return Cluster(
        name="measured",
        kinds=kinds,
        sites=(Site(name="cluster", hosts=tuple(kind_of), bandwidth_bytes_per_s=1.0, latency_s=0.0),),
        hosts=tuple(Host(name=name, site="cluster", devices=(name,)) for name in kind_of),
        devices=devices,
        links=(),
    )
