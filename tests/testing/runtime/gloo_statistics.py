"""Devices in processes of their own that take statistics of batches together; a new process finds this module."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.models.statistics import BatchStatistics, JoinedDevices
from spantrain.models.units import ModuleUnit
from spantrain.runtime.gradients.groups import open_groups
from testing.patience import PATIENCE_S


@dataclass(frozen=True, kw_only=True)
class Order:
    """What each process does."""

    plan: Plan
    rows: torch.Tensor
    folder: Path


def normalization() -> ModuleUnit:
    torch.manual_seed(3)
    norm = nn.BatchNorm2d(5)
    with torch.no_grad():
        norm.weight.uniform_(-1, 1)
        norm.bias.uniform_(-1, 1)
    return ModuleUnit("norm", norm)


def device(rank: int, order: Order) -> None:
    """Normalize the own rows, go back, and sum gradients at the same time; write down what came out."""
    torch.set_num_threads(1)
    stage = order.plan.stages[0]
    groups = open_groups(
        order.plan,
        0,
        stage.devices[rank],
        store=dist.FileStore(str(order.folder / "store"), len(stage.devices)),
        torch_device=torch.device("cpu"),
        timeout_s=PATIENCE_S,
        joined=True,
    )
    assert groups.statistics is not None
    unit, (span,) = normalization(), stage.replica_spans(rank)
    statistics = BatchStatistics([unit], JoinedDevices(group=groups.statistics, leads=True))
    given = order.rows[span.lo : span.hi].clone().requires_grad_()
    sums = torch.full((2**20,), 1.0)
    wait = groups.ring.begin_all_reduce(sums)
    with statistics.of(span):
        (found,) = unit(given)
    found.square().sum().backward()
    wait()
    for parameter in unit.parameters():
        groups.ring.all_reduce(parameter.grad)
    statistics.commit([Span(0, len(order.rows))], groups.world.all_reduce, leads=True)
    own = {"found": found.detach(), "given": given.grad, "sums": sums[0]}
    torch.save(own | {name: p.grad for name, p in unit.named_parameters()} | dict(unit.named_buffers()),
               order.folder / f"{rank}.pt")  # fmt: skip
    groups.close()
