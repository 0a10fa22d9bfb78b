"""One name on several processes of a cluster: copies, parts, or neither, which is refused."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from preloaded import spawn
from spantrain.errors import UsageError
from spantrain.outer.client.parameters import ModelParameters
from spantrain.outer.client.replica import ClusterCopy
from testing.outer.processes import replica
from testing.patience import PATIENCE_S


class SharedTensors:
    """Where the threads of a cluster meet, as its processes do."""

    def __init__(self, size: int) -> None:
        self.size, self.said = size, [object()] * size
        self.all_here = threading.Barrier(size, timeout=PATIENCE_S)

    def gather(self, rank: int, what: Any) -> list[Any]:
        self.said[rank] = what
        self.all_here.wait()
        said = list(self.said)
        self.all_here.wait()
        return said


class ThreadRanks:
    """One thread of a cluster (`client_ranks.Ranks`)."""

    def __init__(self, service: SharedTensors, rank: int) -> None:
        self._service, self.rank, self.size = service, rank, service.size

    def gather(self, text: str) -> list[str]:
        return self._service.gather(self.rank, text)

    def agree(self, numbers: Sequence[int]) -> list[int]:
        return list(self._service.gather(self.rank, list(numbers))[0])

    def total(self, number: int) -> int:
        return sum(self._service.gather(self.rank, number))

    def share(self, tensor: Tensor) -> None:
        tensor.copy_(self._service.gather(self.rank, tensor.clone())[0])

    def carry(self, tensor: Tensor, source: int, target: int) -> None:
        raise AssertionError("nothing is held by some of the processes alone here")

    def close(self) -> None:
        pass


def cluster(tensors: Sequence[dict[str, Tensor]], work: Callable[[ClusterCopy], Any]) -> list[Any]:
    """Have each thread begin with its tensors, and do something; return what came of it, or what was raised."""
    service = SharedTensors(len(tensors))

    def member(rank: int) -> Any:
        try:
            return work(ClusterCopy(ModelParameters(tensors[rank], ThreadRanks(service, rank))))
        except UsageError as error:
            return str(error)

    with ThreadPoolExecutor(len(tensors)) as pool:
        return list(pool.map(member, range(len(tensors))))


def test_what_several_processes_have_alike_is_one_parameter():
    found = cluster([{"w": torch.ones(2, 3)} for _ in range(3)], lambda copy: {**copy.take().now})
    assert found[0]["w"].tolist() == [[1.0] * 3] * 2
    assert found[1:] == [{}, {}]


def test_halves_of_one_name_and_shape_are_refused_on_all_processes_alike():
    """The tensor-parallel halves of a weight: the second was once made the first, bit for bit."""
    whole = torch.arange(12.0).reshape(4, 3)
    first, second = cluster(
        [{"a": torch.ones(3), "w": whole[:2]}, {"a": torch.ones(3), "w": whole[2:]}], lambda _: "begun"
    )
    assert first == second
    assert first.startswith(
        "w: process 1 has other numbers than process 0, under one name and shape ([2, 3]). If these"
    )
    assert "give each a name of its own" in first


def test_parts_that_begin_alike_are_refused_at_the_first_push_before_anything_is_sent():
    """Experts with local numbers, all made from one seed: nothing is wrong to be seen before they are trained."""
    tensors = [{"expert.0": torch.zeros(4)} for _ in range(2)]
    found = cluster(tensors, _train_apart)
    assert all(text.startswith("expert.0: process 1 has other numbers than process 0") for text in found)


def test_parts_that_begin_alike_are_refused_at_the_first_version_before_it_makes_them_one():
    found = cluster([{"expert.0": torch.zeros(4)} for _ in range(2)], _take_version_apart)
    assert all(text.startswith("expert.0: process 1 has other numbers than process 0") for text in found)


def _take_version_apart(copy: ClusterCopy) -> str:
    live = copy._live
    live._live["expert.0"].add_(live._ranks.rank + 1)
    live.move({"expert.0": torch.zeros(4)}, {"expert.0": torch.ones(4)})
    return "one version"


def _train_apart(copy: ClusterCopy) -> str:
    live = copy._live
    live._live["expert.0"].add_(live._ranks.rank + 1)
    copy.take()
    return "pushed"


def test_copies_that_rounding_drove_apart_are_told_once_and_sent(caplog):
    """DistributedDataParallel over unlike processors: gradients are the same bits, steps may not be."""
    found = cluster([{"w": torch.ones(8)} for _ in range(2)], _train_with_rounding)
    assert found == ["pushed"] * 2
    said = [record.getMessage() for record in caplog.records if "has not the bits of" in record.getMessage()]
    assert len(said) == 2  # in each process
    assert said[0].startswith("w: process 1 has not the bits of process 0")


def _train_with_rounding(copy: ClusterCopy) -> str:
    live = copy._live
    for _ in range(2):
        live._live["w"].mul_(1 + 2e-7 * live._ranks.rank)
        copy.take()
    return "pushed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (4, 3), (2, 3, 2), (3, 2048)])
def test_any_number_that_differs_is_found_and_rows_that_are_swapped(dtype, shape):
    def same(one: Tensor, other: Tensor) -> bool:
        return cluster([{"w": one}, {"w": other}], lambda _: "begun") == ["begun"] * 2

    one = torch.arange(1.0, 1 + max(1, torch.Size(shape).numel())).reshape(shape).to(dtype)
    assert same(one, one.clone())
    other = one.clone()
    other.view(-1)[-1] *= 2
    assert not same(one, other)
    if one.dim() and one.shape[0] > 1:
        assert not same(one, one.flip(0))


@pytest.mark.slow
def test_each_replica_of_a_divided_parameter_gets_its_parts_and_other_numbers_are_refused(tmp_path: Path):
    """Two by two processes: tensor parallel on a mesh of its own in each replica."""
    spawn(replica, args=(str(tmp_path / "store"),), nprocs=4)
