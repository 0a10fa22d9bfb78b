"""Floating-point operations of what runs inside a `with` block, in this thread alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class FlopMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts by torch's own table of operations.

    Torch's `FlopCounterMode` also puts hooks on the modules of all threads, to count by module. Here members of a
    tensor-parallel group may run in threads, and a hook that looks at a divided tensor would gather it out of turn.
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
