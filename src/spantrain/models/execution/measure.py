"""What a unit costs: bytes that it holds behind F and I, alone or as a member of a group, and its operations.

What a member holds by its share is measured on two of them, one after the other: unlike parts give a line of bytes that
both hold whole, and bytes that grow with the part. So what is gathered and summed counts too, and what a unit computes
whole for want of a rule.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from spantrain.core.records import Record
from spantrain.core.shares import shares_of
from spantrain.errors import ConfigError
from spantrain.models.execution.held import Allocations, StorageLog
from spantrain.models.execution.segment import Segment
from spantrain.models.low_weights import full_weight
from spantrain.models.randomness.draws import DrawnSamples
from spantrain.models.tensor_parallel.divided import own_part
from spantrain.models.tensor_parallel.group import LoneGroup
from spantrain.models.tensor_parallel.shard import shard_units
from spantrain.models.units import Rows, UnitModule, copied

_LOGGER = logging.getLogger(__name__)

TWO = shares_of((3.0, 1.0))
"""Whom `held_by_two` measures."""

Batch = Callable[[], tuple[tuple[Tensor, ...], Rows]]
"""Returns new tensors as they cross the cut before a unit, and what it may read."""


class HeldBehind(Record):
    """Bytes of distinct storages, without parameters and buffers."""

    outputs: tuple[Tensor, ...]
    """Without numbers."""
    forward_bytes: int
    """Behind F, with inputs and outputs."""
    backward_input_bytes: int
    """Behind I; on the model's first unit, which has none, of what its W waits with."""


def working_bytes(unit: UnitModule, batch: Batch, autocast_dtype: torch.dtype | None, *, ends_model: bool) -> int:
    """Run F and B of a unit on the processor; return the most bytes that operations had besides what was held then."""
    entering, rows = batch()
    segment = Segment([unit], ends_model=ends_model, autocast_dtype=autocast_dtype, torch_device=torch.device("cpu"))
    unit.train()
    with Allocations() as made:
        held, outputs = segment.forward(entering, rows, _first_samples((*entering, *rows.values())))
        del entering, rows
        most_bytes, held_bytes = int(made.most_bytes()), int(made.now_bytes)
        gradients = tuple(torch.ones_like(output) for output in outputs if output.is_floating_point())
        del outputs
        made.most_bytes()
        segment.backward(held, gradients)
        most_bytes = max(most_bytes, int(made.most_bytes()))
    unit.eval()
    for parameter in unit.parameters():
        full_weight(parameter).grad = None
    return max(0, most_bytes - held_bytes)


def held_behind(unit: UnitModule, batch: Batch, autocast_dtype: torch.dtype | None, *, ends_model: bool) -> HeldBehind:
    """Run F and I of a unit on the processor and count what each leaves behind."""
    entering, rows = batch()
    segment = Segment([unit], ends_model=ends_model, autocast_dtype=autocast_dtype, torch_device=torch.device("cpu"))
    log = StorageLog([*unit.parameters(), *unit.buffers()])
    unit.train()
    with log.watching():
        held, outputs = segment.forward(entering, rows, _first_samples((*entering, *rows.values())))
    unit.eval()
    forward_bytes = log.look_with(*entering, *(rows[number] for number in unit.reads), *outputs, *held.tensors)
    shapes = tuple(torch.empty_like(output, device="meta") for output in map(own_part, outputs))
    del entering, rows
    segment.backward_input(held, tuple(torch.ones_like(output) for output in outputs if output.is_floating_point()))
    del outputs
    log.add(*held.tensors)
    return HeldBehind(outputs=shapes, forward_bytes=forward_bytes, backward_input_bytes=log.look())


def _first_samples(tensors: Sequence[Tensor]) -> DrawnSamples:
    return DrawnSamples(seed=0, step=0, first=0, count=tensors[0].shape[0])


def held_by_two(
    unit: UnitModule,
    batch: Batch,
    autocast_dtype: torch.dtype | None,
    *,
    ends_model: bool,
    sequence_parallel: bool = False,
) -> tuple[HeldBehind, ...]:
    """Return what each of two members holds; the unit stays whole. Nothing, with a warning, if it does not run so.

    With `sequence_parallel`, they hold slices of the sequence where they can.

    Raises:
        Exception: it has no numbers, and does not run so.
    """

    def held_by(rank: int) -> HeldBehind:
        own, group = copied(unit), LoneGroup(rank, len(TWO))
        shard_units([own], TWO[rank].shares, rank, group, sequence_parallel=sequence_parallel)
        return held_behind(own, batch, autocast_dtype, ends_model=ends_model)

    try:
        with ThreadPoolExecutor(1) as thread:  # in which none of torch's modes is active, but those of tensors
            return tuple(thread.map(held_by, range(len(TWO))))
    except (RuntimeError, TypeError, ValueError, AssertionError, ConfigError) as error:
        if any(map(is_fake, unit.parameters())):
            raise
        # Of code that nobody here wrote. Most models are trained without dividing units: they must not be stopped.
        _LOGGER.warning("%s does not run divided among two devices: %s; its memory is reckoned", unit.name, error)
        return ()


class FlopMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations of a `with` block in this thread, by torch's own table of operations.

    Torch's `FlopCounterMode` also puts hooks on the modules of all threads, to count by module; they fail on tensors
    that require gradients while none are computed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0
        """Operations so far."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count it; one that the table lacks is taken apart first."""
        named = dict(kwargs or {})
        operation: Any = func
        formula = flop_registry.get(operation._overloadpacket)
        if formula is None:
            with self:
                made = operation.decompose(*args, **named)
            if made is not NotImplemented:
                return made
        result = func(*args, **named)
        if formula is not None:
            self.total += formula(*args, **named, out_val=result)
        return result
