"""`fsdp`: fully sharded data parallelism (PyTorch FSDP; Zhao et al., VLDB 2023; ZeRO stage 3).

Kept: equal shares, all state divided evenly, each unit's parameters gathered one unit ahead for every forward and again
for every backward (full sharding, backward prefetch), gradients summed to their holders unit by unit, beside the
backward, for every micro-batch (`torch-fsdp` in `cost.sum_models`). As a user would, the best size of micro-batch is
taken. Not kept: hybrid sharding (divided inside a host, whole across hosts), gradients accumulated without a sum
(`no_sync`, which would hold them whole), offloading. Devices are alike to it, and all are used.
"""

from spantrain.core.plan import StateSharding, SumModel
from spantrain.planner.request import PlanRequest, Proposal
from spantrain.planner.strategies.baselines.ddp import data_parallel


def fsdp(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the model on all devices, with equal shares and all its state divided.

    Raises:
        InfeasiblePlanError: there are fewer samples than devices, or some device cannot hold its part.
    """
    return data_parallel(request, StateSharding.ZERO3, SumModel.TORCH_FSDP)
