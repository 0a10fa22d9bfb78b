"""Members in processes of their own, joined by Gloo, and in threads."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from preloaded import spawn
from spantrain.core.shares import TensorPart
from spantrain.core.span import Span
from spantrain.models.build import build_units
from spantrain.models.tensor_parallel.group import LoneGroup, TensorGroup
from spantrain.models.tensor_parallel.shard import shard_units
from testing.models.divided_units import Member, Seen, Work, assert_near, whole_gradients
from testing.models.thread_group import ThreadGroup, run_members
from testing.patience import PATIENCE_S
from testing.runtime.gloo_members import CLASSES, SHARES, Order, member, small_units

pytestmark = pytest.mark.tensor_parallel


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
    spawn(member, args=(order,), nprocs=len(SHARES))
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False, map_location="cpu") for rank in range(len(SHARES))]
    assert [said["own"].tolist() for said in found] == [
        [[0, 3, 6, 9, 12], [18, 21, 24, 27, 30]],
        [[], []],
        [[15], [33]],
    ]
    assert [[row.tolist() for row in said["rows"]] for said in found] == [
        [[0, 6, 12], [3, 9, 15]],
        [[], []],
        [[18, 24, 30], [21, 27, 33]],
    ]
    assert [[row.tolist() for row in said["round_rows"]] for said in found] == [
        [[low + 3 * number for low in (0, 6, 12)] for number in range(5)],
        [[]] * 5,
        [[low + 3 * number for low in (18, 24, 30)] for number in range(5)],
    ]
    for said in found:
        assert said["flat_gathered"].tolist() == [1, 2, 2]
        assert [one.tolist() for one in said["totals"]] == [
            [6 * at + 3 * number for at in range(7)] for number in range(5)
        ]
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


def test_a_member_alone_is_given_what_has_the_shapes_of_all() -> None:
    group, tensor = LoneGroup(1, 3), torch.ones(2, 4)
    assert group.all_gather(tensor, [3, 4, 1], -1).tolist() == 2 * [[0, 0, 0, 1, 1, 1, 1, 0]]
    assert group.reduce_scatter(torch.arange(8.0), [3, 4, 1], 0).tolist() == [3, 4, 5, 6]
    group.all_reduce(tensor)
    assert tensor.tolist() == 2 * [[1, 1, 1, 1]]


def test_a_member_that_fails_ends_those_that_wait_for_it() -> None:
    def work(group: ThreadGroup) -> None:
        if group.rank == 1:
            raise ValueError("I have had enough")
        group.all_reduce(torch.zeros(1))

    with pytest.raises(ValueError, match="enough"):
        run_members(2, work)


def test_a_member_that_waits_for_one_that_has_ended_is_told() -> None:
    def work(group: ThreadGroup) -> None:
        if group.rank == 1:
            group.all_reduce(torch.zeros(1))

    with pytest.raises(RuntimeError, match="1 of 2 members wait for an operation, the others have ended"):
        run_members(2, work)


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
