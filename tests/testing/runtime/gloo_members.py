"""Members in processes of their own: what each runs stands in a module that a new process finds."""

import datetime
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spantrain.models.tensor_parallel.shard import shard_units
from spantrain.models.units import LABELS, ModuleUnit, UnitModule, sample_losses
from spantrain.runtime.gradients.members import TorchMembers
from testing.models.divided_units import Work
from testing.patience import PATIENCE_S

SHARES = (3, 1, 2)
CLASSES, WIDTH = 11, 12


class Tokens(UnitModule):
    def __init__(self) -> None:
        super().__init__("wte", prefixes={"wte": "wte"})
        self.wte = nn.Embedding(CLASSES, WIDTH)
        self.reads = (0,)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return (self.wte(tokens),)


class Classes(UnitModule):
    def __init__(self) -> None:
        super().__init__("head", prefixes={"head": "head"})
        self.head = nn.Linear(WIDTH, CLASSES)
        self.reads = (LABELS,)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return sample_losses(self.head(hidden), labels).sum()


def small_units() -> list[UnitModule]:
    """An embedding, two of torch's layers, an output layer: nothing that takes long to import."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 6, 20, batch_first=True) for _ in range(2)]
    units = [Tokens(), *(ModuleUnit(f"layer.{number}", layer) for number, layer in enumerate(layers)), Classes()]
    return [unit.eval() for unit in units]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What each process does."""

    work: Work
    folder: Path
    device: str = "cpu"
    """Where all of them compute; Gloo carries tensors of one GPU that they share."""


def member(rank: int, order: Order) -> None:
    """Train one member's part for a moment and write down what it saw."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(order.folder / "store"), len(SHARES))
    timeout = datetime.timedelta(seconds=PATIENCE_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(SHARES), timeout=timeout)
    assert dist.group.WORLD is not None
    group = TorchMembers(dist.group.WORLD)
    device = torch.device(order.device)
    gathered = group.all_gather(torch.full((2, rank + 1), float(rank), device=device), [1, 2, 3], 1)
    small = torch.full((3,), rank + 1.0, dtype=torch.bfloat16, device=device)
    group.all_reduce(small)
    pieces = torch.arange(12.0, device=device).view(2, 6)
    own = group.reduce_scatter(pieces, [5, 0, 1], 1)
    flat = torch.arange(6.0, device=device) * (rank + 1)
    several = [group.begin_reduce_scatter(flat + number, [3, 0, 3]) for number in range(2)]
    rows = [wait() for wait in several]
    spread = TorchMembers(dist.group.WORLD, spread=True)
    several = [spread.begin_reduce_scatter(flat + number, [3, 0, 3]) for number in range(5)]
    gathering = spread.begin_all_gather(torch.full((rank,), float(rank), device=device), [0, 1, 2])
    round_rows, flat_gathered = [wait() for wait in several], gathering()
    totals = [torch.arange(7.0, device=device) * (rank + 1) + number for number in range(5)]
    for wait in [spread.begin_all_reduce(total) for total in totals]:
        wait()
    spread.close()
    units = small_units()
    parts = shard_units(units, SHARES, rank, group)
    seen = replace(order.work, device=order.device).run(units)
    calls = {like: len(seconds) for like, seconds in group._seconds.items()}
    found = {
        "gathered": gathered,
        "own": own,
        "rows": rows,
        "round_rows": round_rows,
        "flat_gathered": flat_gathered,
        "totals": totals,
        "small": small,
        "spent_s": group.exchanging_s,
        "calls": calls,
    }
    found |= {"parts": parts, "losses": seen.outputs, "gradients": seen.gradients}
    torch.save(found, order.folder / f"{rank}.pt")
    dist.destroy_process_group()
