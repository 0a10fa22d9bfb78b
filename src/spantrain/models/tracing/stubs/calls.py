"""Which blocks a forward calls, in order, and what each of them needs of what others made.

The model's own code runs. What it does between blocks, without weights of its own, is done again by whoever needs it:
so only what blocks made has to be known, wherever it is kept on its way to another block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.overrides import TorchFunctionMode

from spantrain.models.randomness.draws import NOISE, DrawingModules, DrawnSamples, SeededDraws
from spantrain.models.tracing.follow import LARGE, SMALL
from spantrain.models.tracing.foregone import ForegoneOutcomes
from spantrain.models.tracing.numbers import OF_FIRST, OF_SHAPES, SHORT_CUTS, Asks, asked
from spantrain.models.tracing.stubs.template import GivenParts, Template, given_again, joined_templates
from spantrain.models.tracing.tape import (
    Facts,
    NamedWeight,
    Samples,
    TraceProblem,
    UnitDevice,
    Value,
    line_of_model,
    tensors_in,
    version_of,
)
from spantrain.models.tracing.watch import wrapped


@dataclass(frozen=True)
class Row:
    """A tensor of the samples, by its number; see `models.units.Rows`."""

    number: int


@dataclass(frozen=True)
class Inside:
    """What a call did that cannot be given again: whoever needs it is in its unit."""

    call: int
    kept: bool = False
    """A tensor that it made and keeps in a module, say; otherwise one that was there before, and that it changed."""


Source = Value | NamedWeight | Row | Inside
"""What a tensor is made of: results of calls, weights outside of blocks, samples."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockCall:
    """One call of a module that has parameters."""

    path: str
    needs: frozenset[Source]
    template: Template
    where: str
    """FILE:LINE of the model's code."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Calls:
    """What a forward calls."""

    calls: tuple[BlockCall, ...]
    result_needs: frozenset[Source]
    """What the loss, or what it is made of, needs."""
    looked_at: frozenset[Source]
    """What is decided by: every unit needs it."""
    facts: Mapping[int, Facts]
    """Of the values, by index."""
    written_into: frozenset[Source]
    """Values and samples that are changed in place."""
    names: Mapping[int, str | None]
    """The keyword of each tensor of the samples that the model is given; None: it goes in by position."""

    @property
    def direct(self) -> frozenset[str]:
        """Names of weights that are used outside of the modules that are called."""
        needs = (self.result_needs, *(call.needs for call in self.calls))
        return frozenset(source.name for some in needs for source in some if isinstance(source, NamedWeight))


@dataclass(frozen=True)
class _Known:
    """What is known of a tensor."""

    sources: frozenset[Source] = frozenset()
    data: bool = False
    weights: bool = False
    drawn: bool = False
    """Made of random numbers."""

    def __or__(self, other: "_Known") -> "_Known":
        return _Known(
            self.sources | other.sources,
            self.data or other.data,
            self.weights or other.weights,
            self.drawn or other.drawn,
        )

    @property
    def varies(self) -> bool:
        """Whether its numbers are not always the same."""
        return self.data or self.weights or self.drawn


def find_calls(
    model: nn.Module,
    opened: frozenset[str],
    args: Mapping[int, Tensor],
    names: Mapping[int, str | None],
    pick: Callable[[Any], Any],
) -> tuple[Calls, SeededDraws]:
    """Run a model's forward; return what it calls, and what it drew. Arguments are those of `record.record`.

    Raises:
        TraceProblem: the forward decides by numbers of the data.
    """
    samples = DrawnSamples(seed=0, step=0, first=0, count=next(iter(args.values())).shape[0])
    draws = SeededDraws(DrawingModules.of(model, {}), samples)
    recorder = _CallRecorder(model, opened, args, draws)
    with draws, wrapped(recorder, model, opened), recorder:
        positional = [arg for number, arg in args.items() if names[number] is None]
        keyword = {name: args[number] for number, name in names.items() if name is not None}
        result = model(*positional, **keyword)
    return recorder.found(pick(result), names), draws


def calls_for_any(small: Calls, large: Calls) -> Calls:
    """Return the calls for any number of samples, of those for `SMALL` and `LARGE`.

    Raises:
        TraceProblem: what is called depends on the number of samples.
    """
    same = [call.path for call in small.calls] == [call.path for call in large.calls]
    if not same or small.result_needs != large.result_needs or set(small.facts) != set(large.facts):
        where = small.calls[-1].where if small.calls else "its forward"
        raise TraceProblem("what is done depends on the number of samples", where=where, module="")
    calls = []
    for one, other in zip(small.calls, large.calls, strict=True):
        if one.needs != other.needs:
            raise TraceProblem("what is done depends on the number of samples", where=one.where, module="")
        calls.append(replace(one, template=joined_templates(one.template, other.template, one.where)))
    facts = {index: _facts(one, large.facts[index]) for index, one in small.facts.items()}
    return replace(small, calls=tuple(calls), facts=facts, looked_at=small.looked_at | large.looked_at)


def _facts(one: Facts, other: Facts) -> Facts:
    sizes = zip(one.shape, other.shape, strict=True)
    shape = tuple(a if a == b else Samples((b - a) // (LARGE - SMALL), a - SMALL * (b - a)) for a, b in sizes)  # type: ignore[operator]
    return replace(one, shape=shape, from_data=one.from_data or other.from_data)


@dataclass(kw_only=True)
class _Running:
    """The call that is running."""

    path: str
    number: int
    own: set[int]
    """Identities of its weights."""
    given: GivenParts
    needs: set[Source] = field(default_factory=set)
    reads_numbers: bool = False


class _CallRecorder(TorchFunctionMode):
    """Sees every call of torch's functions while it is active."""

    def __init__(
        self, model: nn.Module, opened: frozenset[str], args: Mapping[int, Tensor], draws: SeededDraws
    ) -> None:
        super().__init__()
        self._draws = draws
        self._foregone = ForegoneOutcomes()
        self._opened = opened
        self.opened: list[str] = []
        """Paths of the opened modules whose forward is running, the innermost last."""
        self._modules = dict(model.named_modules())
        self._running: _Running | None = None
        self._calls: list[BlockCall] = []
        self._facts: dict[int, Facts] = {}
        self._looked_at: set[Source] = set()
        self._written_into: set[Source] = set()
        self._known: dict[int, _Known] = {}
        self._alive: list[Tensor] = []  # so that no two tensors have one id
        self._first: dict[int, Source] = {}
        """What a tensor was before anything was written into it."""
        self._device = next(iter(args.values())).device
        self._weight_names = {id(weight): name for name, weight in model.named_parameters()}
        for name, weight in model.named_parameters():
            self._note(weight, _Known(frozenset({NamedWeight(name)}), weights=True))
        for tensor in model.buffers():
            self._note(tensor, _Known())
        for number, arg in args.items():
            self._note(arg, _Known(frozenset({Row(number)}), data=True))
            self._first[id(arg)] = Row(number)

    def found(self, result: Any, names: Mapping[int, str | None]) -> Calls:
        """Return what was called."""
        result_needs = frozenset(source for tensor in tensors_in(result) for source in self._of(tensor).sources)
        for source in frozenset().union(result_needs, *(call.needs for call in self._calls)):
            if isinstance(source, Inside) and source.kept:
                path = self._calls[source.call].path
                above = [opened for opened in self._opened if opened and path.startswith(f"{opened}.")]
                why = f"what {path} keeps is used outside of it, and is neither given nor returned"
                raise TraceProblem(why, where=self._calls[source.call].where, module=max(above, key=len, default=""))
        return Calls(
            calls=tuple(self._calls),
            result_needs=result_needs,
            looked_at=frozenset(self._looked_at),
            facts=self._facts,
            written_into=frozenset(self._written_into),
            names=names,
        )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and note where its results come from."""
        given, name = dict(kwargs or {}), getattr(func, "__name__", "")
        tensors = tensors_in((args, given))
        outcome = self._foregone.outcome(name, args)
        if outcome is not None:
            return outcome
        self._check(name, tensors, args)
        versions, drawn = [version_of(tensor) for tensor in tensors], len(self._draws.noted)
        result = func(*args, **given)
        made = tensors_in(result)
        draws = len(self._draws.noted) > drawn
        in_common = draws and name in NOISE and all(tensor.numel() == 1 for tensor in made)
        self._foregone.note(name, tensors, made, in_common=in_common)
        changed = [t for t, version in zip(tensors, versions, strict=True) if version_of(t) != version]
        if not made and not changed and asked(name, args, inside=False) is None:
            return result
        origin = _Known(data=draws and not in_common, drawn=draws)
        for tensor in () if name in OF_SHAPES else tensors[:1] if name in OF_FIRST else tensors:
            origin |= self._of(tensor)
            if self._running is not None:
                self._running.needs |= self._needed(self._running, tensor)
        inside = self._running is not None and origin.varies
        number = len(self._calls)  # of the call that is running
        self._note_changes(changed, replace(origin, sources=frozenset({Inside(number)})) if inside else origin)
        for tensor in made:
            if not any(tensor is one for one in (*changed, *tensors)):
                kept = frozenset({Inside(number, kept=True)})
                self._note(tensor, replace(origin, sources=kept) if inside else origin)
        return result

    def run_closed(self, path: str, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a closed module; one with parameters is a call."""
        own = {id(weight) for weight in self._modules[path].parameters()}
        if self._running is not None or not own:
            return forward(*args, **kwargs)
        where, given = line_of_model(), GivenParts(args, kwargs)
        self._running = running = _Running(path=path, number=len(self._calls), own=own, given=given)
        made: dict[int, tuple[Value, Tensor]] = {}
        try:
            returned = forward(*args, **kwargs)
            template = given.template(returned, lambda tensor: self._new_value(tensor, made))
        finally:
            self._running = None
        self._calls.append(BlockCall(path=path, needs=frozenset(running.needs), template=template, where=where))
        if running.reads_numbers and any(type(part) in (int, float) for part in template.leaves()):
            raise TraceProblem("a block returns a number that depends on data", where=where, module=path)
        fresh = {value: self._alias(value, tensor) for value, tensor in made.values()}

        def fill(sign: Any) -> Any:
            return self._device if isinstance(sign, UnitDevice) else fresh[sign] if isinstance(sign, Value) else sign

        return given_again(template, given.at, fill)

    def _needed(self, running: _Running, tensor: Tensor) -> frozenset[Source]:
        """Return what the running call needs of others for a tensor; its own weights are not asked for."""
        if id(tensor) in running.own:
            return frozenset()
        if id(tensor) in self._weight_names and not running.given.has(tensor):
            why = f"it uses {self._weight_names[id(tensor)]}, which is neither its own nor given to it"
            raise TraceProblem(why, where=line_of_model(), module=running.path)
        return self._of(tensor).sources - {Inside(running.number), Inside(running.number, kept=True)}

    def _new_value(self, tensor: Tensor, made: dict[int, tuple[Value, Tensor]]) -> Value:
        """Return the value that stands for a tensor which the running call gives to others."""
        if id(tensor) not in made:
            known = self._of(tensor)
            assert self._running is not None
            self._running.needs |= self._needed(self._running, tensor)
            value = Value(len(self._facts))
            self._facts[value.index] = Facts(
                shape=tuple(tensor.shape), dtype=tensor.dtype, from_data=known.data, from_weights=known.weights
            )
            made[id(tensor)] = value, tensor
        return made[id(tensor)][0]

    def _alias(self, value: Value, tensor: Tensor) -> Tensor:
        """Return another tensor of the same numbers: what a call keeps is told apart from what it gives."""
        known, fresh = self._of(tensor), tensor.view_as(tensor)
        self._note(fresh, replace(known, sources=frozenset({value})))
        self._first[id(fresh)] = value
        return fresh

    def _of(self, tensor: Tensor) -> _Known:
        if id(tensor) in self._known:
            return self._known[id(tensor)]
        if is_fake(tensor) or tensor.requires_grad:
            # Where it comes from was not seen: it may depend on anything so far.
            return _Known(frozenset(Inside(number) for number in range(len(self._calls))), data=True, weights=True)
        return _Known()

    def _note(self, tensor: Tensor, known: _Known) -> None:
        self._known[id(tensor)] = known
        self._alive.append(tensor)

    def _note_changes(self, changed: Sequence[Tensor], origin: _Known) -> None:
        """Note what was written into, and all that share its memory."""
        memory = {tensor.untyped_storage()._cdata for tensor in changed}
        for tensor in [one for one in self._alive if memory and one.untyped_storage()._cdata in memory]:
            inside = self._running is not None
            self._known[id(tensor)] = origin if inside else self._of(tensor) | origin
            if id(tensor) in self._first:
                self._written_into.add(self._first[id(tensor)])

    def _check(self, name: str, tensors: Sequence[Tensor], args: tuple[Any, ...]) -> None:
        """Refuse decisions by numbers that depend on weights, or on samples, but for a library's short cuts."""
        asks = asked(name, args, inside=False)
        if asks is None:
            return
        known = _Known()
        for tensor in tensors:
            known |= self._of(tensor)
        if not known.data and ((not known.weights and not known.drawn) or self._running is not None):
            return
        if self._running is not None and name != "__bool__":
            self._running.reads_numbers |= asks is Asks.NUMBERS
            return
        where = line_of_model()
        if known.weights or known.drawn or not any(library in where for library in SHORT_CUTS):
            path = self.opened[-1] if self._running is None else self._running.path
            why = f"control flow depends on data: `{name.strip('_')}` of a tensor that depends on the inputs"
            if known.drawn and self._running is None:
                why = f"control flow depends on a random number: `{name.strip('_')}` of it"
            raise TraceProblem(why, where=where, module=path)
        self._looked_at |= known.sources
