"""Processes of one cluster that train with an outer optimizer: what each runs, where a new process finds it."""

import datetime
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from spantrain.errors import UsageError
from spantrain.outer.client.optimizer import OuterOptimizer, OuterOptions
from spantrain.outer.client.parameters import ModelParameters
from spantrain.outer.client.ranks import TorchRanks
from spantrain.outer.client.replica import ClusterCopy
from testing.outer.clients import batch_of, small_model
from testing.patience import PATIENCE_S


@dataclass(frozen=True, kw_only=True)
class Order:
    """What each process does."""

    folder: Path
    master: str
    token: str
    size: int = 2
    how: str = "ddp"
    steps: int = 10
    samples: int = 0
    """Of leased data; 0 for batches by number."""


def member(rank: int, order: Order) -> None:
    """Train, and write down what the parameters are in this process."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(order.folder / "store"), order.size)
    timeout = datetime.timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=order.size, timeout=timeout)
    model = divided(small_model(0 if order.how == "stages" else rank), order)
    options = OuterOptions(wait_for_start_s=PATIENCE_S)
    named = model.named_parameters()
    if order.how == "stages":
        # Each has a layer of its own; what lies between them, and its gradients, are made up.
        named = [(name, one) for name, one in named if name.startswith("2" if rank else "0")]
    with OuterOptimizer(
        named, master=order.master, token=order.token, cluster="a", inner_steps=2, options=options
    ) as outer:
        seen = trained(model, outer, rank, order)
        done = outer.finish(PATIENCE_S)
        metrics = outer.metrics
    found = {"parameters": whole(model), "done": done, "rounds": metrics.outer_rounds, "tokens": metrics.tokens}
    torch.save(found | {"seen": seen}, order.folder / f"{rank}.pt")
    dist.destroy_process_group()


def divided(model: nn.Module, order: Order) -> nn.Module:
    if order.how == "ddp":
        return DistributedDataParallel(model)
    if order.how == "stages":
        return model
    mesh = init_device_mesh("cpu", (order.size,))
    # Each process began with other numbers; fully_shard keeps each one's part: all get those of the first.
    for one in model.parameters():
        dist.broadcast(one.data, 0)
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trained(model: nn.Module, outer: OuterOptimizer, rank: int, order: Order) -> list[int]:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if not order.samples:
        for number in range(order.steps):
            inputs, targets = batch_of(number)
            if order.how == "stages":
                step(model, inner, inputs, targets)
                outer.step(tokens=8 * (rank == 1))
                continue
            step(model, inner, inputs[rank :: order.size], targets[rank :: order.size])
            outer.step(tokens=8 // order.size)
        return []
    seen: list[int] = []
    for indices in outer.data(order.samples, batch_samples=3):
        inputs, targets = batch_of(indices[0])
        step(model, inner, inputs, targets)
        seen += indices
        outer.step(tokens=len(indices))
    return seen


def step(model: nn.Module, inner: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    inner.zero_grad()
    (model(inputs) - targets).square().mean().backward()
    inner.step()


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    named = {name.removeprefix("module."): one.detach() for name, one in model.named_parameters()}
    return {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in named.items()}


def replica(rank: int, store: str) -> None:
    """Be one of two by two processes that have a parameter in halves, each on a mesh of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
    ranks, whole = TorchRanks(), torch.arange(8.0).reshape(4, 2)
    part = distribute_tensor(whole.clone(), mesh["parts"], [Shard(0)])
    copy = ClusterCopy(ModelParameters({"w": part}, ranks))
    copy.pulled({"w": whole + 100} if rank == 0 else {}, counted=False)
    assert torch.equal(part.full_tensor(), whole + 100), "the second replica once got whatever lay in memory"
    part.to_local().add_(rank // 2)
    with pytest.raises(UsageError, match="w: process 2 has other numbers than process 0"):
        copy.take()
    ranks.close()
    dist.destroy_process_group()
