"""`ddp`: plain data parallelism (PyTorch DistributedDataParallel; Li et al., VLDB 2020).

Kept: the whole model on every device, equal shares of the samples, gradients summed in its buckets beside the last
backward (`torch-ddp` in `cost.sum_models`). Micro-batches are accumulated without a sum between them (`no_sync`); of
their sizes and those of buckets the best is taken, as a user would who tries them out. Not kept: where the global batch
does not divide evenly, shares differ by one sample in the place of padding.
"""

from spantrain.core.plan import StateSharding, SumModel
from spantrain.errors import InfeasiblePlanError
from spantrain.planner.assembly.assemble import Assembler, StageShape
from spantrain.planner.request import PlanRequest, Proposal


def ddp(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the whole model on every device, with equal shares.

    Raises:
        InfeasiblePlanError: there are fewer samples than devices, or some device cannot hold the whole model.
    """
    return data_parallel(request, StateSharding.NONE, SumModel.TORCH_DDP)


def data_parallel(
    request: PlanRequest, state_sharding: StateSharding, sums: SumModel = SumModel.SPANTRAIN
) -> tuple[Proposal, ...]:
    """Propose the whole model on every device, with equal shares, and its state divided or not.

    Raises:
        InfeasiblePlanError: as `ddp`; or all micro-batches that the job asks for are smaller than the devices are many.
    """
    devices = request.devices_within_quotas
    sizes = _sizes(request, len(devices))
    assembler = Assembler(request, sums)
    shape = StageShape(units=range(assembler.units), devices=devices, state_sharding=state_sharding)
    return assembler.best((((shape,), size, None) for size in sizes), "1f1b")


def _sizes(request: PlanRequest, count: int) -> list[int]:
    """Return the sizes of micro-batches to try, in which each device has a sample."""
    total, asked = request.job.global_batch, request.job.micro_batches
    if total < count:
        raise InfeasiblePlanError(f"{count} devices, but only {total} samples in a step: some would get none")
    if not asked:
        each = -(-total // count)
        return sorted({min(total, count * 2**power) for power in range(each.bit_length() + 1)})
    sizes = sorted(size for size in set(asked) if size >= count)
    if not sizes:
        of_what = ", ".join(map(str, sorted(set(asked))))
        raise InfeasiblePlanError(f"with micro-batches of {of_what}: {count} devices, so some would get no sample")
    return sizes
