"""What a place that draws random numbers is called: by the modules that are running, not by how the model was cut; and
where the samples are in what it draws: seen by running a model with two numbers of samples, or guessed.

A place is the chain of calls that are under way, each a module's full name in the unsplit model, numbered from the
second time on that its caller calls it; then how many draws the innermost of them made before, in this call.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from spantrain.core.records import Record

Sizes = tuple[int, ...]
ORDERS = frozenset({"randperm"})
"""Names of functions whose numbers belong together: they are drawn once for all samples, and never one for each."""
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


class DrawnShape(Record):
    """The shape of one draw."""

    dim: int | None
    """That has the samples; None: it is drawn once for all of them."""
    sizes: Sizes = ()
    """Of one sample's part, where that is known; a dimension that has several entries for each sample stays in it."""

    def of_sample(self, shape: Sequence[int], samples: int) -> Sizes:
        """Return the sizes of one sample's part of a shape.

        Raises:
            ValueError: it is not divided by samples.
        """
        if self.dim is None:
            return tuple(shape)
        if shape[self.dim] % samples:
            raise ValueError(f"a shape of {tuple(shape)} is not divided by {samples} samples along {self.dim}")
        each = shape[self.dim] // samples
        is_folded = each > 1 or len(self.sizes) == len(shape)
        return (*shape[: self.dim], *((each,) if is_folded else ()), *shape[self.dim + 1 :])


DrawnShapes = Mapping[str, DrawnShape]
"""By place."""


def seen_shape(small: Sizes, large: Sizes, samples: tuple[int, int]) -> DrawnShape | None:
    """Return the shape of what was drawn for two numbers of samples; None: they are not found in it."""
    if small == large:
        return DrawnShape(dim=None, sizes=small)
    growing = [dim for dim, (one, other) in enumerate(zip(small, large, strict=False)) if one != other]
    if len(small) != len(large) or len(growing) != 1:
        return None
    dim = growing[0]
    each, rest = divmod(small[dim], samples[0])
    if rest or each * samples[1] != large[dim]:
        return None
    return DrawnShape(dim=dim, sizes=(*small[:dim], *((each,) if each > 1 else ()), *small[dim + 1 :]))


def seen_shapes(
    small: Mapping[str, tuple[str, Sizes]],
    large: Mapping[str, tuple[str, Sizes]],
    samples: tuple[int, int],
    *,
    in_loops: bool = False,
) -> tuple[DrawnShapes, tuple[str, ...]]:
    """Return the shapes of what was drawn, noted by place with the function that drew it, and what is unlike.

    With `in_loops`, `multinomial` may be called for one sample after another: whether that matters is checked later.
    """
    found, unlike = dict[str, DrawnShape](), []
    for place in dict.fromkeys((*small, *large)):
        both = small.get(place), large.get(place)
        shape = seen_shape(both[0][1], both[1][1], samples) if both[0] and both[1] else None
        if in_loops and not both[0] and both[1] and both[1][0] == "multinomial":
            continue
        if shape is None or (shape.dim is not None and next(one[0] for one in both if one) in ORDERS):
            module = place.rpartition(":")[0].rpartition(">")[2] or "the model"
            sizes = " and ".join(str(one[1]) if one else "nothing" for one in both)
            name = next(one[0] for one in both if one)
            unlike.append(f"`{name}` in {module} draws {sizes} for {samples[0]} and {samples[1]} samples")
        else:
            found[place] = shape
    return found, tuple(unlike)


def guessed_shape(shape: Sizes, samples: int) -> DrawnShape:
    """Return where samples most probably are: first, folded into the first dimension, along another one, or nowhere."""
    if shape and shape[0] % samples == 0:
        return DrawnShape(dim=0)
    along = [dim for dim, size in enumerate(shape) if size == samples]
    return DrawnShape(dim=along[0] if along else None)
