"""The rows of a stage's parameters that one replica updates, where replicas divide the optimizer's state (ZeRO).

Of the optimizer's state each has that of its rows: equal parts, along the first dimension, of every parameter that is
trained. With ZeRO 1 each has all parameters, and gradients of all of them, of which the sum of its rows comes to it at
the end of a step; behind the update all take all rows. Together that sends what a sum of all gradients to all replicas
does. Where gradients are divided, too, and parameters: `unit_shards`.

An update of rows is that of the whole parameter for every optimizer that looks at one element at a time; of those that
do not, plans are refused (`app.training.requests.check_divided`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from spantrain.core.plan import GradientSums, Plan
from spantrain.core.records import Record
from spantrain.core.shares import TensorPart
from spantrain.core.span import Span
from spantrain.runtime.gradients.members import MemberGroup
from spantrain.runtime.gradients.step_sums import Parameters, buckets_of


class OwnRows(Record):
    """What of a parameter one device updates."""

    rows: nn.Parameter
    """What the optimizer has: a view of them, or the parameter itself; where parameters are divided, all there is."""
    whole: nn.Parameter
    """The parameter that they are of, as the stage has it."""
    part: TensorPart
    """Which part of the unsplit model's tensor they are."""

    @property
    def is_first(self) -> bool:
        """Whether it has the first row, and so what the optimizer keeps of the parameter as a whole."""
        return self.part.is_whole or self.part.ranges[0].lo == 0

    def of(self, gradient: Tensor) -> Tensor:
        """Return the rows of a gradient, as a view."""
        if self.part.is_whole:
            return gradient
        (span,) = self.part.ranges
        return gradient[span.lo : span.hi]


def own_rows(plan: Plan, device: str, parameters: Parameters) -> dict[str, OwnRows] | None:
    """Return what a device updates of its stage's parameters, by name; None: all of them whole.

    Of a parameter with fewer rows than there are replicas, some update nothing. Where nothing is kept whole, rows are
    copies, and those that are not trained have some, too: whole ones may be given up. Are they offloaded, they lie in
    the host's memory, page-locked.
    """
    crew = plan.crew_of(device)
    stage, replica_index = crew.first, crew.replica_index(device)
    if not stage.divides_state and not stage.offloads:
        return None
    found = {}
    for name, parameter in parameters.items():
        rows = _rows_of(parameter, replica_index, len(stage.replicas))
        if rows and (parameter.requires_grad or stage.keeps_rows):
            found[name] = _own(parameter, rows, copies=stage.keeps_rows, on_host=stage.offloads)
    return found


def _own(parameter: nn.Parameter, rows: range, *, copies: bool, on_host: bool) -> OwnRows:
    part, held = TensorPart(full_shape=tuple(parameter.shape)), parameter.detach()
    if parameter.dim() and len(rows) < parameter.shape[0]:
        part = TensorPart(full_shape=tuple(parameter.shape), ranges=(Span(rows.start, rows.stop),))
        held = held[rows.start : rows.stop]
    elif not copies:
        return OwnRows(rows=parameter, whole=parameter, part=part)
    if copies:
        lies_there = not on_host or held.device.type == "cpu"
        held = held.clone() if lies_there else torch.empty_like(held, device="cpu", pin_memory=True).copy_(held)
    own = nn.Parameter(held, requires_grad=parameter.requires_grad)
    return OwnRows(rows=own, whole=parameter, part=part)


def _rows_of(parameter: Tensor, rank: int, replicas: int) -> range:
    """Return the rows that a replica updates; a number is one row, and the last one's."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return range(rows * rank // replicas, rows * (rank + 1) // replicas)


def begin_rows_sum(gradients: Sequence[Tensor], group: MemberGroup, most_bytes: int) -> Callable[[], None]:
    """Begin to sum to each replica its rows of gradients; return what waits until that is done.

    In place: all other rows are then of no use. About so many bytes are copied at a time.
    """
    *before, last = _turns(gradients, group.size, most_bytes)
    for pieces in before:  # all are begun here: collectives are in one order on all replicas
        _begin_sum(pieces, group)()
    return _begin_sum(last, group)


def _begin_sum(pieces: Sequence[Sequence[Tensor]], group: MemberGroup) -> Callable[[], None]:
    flat = torch.cat([piece.reshape(-1) for row in pieces for piece in row])
    wait = group.begin_reduce_scatter(flat, [elements_of(row) for row in pieces])
    return lambda: fill(pieces[group.rank], wait())


def gather_rows(parameters: Parameters, group: MemberGroup, sums: GradientSums) -> None:
    """Have all replicas take from each other the rows that each has updated, in buckets as gradients are summed in."""
    held = {name: own.detach() for name, own in parameters.items() if own.requires_grad and own.numel()}
    for bucket in buckets_of(held.items(), {name: own.numel() for name, own in held.items()}, sums):
        for pieces in _turns([held[name] for name in bucket], group.size, sums.bucket_bytes):
            own = [piece.reshape(-1) for piece in pieces[group.rank]]
            sizes = [elements_of(row) for row in pieces]
            taken = group.begin_all_gather(torch.cat(own) if own else held[bucket[0]].new_empty(0), sizes)()
            for rank, values in enumerate(taken.split_with_sizes(sizes)):
                if rank != group.rank:
                    fill(pieces[rank], values)


def _turns(tensors: Sequence[Tensor], replicas: int, most_bytes: int) -> list[list[list[Tensor]]]:
    """Return, for each of several turns, the rows of tensors that each replica has, as views.

    Each is of so many bytes or up to twice as many; buckets of usual size, somewhat over it, have one.
    """
    pieces, count = pieces_of(tensors, replicas), sum(own.nbytes for own in tensors) // most_bytes
    if count < 2:
        return [pieces]
    return [
        [
            [piece[len(piece) * turn // count : len(piece) * (turn + 1) // count] for piece in row]
            for row in pieces
        ]
        for turn in range(count)
    ]  # fmt: skip


def pieces_of(tensors: Sequence[Tensor], replicas: int) -> list[list[Tensor]]:
    """Return the rows of tensors, as views, that each replica has; none of those of which it has none."""
    return [
        [
            (own if own.dim() else own[None])[rows.start : rows.stop]
            for own in tensors
            if (rows := _rows_of(own, rank, replicas))
        ]
        for rank in range(replicas)
    ]


def elements_of(pieces: Sequence[Tensor]) -> int:
    """Return how many numbers some tensors have."""
    return sum(piece.numel() for piece in pieces)


def fill(pieces: Sequence[Tensor], values: Tensor) -> None:
    """Lay numbers, one behind the other, into tensors."""
    sizes = [piece.numel() for piece in pieces]
    for piece, own in zip(pieces, values.split_with_sizes(sizes) if sizes else (), strict=True):
        piece.copy_(own.view_as(piece))
