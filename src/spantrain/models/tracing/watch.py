"""Who writes a forward down sees torch's functions as they are called, which modules run, and what is drawn.

It is written down for two numbers of samples, to be told for any.
"""

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from spantrain.core.records import Record
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.randomness.draws import NOISE, DrawingModules, DrawnSamples, SeededDraws
from spantrain.models.randomness.places import DrawnShapes, seen_shapes
from spantrain.models.sources import OWN
from spantrain.models.tracing.batch import call_named, picked, taken_names
from spantrain.models.tracing.numbers import ForegoneOutcomes
from spantrain.models.tracing.source import Given, Loaded
from spantrain.models.tracing.tape import LARGE, SMALL, tensors_in, version_of
from spantrain.models.units import Rows

Found = TypeVar("Found")


@dataclass(frozen=True)
class Origin:
    """What a tensor's numbers depend on."""

    data: bool = False
    weights: bool = False
    drawn: bool = False
    """A random number that all samples of a step have in common."""
    sources: frozenset[Any] = frozenset()
    """What it is made of, where that is told apart."""

    def __or__(self, other: "Origin") -> "Origin":
        return Origin(
            self.data or other.data,
            self.weights or other.weights,
            self.drawn or other.drawn,
            self.sources | other.sources,
        )


class CallDone(Record):
    """What a call did."""

    result: Any
    made: Sequence[Tensor]
    """Tensors in its result."""
    changed: Sequence[Tensor]
    """Those it was given, and wrote into."""
    draws: bool
    """Whether it drew random numbers."""


class ForwardWatch(TorchFunctionMode, ABC, Generic[Found]):
    """Sees every call of torch's functions while it is active, and the modules that run."""

    def __init__(self, model: nn.Module, opened: frozenset[str], draws: SeededDraws) -> None:
        """Watch a model, in whose modules at these paths is looked."""
        super().__init__()
        self._opened = opened
        self.opened: list[str] = []
        """Paths of the opened modules whose forward is running, the innermost last."""
        self._model = model
        self._draws = draws
        self._foregone = ForegoneOutcomes()
        self._origin: dict[int, Origin] = {}
        """By identity of a tensor."""
        self._alive: list[Tensor] = []  # so that no two tensors have one id

    @abstractmethod
    def run_closed(self, path: str, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a module that is not looked into."""

    @abstractmethod
    def see(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, and write it down."""

    @abstractmethod
    def found(self, result: Any) -> Found:
        """Return what was written down, given what the loss is made of."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, unless it is known what it says."""
        name = getattr(func, "__name__", "")
        outcome = self._foregone.outcome(name, args)
        return self.see(func, name, args, dict(kwargs or {})) if outcome is None else outcome

    def _do(self, work: Callable[[], Any], tensors: Sequence[Tensor]) -> CallDone:
        """Do a call that is given tensors."""
        versions, drawn = [version_of(tensor) for tensor in tensors], len(self._draws.noted)
        result = work()
        changed = [t for t, version in zip(tensors, versions, strict=True) if version_of(t) != version]
        return CallDone(result=result, made=tensors_in(result), changed=changed, draws=len(self._draws.noted) > drawn)

    def _is_in_common(self, name: str, tensors: Sequence[Tensor], done: CallDone) -> bool:
        """Whether a function of torch drew one random number for all samples; note what it made."""
        in_common = done.draws and name in NOISE and all(tensor.numel() == 1 for tensor in done.made)
        self._foregone.note(name, tensors, done.made, in_common=in_common)
        return in_common

    def _sharing(self, changed: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors that share memory with some that were written into, these among them."""
        memory = {tensor.untyped_storage()._cdata for tensor in changed}
        return [tensor for tensor in self._alive if tensor.untyped_storage()._cdata in memory] if memory else []

    def _origin_of(self, *tensors: Tensor) -> Origin:
        """Return what any of some tensors depends on; one that was there before, on nothing."""
        return functools.reduce(Origin.__or__, (self._origin.get(id(tensor), Origin()) for tensor in tensors), Origin())

    def _note(self, tensor: Tensor, origin: Origin) -> None:
        self._origin[id(tensor)] = origin
        self._alive.append(tensor)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See what runs inside the `with` block."""
        modules = dict(self._model.named_modules())
        own = {path: module.__dict__.get("forward") for path, module in modules.items()}
        for path, module in modules.items():
            module.forward = self._told(path, module.forward, is_open=path in self._opened)
        try:
            with self._draws, self:
                yield
        finally:
            for path, module in modules.items():
                del module.__dict__["forward"]
                if own[path] is not None:
                    module.__dict__["forward"] = own[path]

    def _told(self, path: str, forward: Callable[..., Any], *, is_open: bool) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not is_open:
                return self.run_closed(path, forward, args, kwargs)
            self.opened.append(path)
            try:
                return forward(*args, **kwargs)
            finally:
                self.opened.pop()

        return run


Watching = Callable[[nn.Module, frozenset[str], Mapping[int, Tensor], Rows, SeededDraws], ForwardWatch[Found]]
"""Makes one of a model, of the paths of its modules that are looked into, of what the model is given of the samples (it
may be fake), of the samples with their numbers, and of what draws."""


def watched(
    watching: Watching[Found], spec: ModelSpec, loaded: Loaded, opened: frozenset[str], given: Given
) -> tuple[Found, Found, DrawnShapes]:
    """Run a model's forward for `SMALL` and `LARGE` samples; return what was found of each, and where samples are.

    Args:
        watching: makes who writes it down.
        spec: the model.
        loaded: it, as it is trained; its code is run, its parameters may be fake tensors.
        opened: paths of the modules that are looked into.
        given: makes an input of a tensor of the example batch.

    Raises:
        TraceProblem: the forward decides by numbers of the data, or does what cannot be written down.
        ConfigError: it cannot be told where samples are in what is drawn.
    """
    found, drawn = list[Found](), list[SeededDraws]()
    names = taken_names(loaded.batch, loaded.loss)
    for samples in (SMALL, LARGE):
        rows = loaded.batch.resized(samples).rows
        args = {number: given(rows[number]) for number in names}
        modules = DrawingModules.of(loaded.module, {})
        draws = SeededDraws(modules, DrawnSamples(seed=0, step=0, first=0, count=samples))
        watch = watching(loaded.module, opened, args, rows, draws)
        with _without_checks_of_distributions(), watch.watching():
            result = call_named(loaded.module, args, names)
        found.append(watch.found(picked(loaded.loss, result, f"model {spec.name}")))
        drawn.append(draws)
    return found[0], found[1], _shapes_drawn(spec, *drawn)


@contextlib.contextmanager
def _without_checks_of_distributions() -> Iterator[None]:
    """Have those of torch not look at the numbers that they are made of, which there are none of yet."""
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checks)


def _shapes_drawn(spec: ModelSpec, small: SeededDraws, large: SeededDraws) -> DrawnShapes:
    """Return where the samples are in what was drawn for `SMALL` and `LARGE`.

    Raises:
        ConfigError: that cannot be told.
    """
    if spec.objective != OWN and (operations := small.unlike or large.unlike):
        raise ConfigError(f"model {spec.name}: {operations[0]}, not by sample; train with --dropout off")
    draws, unlike = seen_shapes(small.noted, large.noted, (SMALL, LARGE), in_loops=spec.objective == OWN)
    if unlike:
        raise ConfigError(
            f"model {spec.name}: {unlike[0]}, so what is drawn cannot be told by sample: have it draw with the samples "
            "as one dimension, or train with --dropout off"
        )
    return draws
