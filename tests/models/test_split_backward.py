"""Pins what torch's private I and W do, and what is added to them."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from spantrain.models.execution.split_backward import SplitBackward

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden, hidden, hidden, need_weights=False)[0]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4).eval()

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.relu(hidden + self.norm(self.conv(hidden)))


class TiedTwice(nn.Module):
    """One weight used twice, registered behind the biases: torch alone makes two overlapping groups of this."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.second = nn.Parameter(torch.randn(WIDTH))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.tanh(functional.linear(hidden, self.weight, self.first))
        return hidden + functional.linear(inner, self.weight, self.second)


class Added(nn.Module):
    """Parameters whose gradients are, for one sample, the very tensor that is the input's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.two = nn.Parameter(torch.randn(1, 4, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden + self.one + self.two)


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.block = Block()
        self.use_reentrant = use_reentrant

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + checkpoint(self.block, hidden, use_reentrant=self.use_reentrant)


class SideOutput(nn.Module):
    """A second output that depends on a parameter and on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.table = nn.Parameter(torch.randn(WIDTH))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(hidden), self.table * 2


class PassedBy(nn.Module):
    """No parameter has to do with the input, as where the second of two towers begins."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden * 1, self.table * 2


def run_full(module: nn.Module, spans: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of inputs and of parameters by plain backward passes."""
    module.zero_grad()
    leaves = [span.clone().requires_grad_() for span in spans]
    for leaf in leaves:
        outputs = module(leaf)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.cos(output.detach()) for output in outputs])
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    return [leaf.grad for leaf in leaves], gradients


class Runner:
    """Runs F, I and W of a module's spans in whatever order a test asks for."""

    def __init__(self, module: nn.Module, spans: list[Tensor]) -> None:
        self.module, self.spans = module, spans
        self.split = SplitBackward(list(module.parameters()), name="test")
        self.outputs: dict[int, tuple[Tensor, ...]] = {}
        self.leaves: dict[int, Tensor] = {}
        self.pending = {}
        self.input_gradients: dict[int, Tensor] = {}

    def do(self, order: str) -> "Runner":
        for word in order.split():
            {"F": self.forward, "I": self.input_half, "W": self.weight_half, "B": self.fused}[word[0]](int(word[1:]))
        return self

    def forward(self, span: int) -> None:
        self.leaves[span] = self.spans[span].clone().requires_grad_()
        outputs = self.module(self.leaves[span])
        self.outputs[span] = outputs if isinstance(outputs, tuple) else (outputs,)

    def input_half(self, span: int) -> None:
        gradients = [torch.cos(output.detach()) for output in self.outputs[span]]
        (self.input_gradients[span],), self.pending[span] = self.split.backward_input(
            self.outputs[span], gradients, [self.leaves[span]]
        )

    def weight_half(self, span: int) -> None:
        self.split.backward_weight(self.pending[span])

    def fused(self, span: int) -> None:
        gradients = [torch.cos(output.detach()) for output in self.outputs[span]]
        (self.input_gradients[span],) = self.split.backward(self.outputs[span], gradients, [self.leaves[span]])


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert (found - wanted).norm() <= 1e-5 * wanted.norm().clamp(min=1e-12)


def make_spans(count: int, samples: int = 2) -> list[Tensor]:
    return [torch.randn(samples, 4, WIDTH) for _ in range(count)]


MODULES = {
    "blocks": lambda: nn.Sequential(Block(), Block(), Block()),
    "attention": lambda: nn.Sequential(Attention(), Attention()),
    "convolution": lambda: nn.Sequential(Convolution(), Convolution()),
    "tied": TiedTwice,
    "added": Added,
    "checkpoint": lambda: nn.Sequential(Block(), Checkpointed(use_reentrant=False)),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "order",
    [
        "F0 I0 W0 F1 I1 W1 F2 I2 W2",
        "F0 F1 I0 F2 I1 W0 I2 W2 W1",
        "F0 F1 F2 I2 I1 I0 W0 W1 W2",
        "F0 F1 I1 B0 F2 W1 B2",
    ],
)
def test_halves_in_any_order_give_the_full_gradients(name: str, order: str) -> None:
    torch.manual_seed(0)
    module, spans = MODULES[name](), make_spans(3)
    wanted_inputs, wanted = run_full(module, spans)
    runner = Runner(module, spans).do(order)
    assert runner.split.splits
    for index, gradient in enumerate(wanted_inputs):
        assert_close(runner.input_gradients[index], gradient)
    for parameter, gradient in zip(module.parameters(), wanted, strict=True):
        assert_close(parameter.grad, gradient)


def test_input_half_leaves_parameters_alone_and_weight_half_adds() -> None:
    module = Block()
    runner = Runner(module, make_spans(1)).do("F0 I0")
    assert all(parameter.grad is None for parameter in module.parameters())
    runner.do("W0")
    once = [parameter.grad.clone() for parameter in module.parameters()]
    runner.do("F0 I0 W0")
    for parameter, gradient in zip(module.parameters(), once, strict=True):
        assert_close(parameter.grad, 2 * gradient)


def test_weight_half_frees_the_graph() -> None:
    runner = Runner(nn.Sequential(Block(), Block()), make_spans(1)).do("F0 I0")
    assert runner.pending[0].groups
    assert not runner.outputs[0][0].requires_grad
    runner.do("W0")
    assert not runner.pending[0].groups


def test_parameter_gradients_never_share_memory_with_what_is_sent() -> None:
    module = Added()
    runner = Runner(module, make_spans(1, samples=1)).do("F0 I0 W0")
    places = {runner.input_gradients[0].data_ptr(), module.one.grad.data_ptr(), module.two.grad.data_ptr()}
    assert len(places) == 3


def test_an_input_that_nothing_depends_on_gets_zeros() -> None:
    block, unused = Block(), torch.randn(2, 3).requires_grad_()
    leaf = torch.randn(2, 4, WIDTH).requires_grad_()
    output = block(leaf)
    split = SplitBackward(list(block.parameters()), name="test")
    gradients, _ = split.backward_input([output], [torch.ones_like(output)], [leaf, unused])
    assert torch.equal(gradients[1], torch.zeros(2, 3))


def test_an_input_passed_on_unchanged_gets_both_gradients() -> None:
    block = Block()
    leaf = torch.randn(2, 4, WIDTH).requires_grad_()
    output = block(leaf)
    split = SplitBackward(list(block.parameters()), name="test")
    (gradient,), pending = split.backward_input(
        [output, leaf], [torch.ones_like(output), torch.full_like(leaf, 3.0)], [leaf]
    )
    split.backward_weight(pending)
    again = leaf.detach().requires_grad_()
    block(again).sum().backward()
    assert_close(gradient, again.grad + 3.0)


def test_frozen_parameters_are_left_out() -> None:
    module = Block()
    module.up.weight.requires_grad_(False)
    runner = Runner(module, make_spans(1)).do("F0 I0 W0")
    assert runner.split.splits
    assert module.up.weight.grad is None
    assert module.up.bias.grad is not None


@pytest.mark.parametrize("make", [lambda: Checkpointed(use_reentrant=True), SideOutput, PassedBy])
def test_a_module_that_cannot_be_split_does_all_of_it_at_i_and_says_so_once(make, caplog) -> None:
    torch.manual_seed(0)
    module, spans = make(), make_spans(2)
    wanted_inputs, wanted = run_full(module, spans)
    with caplog.at_level(logging.WARNING):
        runner = Runner(module, spans).do("F0 F1 I0 I1 W1 W0")
    assert not runner.split.splits
    assert len(caplog.records) == 1
    assert "cannot be split" in caplog.text
    for index, gradient in enumerate(wanted_inputs):
        assert_close(runner.input_gradients[index], gradient)
    for parameter, gradient in zip(module.parameters(), wanted, strict=True):
        assert_close(parameter.grad, gradient)
