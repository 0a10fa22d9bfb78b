"""A measured run of another framework: its time by that framework's order, its memory by the event engine."""

from collections.abc import Mapping
from dataclasses import dataclass

from spantrain.core.action import Action, Direction, Op
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.span import Span, equal_spans
from spantrain.core.units import ModelSpec
from spantrain.cost.held_sizes import HeldBytes, HeldSizes
from spantrain.sim.costs import StepCosts
from spantrain.sim.engine import SimulationOptions, SimulationResult, simulate
from spantrain.sim.transfers import TransferCost
from spantrain_studies.reference.layers import LayerCosts
from spantrain_studies.reference.network import Placed, ReferenceNetwork
from spantrain_studies.reference.pipeline import CutSeconds, MessageSeconds, StageSeconds, pipeline_ends_s
from spantrain_studies.reference.platform import Platform
from spantrain_studies.reference.types import Reference, ReferenceCase, ReferencePlan, ReferenceReplica


@dataclass(frozen=True, kw_only=True)
class TimeParts:
    """What a step's seconds are made of, as the stage that works longest sees it."""

    compute_s: float
    receive_s: float
    """Messages on their way in, and what it does to take them."""
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
    return run.prediction(simulate(run.plan, run, steps=1, options=run.options))


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
            trace=False, held_sizes={device: self._held_sizes(device) for device in self.plan.devices}
        )

    def action_s(self, device: str, action: Action) -> float:
        """Return the seconds of computing an action."""
        return self._compute_s(device, action.op)

    def transfer(self, source: str, target: str, direction: Direction, stage: int, span: Span) -> TransferCost:
        """Return a message that takes no time: the engine tells what is held, not when (`pipeline`)."""
        return TransferCost(
            size_bytes=self._cut_sample_bytes(stage if direction is Direction.FORWARD else stage - 1) * span.size,
            latency_s=0.0,
            occupancy_s=0.0,
            links=(f"{source}->{target}",),
        )

    def gradient_bucket_s(self, stage: int) -> tuple[float, ...]:  # noqa: ARG002 - none takes any
        """Return nothing, as `transfer` does."""
        return ()

    def _ring_sum_s(self, stage: int) -> float:
        """Return the seconds of the ring sum over all replicas of a stage."""
        layers = self._case.stages[stage].layers
        replicas = self._case.stages[stage].replicas
        size_bytes = max(4.0 * self._layers.parameters(layers, r.tp_degree) * r.tp_degree for r in replicas)
        placed = [self._placed(stage, number) for number in range(len(replicas))]
        return self._network.ring_sum_s(placed, size_bytes)

    def optimizer_s(self, device: str) -> float:
        """Return the seconds of a device's update of its parameters."""
        stage, replica = self._of(device)
        return self._layers.update_s(self._case.stages[stage].layers, replica, self._case.micro_batch)

    def _ends_s(self) -> tuple[float, ...]:
        """Return when each stage's replicas have all done their part of the pipeline."""
        count = len(self._case.stages)
        by_pipeline = [
            pipeline_ends_s(
                [self._stage_seconds(f"stage{stage}-replica{number}") for stage in range(count)],
                [self._cut_seconds(stage, number) for stage in range(count - 1)],
                self._case.micro_batches,
            )
            for number in _pipelines(self._case).values()
        ]
        return tuple(map(max, zip(*by_pipeline, strict=True)))

    def _stage_seconds(self, device: str) -> StageSeconds:
        return StageSeconds(
            forward_s=self._compute_s(device, Op.FORWARD), backward_s=self._compute_s(device, Op.BACKWARD)
        )

    def _cut_seconds(self, stage: int, number: int) -> CutSeconds:
        """Return the messages of a pipeline across the cut above a stage."""
        lower, upper = self._placed(stage, number), self._placed(stage + 1, number)
        return CutSeconds(
            activation=self._message_seconds(stage, lower, upper), gradient=self._message_seconds(stage, upper, lower)
        )

    def _message_seconds(self, cut: int, source: Placed, target: Placed) -> MessageSeconds:
        """Return a micro-batch's message: each rank carries a part; the receiver gathers all, and launches anew."""
        size_bytes = self._cut_sample_bytes(cut) * self._case.micro_batch
        wire_s = self._network.transfer_s(source, target, size_bytes)
        launch_s = self._platform.relaunched_layers * self._layers.launch_s(target[0].kind)
        return MessageSeconds(
            wire_s=wire_s,
            held_s=self._platform.send_hold_s(wire_s, size_bytes / source[0].tp_degree),
            taken_s=self._network.gather_s(target[0], size_bytes) + launch_s,
        )

    def prediction(self, result: SimulationResult) -> CasePrediction:
        """Return the figures of the simulated step, with what they are made of."""
        longest = max(self.plan.devices, key=lambda device: sum(self._of_micro_batch(device).values()))
        peaks = result.peak_bytes
        fullest = max(peaks, key=lambda device: peaks[device])
        have = {device.name: device.memory_bytes for device in self.plan.cluster.devices}
        ends_s = self._ends_s()
        last = max(range(len(ends_s)), key=lambda stage: ends_s[stage] + self._after_s(stage))
        return CasePrediction(
            step_s=ends_s[last] + self._after_s(last),
            peak_bytes=peaks[fullest],
            longest=self._describe(longest),
            fullest=self._describe(fullest),
            over_memory=tuple(dict.fromkeys(self._describe(name) for name in peaks if peaks[name] > have[name])),
            time=self._time_parts(longest, last, ends_s[last]),
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

    def _update_s(self, stage: int) -> float:
        return max(self.optimizer_s(device) for device in self.plan.devices if self._of(device)[0] == stage)

    def _of_micro_batch(self, device: str) -> dict[str, float]:
        """Return what a micro-batch takes a device: its computation, and its ends of messages."""
        stage, number = self._place[device]
        below = self._cut_seconds(stage - 1, number) if stage else None
        above = self._cut_seconds(stage, number) if stage < len(self._case.stages) - 1 else None
        received = [*([below.activation] if below else []), *([above.gradient] if above else [])]
        sent = [*([below.gradient] if below else []), *([above.activation] if above else [])]
        return {
            "compute_s": self._compute_s(device, Op.FORWARD) + self._compute_s(device, Op.BACKWARD),
            "receive_s": sum(message.wire_s + message.taken_s for message in received),
            "send_s": sum(message.held_s for message in sent),
        }

    def _after_s(self, stage: int) -> float:
        """Return what a stage does once the pipeline is empty."""
        return self._ring_sum_s(stage) + self._update_s(stage)

    def _time_parts(self, device: str, last: int, pipeline_s: float) -> TimeParts:
        busy = {name: self._case.micro_batches * seconds for name, seconds in self._of_micro_batch(device).items()}
        return TimeParts(
            **busy,
            wait_s=pipeline_s - sum(busy.values()),
            gradient_sum_s=self._ring_sum_s(last),
            update_s=self._update_s(last),
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
