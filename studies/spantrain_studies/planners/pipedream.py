"""`pipedream`: the partition of PipeDream (Harlap et al., Narayanan et al., SOSP 2019, section 3.1), run with a flush.

Kept: the dynamic programme over layers and counts of devices, in which a stage of m devices takes the longer of its
computation over m and its weights' sum, a cut takes its bytes both ways, and the slowest of all is least; replicas
share samples equally; 1F1B. Devices are alike to it, as in the paper: times are the mean over the kinds, the network
is the mean between neighbours in the cluster's order, in one level. Replicas sum by torch's DDP (section 4). Not kept:
weight stashing and updates after every micro-batch. They are not exact training, so a step ends with a flush
(PipeDream-Flush). Memory is not looked at while planning; what does not fit is refused.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from spantrain.core.plan import SumModel
from spantrain.cost.span_tables import Array
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import StageShape
from spantrain.planner.request import PlanRequest, Proposal
from spantrain_studies.planners.assembler import PaperAssembler

_MAX_DEVICES = 256


def pipedream(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose PipeDream's stages for the micro-batch sizes that suit them best.

    Raises:
        InfeasiblePlanError: no partition fits, or there are more devices than its programme can go through.
    """
    devices = request.devices_within_quotas
    if len(devices) > _MAX_DEVICES:
        raise InfeasiblePlanError(f"goes through counts of devices, {_MAX_DEVICES} at most, got {len(devices)}")
    assembler = PaperAssembler(request, SumModel.TORCH_DDP)
    return assembler.best(_options(assembler, request, devices), "1f1b")


def _options(
    assembler: PaperAssembler, request: PlanRequest, devices: tuple[str, ...]
) -> Iterator[tuple[tuple[StageShape, ...], int, float]]:
    kinds = assembler.kinds(devices)
    bandwidth = assembler.mean_bandwidth_bytes_per_s(devices)
    for size in request.job.micro_batch_sizes():
        work = assembler.work_sums(kinds, size)
        sync = assembler.trained_sums / bandwidth
        cut_s = size * assembler.cut_bytes / bandwidth
        slowest_s, stages = _partition(work, sync, cut_s, len(devices), most=size)
        if slowest_s == float("inf"):
            continue
        shapes, used = [], 0
        for units, count in stages:
            shapes.append(StageShape(units=units, devices=devices[used : used + count]))
            used += count
        yield tuple(shapes), size, slowest_s * -(-request.job.global_batch // size)


def _partition(
    work: Array, sync: Array, cut_s: Array, devices: int, *, most: int
) -> tuple[float, tuple[tuple[range, int], ...]]:
    """Return the time of the slowest stage or cut, and each stage's units and count of devices.

    `work` and `sync` are running sums over units: a micro-batch's seconds on one device, and weights over bandwidth.
    A stage has `most` devices at most: each needs a sample.
    """
    units = len(work) - 1
    below = np.triu(np.ones((units + 1, units + 1)), 1) == 0
    compute = np.where(below, np.inf, work[None, :] - work[:, None])
    weights = sync[None, :] - sync[:, None]
    times = [compute] + [
        np.maximum(compute / count, 2 * (count - 1) / count * weights) for count in range(1, devices + 1)
    ]
    # best[m][j]: the slowest of units 0 to j-1 on m devices.
    best = [np.where(np.arange(units + 1) == 0, 0.0, np.inf)]
    choices: list[NDArray[np.int64]] = [np.zeros((units + 1, 2), dtype=np.int64)]
    for total in range(1, devices + 1):
        value, choice = np.full(units + 1, np.inf), np.zeros((units + 1, 2), dtype=np.int64)
        for count in range(1, min(total, most) + 1):
            before = np.maximum(best[total - count], cut_s)
            table = np.maximum(before[:, None], times[count])
            first = table.argmin(axis=0)
            found = table[first, np.arange(units + 1)]
            better = found < value
            value[better] = found[better]
            choice[better] = np.stack([first, np.full_like(first, count)], axis=1)[better]
        best.append(value)
        choices.append(choice)
    if best[devices][units] == np.inf:
        return float("inf"), ()
    stages: list[tuple[range, int]] = []
    end, left = units, devices
    while end > 0:
        first, count = (int(entry) for entry in choices[left][end])
        stages.append((range(first, end), count))
        end, left = first, left - count
    return float(best[devices][units]), tuple(reversed(stages))
