"""Cases for `benchmarks/schedules.py`: pipelines with made-up times, and with those of the papers' devices.

Nothing is measured. Made-up cases draw stage times, transfers and latencies of micro-batches of 8 samples. Cases of the
papers' devices take devices and links of a preset and cut a transformer or a residual network over them: seconds by the
analytic law of `spantrain.cost.analytic` and the data sheets, with an uneven cut, and now and then two unequal
replicas in a stage.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from spantrain.config.cluster_file import load_preset
from spantrain.core.action import Action, Direction, Op
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Site
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.span import Span, apportion, equal_spans
from spantrain.core.units import ModelSpec, TensorSpec, Unit
from spantrain.cost.analytic import HALF_RATE_SAMPLES, AnalyticLaw
from spantrain.sim.costs import StepCosts
from spantrain.sim.transfers import TransferCost

_MODEL = ModelSpec(name="none", family="gpt2", config={}, dataset="stdlib-text")
_PAPERS = (
    "spantrain-setting-1",
    "spantrain-setting-2",
    "spantrain-table-1",
    "asteroid-a-100",
    "asteroid-a-1000",
    "asteroid-b-100",
    "asteroid-b-1000",
    "asteroid-c-100",
    "asteroid-c-1000",
    "asteroid-d-100",
    "asteroid-d-1000",
)
NOMINAL = 8
"""Samples of a micro-batch in the made-up cases."""
_MOST_RATIO, _MOST_LATENCY = 8.0, 4.0
"""Of a transfer to the slowest stage's forward, and of a latency to the mean forward."""


@dataclass(kw_only=True)
class Case:
    """A pipeline without a memory limit."""

    name: str
    plan: Plan
    costs: StepCosts

    @property
    def of_devices(self) -> bool:
        """Whether it is one of the papers' devices."""
        return not self.name.startswith("made up")

    @cached_property
    def network_matters(self) -> bool:
        """Whether some message takes at least half a mean forward from its first byte sent to its last one there."""
        forward_s = [self.costs.action_s(*_action(stage, index)) for index, stage in enumerate(self.plan.stages)]
        return max(map(sum, self._ways()), default=0.0) >= 0.5 * sum(forward_s) / len(forward_s)

    def _ways(self) -> list[tuple[float, float]]:
        return list(_ways(self.plan, self.costs))


def _action(stage: Stage, index: int) -> tuple[str, Action]:
    return stage.replicas[0].devices[0], Action(index, Op.FORWARD, stage.replica_spans(0)[0])


def _ways(plan: Plan, costs: StepCosts) -> Iterator[tuple[float, float]]:
    """Yield latency and transfer seconds of each cut, forward."""
    for index in range(len(plan.stages) - 1):
        here, there = plan.stages[index], plan.stages[index + 1]
        for a in here.replicas:
            for b in there.replicas:
                way = costs.transfer(a.devices[0], b.devices[0], Direction.FORWARD, index, here.replica_spans(0)[0])
                yield way.latency_s, way.occupancy_s


def cases(count: int, seed: int) -> list[Case]:
    """Return so many cases, made-up ones and those of the papers' devices in turn."""
    chance = random.Random(seed)
    made = [made_up_case, device_case]
    found: list[Case] = []
    while len(found) < count:
        case = made[len(found) % 2](chance)
        if case is not None:
            found.append(case)
    return found


@dataclass(kw_only=True)
class MadeUpCosts(StepCosts):
    """Seconds of micro-batches of `NOMINAL` samples; others take `(samples + _HALF_RATE) / (NOMINAL + _HALF_RATE)`.

    So small micro-batches use a device worse, as the analytic law has it. Messages are in proportion to samples.
    """

    seconds: tuple[Mapping[Op, float], ...]
    latency_s: tuple[float, ...]
    transfer_s: tuple[float, ...]

    def action_s(self, device: str, action: Action) -> float:  # noqa: ARG002 - a stage has one device
        """Return the seconds of an action."""
        of = self.seconds[action.stage]
        whole = action.op is Op.BACKWARD
        nominal = of[Op.BACKWARD_INPUT] + of[Op.BACKWARD_WEIGHT] if whole else of[action.op]
        return nominal * (action.span.size + HALF_RATE_SAMPLES) / (NOMINAL + HALF_RATE_SAMPLES)

    def transfer(self, source: str, target: str, direction: Direction, stage: int, span: Span) -> TransferCost:
        """Return what it takes to send a span; each pair has its own link."""
        cut = stage if direction is Direction.FORWARD else stage - 1
        return TransferCost(
            size_bytes=span.size,
            latency_s=self.latency_s[cut],
            occupancy_s=self.transfer_s[cut] * span.size / NOMINAL,
            links=(f"{source}->{target}",),
        )


def made_up_case(chance: random.Random, *, most_stages: int = 8, micro_batches: int = 0) -> Case:
    """Return a case with drawn times; with drawn micro-batches as well, if none are asked for."""
    stages, count = chance.randint(2, most_stages), micro_batches or _micro_batches(chance)
    spread = math.log(chance.choice([1.0, 2.0, 4.0, 8.0]))
    forward = [math.exp(chance.uniform(0, spread)) for _ in range(stages)]
    mean = sum(forward) / stages
    seconds = tuple(
        {
            Op.FORWARD: f,
            Op.BACKWARD_INPUT: f * chance.uniform(0.8, 1.3),
            Op.BACKWARD_WEIGHT: f * chance.uniform(0.6, 1.1),
        }
        for f in forward
    )
    typical = mean * chance.choice([0.0, 0.25, 0.5, 1.0, 2.0])
    spread = math.log(chance.choice([1.0, 2.0, 4.0, 8.0]))
    cut = tuple(typical * math.exp(chance.uniform(-spread / 2, spread / 2)) for _ in range(stages - 1))
    most = mean * chance.choice([0.0, 0.5, 1.0, 2.0, 4.0])
    latency = tuple(chance.uniform(0.0, most) for _ in range(stages - 1))
    costs = MadeUpCosts(seconds=seconds, latency_s=latency, transfer_s=cut)
    return Case(name=f"made up, {stages} stages, {count}", plan=_plain_plan(stages, count), costs=costs)


def _micro_batches(chance: random.Random) -> int:
    return round(math.exp(chance.uniform(math.log(4), math.log(64))))


def _plain_plan(stages: int, count: int) -> Plan:
    names = tuple(f"d{stage}" for stage in range(stages))
    kind = DeviceKind(
        name="made up",
        peak_fp16_flop_per_s=1.0,
        peak_fp32_flop_per_s=1.0,
        memory_bytes=1,
        memory_bandwidth_bytes_per_s=1.0,
        power_w=1.0,
        source="made up",
    )
    cluster = Cluster(
        name="made up",
        kinds=(kind,),
        sites=(Site(name="here", hosts=("one",), bandwidth_bytes_per_s=1.0, latency_s=0.0),),
        hosts=(Host(name="one", site="here", devices=names),),
        devices=tuple(
            Device(name=name, kind="made up", host="one", site="here", backend="emulated", memory_bytes=1)
            for name in names
        ),
        links=(),
    )
    bounds = [(index, index + 1) for index in range(stages)]
    return _plan(cluster, [[(name, 1.0)] for name in names], bounds, equal_spans(count * NOMINAL, NOMINAL))


def _plan(
    cluster: Cluster,
    groups: Sequence[Sequence[tuple[str, float]]],
    bounds: Sequence[tuple[int, int]],
    spans: tuple[Span, ...],
) -> Plan:
    stages = tuple(
        Stage(
            first_unit=first,
            end_unit=end,
            replicas=tuple(
                Replica(devices=(name,), sample_share=share, in_flight_limit=spans[-1].hi) for name, share in group
            ),
            micro_batches=spans,
        )
        for group, (first, end) in zip(groups, bounds, strict=True)
    )
    return Plan(
        cluster=cluster,
        model=_MODEL,
        global_batch=spans[-1].hi,
        dtype="float32",
        stages=stages,
        schedule="critical-path",
    )


def with_limits(plan: Plan, limits: Sequence[Sequence[int]]) -> Plan:
    """Return the plan with other in-flight limits, in samples, by stage and replica."""
    stages = tuple(
        replace(
            stage,
            replicas=tuple(replace(one, in_flight_limit=most) for one, most in zip(stage.replicas, row, strict=True)),
        )
        for stage, row in zip(plan.stages, limits, strict=True)
    )
    return replace(plan, stages=stages)


@dataclass(kw_only=True)
class LawCosts(StepCosts):
    """Seconds by data sheets, on the links of a cluster; the step ends with its pipeline."""

    plan: Plan
    units: tuple[Unit, ...]

    @cached_property
    def _laws(self) -> Mapping[str, AnalyticLaw]:
        cluster = self.plan.cluster
        return {
            device: AnalyticLaw(
                kind=cluster.kind_by_name[cluster.device_by_name[device].kind], speed=1.0, dtype=self.plan.dtype
            )
            for device in self.plan.devices
        }

    def action_s(self, device: str, action: Action) -> float:
        """Return the seconds of an action on a device."""
        stage = self.plan.stages[action.stage]
        units = self.units[stage.first_unit : stage.end_unit]
        return sum(self._laws[device].seconds(unit, action.op, action.span.size) for unit in units)

    def transfer(self, source: str, target: str, direction: Direction, stage: int, span: Span) -> TransferCost:
        """Return what it takes to send a span; all pairs between two sites share the link."""
        here, cluster = self.plan.stages[stage], self.plan.cluster
        unit = (here.end_unit if direction is Direction.FORWARD else here.first_unit) - 1
        link = cluster.link(source, target)
        size_bytes = self.units[unit].cut_bytes_per_sample * span.size
        a, b = cluster.device_by_name[source], cluster.device_by_name[target]
        name = f"{a.site}->{b.site}" if a.site != b.site else f"{a.host}->{b.host}"
        return TransferCost(
            size_bytes=size_bytes,
            latency_s=link.latency_s,
            occupancy_s=size_bytes / link.bandwidth_bytes_per_s,
            links=(name if a.host != b.host else f"{source}->{target}",),
        )


def device_case(chance: random.Random) -> Case | None:
    """Return a case of the papers' devices; None where it would be outside the grid."""
    preset = chance.choice(_PAPERS)
    cluster = load_preset(preset)
    model, units = _model(chance)
    groups = _groups(chance, cluster, most=min(8, len(units)))
    if groups is None:
        return None
    count, samples = _micro_batches(chance), chance.choice([1, 2, 4, 8])
    samples = max(samples, max(len(group) for group in groups) * 2 if any(len(g) > 1 for g in groups) else 1)
    bounds = _cut(chance, groups, units)
    plan = _plan(cluster, groups, bounds, equal_spans(count * samples, samples))
    costs = LawCosts(plan=plan, units=units)
    name = f"{preset}, {model}, {len(groups)} stages, {count} of {samples}"
    return Case(name=name, plan=plan, costs=costs) if _in_grid(plan, costs) else None


def _in_grid(plan: Plan, costs: StepCosts) -> bool:
    forward = [costs.action_s(*_action(stage, index)) for index, stage in enumerate(plan.stages)]
    latency_s, transfer_s = (max(part) for part in zip(*_ways(plan, costs), strict=True))
    return (
        max(forward) <= _MOST_RATIO * min(forward)
        and transfer_s <= _MOST_RATIO * max(forward)
        and latency_s <= _MOST_LATENCY * sum(forward) / len(forward)
    )


def _groups(chance: random.Random, cluster: Cluster, *, most: int) -> list[list[tuple[str, float]]] | None:
    """Return the replicas of each stage with their shares: sites in any order, devices of a site together."""
    sites = [site.name for site in cluster.sites]
    chance.shuffle(sites)
    chosen = chance.sample(cluster.devices, chance.randint(2, min(most + 2, len(cluster.devices))))
    chosen.sort(key=lambda device: sites.index(device.site))
    groups: list[list[tuple[str, float]]] = []
    before = None
    for device in chosen:
        share = cluster.kind_by_name[device.kind].peak_fp32_flop_per_s / 1e12
        if before is not None and before.site == device.site and len(groups[-1]) == 1 and chance.random() < 0.15:
            groups[-1].append((device.name, share))
        else:
            groups.append([(device.name, share)])
        before = device
    return groups if 2 <= len(groups) <= most else None


def _cut(
    chance: random.Random, groups: Sequence[Sequence[tuple[str, float]]], units: Sequence[Unit]
) -> list[tuple[int, int]]:
    """Return units in proportion to the speed of each stage, up to half more or less than that; at least one."""
    weights = [sum(share for _, share in group) * chance.uniform(0.5, 1.5) for group in groups]
    sizes = [1 + extra for extra in apportion(len(units) - len(groups), weights)]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _model(chance: random.Random) -> tuple[str, tuple[Unit, ...]]:
    """Return a network's name and units."""
    name, layers, hidden, tokens = chance.choice(
        [
            ("gpt2-small", 12, 768, 512),
            ("gpt2-medium", 24, 1024, 512),
            ("bert-base", 12, 768, 128),
            ("bert-small", 8, 512, 128),
            ("resnet-101", 0, 0, 0),
        ]
    )
    if layers:
        return name, tuple(_block(f"block{k}", hidden, tokens) for k in range(layers))
    rows = [(64, 56, 3), (128, 28, 4), (256, 14, 23), (512, 7, 3)]
    return name, tuple(_bottleneck(f"{c}.{k}", c, side) for c, side, blocks in rows for k in range(blocks))


def _block(name: str, hidden: int, tokens: int) -> Unit:
    """Return a transformer block: 12 h^2 parameters, each used twice a token, and attention."""
    flop = 2.0 * tokens * 12 * hidden**2 + 4.0 * tokens**2 * hidden
    return _unit(name, flop, 4 * 12 * hidden**2, 4 * tokens * hidden, held=16)


def _bottleneck(name: str, channels: int, side: int) -> Unit:
    """Return a residual block of 1x1, 3x3 and 1x1 convolutions: 17 c^2 parameters, each used at every pixel."""
    return _unit(name, 2.0 * side**2 * 17 * channels**2, 4 * 17 * channels**2, 4 * 4 * channels * side**2, held=3)


def _unit(name: str, flop: float, parameter_bytes: int, cut_bytes: int, *, held: int) -> Unit:
    tensor = TensorSpec(name=name, shape_per_sample=(cut_bytes // 4,), dtype="float32", bytes_per_sample=cut_bytes)
    return Unit(
        name=name,
        unit_class=name,
        parameter_bytes=parameter_bytes,
        forward_flop_per_sample=flop,
        outputs=(tensor,),
        activation_bytes_per_sample=held * cut_bytes,
    )
