"""What a stage of a pipeline does with its parameters at its leader's order, by `outer.client.replica`."""

from spantrain.core.outer.stages import StageOrder
from spantrain.outer.client.replica import ClusterCopy, TakenPush
from spantrain.outer.shard.numerics import Tensors


def carry_out(copy: ClusterCopy, order: StageOrder, version: Tensors) -> TakenPush | None:
    """Do what all stages do behind the same step; return what was copied, if the order is to push.

    `version` is this stage's tensors of what the order's pull brought; devices but the stage's first have none.

    >>> import torch
    >>> from spantrain.core.outer.events import Ticket
    >>> weight = torch.tensor([3.0])
    >>> copy = ClusterCopy({"weight": weight})
    >>> carry_out(copy, StageOrder(pull=Ticket(1, 1), version=5), {"weight": torch.tensor([7.0])})
    >>> weight
    tensor([7.])
    """
    if order.skipped:
        copy.skipped()
    if order.pull is not None:
        copy.pulled(version, counted=order.counted, left_out=order.left_out)
    return copy.take() if order.push else None
