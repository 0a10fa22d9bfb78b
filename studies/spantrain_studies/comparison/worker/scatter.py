"""Sums of gradients to their holders, beside the backward pass.

Gloo's reduce-scatter is an all-reduce whose result is cut, which sends twice the bytes, and fully_shard waits for it
where there are no streams. NCCL does neither. So that fully_shard is not slower here than it need be, everyone sends
everyone its part, which is as many bytes as NCCL's rings send, and the sums are made when the backward pass has ended.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class LaterReduceScatter(ReduceScatter):
    """What fully_shard calls to sum gradients; the sums are there after `finish`."""

    def __init__(self) -> None:
        self._under_way: list[tuple[dist.Work, Tensor, Tensor]] = []

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return room for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ARG002 - always a sum: the loss is scaled for one
        async_op: bool = False,  # noqa: ARG002 - always
    ) -> None:
        """Send everyone its part of the gradients, and take in what is sent here."""
        arrived = torch.empty_like(input_tensor)
        work = dist.all_to_all_single(arrived, input_tensor, group=group, async_op=True)
        assert work is not None
        self._under_way.append((work, arrived, output_tensor))

    def finish(self) -> None:
        """Wait for all that is under way and make the sums."""
        for work, arrived, output in self._under_way:
            work.wait()
            torch.sum(arrived.view(-1, output.numel()), dim=0, out=output.view(-1))
        self._under_way.clear()
