"""Who writes a forward down is told which modules run."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn


class ModuleWatch(Protocol):
    """Is told which modules run."""

    opened: list[str]
    """Paths of the opened modules whose forward is running, the innermost last."""

    def run_closed(self, path: str, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a module that is not looked into."""


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
