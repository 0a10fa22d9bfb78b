"""`asteroid`: the planner of Asteroid (Ye et al., MobiCom 2024, sections 3.2 and 3.3), for pipelines of unlike devices.

Kept: measured times that are not linear in samples; devices sorted by memory, those with the most first; stages of
neighbours among them, data parallel; memory of K_p = 2 (P - p) - 1 micro-batches as a hard limit (equation 3); samples
by algorithm 1 (`asteroid_shares`); the dominant step and the dynamic programme of algorithm 2 (`asteroid_search`); all
devices take part, unless algorithm 1 leaves one without a sample; 1F1B with those K_p; sums by torch's DDP (section 4).
Of devices with the same memory the faster goes first. T_a is the ring of `cost.collectives`; communication takes as
long as its busiest link or port needs, both directions one after the other. The micro-batch size, given in the paper,
is tried for a few sizes. Not looked at, as in the paper: parameters that stages share. Pipeline replay is not part of
planning.
"""

from collections.abc import Iterator, Sequence

from spantrain.core.action import Op
from spantrain.core.plan import Plan, Replica, Stage, SumModel
from spantrain.core.span import equal_spans
from spantrain.cost.span_tables import SpanTables
from spantrain.cost.sums import default_sums
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import infeasible
from spantrain.planner.request import PlanRequest, Proposal
from spantrain_studies.planners.asteroid.search import StagePlace, best_pipeline
from spantrain_studies.planners.asteroid.tables import DeviceNetwork, DeviceTables

_MAX_DEVICES = 32
_SEVERAL = 4
"""Micro-batches that a step should have at least."""
_SIZES = {8: 6, 16: 4, _MAX_DEVICES: 2}
"""How many sizes are planned for, up to so many devices."""


def asteroid(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose Asteroid's pipeline for some micro-batch sizes, the one that it likes best first.

    Raises:
        InfeasiblePlanError: nothing fits, or there are more devices than its programme can go through.
        ProfileError: the profile lacks a timing or a link.
    """
    names = request.devices_within_quotas
    if len(names) > _MAX_DEVICES:
        raise InfeasiblePlanError(f"goes through ranges of devices, {_MAX_DEVICES} at most, got {len(names)}")
    found = []
    for proposal in _proposals(request, _sorted(request, names)):
        found.append(proposal)
        if len(found) == next(sizes for most, sizes in _SIZES.items() if len(names) <= most):
            break
    if not found:
        raise infeasible(request.profile, request.job, names)
    return tuple(sorted(found, key=lambda proposal: proposal.own_estimate_s or 0.0))


def _sorted(request: PlanRequest, names: Sequence[str]) -> list[str]:
    devices = request.profile.cluster.device_by_name
    speed = request.profile.score_by_device
    return sorted(names, key=lambda name: (-devices[name].memory_bytes, -speed.get(name, 0.0)))


def _proposals(request: PlanRequest, devices: Sequence[str]) -> Iterator[Proposal]:
    """Yield a proposal for each micro-batch size that fits: large ones first, those of few micro-batches last."""
    sizes, total = request.job.micro_batch_sizes(), request.job.global_batch
    several = [size for size in sizes if _SEVERAL * size <= total]
    spans = SpanTables(request.profile, request.job.optimizer, request.job.dtype)
    network = _network(spans, devices)
    for size in (*reversed(several), *sizes[len(several) :]):
        tables = DeviceTables(spans, network, devices, size)
        best = best_pipeline(tables, -(-total // size))
        if best is not None:
            plan = _plan(request, tables, best.stages)
            if all(peak <= _memory_of(plan, name) for name, peak in spans.memory.plan_peak_bytes(plan).items()):
                yield Proposal(plan=plan, own_estimate_s=best.latency_s)


def _network(spans: SpanTables, devices: Sequence[str]) -> DeviceNetwork:
    whole, ops = range(spans.units), (Op.FORWARD, Op.BACKWARD)
    seconds = [sum(spans.compute.stage_seconds(whole, name, op, 1) for op in ops) for name in devices]
    return DeviceNetwork(spans.network, devices, [1 / max(second, 1e-12) for second in seconds])


def _memory_of(plan: Plan, name: str) -> int:
    return plan.cluster.device_by_name[name].memory_bytes


def _plan(request: PlanRequest, tables: DeviceTables, stages: Sequence[StagePlace]) -> Plan:
    return Plan(
        cluster=request.profile.cluster,
        model=request.profile.model,
        global_batch=request.job.global_batch,
        dtype=tables.dtype,
        stages=tuple(_stage(request, tables, place) for place in stages),
        schedule="1f1b-asteroid",
    )


def _stage(request: PlanRequest, tables: DeviceTables, place: StagePlace) -> Stage:
    samples = tables.samples(place.low, place.high, place.units, place.held)
    own = tables.devices[place.low : place.high]
    shares = [(name, count) for name, count in zip(own, samples, strict=True) if count]
    return Stage(
        first_unit=place.units.start,
        end_unit=place.units.stop,
        micro_batches=equal_spans(request.job.global_batch, tables.size),
        replicas=tuple(
            Replica(devices=(name,), sample_share=float(count), in_flight_limit=place.held * count)
            for name, count in shares
        ),
        sums=default_sums(SumModel.TORCH_DDP),
    )
