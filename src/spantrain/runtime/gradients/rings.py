"""Sums and gathers round a ring of a group's members, for rings that reach over slow links.

Each member sends the next one only, in the order of ranks, which is that of sites: what goes round crosses from site to
site once for each turn, where an exchange of all with all crosses for each pair. A member asks for all that is to come
at once, so no turn waits for the word that its receiver is ready, as those of Gloo's own rings do. (Patarasuk and
Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 2009, has both halves of a sum.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from spantrain.errors import PeerLostError
from spantrain.runtime.gradients.step_sums import Background

_SUMS_AT_ONCE = 2
Wait = Callable[[], object]


class SiteRing:
    """Exchanges with both neighbours, beside the calling thread; all members begin the same ones in the same order."""

    def __init__(self, group: ProcessGroup) -> None:
        """Go round the members of a group of Gloo, in the order of their ranks."""
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._sums = [Background(f"ring of sums {number}") for number in range(_SUMS_AT_ONCE)]
        self._gathers = Background("ring of gathers")
        self._begun = 0

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to replace a contiguous tensor by the members' sum, the same bits for all; return what waits."""
        flat = tensor.view(-1).cpu()
        each = [flat.numel() * rank // self._size for rank in range(self._size + 1)]
        parts = flat.split_with_sizes([end - begin for begin, end in pairwise(each)])
        added, whole = (
            [parts[(self._rank - first - turn) % self._size] for turn in range(self._size)] for first in (1, 0)
        )
        received = [torch.empty_like(one) for one in added[1:]]

        def arrived(turn: int) -> None:
            if turn < len(received):
                added[turn + 1] += received[turn]

        # What comes whole comes when all have added to it: it may land where the own share was.
        wait = self._begin(self._next_sums(), [*added[:-1], *whole[:-1]], [*received, *whole[1:]], arrived)

        def all_of_it() -> None:
            wait()
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view_as(tensor))

        return all_of_it

    def begin_sum(self, tensor: Tensor, sizes: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to bring each member its elements of a sum, to which all add, from the one behind it on.

        Returns:
            What waits, and returns the own elements; the tensor may be anything then.
        """
        parts = list(tensor.cpu().split_with_sizes(list(sizes)))
        turns = [parts[(self._rank - 1 - turn) % self._size] for turn in range(self._size)]
        received = [torch.empty_like(one) for one in turns[1:]]

        def arrived(turn: int) -> None:
            turns[turn + 1] += received[turn]

        wait = self._begin(self._next_sums(), turns[:-1], received, arrived)

        def own() -> Tensor:
            wait()
            return parts[self._rank].to(tensor.device)

        return own

    def begin_gather(self, tensor: Tensor, sizes: Sequence[int]) -> Callable[[], Tensor]:
        """Begin to lay the members' flat tensors behind each other; return what waits, and returns all of them."""
        whole = torch.empty(sum(sizes), dtype=tensor.dtype)
        parts = whole.split_with_sizes(list(sizes))
        parts[self._rank].copy_(tensor)
        turns = [parts[(self._rank - turn) % self._size] for turn in range(self._size)]
        wait = self._begin(self._gathers, turns[:-1], turns[1:], lambda _turn: None)

        def all_of_them() -> Tensor:
            wait()
            return whole.to(tensor.device)

        return all_of_them

    def close(self) -> None:
        """End its threads."""
        for thread in (*self._sums, self._gathers):
            thread.close()

    def _next_sums(self) -> Background:
        return self._sums[self._begun % _SUMS_AT_ONCE]

    def _begin(
        self, thread: Background, sent: Sequence[Tensor], received: Sequence[Tensor], arrived: Callable[[int], None]
    ) -> Wait:
        """Begin to send and receive by turns, each when the one before has `arrived`; return what waits."""
        first_tag = self._begun * 2 * self._size
        self._begun += 1
        ahead, behind = (self._rank + 1) % self._size, (self._rank - 1) % self._size

        def go_round() -> None:
            with blaming_peers():
                coming = [
                    _begun(dist.irecv, one, group=self._group, group_src=behind, tag=first_tag + turn)
                    for turn, one in enumerate(received)
                ]
                going = []
                for turn, (one, wait) in enumerate(zip(sent, coming, strict=True)):
                    going.append(_begun(dist.isend, one, group=self._group, group_dst=ahead, tag=first_tag + turn))
                    wait()
                    arrived(turn)
                for wait in going:
                    wait()

        over = thread.begin(go_round)
        return lambda: thread.wait(over, lambda: None)


def _begun(way: Callable[..., dist.Work | None], tensor: Tensor, **how: object) -> Wait:
    """Begin to send or receive a tensor; return what waits. What is empty does not travel."""
    work = way(tensor, **how) if tensor.numel() else None
    return (lambda: None) if work is None else work.wait


@contextmanager
def blaming_peers(what: str = "another device of this stage went away") -> Iterator[None]:
    """A collective that fails does so because another member went away: it is that one that should be named."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerLostError(f"{what}: {error}") from error
