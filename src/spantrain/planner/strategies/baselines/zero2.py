"""`zero2`: data parallelism with divided gradients and optimizer state (Rajbhandari et al., ZeRO, SC 2020, stage 2).

Kept: the whole model on every device, equal shares, who holds what, and the bytes that are sent: each micro-batch's
gradients are summed to their holders beside the backward, which do not keep what is not theirs (`deepspeed-zero` in
`cost.sum_models`), and the new parameters are gathered at the end of the step. As a user would, the best sizes of
micro-batch and bucket are taken. Not kept: offloading to the host.
"""

from spantrain.core.plan import StateSharding, SumModel
from spantrain.planner.request import PlanRequest, Proposal
from spantrain.planner.strategies.baselines.ddp import data_parallel


def zero2(request: PlanRequest) -> tuple[Proposal, ...]:
    """Propose the whole model on every device, with equal shares, gradients and optimizer state divided.

    Raises:
        InfeasiblePlanError: there are fewer samples than devices, or some device cannot hold its part.
    """
    return data_parallel(request, StateSharding.ZERO2, SumModel.DEEPSPEED_ZERO)
