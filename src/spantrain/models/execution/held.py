"""Bytes of tensors that are really held: storages, each once, watched without keeping them alive.

Counted are the tensors that autograd saves while it is watched (`torch.autograd.graph.saved_tensors_hooks`) and those
that are named. What operations need only while they run is part of no tensor that outlives them: `Allocations` sees it.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spantrain.core.span import Span


class StorageLog:
    """Notes storages, and says how many bytes of them are alive."""

    def __init__(self, leave_out: Iterable[Tensor] = ()) -> None:
        """Watch nothing yet; storages of the tensors in `leave_out` (parameters, buffers) are never counted."""
        # By themselves: those of divided parameters are elsewhere each time that they are whole.
        self._left_out = {tensor.untyped_storage()._cdata for tensor in leave_out}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        """By what torch has for a storage, with numbers or without."""
        self.most_bytes = 0
        """The largest figure that `look` has found."""

    def add(self, *tensors: Tensor) -> None:
        """Note the storages of tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._left_out:
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._seen[storage._cdata] = (reference, storage.nbytes())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what autograd saves inside the `with` block."""
        pack, unpack = self._pack, lambda tensor: tensor
        if "torch._dynamo" in sys.modules:  # else they would be compiled, too, where compiled layers call them
            pack, unpack = map(torch.compiler.disable, (pack, unpack))
        with saved_tensors_hooks(pack, unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        self.add(tensor)
        # Detached: an operation that saves its own output would else hold itself alive.
        return tensor.detach()

    def look_with(self, *tensors: Tensor) -> int:
        """Return the bytes that are alive now, with those of some tensors, which are not noted."""
        now_bytes = self.look()
        storages = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}
        return now_bytes + sum(
            storage.nbytes() for at, storage in storages.items() if at not in self._seen and at not in self._left_out
        )

    def look(self) -> int:
        """Return the bytes that are alive now."""
        entries = self._seen.items()
        self._seen = {at: entry for at, entry in entries if not entry[0].expired()}  # type: ignore[no-untyped-call]
        now_bytes = sum(size for _, size in self._seen.values())
        self.most_bytes = max(self.most_bytes, now_bytes)
        return now_bytes


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches what the operations of a `with` block allocate on the processor: storages, while they are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = StorageLog()

    @property
    def now_bytes(self) -> int:
        """What is alive of it."""
        return self._log.look()

    def most_bytes(self) -> int:
        """Return the most that was alive at once since this was asked last."""
        most_bytes, self._log.most_bytes = self._log.most_bytes, 0
        return most_bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note what it returns."""
        result = func(*args, **(kwargs or {}))
        self._log.add(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        self._log.look()
        return result


class HeldMeter:
    """Bytes of tensors that a stage holds for spans in flight, and the most of them.

    The first span of each size is watched through F and its backward pass; others of that size hold as much, and cost
    nothing to count.
    """

    def __init__(self, module: nn.Module) -> None:
        """Count what is held besides the module's own parameters and buffers."""
        self._module = module
        self._after_forward: dict[int, int] = {}
        """By samples: bytes from F on."""
        self._after_input: dict[int, int] = {}
        """From I on."""
        self._again: dict[int, int] = {}
        """How much more while units are run again."""
        self._now: dict[Span, int] = {}
        self._sum_bytes = 0
        self._messages = StorageLog()
        self.waiting_bytes: Callable[[], int] = int
        """What has arrived and waits for its action; to be set by who knows it."""
        self.peak_bytes = 0
        """The most held at once, with messages; to be set to zero where it is to be looked for anew."""

    @property
    def now_bytes(self) -> int:
        """What is held now, with messages that came or go."""
        return self._sum_bytes + self._messages.look()

    def log_for(self, span: Span) -> StorageLog | None:
        """Return what is to watch a span, if none of its size was watched."""
        if span.size in self._after_forward:
            return None
        return StorageLog([*self._module.parameters(), *self._module.buffers()])

    def forwarded(self, span: Span, log: StorageLog | None) -> None:
        """Count a span behind F."""
        if log is not None:
            self._after_forward[span.size] = log.look()
        self._set(span, self._after_forward[span.size])

    def went_back(self, span: Span, log: StorageLog | None, *, leaves_weights: bool) -> None:
        """Count a span behind I, which leaves the weights to W, or behind B."""
        size = span.size
        if log is not None:
            self._again[size] = log.most_bytes - self._after_forward[size]
            if leaves_weights:
                self._after_input[size] = log.look()
        self._note_peak(self._again.get(size, 0))
        self._set(span, self._after_input.get(size, self._now.get(span, 0)) if leaves_weights else 0)

    def carried(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that come or go between stages, as long as anybody holds them."""
        self._messages.add(*tensors)

    def released(self, span: Span) -> None:
        """Count a span no more, behind W."""
        self._set(span, 0)

    def clear(self) -> None:
        """Count nothing that is in flight."""
        self._now.clear()
        self._sum_bytes = 0

    def _set(self, span: Span, size_bytes: int) -> None:
        self._sum_bytes += size_bytes - self._now.pop(span, 0)
        if size_bytes:
            self._now[span] = size_bytes
        self._note_peak()

    def _note_peak(self, besides_bytes: int = 0) -> None:
        held_bytes = self.now_bytes + self.waiting_bytes() + besides_bytes
        self.peak_bytes = max(self.peak_bytes, held_bytes)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each storage once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
