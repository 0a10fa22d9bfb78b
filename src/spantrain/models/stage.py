"""Runs one stage's actions on its units: F, I, W and B for spans of samples, in any order that is allowed."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spantrain.core.spans import Span
from spantrain.errors import ProtocolError, ScheduleError
from spantrain.models.split_backward import PendingWeights, SplitBackward
from spantrain.models.units import UnitModule, parameter_names

__all__ = ["StageExecutor"]

Tensors = tuple[Tensor, ...]


@dataclass(kw_only=True)
class _Held:
    """What is kept of one span from F to W."""

    outputs: Tensors
    """With their graph; the last stage's is the loss sum."""
    inputs: Tensors
    """Leaves of the graph that require grad."""
    gradients: Tensors | None = None
    """First stage only: gradients of the outputs, from I to W."""
    pending: PendingWeights | None = None
    """Other stages: what I has left for W."""


class StageExecutor:
    """The computation of one replica of one stage; no clock, no network, no choice of order.

    Which gradients flow: every floating-point tensor at a cut has one, in order, and no other tensor has; a tensor
    that nothing depends on has zeros. On the first stage nobody waits for gradients of inputs, so I only keeps what
    it is given and W does the whole backward (DESIGN section 10: the first stage has no I).

    Losses are summed over samples; the backward pass starts from loss_sum / global_batch, so that gradients of
    all spans and replicas are plain sums.
    """

    def __init__(
        self,
        units: Sequence[UnitModule],
        *,
        is_first: bool,
        is_last: bool,
        global_batch: int,
        autocast_dtype: torch.dtype | None = None,
        torch_device: torch.device | None = None,
    ) -> None:
        assert units, "a stage needs units"
        self._units = tuple(units)
        self._is_first = is_first
        self._is_last = is_last
        self._global_batch = global_batch
        self._autocast_dtype = autocast_dtype
        self._torch_device = torch_device or torch.device("cpu")
        # Moved as one module, so that a parameter shared by two units stays one.
        nn.ModuleList(units).to(self._torch_device)
        self._parameters = _named_parameters(self._units)
        self._split = SplitBackward(list(self._parameters.values()), name=f"{units[0].name}..{units[-1].name}")
        self._held: dict[Span, _Held] = {}

    @property
    def held_samples(self) -> int:
        """Samples in flight: forwarded, and not yet through W."""
        return sum(span.size for span in self._held)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their names in the unsplit model; one shared by two units has the first's name."""
        return dict(self._parameters)

    def discard(self) -> None:
        """Forget everything held, after an abort; gradients already added to `.grad` stay."""
        self._held.clear()

    def forward(self, span: Span, inputs: Tensors, labels: Tensor | None) -> Tensors:
        """Run F; return detached outputs to send, or on the last stage `(loss_sum,)`, a float32 scalar.

        Args:
            span: the samples; the first dimension of every tensor is theirs.
            inputs: tensors alive at the cut before the stage, or the samples themselves on the first stage.
            labels: on the last stage only.

        Raises:
            ScheduleError: some of the samples are in flight already.
            ProtocolError: a tensor does not have one row for each sample.
        """
        if any(span.intersect(other) for other in self._held):
            raise ScheduleError(f"F{span}: some of these samples are in flight: {_listed(self._held)}")
        for index, tensor in enumerate(inputs):
            if tensor.shape[:1] != (span.size,):
                raise ProtocolError(f"F{span}: input {index} is {tuple(tensor.shape)}, wanted {span.size} rows")
        leaves = tuple(self._leaf(tensor) for tensor in inputs)
        outputs = self._run_units(leaves, labels)
        self._held[span] = _Held(outputs=outputs, inputs=tuple(leaf for leaf in leaves if leaf.requires_grad))
        return self._detached(outputs)

    def evaluate(self, inputs: Tensors, labels: Tensor | None) -> Tensors:
        """Return what `forward` would, without holding anything for a backward pass."""
        with torch.no_grad():
            moved = tuple(tensor.to(self._torch_device) for tensor in inputs)
            return self._detached(self._run_units(moved, labels))

    def backward_input(self, span: Span, output_gradients: Tensors) -> Tensors:
        """Run I; return the gradients of the floating-point inputs (none on the first stage).

        Args:
            span: samples that F was run on as one span.
            output_gradients: for each floating-point output, in order; `()` on the last stage.

        Raises:
            ScheduleError: F has not run on exactly this span, or I has.
            ProtocolError: a gradient is missing or has another shape than its output.
        """
        held = self._waiting_for_backward(span, "I")
        outputs, gradients = self._roots(held, span, output_gradients)
        if self._is_first:
            held.gradients = gradients
            return ()
        input_gradients, held.pending = self._split.backward_input(outputs, gradients, held.inputs)
        held.outputs = ()
        return input_gradients

    def backward_weight(self, span: Span) -> None:
        """Run W: add the parameters' gradients of the span to `.grad`, and release what was held for it.

        Raises:
            ScheduleError: I has not run on exactly this span.
        """
        held = self._held.get(span)
        if held is None or (held.gradients is None and held.pending is None):
            raise ScheduleError(f"W{span}: I has not run on it; in flight: {_listed(self._held)}")
        if held.gradients is not None:
            self._split.backward(_with_grad(held.outputs), held.gradients, held.inputs)
        if held.pending is not None:
            self._split.backward_weight(held.pending)
        del self._held[span]

    def backward(self, span: Span, output_gradients: Tensors) -> Tensors:
        """Run B, both halves at once; arguments, result and errors as of `backward_input`."""
        held = self._waiting_for_backward(span, "B")
        outputs, gradients = self._roots(held, span, output_gradients)
        input_gradients = self._split.backward(outputs, gradients, held.inputs)
        del self._held[span]
        return input_gradients

    def _leaf(self, tensor: Tensor) -> Tensor:
        """Return an input as a leaf on the device, of which a gradient is wanted if a stage before waits for it."""
        leaf = tensor.detach().to(self._torch_device)
        return leaf.requires_grad_(leaf.is_floating_point() and not self._is_first)

    def _run_units(self, tensors: Tensors, labels: Tensor | None) -> Tensors:
        assert (labels is not None) == self._is_last, "labels belong to the last stage"
        with self._autocast():
            for unit in self._units[:-1]:
                tensors = unit(*tensors)
            if labels is None:
                return tuple(_not_a_view(tensor) for tensor in self._units[-1](*tensors))
            loss_sum = self._units[-1](*tensors, labels.to(self._torch_device))
        assert isinstance(loss_sum, Tensor), "the last unit returns one tensor, the loss sum"
        assert loss_sum.dim() == 0, f"the loss sum is a scalar, got {tuple(loss_sum.shape)}"
        return (_not_a_view(loss_sum),)

    def _autocast(self) -> AbstractContextManager[object]:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._torch_device.type, dtype=self._autocast_dtype)

    def _detached(self, outputs: Tensors) -> Tensors:
        if self._is_last:
            return (outputs[0].detach().float(),)
        return tuple(output.detach() for output in outputs)

    def _waiting_for_backward(self, span: Span, op: str) -> _Held:
        held = self._held.get(span)
        if held is None:
            raise ScheduleError(f"{op}{span}: F has not run on exactly these; in flight: {_listed(self._held)}")
        if held.gradients is not None or held.pending is not None:
            raise ScheduleError(f"{op}{span}: I has run on it already; only W is left")
        return held

    def _roots(self, held: _Held, span: Span, output_gradients: Tensors) -> tuple[Tensors, Tensors]:
        """Return the outputs that require grad and their gradients, of the right type and on the device."""
        if self._is_last:
            assert not output_gradients, "the last stage starts from its loss"
            loss_sum = held.outputs[0]
            return held.outputs, (torch.full_like(loss_sum, 1.0 / self._global_batch),)
        floating = [output for output in held.outputs if output.is_floating_point()]
        if len(floating) != len(output_gradients):
            raise ProtocolError(f"{span}: got {len(output_gradients)} output gradients, wanted {len(floating)}")
        for output, gradient in zip(floating, output_gradients, strict=True):
            if output.shape != gradient.shape:
                raise ProtocolError(f"{span}: output gradient {tuple(gradient.shape)}, wanted {tuple(output.shape)}")
        pairs = zip(floating, output_gradients, strict=True)
        wanted = [(output, gradient.to(output)) for output, gradient in pairs if output.requires_grad]
        return tuple(output for output, _ in wanted), tuple(gradient for _, gradient in wanted)


def _named_parameters(units: Sequence[UnitModule]) -> dict[str, nn.Parameter]:
    named: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for unit in units:
        for local, full in parameter_names(unit).items():
            parameter = unit.get_parameter(local)
            if id(parameter) not in seen:
                seen.add(id(parameter))
                named[full] = parameter
    return named


def _not_a_view(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is a view: torch's I detaches outputs in place, which a view does not allow."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor._is_view() else tensor


def _with_grad(outputs: Tensors) -> Tensors:
    """Return those outputs that gradients can start from."""
    return tuple(output for output in outputs if output.is_floating_point() and output.requires_grad)


def _listed(held: dict[Span, _Held]) -> str:
    return ", ".join(str(span) for span in held) or "nothing"
