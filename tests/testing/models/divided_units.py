"""One process's gradients, and those of a group's members put together, of the same units on the same samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spantrain.core.shares import TensorPart
from spantrain.core.span import Span
from spantrain.models.execution.stage import StageExecutor
from spantrain.models.tensor_parallel.division import put
from spantrain.models.tensor_parallel.shard import partial_parameters, shard_units
from spantrain.models.units import UnitModule
from testing.models.rows import rows_of
from testing.models.thread_group import ThreadGroup, run_members

Build = Callable[[], list[UnitModule]]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What came out of some spans: losses or outputs, gradients of inputs, gradients by parameter."""

    outputs: list[Tensor]
    input_gradients: list[Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Samples for consecutive units of a model, and the order of operations on them."""

    inputs: tuple[Tensor, ...]
    labels: Tensor | None
    output_gradients: tuple[Tensor, ...] = ()
    spans: tuple[Span, ...]
    order: str = "FB"
    """Of each span: `FB` or `FIW`."""
    is_first: bool = False
    """Whether inputs are read; otherwise a unit before has made them."""
    dtype: str = "float32"
    recompute: tuple[int, ...] = ()
    device: str = "cpu"

    def run(self, units: Sequence[UnitModule], group: ThreadGroup | None = None) -> Seen:
        executor = StageExecutor(
            units,
            is_last=self.labels is not None,
            global_batch=self.inputs[0].shape[0],
            dtype=self.dtype,
            recompute=self.recompute,
            torch_device=torch.device(self.device),
        )
        outputs: list[Tensor] = []
        input_gradients: list[Tensor] = []
        for span in self.spans:
            read = rows_of(self.inputs if self.is_first else (), self.labels, span)
            received = () if self.is_first else tuple(tensor[span.lo : span.hi] for tensor in self.inputs)
            outputs += executor.forward(span, received, read)
        for span in reversed(self.spans):
            gradients = tuple(tensor[span.lo : span.hi] for tensor in self.output_gradients)
            backward = executor.backward if self.order == "FB" else executor.backward_input
            input_gradients += backward(span, gradients)
        if group is not None and not self.is_first:
            group.operations.append("W")
        for span in self.spans if self.order == "FIW" else ():
            executor.backward_weight(span)
        found = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in executor.named_parameters().items()
        }
        return Seen(outputs=outputs, input_gradients=input_gradients, gradients=found)


@dataclass(frozen=True, kw_only=True)
class Member:
    seen: Seen
    parts: dict[str, TensorPart]
    operations: list[str]
    units: list[UnitModule]


def run_divided(build: Build, work: Work, shares: Sequence[float], *, sequence_parallel: bool = False) -> list[Member]:
    def one(group: ThreadGroup) -> Member:
        units = waiting[group.rank]
        parts = shard_units(units, shares, group.rank, group, sequence_parallel=sequence_parallel)
        seen = work.run(units, group)
        operations = list(group.operations)
        for name in partial_parameters(units):
            group.all_reduce(seen.gradients[name])
        return Member(seen=seen, parts=parts, operations=operations, units=units)

    # Built one after another: building sets the process's random state for a moment.
    waiting = [build() for _ in shares]
    return run_members(len(shares), one)


def whole_gradients(members: Sequence[Member]) -> dict[str, Tensor]:
    """The parts' gradients, each in its place; a number that no member has stays NaN."""
    found: dict[str, Tensor] = {}
    for member in members:
        for name, gradient in member.seen.gradients.items():
            part = member.parts[name]
            whole = found.setdefault(name, torch.full(part.full_shape, torch.nan))
            put(whole, part, gradient)
    return found


def assert_near(found: Tensor, wanted: Tensor, what: str, tolerance: float = 1e-5) -> None:
    scale = wanted.float().norm().clamp(min=1e-12)
    difference = (found.float() - wanted.float()).norm()
    assert difference <= tolerance * scale, f"{what}: off by {float(difference / scale):.2e} of its size"


def assert_like_whole(
    build: Build,
    work: Work,
    shares: Sequence[float],
    tolerance: float = 1e-5,
    *,
    sums_in_weights: bool = False,
    sequence_parallel: bool = False,
) -> list[Member]:
    """Every member's outputs and input gradients, and the parts' gradients together, are those of the whole units."""
    wanted = work.run(build())
    members = run_divided(build, work, shares, sequence_parallel=sequence_parallel)
    for rank, member in enumerate(members):
        for index, output in enumerate(wanted.outputs):
            assert_near(member.seen.outputs[index], output, f"rank {rank}: output {index}", tolerance)
        for index, gradient in enumerate(wanted.input_gradients):
            assert_near(member.seen.input_gradients[index], gradient, f"rank {rank}: input gradient {index}", tolerance)
    found = whole_gradients(members)
    assert found.keys() == wanted.gradients.keys()
    # A key's bias has a gradient of nothing but rounding: it is held against the others.
    largest = max(float(gradient.norm()) for gradient in wanted.gradients.values())
    for name, gradient in wanted.gradients.items():
        if float(gradient.norm()) > 1e-6 * largest:
            assert_near(found[name], gradient, name, tolerance)
    assert len({tuple(map(_kind, member.operations)) for member in members}) == 1, "members called unlike operations"
    assert work.is_first or sums_in_weights or members[0].operations[-1] == "W", "W has operations of the group"
    return members


def _kind(operation: str) -> str:
    return operation.partition("[")[0] if operation.startswith("all_gather") else operation
