"""What is done around the work of each unit where replicas divide gradients, or parameters too (ZeRO 2 and 3).

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, stages 2, 3; Zhao
et al., "PyTorch FSDP", VLDB 2023. Kept: behind a unit's backward its gradients are summed to those that update their
rows, beside the next unit's, and nobody holds others' for longer; of stage 3, a unit's parameters are whole only while
it works, and the next one's come meanwhile. Not kept: flat parameters; each has rows of its own (`own_rows`).

Whole parameters keep their storage, which is empty between the unit's turns: what autograd has saved of them is there
again when the unit goes back. All replicas do the same actions in the same order (`schedule.joint`).

A stage of one device may have its rows in its host's memory: then they come from there, and gradients go there.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from spantrain.core.records import Record
from spantrain.devices.registry import class_of
from spantrain.models.execution.segment import SegmentShards, Tensors
from spantrain.models.low_weights import full_weight
from spantrain.runtime.gradients.members import MemberGroup
from spantrain.runtime.gradients.own_rows import OwnRows, elements_of, fill, pieces_of

Rows = Mapping[int, OwnRows]
"""What this device updates, by the identity of the float32 parameter."""


class _Gathered(Record):
    """Parameters of one type: views of what each replica has of them, and of this one its own."""

    pieces: Sequence[Sequence[Tensor]]
    """By replica: of the whole parameters, which may have no memory now."""
    own: Sequence[Tensor]
    """Float32."""
    whole: Sequence[Tensor]

    def begin(self, group: MemberGroup) -> Callable[[], Tensor]:
        flat, device = [rows.reshape(-1).to(self.whole[0].dtype) for rows in self.own], self.whole[0].device
        sent = torch.cat(flat) if flat else self.whole[0].new_empty(0)
        (there,) = class_of(device).bring((sent,), device)
        return group.begin_all_gather(there, list(map(elements_of, self.pieces)))

    def put(self, values: Tensor) -> None:
        for one in self.whole:
            one.untyped_storage().resize_(one.nbytes)
        for pieces, part in zip(self.pieces, values.split_with_sizes(list(map(elements_of, self.pieces))), strict=True):
            fill(pieces, part)


class _Pass(Record):
    """What a pass in one direction gathers in front of each segment, and gives up behind it, by segment.

    What several segments share is whole from the first of them on that the pass comes to, up to the last.
    """

    gathered: Sequence[Sequence[_Gathered]]
    given_up: Sequence[Sequence[Tensor]]


class UnitShards(SegmentShards):
    """The exchanges of one device around the segments of its stage, each of one unit.

    Of an executor that it is given to (`StageExecutor.shards`), which calls it for each segment of each pass. All
    replicas come to the same segments in the same order.
    """

    def __init__(
        self,
        segments: Sequence[Sequence[nn.Parameter]],
        rows: Rows,
        group: MemberGroup,
        *,
        gathers: bool,
        on_host: bool = False,
        summed_behind: Iterable[nn.Parameter] = (),
    ) -> None:
        """Take the parameters of each segment; where they are gathered, whole ones are given up at once.

        Args:
            segments: parameters as they stand in the modules.
            rows: what this device has of them.
            group: the replicas.
            gathers: whether parameters are divided, too, or elsewhere.
            on_host: whether they are in the host's memory.
            summed_behind: those whose whole gradients are summed when the work of a step is over.
        """
        self._group, self._rows, self.on_host = group, rows, on_host
        self._summed = [_by_dtype(own) for own in _summed_at(segments, {id(one) for one in summed_behind})]
        every = {id(one): one for own in segments for one in (*own, *map(full_weight, own))} if gathers else {}
        for one in every.values():
            one.data = torch.empty_like(one.data)  # a dense storage of its own, whatever it was a view of
        self._ahead = self._pass_over(segments if gathers else [()] * len(segments))
        backwards = self._pass_over(list(reversed(segments)) if gathers else [()] * len(segments))
        self._back = _Pass(gathered=backwards.gathered[::-1], given_up=backwards.given_up[::-1])
        for one in every.values():
            one.data.untyped_storage().resize_(0)
        self._whole = [one.data for own in segments for one in own] if gathers else []
        self._aliases = {one.untyped_storage()._cdata for one in self._whole}
        self._coming: tuple[Sequence[_Gathered], list[Callable[[], Tensor]]] | None = None
        """What is on its way, for the segment whose turn is next."""
        self._summing: list[Callable[[], None]] = []
        self.exchanging_s = 0.0
        """Seconds that the work has waited for other replicas since they were forgotten."""

    def forget_exchanges(self) -> None:
        """Begin to count exchanges anew."""
        self.exchanging_s = 0.0

    @property
    def rows(self) -> Sequence[nn.Parameter]:
        """What this device updates."""
        return [own.rows for own in self._rows.values()]

    @property
    def besides_bytes(self) -> int:
        """The most bytes that are held beside what this device updates: of units at work, and of those to come."""
        whole_bytes = most_bytes = coming_bytes = 0
        for gathered, given_up in zip(reversed(self._back.gathered), reversed(self._back.given_up), strict=True):
            coming_bytes = sum(one.nbytes for bucket in gathered for one in bucket.whole)
            whole_bytes += coming_bytes
            most_bytes = max(most_bytes, whole_bytes + coming_bytes)
            whole_bytes -= sum(one.nbytes for one in given_up)
        gradients = max((sum(one.nbytes for of_one in own for one in of_one) for own in self._summed), default=0)
        return most_bytes + 2 * gradients

    def ahead(self, number: int) -> AbstractContextManager[None]:
        """Have a segment's parameters be whole inside, in a pass forward.

        Raises:
            PeerLostError: another replica went away.
        """
        return self._at(self._ahead, number, number + 1 if number + 1 < len(self._summed) else None)

    @contextmanager
    def back(self, number: int, last: int, *, sums: bool) -> Iterator[None]:
        """Have them be whole in a pass back, which ends with segment `last`; begin to sum what it added to gradients.

        Raises:
            PeerLostError: another replica went away.
        """
        with self._at(self._back, number, number - 1 if number > last else None):
            yield
        for parameters in self._summed[number] if sums else ():
            self._begin_sum(parameters)

    @contextmanager
    def _at(self, way: _Pass, number: int, then: int | None) -> Iterator[None]:
        buckets = way.gathered[number]
        coming, self._coming = self._coming, None
        waits = coming[1] if coming is not None and coming[0] is buckets else self._begun(buckets)
        for bucket, wait in zip(buckets, waits, strict=True):
            bucket.put(self._waited(wait))
        if then is not None:
            self._coming = way.gathered[then], self._begun(way.gathered[then])
        yield
        for one in way.given_up[number] if then is not None else self._whole:
            one.untyped_storage().resize_(0)

    def _begun(self, buckets: Sequence[_Gathered]) -> list[Callable[[], Tensor]]:
        return [one.begin(self._group) for one in buckets]

    def outlive(self, outputs: Tensors) -> Tensors:
        """Return what a segment makes, none of it in the memory of a parameter."""
        return tuple(one.clone() if one.untyped_storage()._cdata in self._aliases else one for one in outputs)

    def finish(self) -> None:
        """Wait for the sums that are under way."""
        while self._summing:
            self._summing.pop(0)()

    def clear(self) -> None:
        """Forget what is under way, and give up what is whole, after an abort."""
        self._coming = None
        self._summing.clear()
        for one in self._whole:
            one.untyped_storage().resize_(0)

    def _begin_sum(self, parameters: Sequence[nn.Parameter]) -> None:
        """Begin to sum gradients to their holders, who add them to what they have; those before are waited for."""
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        for one in parameters:
            one.grad = None
        pieces = pieces_of(gradients, self._group.size)
        sizes = list(map(elements_of, pieces))
        flat = torch.cat([piece.reshape(-1) for row in pieces for piece in row])
        del gradients, pieces
        self.finish()
        wait = self._group.begin_reduce_scatter(flat, sizes)
        updated = [self._rows[id(one)].rows for one in parameters if id(one) in self._rows]
        self._summing.append(lambda: _add(updated, self._waited(wait)))

    def _waited(self, wait: Callable[[], Tensor]) -> Tensor:
        start_s = time.perf_counter()
        found = wait()
        self.exchanging_s += time.perf_counter() - start_s
        return found

    def _pass_over(self, segments: Sequence[Sequence[nn.Parameter]]) -> _Pass:
        """Return what is gathered and given up in a pass over segments in this order."""
        first, last = dict[int, int](), dict[int, int]()
        for number, own in enumerate(segments):
            for one in own:
                first.setdefault(id(one), number)
                last[id(one)] = number
        return _Pass(
            gathered=[
                [self._bucket(alike) for alike in _by_dtype(one for one in own if first[id(one)] == number)]
                for number, own in enumerate(segments)
            ],
            given_up=[[one.data for one in own if last[id(one)] == number] for number, own in enumerate(segments)],
        )

    def _bucket(self, parameters: Sequence[nn.Parameter]) -> _Gathered:
        own = [self._rows[key].rows.detach() for key in map(id, map(full_weight, parameters)) if key in self._rows]
        whole = [one.data for one in parameters]
        return _Gathered(pieces=pieces_of(whole, self._group.size), own=own, whole=whole)


def _summed_at(segments: Sequence[Sequence[nn.Parameter]], behind: set[int]) -> list[list[nn.Parameter]]:
    """Return, by segment, the float32 parameters whose gradients are done when a pass has gone back through it.

    Of those that several segments share, that is the first one.
    """
    found, seen = [], set(behind)
    for own in segments:
        full = {id(one): one for one in map(full_weight, own) if one.requires_grad}
        found.append([one for key, one in full.items() if key not in seen])
        seen |= full.keys()
    return found


def _by_dtype(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    found: dict[torch.dtype, list[nn.Parameter]] = {}
    for one in parameters:
        found.setdefault(one.dtype, []).append(one)
    return list(found.values())


def _add(updated: Sequence[nn.Parameter], values: Tensor) -> None:
    sizes = [one.numel() for one in updated]
    for one, part in zip(updated, values.split_with_sizes(sizes) if sizes else (), strict=True):
        summed = part.view_as(one).to(one.device)
        if one.grad is None:
            one.grad = summed.clone()
        else:
            one.grad += summed
