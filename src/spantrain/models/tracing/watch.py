"""Who writes a forward down is told which modules run, and what those return to hooks."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from spantrain.models.tracing.tape import Tap, tensors_in


class ModuleWatch(Protocol):
    """Is told which modules run."""

    opened: list[str]
    """Paths of the opened modules whose forward is running, the innermost last."""

    def run_closed(self, path: str, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a module that is not looked into."""


class HookedResults:
    """What modules inside of closed ones returned, whose hooks may keep it for code outside."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, int, Tap]] = {}

    def note(self, path: str, result: Any, step: int) -> None:
        """Note what a module returned in the step of this number."""
        calls = {tap.call for _, at, tap in self._found.values() if (at, tap.path) == (step, path)}
        for part, tensor in enumerate(tensors_in(result)):
            self._found[id(tensor)] = tensor, step, Tap(path, len(calls), part)

    def of_step(self, step: int) -> list[Tensor]:
        """Return all that came of a step."""
        return [tensor for tensor, at, _ in self._found.values() if at == step]

    def take(self, tensor: Tensor) -> tuple[int, Tap] | None:
        """Return the number of the step that a tensor comes of, and where there; None: it is none of them."""
        found = self._found.pop(id(tensor), None)
        return None if found is None else found[1:]


@contextlib.contextmanager
def wrapped(recorder: ModuleWatch, model: nn.Module, opened: frozenset[str]) -> Iterator[None]:
    """Have every module tell the recorder when it runs."""
    modules = dict(model.named_modules())
    own = {path: module.__dict__.get("forward") for path, module in modules.items()}
    for path, module in modules.items():
        module.forward = _told(recorder, path, module.forward, is_open=path in opened)
    try:
        yield
    finally:
        for path, module in modules.items():
            del module.__dict__["forward"]
            if own[path] is not None:
                module.__dict__["forward"] = own[path]


def _told(recorder: ModuleWatch, path: str, forward: Callable[..., Any], *, is_open: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_open:
            return recorder.run_closed(path, forward, args, kwargs)
        recorder.opened.append(path)
        try:
            return forward(*args, **kwargs)
        finally:
            recorder.opened.pop()

    return run
