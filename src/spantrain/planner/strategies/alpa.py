"""`alpa`: the inter-operator level of Alpa (Zheng et al., OSDI 2022, section 5), on submeshes of equal size.

Kept: stages on submeshes that are alike, numbers of stages that divide the devices, the latency of a synchronous 1F1B
pipeline (its equation 2: the sum of all stages and the slowest one for every further micro-batch), memory as a limit.
Devices are alike to it: times are the mean over the kinds, the network is the mean between neighbours in the cluster's
order. Its loop over the slowest stage's time is a programme here that makes that time least; the sum hardly depends on
the cuts. Not kept: the intra-operator level. Inside a submesh samples are shared equally (data parallelism).
"""

from collections.abc import Iterator
from itertools import pairwise

from spantrain.planner.assemble import Assembler, StageShape
from spantrain.planner.cuts import least_largest
from spantrain.planner.request import PlanRequest, Proposal

__all__ = ["alpa"]


def alpa(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose alike submeshes, for the numbers of stages and micro-batch sizes that suit best.

    Raises:
        InfeasiblePlanError: no division into alike submeshes fits.
    """
    assembler = Assembler(request)
    return assembler.best(_options(assembler, request), "1f1b")


def _options(assembler: Assembler, request: PlanRequest) -> Iterator[tuple[tuple[StageShape, ...], int, float]]:
    devices = request.devices_within_quotas
    kinds = assembler.kinds(devices)
    bandwidth = assembler.mean_bandwidth_bytes_per_s(devices)
    for stages in range(1, min(len(devices), assembler.units) + 1):
        if len(devices) % stages:
            continue
        width = len(devices) // stages
        for size in request.job.micro_batch_sizes():
            if size % width:
                continue
            work = assembler.work_sums(kinds, size // width)
            one = work[None, :] - work[:, None] + (size / width * assembler.cut_bytes / bandwidth)[:, None]
            slowest_s, begins = least_largest([one] * stages)
            sizes = list(pairwise(begins))
            shapes = tuple(
                StageShape(units=range(first, end), devices=devices[place * width : (place + 1) * width])
                for place, (first, end) in enumerate(sizes)
            )
            micro_batches = -(-request.job.global_batch // size)
            latency_s = sum(float(one[first, end]) for first, end in sizes) + (micro_batches - 1) * slowest_s
            yield shapes, size, latency_s
