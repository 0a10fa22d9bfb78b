"""`hetpipe`: equal virtual workers of HetPipe (Park et al., USENIX ATC 2020), run with a flush.

Kept: devices of unlike kinds form virtual workers, each a pipeline; workers share the samples equally; the cuts make
the slowest stage fastest within the devices' memory (its integer programme's objective, here by a dynamic programme).
Of its ways to form workers, the equal distribution (ED): every worker has the same devices, so that one set of cuts
fits all. The number of workers is tried; devices that do not divide evenly are left out. Not kept: the parameter
server, in whose place stages sum in rings by torch's DDP, in its favour; bounded staleness (WSP), which is not exact
training; workers that are unlike.
"""

from collections.abc import Iterator

import numpy as np

from spantrain.core.plan import SumModel
from spantrain.cost.span_tables import Array, over_spans
from spantrain.planner.assembly.assemble import StageShape, least_largest
from spantrain.planner.request import PlanRequest, Proposal
from spantrain_studies.planners.assembler import PaperAssembler


def hetpipe(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose equal virtual workers, for the numbers of workers and micro-batch sizes that suit best.

    Raises:
        InfeasiblePlanError: no virtual workers can be formed whose stages fit.
    """
    assembler = PaperAssembler(request, SumModel.TORCH_DDP)
    return assembler.best(_options(assembler, request), "1f1b")


def _options(assembler: PaperAssembler, request: PlanRequest) -> Iterator[tuple[tuple[StageShape, ...], int, float]]:
    by_kind: dict[str, list[str]] = {}
    for name in request.devices_within_quotas:
        by_kind.setdefault(request.profile.cluster.device_by_name[name].kind, []).append(name)
    for workers in range(1, max(map(len, by_kind.values())) + 1):
        slots = [
            tuple(members[worker * each + place] for worker in range(workers))
            for members in by_kind.values()
            for each in (len(members) // workers,)
            for place in range(each)
        ]
        if len(slots) > assembler.units:
            continue
        for size in request.job.micro_batch_sizes():
            if size % workers:
                continue
            slowest_s, begins = least_largest(_costs(assembler, slots, size // workers))
            if slowest_s < float("inf"):
                shapes = tuple(
                    StageShape(units=range(first, end), devices=slot)
                    for slot, first, end in zip(slots, begins[:-1], begins[1:], strict=True)
                )
                yield shapes, size, slowest_s * -(-request.job.global_batch // size)


def _costs(assembler: PaperAssembler, slots: list[tuple[str, ...]], samples: int) -> list[Array]:
    """Return for each stage the seconds of a worker's micro-batch for units i to j-1, as [i, j]; infinite: no room."""
    bandwidth = assembler.mean_bandwidth_bytes_per_s([slot[0] for slot in slots])
    arrives = samples * assembler.cut_bytes / bandwidth
    found = []
    for place, slot in enumerate(slots):
        one = assembler.work_sums(assembler.kinds(slot[:1]), samples)
        room = min(assembler.profile.cluster.device_by_name[name].memory_bytes for name in slot)
        need = assembler.spans.need(slot[0], samples * (len(slots) - place), samples)
        found.append(np.where(need <= room, over_spans(one) + arrives[:, None], np.inf))
    return found
