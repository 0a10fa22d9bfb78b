"""The halves of a backward pass, in any order, are the whole; what is left to W is the products of weights."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from spantrain.core.span import Span
from spantrain.models.execution.segment import HeldSegment, Segment
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.units import ModuleUnit, UnitModule
from spantrain.models.weight_gradients import Final

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


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, hidden: Tensor, _: Tensor) -> Tensor:
        return self.block(hidden)


class PassedOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(hidden), hidden


class PassedBy(nn.Module):
    """No parameter has to do with the input, as where the second of two towers begins."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden * 1, self.table * 2


class Alone(UnitModule):
    """A module that is a unit."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__("alone", prefixes={"body": ""})
        self.body = body

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = self.body(*tensors)
        return outputs if isinstance(outputs, tuple) else (outputs,)


def segment_of(module: nn.Module, dtype: torch.dtype | None = None) -> Segment:
    return Segment([Alone(module)], ends_model=False, torch_device=torch.device("cpu"), autocast_dtype=dtype)


def run_full(
    module: nn.Module, spans: list[Tensor], dtype: torch.dtype | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of inputs and of parameters by plain backward passes."""
    module = copy.deepcopy(module)
    leaves = [span.clone().requires_grad_() for span in spans]
    for leaf in leaves:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            outputs = module(leaf)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.cos(output.detach()) for output in outputs])
    return [leaf.grad for leaf in leaves], [parameter.grad for parameter in module.parameters()]


class Runner:
    """Runs F, I and W of a module's spans in whatever order a test asks for."""

    def __init__(self, module: nn.Module, spans: list[Tensor], dtype: torch.dtype | None = None) -> None:
        self.module, self.spans = module, spans
        self.segment = segment_of(module, dtype)
        self.outputs: dict[int, tuple[Tensor, ...]] = {}
        self.held: dict[int, HeldSegment] = {}
        self.input_gradients: dict[int, Tensor] = {}
        self.final: Final | None = None

    def do(self, order: str) -> "Runner":
        for word in order.split():
            {"F": self.forward, "I": self.input_half, "W": self.weight_half, "B": self.fused}[word[0]](int(word[1:]))
        return self

    def forward(self, span: int) -> None:
        leaf = self.spans[span].clone().requires_grad_()
        self.held[span], self.outputs[span] = self.segment.forward((leaf,), {})

    def _gradients(self, span: int) -> tuple[Tensor, ...]:
        return tuple(torch.cos(output) for output in self.outputs[span])

    def input_half(self, span: int) -> None:
        (self.input_gradients[span],) = self.segment.backward_input(self.held[span], self._gradients(span))

    def weight_half(self, span: int) -> None:
        self.segment.backward_weight(self.held[span], self.final)

    def fused(self, span: int) -> None:
        gradients = self._gradients(span)
        (self.input_gradients[span],) = self.segment.backward(self.held[span], gradients, final=self.final)


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert (found - wanted).norm() <= tolerance * wanted.norm().clamp(min=1e-12)


def make_spans(count: int, samples: int = 2) -> list[Tensor]:
    return [torch.randn(samples, 4, WIDTH) for _ in range(count)]


class Writing(nn.Module):
    """Layers whose outputs are written into."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Sequential(nn.Conv1d(4, 4, 1, bias=False), nn.ReLU(inplace=True))

    def forward(self, hidden: Tensor) -> Tensor:
        made = self.one(hidden)
        made += 0.5
        made[:, 0] = 0.25
        return self.two(functional.relu_(made))


class Again(nn.Module):
    """One layer three times, one behind the other, as in models that share their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(3):
            hidden = torch.tanh(self.layer(hidden)) + hidden
        return hidden


class Strided(nn.Module):
    """Convolutions of all sorts: strides, dilations, groups, edges of other things than zeros, words for padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(4, 8, 3, stride=2, padding=2, dilation=2, groups=2),
            nn.Conv1d(8, 8, 3, padding="same"),
            nn.Conv1d(8, 8, 3, padding=1, padding_mode="circular"),
            nn.ConvTranspose1d(8, 4, 2),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layers(hidden)


MODULES = {
    "blocks": lambda: nn.Sequential(Block(), Block(), Block()),
    "attention": lambda: nn.Sequential(Attention(), Attention()),
    "convolution": lambda: nn.Sequential(Convolution(), Convolution()),
    "strided": Strided,
    "tied": TiedTwice,
    "again": Again,
    "added": Added,
    "writing": Writing,
    "checkpoint": lambda: nn.Sequential(Block(), Checkpointed(use_reentrant=False)),
    "reentrant checkpoint": lambda: nn.Sequential(Block(), Checkpointed(use_reentrant=True)),
    "side": SideOutput,
    "passed by": PassedBy,
    "conv1d of transformers": lambda: Conv1D(WIDTH, WIDTH),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "order",
    ["F0 I0 W0 F1 I1 W1 F2 I2 W2", "F0 F1 I0 F2 I1 W0 I2 W2 W1", "F0 F1 F2 I2 I1 I0 W0 W1 W2", "F0 F1 I1 B0 F2 W1 B2"],
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_halves_in_any_order_give_the_full_gradients(name: str, order: str, dtype: torch.dtype | None) -> None:
    """In bfloat16, autocast sums the gradients of several uses of a weight in bfloat16, and here in float32."""
    torch.manual_seed(0)
    module, spans = MODULES[name](), make_spans(3)
    wanted_inputs, wanted = run_full(module, spans, dtype)
    runner = Runner(module, spans, dtype).do(order)
    tolerance = 1e-5 if dtype is None else 1e-2
    for index, gradient in enumerate(wanted_inputs):
        assert_close(runner.input_gradients[index], gradient, tolerance)
    for parameter, gradient in zip(module.parameters(), wanted, strict=True):
        assert_close(parameter.grad, gradient, tolerance)


@pytest.mark.parametrize("name", MODULES)
def test_each_half_tells_of_what_it_adds_to_when_that_is_done(name: str) -> None:
    """A gradient does not change after it was told of."""
    torch.manual_seed(0)
    module = MODULES[name]()
    for order in ("F0 I0 W0", "F0 B0"):
        runner = Runner(module, make_spans(1))
        told: list[tuple[nn.Parameter, Tensor | None]] = []
        runner.final = lambda parameters, told=told: told.extend(
            (one, None if one.grad is None else one.grad.clone()) for one in parameters
        )
        runner.do(order)
        for parameter, gradient in told:
            assert (gradient is None) == (parameter.grad is None)
            assert gradient is None or torch.equal(gradient, parameter.grad)
        module.zero_grad()


def test_weights_are_left_to_the_second_half_and_all_else_is_not() -> None:
    module = Block()
    runner = Runner(module, make_spans(1)).do("F0 I0")
    assert {name for name, parameter in module.named_parameters() if parameter.grad is None} == {
        "up.weight", "up.bias", "down.weight", "down.bias",
    }  # fmt: skip
    runner.do("W0")
    once = [parameter.grad.clone() for parameter in module.parameters()]
    runner.do("F0 I0 W0")
    for parameter, gradient in zip(module.parameters(), once, strict=True):
        assert_close(parameter.grad, 2 * gradient)


def test_only_inputs_of_layers_and_gradients_of_their_outputs_wait_for_the_second_half() -> None:
    runner = Runner(nn.Sequential(Block(), Block()), make_spans(1)).do("F0 I0")
    samples, tokens = 2, 4
    assert sum(tensor.numel() for tensor in runner.held[0].tensors) == 2 * samples * tokens * (1 + 4 + 4 + 1) * WIDTH
    runner.do("W0")
    assert runner.held[0].tensors == ()


def test_parameter_gradients_never_share_memory_with_what_is_sent() -> None:
    module = Added()
    runner = Runner(module, make_spans(1, samples=1)).do("F0 I0 W0")
    places = {runner.input_gradients[0].data_ptr(), module.one.grad.data_ptr(), module.two.grad.data_ptr()}
    assert len(places) == 3


def test_an_input_that_nothing_depends_on_gets_zeros() -> None:
    segment = segment_of(Unused())
    leaves = (torch.randn(2, 4, WIDTH).requires_grad_(), torch.randn(2, 3).requires_grad_())
    held, outputs = segment.forward(leaves, {})
    assert torch.equal(segment.backward_input(held, tuple(map(torch.ones_like, outputs)))[1], torch.zeros(2, 3))


def test_an_input_passed_on_unchanged_gets_both_gradients() -> None:
    module = PassedOn()
    leaf = torch.randn(2, 4, WIDTH)
    segment = segment_of(module)
    held, outputs = segment.forward((leaf.clone().requires_grad_(),), {})
    (gradient,) = segment.backward_input(held, (torch.ones_like(leaf), torch.full_like(leaf, 3.0)))
    again = leaf.clone().requires_grad_()
    module.block(again).sum().backward()
    assert_close(gradient, again.grad + 3.0)
    assert len(outputs) == 2


def test_frozen_parameters_are_left_out() -> None:
    module = Block()
    module.up.weight.requires_grad_(False)
    module.down.bias.requires_grad_(False)
    Runner(module, make_spans(1)).do("F0 I0 W0")
    assert {name for name, parameter in module.named_parameters() if parameter.grad is None} == {
        "up.weight", "down.bias",
    }  # fmt: skip


class Adapted(nn.Module):
    """A frozen layer between layers that are trained."""

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), nn.Parameter(torch.ones(width, 1) * 0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.base(hidden * self.scale)) + hidden


@pytest.mark.parametrize("layer", [nn.Linear(64, 64), Conv1D(64, 64), nn.Conv1d(64, 64, 3, padding=1)])
def test_spans_in_flight_hold_no_copies_of_frozen_weights_that_autocast_rounds(layer: nn.Module) -> None:
    """With the gradients that plain PyTorch has then."""
    rows, length = (64, 4) if isinstance(layer, nn.Conv1d) else (4, 64)
    model = nn.Sequential(Adapted(layer, rows), Adapted(copy.deepcopy(layer), rows))
    plain, given = copy.deepcopy(model), torch.randn(1, rows, length)
    stage = StageExecutor(
        [ModuleUnit("first", model[0]), ModuleUnit("second", model[1])],
        is_last=False, global_batch=3, dtype="bfloat16",
    )  # fmt: skip
    gradient, spans = torch.randn(1, rows, length), [Span(step, step + 1) for step in range(3)]
    (first, *_), held = (
        [stage.forward(span, (given.clone().requires_grad_(),), {}) for span in spans],
        stage.meter.now_bytes,
    )
    assert held <= len(spans) * 8 * given.nbytes
    for span in spans:
        (back,) = stage.backward_input(span, (gradient,))
        stage.backward_weight(span)
    own = given.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = plain(own)
    result.backward(gradient)
    assert torch.equal(first[0], result.detach())
    assert torch.equal(back, own.grad)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, 3 * plain.get_parameter(name).grad)
