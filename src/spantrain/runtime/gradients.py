"""Sums of gradients: among the replicas of a stage, and of parameters that stages share.

Losses are divided by the global batch before the backward pass, so every sum is a plain sum.
"""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import Store

from spantrain.cost.collectives import RUNTIME_BUCKET_BYTES
from spantrain.errors import PeerLostError

__all__ = ["GradientSum", "gradient_square"]


class GradientSum:
    """The replicas of one stage, as one process group of one generation."""

    def __init__(
        self, *, store: Store | None, rank: int, num_replicas: int, torch_device: torch.device, timeout_s: float
    ) -> None:
        self._num_replicas = num_replicas
        self.rank = rank
        if num_replicas > 1:
            assert store is not None, "replicas need a store to meet at"
            with _blaming_peers():
                dist.init_process_group(
                    "nccl" if torch_device.type == "cuda" else "gloo",
                    store=store,
                    rank=rank,
                    world_size=num_replicas,
                    timeout=datetime.timedelta(seconds=timeout_s),
                )

    def all_reduce(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum every gradient over the replicas, in buckets; a missing gradient counts as zero."""
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._num_replicas == 1:
            return
        for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            with _blaming_peers():
                dist.all_reduce(flat)
            start = 0
            for gradient in bucket:
                gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
                start += gradient.numel()

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every replica the first one's tensors, in place."""
        if self._num_replicas > 1:
            for tensor in tensors:
                with _blaming_peers():
                    dist.broadcast(tensor, src=0)

    def broadcast_bytes(self, content: bytes, torch_device: torch.device) -> bytes:
        """Give every replica the first one's bytes."""
        if self._num_replicas == 1:
            return content
        size = torch.tensor([len(content)], dtype=torch.int64, device=torch_device)
        with _blaming_peers():
            dist.broadcast(size, src=0)
        data = torch.zeros(int(size), dtype=torch.uint8, device=torch_device)
        if self.rank == 0:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        with _blaming_peers():
            dist.broadcast(data, src=0)
        return data.cpu().numpy().tobytes()

    def close(self) -> None:
        """Leave the group; it ends with its generation."""
        if self._num_replicas > 1 and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _blaming_peers() -> Iterator[None]:
    """A collective that fails does so because another replica went away: it is that one that should be named."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"another replica of this stage went away: {error}") from error


def _buckets(gradients: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group gradients of one dtype until a bucket is full; each gradient is in exactly one bucket."""
    buckets: list[list[torch.Tensor]] = []
    room = 0
    for gradient in gradients:
        size = gradient.numel() * gradient.element_size()
        if not buckets or size > room or buckets[-1][0].dtype != gradient.dtype:
            buckets.append([])
            room = RUNTIME_BUCKET_BYTES
        buckets[-1].append(gradient)
        room -= size
    return buckets


def gradient_square(parameters: Mapping[str, torch.nn.Parameter], *, leave_out: frozenset[str]) -> float:
    """Return the sum of squares of all gradients, but for parameters that another stage counts."""
    total = 0.0
    for name, parameter in parameters.items():
        if name not in leave_out and parameter.grad is not None:
            total += float(parameter.grad.detach().double().square().sum())
    return total
