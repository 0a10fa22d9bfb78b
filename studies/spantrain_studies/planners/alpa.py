"""`alpa`: the inter-operator level of Alpa (Zheng et al., OSDI 2022, section 5), on submeshes of equal size.

Kept: stages on submeshes that are alike, numbers of stages that divide the devices, the latency of a synchronous 1F1B
pipeline (its equation 2: the sum of all stages and the slowest one for every further micro-batch), memory as a limit.
Devices are alike to it: times are the mean over the kinds, the network is the mean between neighbours in the cluster's
order. Its loop over the slowest stage's time is a programme here that makes that time least; the sum hardly depends on
the cuts. Of the intra-operator level only this: a submesh divides samples, tensors (inside hosts), or both, in one way
for all stages. Gradients are summed in one piece behind all micro-batches (`alpa` in `cost.sums`). Not kept: its
integer programme over the operators' layouts, and submeshes of different sizes.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from spantrain.core.action import SPLIT_OPS
from spantrain.core.plan import SumModel
from spantrain.cost.span_tables import Array, over_spans
from spantrain.planner.assembly.assemble import StageShape, least_largest
from spantrain.planner.request import PlanRequest, Proposal
from spantrain_studies.planners.assembler import PaperAssembler

Group = tuple[str, ...]


def alpa(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose alike submeshes, for the numbers of stages, tensor-parallel degrees and micro-batch sizes that suit best.

    Raises:
        InfeasiblePlanError: no division into alike submeshes fits.
    """
    assembler = PaperAssembler(request, SumModel.ALPA)
    return assembler.best(_options(assembler, request), "1f1b")


def _options(assembler: PaperAssembler, request: PlanRequest) -> Iterator[tuple[tuple[StageShape, ...], int, float]]:
    devices = request.devices_within_quotas
    bandwidth = assembler.mean_bandwidth_bytes_per_s(devices)
    for degree, groups in _divisions(assembler, devices):
        for stages in range(1, min(len(groups), assembler.units) + 1):
            if len(groups) % stages:
                continue
            width = len(groups) // stages
            for size in request.job.micro_batch_sizes():
                if size % width:
                    continue
                work = _work_sums(assembler, groups, size // width)
                one = over_spans(work) + (size / width * assembler.cut_bytes / bandwidth)[:, None]
                slowest_s, begins = least_largest([one] * stages)
                parts = list(pairwise(begins))
                each = width * degree
                shapes = tuple(
                    StageShape(
                        units=range(first, end),
                        devices=devices[place * each : (place + 1) * each],
                        degrees=(degree,) * width,
                    )
                    for place, (first, end) in enumerate(parts)
                )
                micro_batches = -(-request.job.global_batch // size)
                latency_s = sum(float(one[part]) for part in parts) + (micro_batches - 1) * slowest_s
                yield shapes, size, latency_s


def _divisions(assembler: PaperAssembler, devices: Group) -> Iterator[tuple[int, tuple[Group, ...]]]:
    """Yield tensor-parallel degrees with the groups of neighbours that they make, all of them inside hosts."""
    divides = any(unit.tensor_sums for unit in assembler.profile.graph.units)
    host = {name: assembler.profile.cluster.device_by_name[name].host for name in devices}
    degree = 1
    while degree == 1 or (divides and degree <= len(devices)):
        groups = tuple(devices[first : first + degree] for first in range(0, len(devices), degree))
        if all(len(group) == degree and len({host[name] for name in group}) == 1 for group in groups):
            yield degree, groups
        degree *= 2


def _work_sums(assembler: PaperAssembler, groups: tuple[Group, ...], samples: int) -> Array:
    """Return running sums over units of the seconds of F, I and W, the mean over all groups."""
    alike: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        alike.setdefault(tuple(assembler.kinds(group)), []).append(group)
    total = np.zeros(assembler.units + 1)
    for members in alike.values():
        shares = (1.0,) * len(members[0])
        for op in SPLIT_OPS:
            total += len(members) / len(groups) * assembler.spans.seconds(members[0], shares, op, samples)
    return total
