"""Members in processes of their own, joined by Gloo, and in threads."""

import datetime
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from divided_units import Member, Seen, Work, assert_near, whole_gradients
from patience import PATIENCE_S
from spantrain.core.parts import TensorPart
from spantrain.core.spans import Span
from spantrain.models.build import build_units
from spantrain.models.tensor.group import TensorGroup, ThreadGroup, TorchGroup, run_members
from spantrain.models.tensor.shard import shard_units
from spantrain.models.units import ModuleUnit, UnitModule, sample_losses

pytestmark = pytest.mark.tensor_parallel

SHARES = (3, 1, 2)
CLASSES, WIDTH = 11, 12


class Tokens(UnitModule):
    def __init__(self) -> None:
        super().__init__("wte", prefixes={"wte": "wte"})
        self.wte = nn.Embedding(CLASSES, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return (self.wte(tokens),)


class Classes(UnitModule):
    def __init__(self) -> None:
        super().__init__("head", prefixes={"head": "head"})
        self.head = nn.Linear(WIDTH, CLASSES)

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
    group = TorchGroup(dist.group.WORLD, rank=rank, size=len(SHARES))
    device = torch.device(order.device)
    gathered = group.all_gather(torch.full((2, rank + 1), float(rank), device=device), [1, 2, 3], 1)
    small = torch.full((3,), rank + 1.0, dtype=torch.bfloat16, device=device)
    group.all_reduce(small)
    units = small_units()
    parts = shard_units(units, SHARES, rank, group)
    seen = replace(order.work, device=order.device).run(units)
    found = {"gathered": gathered, "small": small, "spent_s": group.spent_s, "calls": group.calls}
    found |= {"parts": parts, "losses": seen.outputs, "gradients": seen.gradients}
    torch.save(found, order.folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S)
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda:0",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")],
        ),
    ],
)
def test_processes_joined_by_gloo_train_what_one_would(device: str, tmp_path: Path) -> None:
    tokens, labels = torch.randint(0, CLASSES, (2, 4, 5), generator=torch.Generator().manual_seed(1))
    spans = (Span(0, 3), Span(3, 4))
    work = Work(inputs=(tokens,), labels=labels, spans=spans, order="FIW", is_first=True)
    order = Order(work=work, folder=tmp_path, device=device)
    multiprocessing.spawn(member, args=(order,), nprocs=len(SHARES))
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False, map_location="cpu") for rank in range(len(SHARES))]
    for said in found:
        assert said["gathered"].tolist() == 2 * [[0, 1, 1, 2, 2, 2]]
        assert said["small"].tolist() == [6, 6, 6]
        assert said["spent_s"] > 0
        assert said["calls"] == found[0]["calls"]
    members = [
        Member(
            seen=Seen(outputs=said["losses"], input_gradients=[], gradients=said["gradients"]),
            parts=said["parts"],
            operations=[],
            units=[],
        )
        for said in found
    ]
    wanted = work.run(small_units())
    together = whole_gradients(members)
    for name, gradient in wanted.gradients.items():
        if "in_proj_bias" not in name:  # a key's bias has no gradient but rounding
            assert_near(together[name], gradient, name)
    for one in members:
        for loss, other in zip(one.seen.outputs, wanted.outputs, strict=True):
            assert_near(loss, other, "loss")


def test_threads_gather_unequal_lengths_and_sum_in_the_order_of_ranks() -> None:
    def work(group: TensorGroup) -> tuple[list[float], list[list[float]]]:
        tensor = torch.tensor([10.0**group.rank])
        group.all_reduce(tensor)
        return tensor.tolist(), group.all_gather(torch.full((1, group.rank + 1), 1.0), [1, 2], 1).tolist()

    assert run_members(2, work) == 2 * [([11.0], [[1.0, 1.0, 1.0]])]


def test_a_member_that_fails_ends_those_that_wait_for_it() -> None:
    def work(group: ThreadGroup) -> None:
        if group.rank == 1:
            raise ValueError("I have had enough")
        group.all_reduce(torch.zeros(1))

    with pytest.raises(ValueError, match="enough"):
        run_members(2, work)


def test_threads_left_alone_give_up() -> None:
    (alone, _) = ThreadGroup.together(2, timeout_s=0.01)
    with pytest.raises(threading.BrokenBarrierError):
        alone.all_reduce(torch.zeros(1))


def test_shares_must_be_those_of_the_group(small_spec) -> None:
    units = build_units(small_spec("gpt2"), [1], seed=0)
    for shares in ((1.0,), (1.0, 0.0)):
        with pytest.raises(ValueError, match="a group of 2 needs as many positive shares"):
            shard_units(units, shares, 0, ThreadGroup.together(2)[0])


def test_a_group_of_one_leaves_units_as_they_are(small_spec) -> None:
    units = build_units(small_spec("gpt2"), seed=0)
    before = repr(units)
    parts = shard_units(units, (1.0,), 0, ThreadGroup.together(1)[0])
    assert repr(units) == before
    assert all(part == replace(part, ranges=()) and isinstance(part, TensorPart) for part in parts.values())
