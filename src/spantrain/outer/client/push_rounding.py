"""Pseudo-gradients in fewer bytes: how a push's tensors are rounded for the wire, and what a shard makes of them.

Not in Di-PS, which sends what was computed; off unless a master's settings name a format. The codes are those of a
pipeline's cuts (`formats`). What rounding takes from a push is kept where the push was made, and added to
the next one: error feedback, as 1-bit SGD has it from step to step (Seide et al., Interspeech 2014). So the sum of what
shards have added is the sum of what was learned, but for what the last push left over. A parameter is rounded in
pieces that stay in the processor's cache, beginning with the parameter, so that no bit depends on what it is sent with.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from spantrain.core.outer.layers import PIECE_NUMBERS, ParameterSpec
from spantrain.formats.registry import WireFormat


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
