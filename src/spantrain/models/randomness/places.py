"""What a place that draws random numbers is called: by the modules that are running, not by how the model was cut.

A place is the chain of calls that are under way, each a module's full name in the unsplit model, numbered from the
second time on that its caller calls it; then how many draws the innermost of them made before, in this call.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from spantrain.core.records import Record

_current: ContextVar["CallChain | None"] = ContextVar("call_chain", default=None)


class CallPoint(Record):
    """How far a module's call had come when something in it was done."""

    chain: str
    """The calls under way, it the last."""
    drawn: int
    """Draws that the call had made itself."""
    called: Mapping[str, int] = field(default_factory=dict)
    """How often it had called what it then calls."""


@dataclass(kw_only=True)
class _Frame:
    chain: str
    module: str | None = None
    identity: int = 0
    """The module's."""
    drawn: int = 0
    called: Counter[str] = field(default_factory=Counter)


class CallChain:
    """The modules of a model, or of a part of it, that are running in one thread."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """Know modules by their identity: full names in the unsplit model, of the model itself the empty name."""
        self._names = names
        self._frames = [_Frame(chain="")]
        self._thread = threading.get_ident()

    @property
    def innermost(self) -> str:
        """The chain of calls under way."""
        return self._frames[-1].chain

    @property
    def module(self) -> str | None:
        """Full name of the module whose call is the innermost; None: none is running."""
        return self._frames[-1].module

    def next_place(self) -> str:
        """Return the name of the place that draws now, for one draw."""
        frame = self._frames[-1]
        frame.drawn += 1
        return f"{frame.chain}:{frame.drawn - 1}"

    def point(self, module: str | None) -> CallPoint:
        """Return how far the innermost call has come; given a module, the caller of its call, which has just begun."""
        if module is None or self._frames[-1].module != module:
            return CallPoint(chain=self.innermost, drawn=self._frames[-1].drawn)
        frame = self._frames[-2]
        return CallPoint(chain=frame.chain, drawn=frame.drawn, called={module: frame.called[module] - 1})

    def restart(self) -> None:
        """Have the innermost call begin anew."""
        last = self._frames[-1]
        self._frames[-1] = _Frame(chain=last.chain, module=last.module, identity=last.identity)

    @contextlib.contextmanager
    def at(self, point: CallPoint) -> Iterator[None]:
        """Go on from where a call of a module had come; what runs inside may end with calls under way."""
        frame, depth = _Frame(chain=point.chain, drawn=point.drawn, called=Counter(point.called)), len(self._frames)
        self._frames.append(frame)
        try:
            yield
        finally:
            del self._frames[depth:]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note which modules run in this thread inside the `with` block."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            before.remove()
            after.remove()
            del self._frames[1:]

    def _enter(self, module: nn.Module, _args: object) -> None:
        name = self._names.get(id(module))
        if name is None or threading.get_ident() != self._thread:
            return
        caller = self._frames[-1]
        if name == caller.module and id(module) != caller.identity:  # what a stub stands for is the stub's own call
            self._frames.append(caller)
            return
        count = caller.called[name]
        caller.called[name] += 1
        chain = f"{caller.chain}>{name}" + (f"#{count}" if count else "")
        self._frames.append(_Frame(chain=chain, module=name, identity=id(module)))

    def _leave(self, module: nn.Module, _args: object, _result: object) -> None:
        if id(module) in self._names and threading.get_ident() == self._thread:
            self._frames.pop()


START = CallPoint(chain="", drawn=0)
"""Nothing has been called."""


def chain_at(point: CallPoint | None) -> contextlib.AbstractContextManager[None]:
    """Go on from where a call had come, if anybody in this thread notes which modules run."""
    chain = _current.get()
    return contextlib.nullcontext() if chain is None or point is None else chain.at(point)
