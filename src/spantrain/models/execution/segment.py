"""A part of a stage that goes back as one: units whose activations are held, or one unit that is run again.

A stage without recomputation is one segment. Else each recomputed unit is a segment, and so is each run of units
between them; where something is done around each unit, all of them are. Segments are joined as stages are: by detached
tensors, of which the floating-point ones have gradients. Where members of a group hold slices of a sequence, they do so
between segments too; what leaves a stage is whole.

Layers may be compiled by `torch.compile`: operations that lie between products become few kernels. What is compiled
is a layer that a unit calls as a whole, such as a transformer's block, for all layers of a kind once. Its products
are no longer ours to halve: a backward pass does all of such a layer in I and leaves nothing to W. Not compiled are
models that draw at random while they train (which samples they draw for is not the compiler's to know), layers whose
normalizations take statistics of batches, those that are divided among devices, and those that a model's own forward
calls (`models.tracing.stubs`). They run as they are written.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spantrain.formats.precision import check_dtype
from spantrain.models.execution.held import StorageLog
from spantrain.models.randomness.draws import DrawnSamples, SeededDraws
from spantrain.models.tensor_parallel.divided import gathered, own_part, with_own_part
from spantrain.models.units import Rows, UnitModule, drawing_modules, keeps_statistics, parameter_names, rows_read
from spantrain.models.weight_gradients import Deferral, DeferredGradients, Final, defer_in

_LOGGER = logging.getLogger(__name__)

Tensors = tuple[Tensor, ...]
CODE = "inductor"
"""What makes code of a layer."""
ONLY_CUT = "aot_eager_decomp_partition"
"""What says as much of what is kept between a forward and a backward pass, and makes no code."""


class SegmentShards:
    """What is done around each segment of each pass: nothing, where replicas divide neither gradients nor parameters
    (`runtime.gradients.unit_shards`).
    """

    def ahead(self, number: int) -> AbstractContextManager[None]:  # noqa: ARG002
        """Have a segment's parameters be whole while it goes forward."""
        return nullcontext()

    def back(self, number: int, last: int, *, sums: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Have them be whole while it goes back; where it `sums`, what it adds to gradients there is all of the pass.

        The pass ends with segment `last`.
        """
        return nullcontext()

    def outlive(self, outputs: Tensors) -> Tensors:
        """Return what a segment makes, none of it in the memory of a parameter."""
        return outputs

    def clear(self) -> None:
        """Forget what is under way, after an abort."""


@dataclass(kw_only=True)
class HeldSegment:
    """What is kept of one span by one segment, from F to W."""

    inputs: Tensors
    """Leaves, or slices that are leaves, until the gradients of those that require grad are known."""
    rows: Rows = field(default_factory=dict)
    """For the second run of units that read samples."""
    samples: DrawnSamples | None = None
    """Those whose random numbers the second run draws again."""
    outputs: Tensors = ()
    """With their graph; the last segment's of the last stage is the loss sum. Empty if they are computed again."""
    gradients: Tensors | None = None
    """Gradients of outputs, where I had nothing to do: nobody waits for gradients of the model's inputs."""
    deferred: DeferredGradients | None = None
    """What I leaves to W; None: nothing."""

    @property
    def tensors(self) -> Tensors:
        """All that is kept, but for what autograd saves in the graph."""
        deferred = () if self.deferred is None else self.deferred.tensors
        return (*map(own_part, self.inputs), *self.rows.values(), *self.outputs, *(self.gradients or ()), *deferred)


class Segment:
    """Runs F, I, W and B of consecutive units; a recomputed one does all of its backward pass in I.

    What I leaves to W holds the inputs of layers, so a recomputed unit that left something would hold most of its
    activations again until W, of as many samples as the schedule puts off: no memory could be saved where W fills the
    holes.
    """

    def __init__(
        self,
        units: Sequence[UnitModule],
        *,
        ends_model: bool,
        ends_stage: bool = True,
        recomputed: bool = False,
        autocast_dtype: torch.dtype | None = None,
        torch_device: torch.device,
        deferral: Deferral | None = None,
    ) -> None:
        """Take units; `deferral` is that of all layers of the stage, None: they are this segment's alone."""
        self._units = tuple(units)
        self._ends_model = ends_model
        self._ends_stage = ends_stage
        self._recomputed = recomputed
        self._autocast_dtype = autocast_dtype
        self._torch_device = torch_device
        parameters = {id(p): p for unit in units for p in map(unit.get_parameter, parameter_names(unit))}
        self.parameters = tuple(parameters.values())
        """Parameters of its units, each once."""
        self._drawing = drawing_modules(units)
        self._deferral = deferral or _deferral_of(units)

    def run(self, tensors: Tensors, rows: Rows, samples: DrawnSamples | None = None) -> Tensors:
        """Return the tensors alive behind the segment, or the loss sum alone; as the mode of grad is, with a graph.

        `samples` says whose random numbers are drawn; None: torch's own are.
        """
        drawn: AbstractContextManager[object] = nullcontext()
        if self._drawing is not None and samples is not None:
            drawn = SeededDraws(self._drawing, samples)
        low = self._autocast_dtype
        with nullcontext() if low is None else torch.autocast(self._torch_device.type, dtype=low), drawn:
            for unit in self._units[:-1]:
                tensors = unit.run(tensors, rows)
            if not self._ends_model:
                outputs = tuple(self._units[-1].run(tensors, rows))
                return gathered(outputs) if self._ends_stage else outputs
            loss_sum = self._units[-1].run(tensors, rows)
        assert isinstance(loss_sum, Tensor), "the last unit returns one tensor, the loss sum"
        assert loss_sum.dim() == 0, f"the loss sum is a scalar, got {tuple(loss_sum.shape)}"
        return (loss_sum,)

    def forward(self, inputs: Tensors, rows: Rows, samples: DrawnSamples | None = None) -> tuple[HeldSegment, Tensors]:
        """Run F on leaves; return what is to be held, and the outputs without a graph."""
        if self._recomputed:
            with torch.no_grad():
                outputs = self.run(inputs, rows, samples)
            read = {number: rows[number] for number in rows_read(self._units)}
            return HeldSegment(inputs=inputs, rows=read, samples=samples), detached(outputs)
        deferred = DeferredGradients() if _with_grad(inputs) else None
        with self._deferral.into(deferred):
            outputs = self.run(inputs, rows, samples)
        return HeldSegment(inputs=inputs, outputs=tuple(map(own_part, outputs)), deferred=deferred), detached(outputs)

    def backward_input(self, held: HeldSegment, output_gradients: Tensors, log: StorageLog | None = None) -> Tensors:
        """Run I; return the gradients of the inputs that require grad (none at the model's beginning).

        Gradients are those of the floating-point outputs, in order. A log is told what a second run holds.
        """
        if self._recomputed:
            return self.backward(held, output_gradients, log)
        if held.deferred is None:
            held.gradients = output_gradients
            return ()
        held.deferred.later = True
        input_gradients = self.backward(held, output_gradients)
        if log is not None:
            log.add(*held.tensors)
        return input_gradients

    def backward_weight(self, held: HeldSegment, final: Final | None = None) -> None:
        """Run W, if I left anything; `final` is told parameters as they are done."""
        if held.gradients is not None:
            self.backward(held, held.gradients, final=final)
        elif held.deferred is not None:
            held.deferred.compute(self.parameters, final)
        held.gradients = held.deferred = None

    def backward(
        self, held: HeldSegment, output_gradients: Tensors, log: StorageLog | None = None, final: Final | None = None
    ) -> Tensors:
        """Run both halves at once; arguments and result as of `backward_input`, `final` as of `backward_weight`."""
        outputs = self._again(held, log) if self._recomputed else held.outputs
        roots, gradients = _roots(outputs, output_gradients)
        del outputs
        wanted, held.inputs, held.outputs = _with_grad(held.inputs), (), ()
        # What a model's own checkpoints run again asks, too.
        with self._deferral.into(held.deferred), self._telling(final):
            if roots:
                torch.autograd.backward(roots, gradients)
        found = tuple(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in wanted)
        for leaf in wanted:
            leaf.grad = None
        return found

    @contextmanager
    def _telling(self, final: Final | None) -> Iterator[None]:
        """Tell which gradients are done, as they are in the pass inside."""
        hooks = [] if final is None else [_when_added(own, final) for own in self.parameters if own.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _again(self, held: HeldSegment, log: StorageLog | None) -> Tensors:
        """Run F once more, now with a graph."""
        if log is None:
            return tuple(map(own_part, self.run(held.inputs, held.rows, held.samples)))
        with log.watching():
            outputs = tuple(map(own_part, self.run(held.inputs, held.rows, held.samples)))
        log.add(*outputs)
        log.look()
        return outputs


def compile_layers(units: Iterable[UnitModule]) -> None:
    """Have the layers of units compiled when they are called first, where `UnitModule.compiled_by` says so."""
    refused: set[type[nn.Module]] = set()
    for unit in units:
        for layer in unit.layers if unit.compiled_by and unit.group is None else ():
            composed = next(layer.children(), None) is not None and not any(map(keeps_statistics, layer.modules()))
            if composed and layer._compiled_call_impl is None:
                layer._compiled_call_impl = _Compiled(layer, unit.compiled_by, refused)


def is_compiled(layer: nn.Module) -> bool:
    """Whether what a layer does was, or will be, compiled."""
    return isinstance(layer._compiled_call_impl, _Compiled)


class _Compiled:
    """A layer's call, compiled; as it is written from the first time on that this does not work for one of its kind."""

    def __init__(self, layer: nn.Module, by: str, refused: set[type[nn.Module]]) -> None:
        self._kind, self._refused = type(layer), refused
        self._as_written: Callable[..., Any] = layer._call_impl
        self._call: Callable[..., Any] = torch.compile(self._as_written, backend=by)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._kind in self._refused:
            return self._as_written(*args, **kwargs)
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self._call(*args, **kwargs)
        except TorchDynamoException as error:
            why = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
            _LOGGER.warning("%s is not compiled, and runs as it is written: %s", self._kind.__name__, why)
            self._refused.add(self._kind)
            return self._as_written(*args, **kwargs)


def _deferral_of(units: Sequence[UnitModule]) -> Deferral:
    """Have layers leave what they can to W, but for those that are compiled."""
    compile_layers(units)
    return defer_in(units, but=is_compiled)


def segments_of(
    units: Sequence[UnitModule],
    recompute: Sequence[int],
    *,
    is_last: bool,
    each: bool = False,
    dtype: str,
    torch_device: torch.device,
) -> tuple[Segment, ...]:
    """Divide a stage's units into segments, `each` of one unit or as few as can be.

    `recompute` are positions among the units.
    """
    deferral = _deferral_of(units)
    bounds = sorted({0, len(units), *recompute, *(position + 1 for position in recompute)})
    bounds = list(range(len(units) + 1)) if each else bounds
    return tuple(
        Segment(
            units[first:end],
            ends_model=is_last and end == len(units),
            ends_stage=end == len(units),
            recomputed=first in recompute,
            autocast_dtype=autocast_dtype(dtype),
            torch_device=torch_device,
            deferral=deferral,
        )
        for first, end in pairwise(bounds)
    )


def detached(tensors: Tensors) -> Tensors:
    """Return the tensors without their graph."""
    return tuple(with_own_part(tensor, own_part(tensor).detach()) for tensor in tensors)


def _roots(outputs: Tensors, output_gradients: Tensors) -> tuple[Tensors, Tensors]:
    """Return the outputs that gradients can start from, and their gradients, of the right type and on the device."""
    floating = [output for output in outputs if output.is_floating_point()]
    pairs = zip(floating, output_gradients, strict=True)
    wanted = [(output, gradient.to(output)) for output, gradient in pairs if output.requires_grad]
    return tuple(output for output, _ in wanted), tuple(gradient for _, gradient in wanted)


def _with_grad(tensors: Tensors) -> Tensors:
    return tuple(own for own in map(own_part, tensors) if own.requires_grad)


def _when_added(parameter: nn.Parameter, final: Final) -> RemovableHandle:
    hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda _: final((parameter,))
    )
    return hook


def autocast_dtype(dtype: str) -> torch.dtype | None:
    """Return the type that products are computed in; None: that of the parameters, float32.

    Raises:
        ValueError: it is none of `formats.precision`.
    """
    return {"float32": None, "float16": torch.float16}.get(check_dtype(dtype), torch.bfloat16)
