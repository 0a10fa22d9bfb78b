"""`asteroid`: the planner of Asteroid (Ye et al., MobiCom 2024, sections 3.2 and 3.3), for pipelines of unlike devices.

Kept: measured times that are not linear in samples; devices sorted by memory, those with the most first; stages of
neighbours among them, data parallel; memory of K_p = 2 (P - p) - 1 micro-batches as a hard limit (equation 3); samples
by algorithm 1 (`tables`); the dominant step and the dynamic programme of algorithm 2; all
devices take part, unless algorithm 1 leaves one without a sample; 1F1B with those K_p; sums by torch's DDP (section 4).
Of devices with the same memory the faster goes first. T_a is the ring of `cost.sums`; communication takes as
long as its busiest link or port needs, both directions one after the other. The micro-batch size, given in the paper,
is tried for a few sizes. Not looked at, as in the paper: parameters that stages share. Pipeline replay is not part of
planning.

Algorithm 2 of Asteroid (section 3.3): stages on sorted devices, from the last one to the first.

A pipeline has steps: execution of a stage, and communication between two. The dominant step dm is the one with the
fewest bubbles; with M micro-batches the execution phase of step s (equation 6) is D minus the E_f + E_b of the steps
before it, where D = M (E_f + E_b of dm) + the E_f + E_b of the steps before dm, and its waiting phase (equation 5) is
their E_f. So the latency of a round, equation 4, is D + max over s of (T_a of s - E_b of the steps before s), and both
parts of it follow from those of the pipeline behind when a stage and its communication are put in front: for D that is
equation 11 (read with i up to the step before dm, and with E of the new steps in the first line).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from spantrain.core.action import Op
from spantrain.core.plan import Plan, Replica, Stage, SumModel
from spantrain.core.span import equal_spans
from spantrain.cost.span_tables import Array, SpanTables
from spantrain.cost.sums import default_sums
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import infeasible
from spantrain.planner.request import PlanRequest, Proposal
from spantrain_studies.planners.asteroid.tables import DeviceNetwork, DeviceTables


class StagePlace(NamedTuple):
    """A stage of the answer: devices `low` to `high`-1 of the sorted ones."""

    units: range
    low: int
    high: int
    held: int
    """Micro-batches whose activations it holds, K_p."""


class SolvedPipeline(NamedTuple):
    """The answer of algorithm 2."""

    latency_s: float
    stages: tuple[StagePlace, ...]


class _Row(NamedTuple):
    """Q(l, n, p) of one n and p for all l: pipelines of units i to the last on the last devices, by i."""

    execution: Array
    """D."""
    sums: Array
    """What gradient sums add to it."""
    begins: NDArray[np.intp]
    """The first unit of the second stage."""
    devices: NDArray[np.intp]
    """The first device of the second stage."""


def best_pipeline(tables: DeviceTables, micro_batches: int) -> SolvedPipeline | None:
    """Return the pipeline on all devices with the least latency; None if nothing fits."""
    count, units = len(tables.devices), tables.units
    rows: dict[tuple[int, int], _Row] = {}
    best: tuple[float, int] | None = None
    for stages in range(1, min(count, units) + 1):
        held = min(2 * stages - 1, micro_batches)
        for low in range(count - stages + 1):
            if stages == 1:
                rows[low, 1] = _last(tables, low, held, micro_batches)
            else:
                rows[low, stages] = _in_front(tables, rows, (low, stages), held, micro_batches)
        latency_s = float(rows[0, stages].execution[0] + rows[0, stages].sums[0])
        if latency_s < (best[0] if best else float("inf")):
            best = (latency_s, stages)
    return None if best is None else SolvedPipeline(best[0], _followed(rows, best[1], micro_batches))


def _last(tables: DeviceTables, low: int, held: int, micro_batches: int) -> _Row:
    """Return the pipelines of one stage."""
    count, units = len(tables.devices), tables.units
    step = tables.step(low, count, held)
    return _Row(
        execution=micro_batches * step.both[:, units],
        sums=step.sums[:, units],
        begins=np.full(units + 1, units),
        devices=np.full(units + 1, count),
    )


def _in_front(
    tables: DeviceTables, rows: dict[tuple[int, int], _Row], place: tuple[int, int], held: int, micro_batches: int
) -> _Row:
    """Return the best pipelines with one more stage, that begins at device `place[0]`, in front of those there are."""
    low, stages = place
    points = np.arange(tables.units + 1)
    execution = np.full(len(points), np.inf)
    sums, begins, devices = np.zeros(len(points)), points * 0, points * 0
    for middle in range(low + 1, len(tables.devices)):
        if len(tables.devices) - middle < stages - 1:
            break
        behind = rows[middle, stages - 1]
        way, busy_s, back_s = _communication(tables, low, middle, behind)
        step = tables.step(low, middle, held)
        reached = np.maximum(busy_s * micro_batches, way + behind.execution)
        tried = np.maximum(micro_batches * step.both, step.both + reached)
        tail = np.maximum(step.sums, behind.sums - back_s - step.backward)
        choice = (tried + tail).argmin(axis=1)
        tried_s, tail_s = tried[points, choice], tail[points, choice]
        better = tried_s + tail_s < execution + sums
        execution[better], sums[better] = tried_s[better], tail_s[better]
        begins[better], devices[better] = choice[better], middle
    return _Row(execution, sums, begins, devices)


def _communication(tables: DeviceTables, low: int, middle: int, behind: _Row) -> tuple[Array, Array, Array]:
    """Return, by cut, E_f + E_b of the new communication step, the same without latency, and its E_b."""
    shape = len(behind.devices)
    way, busy_s, back_s = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    for high in np.unique(behind.devices).tolist():
        if high > middle:
            up, down = tables.network.rates(low, middle, high)
            own = behind.devices == high
            forward = tables.size * up.busiest * tables.edge_up[own]
            backward = tables.size * down.busiest * tables.edge_down[own]
            busy_s[own] = forward + backward
            way[own] = busy_s[own] + up.latency_s + down.latency_s
            back_s[own] = backward + down.latency_s
    return way, busy_s, back_s


def _followed(rows: dict[tuple[int, int], _Row], stages: int, micro_batches: int) -> tuple[StagePlace, ...]:
    found, first, low = [], 0, 0
    for left in range(stages, 0, -1):
        row = rows[low, left]
        end, high = int(row.begins[first]), int(row.devices[first])
        held = min(2 * left - 1, micro_batches)
        found.append(StagePlace(units=range(first, end), low=low, high=high, held=held))
        first, low = end, high
    return tuple(found)


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
    kinds = [spans.profile.cluster.device_by_name[name].kind for name in devices]
    seconds = [sum(spans.compute.kind_seconds(whole, kind, op, 1) for op in ops) for kind in kinds]
    return DeviceNetwork(spans.network, devices, [1 / max(second, 1e-12) for second in seconds])


def _memory_of(plan: Plan, name: str) -> int:
    return plan.cluster.device_by_name[name].memory_bytes


def _plan(request: PlanRequest, tables: DeviceTables, stages: Sequence[StagePlace]) -> Plan:
    made = (_stage(request, tables, place) for place in stages)
    return request.job.plan_of(request.profile, made, schedule="1f1b-asteroid")


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
