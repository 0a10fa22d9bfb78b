"""`eddl`: data parallelism with shares by capacity (Hao and Zhang, "EDDL", SEC 2021).

Kept: the whole model on every device, samples divided by what each device can do, synchronous sums, taken to be those
of torch's DDP, as others compare with it. Not kept: the leader-worker groups and their joining and leaving during
training. A device that would get no sample is left out.
"""

from collections.abc import Iterator

from spantrain.core.plan import SumModel
from spantrain.planner.assembly.assemble import Assembler, StageShape
from spantrain.planner.request import PlanRequest, Proposal


def eddl(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the whole model on every device, with shares by measured capacity.

    Raises:
        InfeasiblePlanError: some device cannot hold the whole model.
    """
    assembler = Assembler(request, SumModel.TORCH_DDP)
    return assembler.best(_options(assembler, request), "1f1b")


def _options(assembler: Assembler, request: PlanRequest) -> Iterator[tuple[tuple[StageShape, ...], int, None]]:
    units = range(assembler.units)
    for size in request.job.micro_batch_sizes():
        shares = assembler.spans.shares(request.devices_within_quotas, units, size)
        used = [(name, share) for name, share in zip(request.devices_within_quotas, shares, strict=True) if share]
        shape = StageShape(
            units=units, devices=tuple(name for name, _ in used), shares=tuple(share for _, share in used)
        )
        yield (shape,), size, None
