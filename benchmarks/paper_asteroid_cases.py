"""Asteroid's environments and models: boards slowed to what its table 1 measured, inputs as it gives them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from paper_rows import Contest, Contests, larger_images
from spantrain.app.profiling.describe import described_profile
from spantrain.config.artefacts import shipped_graph
from spantrain.config.cluster_file import load_preset
from spantrain.core.cluster import Cluster, DeviceKind
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.units import Unit, UnitGraph
from spantrain.cost.analytic import analytic_profile
from spantrain.models.catalog.catalog import is_text, resolve_model
from spantrain.planner.assembly.assemble import StageShape, least_largest
from spantrain.planner.request import JobSpec, PlanRequest, Proposal
from spantrain.planner.strategies.registry import strategies
from spantrain_studies.planners.assembler import PaperAssembler

PIXELS_224 = 49
BATCHES = {"efficientnet-b1": 2048, "resnet-50": 256, "bert-small": 2048}
TABLE_1_S = {"jetson-nano": 26.7 * 60, "tx2": 11.2 * 60}
"""An epoch of EfficientNet-B1 on CIFAR-10."""
CIFAR_10 = 50_000
BERT_SPEED = {"jetson-nano": 0.63, "tx2": 0.47, "xavier-nx": 0.47}
"""Of the data sheet's, inferred: a straight pipeline's 95 samples/s are 3.5 Nanos or 1.3 NX in table 4."""


@dataclass(frozen=True, kw_only=True)
class Boards:
    """An environment, or so many Jetson Nanos, and a model at the paper's global batch."""

    environment: str = ""
    nanos: int | None = None
    """Figure 18's; with micro-batches of 32 a device."""
    model: str
    measured: bool = False
    """Whether boards are slowed to table 1's epochs."""
    shared: bool = False
    """Whether every port has its part of one line, all sending at once."""


def contest_of(boards: Boards) -> Contest:
    """Return the contest on boards."""
    if boards.nanos is None:
        cluster, job = load_preset(f"asteroid-{boards.environment}"), JobSpec(global_batch=BATCHES[boards.model])
    else:
        cluster, job = nanos(boards.nanos), JobSpec(global_batch=2048, micro_batches=(32 * boards.nanos,))
    if boards.shared:
        parts = len(cluster.devices)
        sites = (replace(site, bandwidth_bytes_per_s=site.bandwidth_bytes_per_s / parts) for site in cluster.sites)
        cluster = replace(cluster, sites=tuple(sites))
    if boards.measured:
        kinds = (_slowed(kind, slowness(kind.name, boards.model)) for kind in cluster.kinds)
        cluster = replace(cluster, kinds=tuple(kinds))
    return Contest(profile=profile_on(cluster, boards.model), job=job, contenders=CONTENDERS)


def slowness(kind: str, model: str) -> float:
    """Return the part of the data sheet's speed that a board is taken to have."""
    if model == "efficientnet-b1":
        return table_1_factor("tx2" if kind == "xavier-nx" else kind)
    return BERT_SPEED.get(kind, 1.0) if model == "bert-small" else 1.0


def _slowed(kind: DeviceKind, factor: float) -> DeviceKind:
    return replace(
        kind,
        peak_fp16_flop_per_s=kind.peak_fp16_flop_per_s * factor,
        peak_fp32_flop_per_s=kind.peak_fp32_flop_per_s * factor,
        memory_bandwidth_bytes_per_s=kind.memory_bandwidth_bytes_per_s * factor,
    )


@cache
def table_1_factor(kind: str) -> float:
    """Return EfficientNet-B1's speed on a board by table 1's epoch of CIFAR-10, over the one by the data sheet.

    Table 1 has no Xavier NX: it is slowed like the TX2.
    """
    environment = {"jetson-nano": "a-100", "tx2": "d-100"}.get(kind)
    if environment is None:
        return 1.0
    expected = ASTEROID(Boards(environment=environment, model="efficientnet-b1")).answer("single-device").samples_per_s
    assert expected is not None, "it fits on a board"
    return CIFAR_10 / TABLE_1_S[kind] / expected


def profile_on(cluster: Cluster, name: str) -> Profile:
    """Return what data sheets let one expect on the papers' inputs."""
    model = resolve_model(name)
    if is_text(model):
        # "Input shape 32 x 512", beside 3 x 32 x 32 for images: 32 tokens of 512 features, no vocabulary to project to.
        model = resolve_model(name, sequence_length=32)
        return analytic_profile(cluster, model, without_head(described_profile(cluster, model).graph))
    if name != "resnet-50":
        return described_profile(cluster, model)
    graph = shipped_graph(model, "float32")
    assert graph is not None, f"{name} ships"
    return analytic_profile(cluster, model, larger_images(graph, PIXELS_224))


def without_head(graph: UnitGraph) -> UnitGraph:
    """Return a transformer's units with each block in two (a third of it attention) and without the last unit."""
    first, *blocks, _ = graph.units
    halves = [part for block in blocks for part in (_part(block, "attention", 1 / 3), _part(block, "mlp", 2 / 3))]
    halves[-1] = replace(halves[-1], outputs=(), unit_class="last")
    return UnitGraph(units=(replace(first, shared=()), *halves), shared_bytes={})


def _part(unit: Unit, name: str, share: float) -> Unit:
    return replace(
        unit,
        name=f"{unit.name}.{name}",
        unit_class=f"{unit.unit_class}.{name}",
        parameter_bytes=round(unit.parameter_bytes * share),
        forward_flop_per_sample=unit.forward_flop_per_sample * share,
        activation_bytes_per_sample=unit.activation_bytes_per_sample // 2,
        tensor_sums=min(unit.tensor_sums, 1),
    )


def balanced_pipeline(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose a stage for each device, cut so that the slowest one's work is least; tensors' sizes are not looked at.

    Table 4's PP: balanced for unlike devices, Asteroid's 1F1B. Both orders of devices, fastest first and last.
    """
    assembler = PaperAssembler(request)
    found = assembler.best(_balanced(assembler, request), "1f1b")
    deeper = tuple(replace(proposal, plan=_deeper(proposal.plan)) for proposal in found)
    return (*deeper, *found)


def _deeper(plan: Plan) -> Plan:
    """Return the plan with K_p = 2 (P - p) - 1 micro-batches in flight."""
    count = len(plan.stages)
    stages = []
    for place, stage in enumerate(plan.stages):
        held = min(2 * (count - place) - 1, len(stage.micro_batches))
        limit = sum(sorted((span.size for span in stage.micro_batches), reverse=True)[:held])
        replicas = tuple(replace(replica, in_flight_limit=limit) for replica in stage.replicas)
        stages.append(replace(stage, replicas=replicas))
    return replace(plan, stages=tuple(stages), schedule="1f1b-asteroid")


def _balanced(assembler: PaperAssembler, request: PlanRequest) -> Iterator[tuple[tuple[StageShape, ...], int, float]]:
    score = request.profile.score_by_device
    falling = sorted(request.devices, key=lambda name: -score[name])
    for devices in (falling, falling[::-1]):
        for size in request.job.micro_batch_sizes():
            work = [assembler.work_sums(assembler.kinds([name]), size) for name in devices]
            slowest_s, begins = least_largest([sums[None, :] - sums[:, None] for sums in work])
            cuts = zip(devices, begins[:-1], begins[1:], strict=True)
            shapes = tuple(StageShape(units=range(first, end), devices=(name,)) for name, first, end in cuts)
            yield shapes, size, slowest_s * -(-request.job.global_batch // size)


def data_parallel(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose shares by capacity on all boards: micro-batches of 32 or more leave none without work."""
    sizes = tuple(size for size in request.job.micro_batch_sizes() if size >= 32)
    return strategies()["eddl"].propose(replace(request, job=replace(request.job, micro_batches=sizes)))


PP, DP = "balanced pipeline", "balanced data parallelism"
CONTENDERS = {PP: balanced_pipeline, DP: data_parallel}
ASTEROID = Contests("asteroid", contest_of)


def nanos(count: int) -> Cluster:
    """Return so many Jetson Nanos behind one switch of 100 Mbit/s."""
    cluster = load_preset("asteroid-a-100")
    like, host = cluster.devices[0], cluster.hosts[0]
    names = [f"nano-{number}" for number in range(count)]
    return replace(
        cluster,
        name=f"{count} nanos",
        hosts=tuple(replace(host, name=name, devices=(f"{name}-gpu0",)) for name in names),
        devices=tuple(replace(like, name=f"{name}-gpu0", host=name) for name in names),
        sites=(replace(cluster.sites[0], hosts=tuple(names)),),
    )
