"""`ddp`: plain data parallelism (PyTorch DistributedDataParallel; Li et al., VLDB 2020).

Kept: the whole model on every device, equal shares of the samples, gradients summed in buckets at the end of the step.
Micro-batches are accumulated without a sum between them (`no_sync`); of their sizes the best is taken, as a user would
who tries them out. Not kept: the sum beside the backward; where the global batch does not divide evenly, shares differ
by one sample in the place of padding.
"""

from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assemble import Assembler, StageShape
from spantrain.planner.request import PlanRequest, Proposal

__all__ = ["ddp"]


def ddp(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the whole model on every device, with equal shares.

    Raises:
        InfeasiblePlanError: there are fewer samples than devices, or some device cannot hold the whole model.
    """
    devices = request.devices_within_quotas
    total = request.job.global_batch
    if total < len(devices):
        raise InfeasiblePlanError(f"{len(devices)} devices, but only {total} samples in a step: some would get none")
    assembler = Assembler(request)
    shape = StageShape(units=range(assembler.units), devices=devices)
    each = -(-total // len(devices))
    sizes = {min(total, len(devices) * 2**power) for power in range(each.bit_length() + 1)}
    return assembler.best((((shape,), size, None) for size in sorted(sizes)), "1f1b")
