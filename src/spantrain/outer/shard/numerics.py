"""The arithmetic of the outer optimizer, on tensors by name.

Di-PS, 4.1 (steps 1 and 3) and algorithm 1. Kept: the mean weighted by tokens, clipping by the norm over all shards.
Decided here: all in float32, or what the parameters have if that is more; sums of squares in float64; terms are added
in the order given. A step is the rule's (`outer.rules`); where only some of the clusters pushed it is a part of one.
All goes through memory once, in blocks that stay in the processor's cache from the first operation to the last; blocks
begin with each parameter, so that no bit depends on what else a shard holds.

Pseudo-gradients may be sent in fewer bytes: not in Di-PS, which sends what was computed, and off unless a master's
settings name a format. The codes are those of a pipeline's cuts (`formats`). What rounding takes from a push is kept
where the push was made, and added to the next one: error feedback, as 1-bit SGD has it from step to step (Seide et al.,
Interspeech 2014). So the sum of what shards have added is the sum of what was learned, but for what the last push left
over. A parameter is rounded in pieces that stay in the processor's cache, beginning with the parameter, so that no bit
depends on what it is sent with.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from spantrain.core.outer.layers import PIECE_NUMBERS, ParameterSpec
from spantrain.formats.registry import WireFormat
from spantrain.outer.rules.registry import OuterRule

Tensors = Mapping[str, Tensor]
"""By parameter name."""

_BLOCK = 2**16
"""Numbers that are worked on at once: with what a step reads and writes of them, 1.3 MiB in single precision."""
_ROW = 4096
"""Numbers whose squares are added in the type that they have."""


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.detach().reshape(-1), _BLOCK)


def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """Return the sum of squares of all numbers; not finite if one is not.

    Sums are in float64; but rows of numbers in float32, whose rounding is lost among the others', are summed as they
    are, in a third of the time, unless that would overflow.

    >>> sum_of_squares([torch.full((5000,), 2.0)]), math.isfinite(sum_of_squares([torch.full((5000,), 1e30)]))
    (20000.0, True)
    """
    return sum(_squares(tensors), 0.0)


def _squares(tensors: Sequence[Tensor]) -> Iterator[float]:
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        in_rows = flat.numel() // _ROW * _ROW if flat.dtype == torch.float32 else 0
        if in_rows:
            rows = flat[:in_rows].view(-1, _ROW).numpy()
            found = float(np.einsum("ij,ij->i", rows, rows).sum(dtype=np.float64))
            if math.isfinite(found):
                yield found
            else:
                in_rows = 0
        for block in torch.split(flat[in_rows:], _BLOCK):
            exact = block.to(torch.float64)
            yield float(torch.dot(exact, exact))


def weighted_mean(parts: Sequence[tuple[float, Tensor]], *, out: Tensor | None = None) -> Tensor:
    """Return the sum of tensors times their parts, in this order; the type is at least float32.

    `out`, of that type, takes the result; it may be the first of the tensors itself.

    >>> first = torch.tensor([2.0, 4.0])
    >>> weighted_mean([(0.5, first), (0.25, torch.tensor([4.0, 0.0]))], out=first) is first, first
    (True, tensor([2., 2.]))
    """
    (first, tensor), *others = parts
    mean = out if out is not None else torch.empty(tensor.shape, dtype=velocity_type(tensor.dtype))
    rest = [(part, _blocks(other)) for part, other in others]
    for k, (into, block) in enumerate(zip(_blocks(mean), _blocks(tensor), strict=True)):
        torch.mul(block.to(into.dtype), first, out=into)
        for part, blocks in rest:
            into.add_(blocks[k], alpha=part)
    return mean


def compensate(gradient: Tensor, now: Tensor, then: Tensor, *, strength: float) -> None:
    """Correct a pseudo-gradient in place for what its parameter did since the version that it began from.

    Not in Di-PS. Delay compensation (DC-ASGD, Zheng et al., ICML 2017): a gradient g found at w would have been about
    g + lambda g g (w' - w) at w', the squares of gradients in the place of second derivatives. With lambda as in
    DC-S3GD (Rigazzi, 2019): such that the correction has `strength` times the size of the gradient; pseudo-gradients
    have no scale of their own. Here that is found for each parameter, so that no bit depends on the cut into shards.

    >>> gradient = torch.tensor([3.0, -4.0])
    >>> compensate(gradient, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]), strength=0.2)
    >>> gradient
    tensor([ 3., -3.])
    """
    arrays = list(zip(*(_blocks(one) for one in (gradient, now, then)), strict=True))
    own, other = sum_of_squares([gradient]), 0.0
    for one, here, there in arrays:
        exact = _correction(one, here, there).to(torch.float64)
        other += float(torch.dot(exact, exact))
    if not (math.isfinite(own) and math.isfinite(other) and other > 0):
        return
    factor = strength * math.sqrt(own / other)
    for one, here, there in arrays:
        one.add_(_correction(one, here, there), alpha=factor)


def _correction(gradient: Tensor, now: Tensor, then: Tensor) -> Tensor:
    return torch.sub(now, then).to(gradient.dtype).mul_(gradient).mul_(gradient)


def velocity_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that means and velocities of such parameters have: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def step_along(
    mean: Tensor, parameter: Tensor, kept: Sequence[Tensor], rule: OuterRule, *, scale: float, part: float = 1.0,
    out: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Write the new parameter to `out`; return what the rule keeps from now on, the first of it in the mean's memory.

    `kept`: what it kept before, in the order of its slots; `scale`: what the mean is multiplied by first, `part`: of a
    whole step. With one slot three arrays are read and two written: twenty bytes a number in single precision.
    """
    new = tuple(torch.empty_like(mean) if k else mean for k in range(len(rule.slots)))
    room = torch.empty(min(_BLOCK, mean.numel()), dtype=mean.dtype)
    before = list(zip(*map(_blocks, kept), strict=True))
    after = list(zip(*map(_blocks, new), strict=True))
    for k, (gradient, here, into) in enumerate(zip(_blocks(mean), _blocks(parameter), _blocks(out), strict=True)):
        ahead = torch.mul(gradient, scale * part, out=room[: gradient.numel()])
        rate = rule.step(ahead, before[k] if before else (), after[k] if after else (), part)
        if into.dtype == ahead.dtype:
            torch.sub(here, ahead, alpha=rate, out=into)
        else:
            into.copy_(torch.sub(here, ahead, alpha=rate))
    return new


def round_push(
    spec: ParameterSpec, wire_format: WireFormat, start: Tensor, now: Tensor, left: Tensor | None, rest: Tensor
) -> Tensor:
    """Return start minus now, and what is left over from earlier, as it is sent.

    Args:
        spec: of the parameter; `wire_format` makes it smaller
        wire_format: what it is sent as
        start: of the round
        now: at its end
        left: over from earlier pushes, float32; None for nothing
        rest: float32, to be written: what is left over from this push; 0 where a number is not finite

    >>> one = ParameterSpec(name="w", shape=(4,))
    >>> rest = torch.empty(4)
    >>> sent = round_push(one, WireFormat.BFLOAT16, torch.full((4,), 1.001953125), torch.zeros(4), None, rest)
    >>> sent[0].item(), rest[0].item()
    (1.0, 0.001953125)
    """
    as_sent = spec.sent_as(wire_format)
    sent = torch.empty(as_sent.shape, dtype=getattr(torch, as_sent.dtype))
    flat = [one.detach().reshape(-1) for one in (start, now)]
    over, before = rest.view(-1), None if left is None else left.view(-1)
    for numbers, row in _pieces(spec, sent, wire_format):
        wanted = (flat[0][numbers] - flat[1][numbers]).float()
        if before is not None:
            wanted.add_(before[numbers])
        wire_format.codec.write(wanted, row)
        torch.sub(wanted, _read(row, wire_format, wanted.numel(), spec), out=over[numbers])
        over[numbers].nan_to_num_(0.0, 0.0, 0.0)
    return sent


def unrounded(spec: ParameterSpec, wire_format: WireFormat, sent: Tensor, out: Tensor) -> Tensor:
    """Write what a rounded parameter was, as exactly as it came, to a contiguous tensor of its shape; return that."""
    flat = out.view(-1)
    for numbers, row in _pieces(spec, sent, wire_format):
        flat[numbers] = _read(row, wire_format, flat[numbers].numel(), spec)
    return out


def _pieces(spec: ParameterSpec, sent: Tensor, wire_format: WireFormat) -> Iterator[tuple[slice, Tensor]]:
    """Yield pieces: where their numbers are in the parameter, and what is sent of them."""
    whole, at = spec.numbers, 0
    sent = sent.view(-1)
    for begin in range(0, whole, PIECE_NUMBERS):
        numbers = slice(begin, min(begin + PIECE_NUMBERS, whole))
        entries = wire_format.codec.entries(numbers.stop - begin)
        yield numbers, sent[at : at + entries]
        at += entries


def _read(row: Tensor, wire_format: WireFormat, numbers: int, spec: ParameterSpec) -> Tensor:
    """Return the numbers of a piece in float32, after they have been what the parameter's type lets them be."""
    return wire_format.codec.read(row, numbers).to(getattr(torch, spec.dtype)).float()
