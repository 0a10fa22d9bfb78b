"""Divided logits behave as the whole tensor does, and their cross-entropy needs none of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from spantrain.core.shares import divide_pieces
from spantrain.core.span import Span
from spantrain.models.tensor_parallel.divided import DividedLogits
from spantrain.models.units import sample_losses
from testing.models.thread_group import ThreadGroup, run_members

pytestmark = pytest.mark.tensor_parallel

CLASSES = 7
SAMPLES, TOKENS = 3, 4
IN_PARTS = "all_gather[1, 3, 12]"
"""The one exchange of a cross-entropy in parts: three numbers for each of the labels."""


def compare(work: Callable[[Any], Tensor], spans: tuple[Span, ...], *, dtype: torch.dtype = torch.float32) -> list[str]:
    """Hold what `work` makes of divided logits, and their gradient, against the same of whole ones."""
    generator = torch.Generator().manual_seed(0)
    whole = (4 * torch.randn(SAMPLES, TOKENS, CLASSES, generator=generator)).to(dtype).requires_grad_()
    wanted = work(whole)
    wanted.sum().backward()
    assert whole.grad is not None

    def member(group: ThreadGroup) -> tuple[Tensor, Tensor, list[str]]:
        own = whole.detach()[..., spans[group.rank].lo : spans[group.rank].hi].clone().requires_grad_()
        result = work(DividedLogits(own, sizes=[span.size for span in spans], dim=-1, group=group))
        assert type(result) is Tensor
        result.sum().backward()
        assert own.grad is not None
        return result.detach(), own.grad, group.operations

    members = run_members(len(spans), member)
    for result, _, _ in members:
        torch.testing.assert_close(result, wanted.detach())
    torch.testing.assert_close(torch.cat([gradient for _, gradient, _ in members], dim=2), whole.grad)
    return members[0][2]


def labels() -> Tensor:
    found = torch.randint(0, CLASSES, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    return found.index_put((torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])), torch.tensor(-100))


@settings(max_examples=20)
@given(shares=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_a_samples_loss_is_that_of_whole_logits(shares: list[int]) -> None:
    spans = divide_pieces(CLASSES, shares)
    assert compare(lambda logits: sample_losses(logits, labels()), spans) == [IN_PARTS]


def own_loss_of_the_library(logits: Any) -> Tensor:
    """The way of transformers' causal models: cast, shift the labels, flatten, mean over those that count."""
    logits = logits.float()
    shifted = functional.pad(labels(), (0, 1), value=-100)[..., 1:].contiguous()
    return functional.cross_entropy(logits.view(-1, CLASSES), shifted.view(-1), ignore_index=-100, reduction="mean")


IN_OWN_CLASSES = {
    "library": own_loss_of_the_library,
    "scaled": lambda logits: functional.cross_entropy((logits / 2).flatten(0, 1), labels().flatten(), reduction="sum"),
    "reshaped": lambda logits: functional.cross_entropy(logits.reshape(-1, CLASSES), labels().flatten()),
}
GATHERED = {
    "smoothed": lambda logits: functional.cross_entropy(
        logits.flatten(0, 1), labels().flatten(), label_smoothing=0.1, reduction="none"
    ),
    "transposed": lambda logits: functional.cross_entropy(logits.transpose(1, 2), labels(), reduction="none"),
    "softmax": lambda logits: torch.softmax(logits, dim=-1) ** 2,
    "cut": lambda logits: logits[..., 2:5] * 3,
    "one class": lambda logits: logits[:, 0, 3],
    "mask": lambda logits: logits[labels() != -100].square(),
    "added": lambda logits: (logits + logits.mean(dim=-1, keepdim=True)).tanh(),
    "listed": lambda logits: torch.cat([logits, logits]).square(),
}


@pytest.mark.parametrize("name", IN_OWN_CLASSES)
def test_a_loss_written_in_another_way_is_taken_in_parts_too(name: str) -> None:
    assert compare(IN_OWN_CLASSES[name], (Span(0, 2), Span(2, 7))) == [IN_PARTS]


@pytest.mark.parametrize("name", GATHERED)
def test_any_other_work_gets_the_whole(name: str) -> None:
    operations = compare(GATHERED[name], (Span(0, 2), Span(2, 7)))
    assert IN_PARTS not in operations


def test_a_cut_of_other_dimensions_keeps_the_classes_divided() -> None:
    compare(lambda logits: sample_losses(logits[:, :-1, :], labels()[:, 1:]), (Span(0, 2), Span(2, 7)))
    assert compare(lambda logits: sample_losses(logits[1:], labels()[1:]), (Span(0, 2), Span(2, 7))) == [
        "all_gather[1, 3, 8]"
    ]


def test_they_say_the_wholes_shape_and_type() -> None:
    (group,) = ThreadGroup.together(1)
    logits = DividedLogits(torch.zeros(3, 4, 2), sizes=(2, 7), dim=-1, group=group)
    assert logits.shape == (3, 4, 9)
    assert (logits.dim(), logits.size(-1), logits.dtype, logits.bfloat16().dtype) == (
        3,
        9,
        torch.float32,
        torch.bfloat16,
    )


def test_bfloat16_logits_are_summed_in_float32() -> None:
    compare(lambda logits: sample_losses(logits, labels()), (Span(0, 3), Span(3, 5), Span(5, 7)), dtype=torch.bfloat16)
