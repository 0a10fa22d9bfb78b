"""Which blocks a forward calls, in order, what each of them needs of what others made, and where that can be cut.

The model's own code runs. What it does between blocks, without weights of its own, is done again by whoever needs it:
so only what blocks made has to be known, wherever it is kept on its way to another block. A model is cut before its
blocks, where all that later ones need can cross.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from spantrain.core.units import ModelSpec
from spantrain.models.randomness.draws import SeededDraws
from spantrain.models.randomness.places import DrawnShapes
from spantrain.models.tracing.cut import StepCutter, UnitPart
from spantrain.models.tracing.follow import Explored, Structure, explored, find_structure
from spantrain.models.tracing.numbers import SHORT_CUTS, Asks, asked, counting
from spantrain.models.tracing.source import Given, Loaded
from spantrain.models.tracing.stubs.template import GivenParts, Template, given_again, joined_templates
from spantrain.models.tracing.tape import Facts, NamedWeight, TraceProblem, UnitDevice, Value, line_of_model, tensors_in
from spantrain.models.tracing.watch import ForwardWatch, Origin, watched
from spantrain.models.units import LABELS, Rows


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

    @property
    def direct(self) -> frozenset[str]:
        """Names of weights that are used outside of the modules that are called."""
        needs = (self.result_needs, *(call.needs for call in self.calls))
        return frozenset(source.name for some in needs for source in some if isinstance(source, NamedWeight))


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
    facts = {index: one.joined(large.facts[index]) for index, one in small.facts.items()}
    return replace(small, calls=tuple(calls), facts=facts, looked_at=small.looked_at | large.looked_at)


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


class BlockWatch(ForwardWatch[Calls]):
    """Notes which closed modules with parameters a forward calls, and what each of them needs of others."""

    def __init__(
        self, model: nn.Module, opened: frozenset[str], args: Mapping[int, Tensor], _rows: Rows, draws: SeededDraws
    ) -> None:
        """Watch a model; arguments are those of `watch.Watching`."""
        super().__init__(model, opened, draws)
        self._running: _Running | None = None
        self._calls: list[BlockCall] = []
        self._facts: dict[int, Facts] = {}
        self._looked_at: set[Source] = set()
        self._written_into: set[Source] = set()
        self._first: dict[int, Source] = {}
        """What a tensor was before anything was written into it."""
        self._device = next(iter(args.values())).device
        self._weight_names = {id(weight): name for name, weight in model.named_parameters()}
        for name, weight in model.named_parameters():
            self._note(weight, Origin(weights=True, sources=frozenset({NamedWeight(name)})))
        for tensor in model.buffers():
            self._note(tensor, Origin())
        for number, arg in args.items():
            self._note(arg, Origin(data=True, sources=frozenset({Row(number)})))
            self._first[id(arg)] = Row(number)

    def found(self, result: Any) -> Calls:
        """Return what was called."""
        result_needs = self._origin_of(*tensors_in(result)).sources
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
        )

    def see(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, and note where its results come from."""
        tensors = tensors_in((args, kwargs))
        self._check(name, tensors, args)
        done = self._do(lambda: func(*args, **kwargs), tensors)
        in_common = self._is_in_common(name, tensors, done)
        if not done.made and not done.changed and asked(name, args, inside=False) is None:
            return done.result
        counted = counting(name, tensors)
        origin = Origin(data=done.draws and not in_common, drawn=done.draws) | self._origin_of(*counted)
        changed = made = origin
        if self._running is not None:
            for tensor in counted:
                self._running.needs |= self._needed(self._running, tensor)
            if origin.data or origin.weights or origin.drawn:  # its numbers are not always the same
                number = self._running.number
                changed = replace(origin, sources=frozenset({Inside(number)}))
                made = replace(origin, sources=frozenset({Inside(number, kept=True)}))
        self._note_changes(done.changed, changed)
        for tensor in done.made:
            if not any(tensor is one for one in (*done.changed, *tensors)):
                self._note(tensor, made)
        return done.result

    def run_closed(self, path: str, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a closed module; one with parameters is a call."""
        own = {id(weight) for weight in self._model.get_submodule(path).parameters()}
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
        return self._origin_of(tensor).sources - {Inside(running.number), Inside(running.number, kept=True)}

    def _new_value(self, tensor: Tensor, made: dict[int, tuple[Value, Tensor]]) -> Value:
        """Return the value that stands for a tensor which the running call gives to others."""
        if id(tensor) not in made:
            known = self._origin_of(tensor)
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
        fresh = tensor.view_as(tensor)
        self._note(fresh, replace(self._origin_of(tensor), sources=frozenset({value})))
        self._first[id(fresh)] = value
        return fresh

    def _origin_of(self, *tensors: Tensor) -> Origin:
        """Return what any of some tensors depends on; one that came unseen, on anything so far."""
        unseen = [t for t in tensors if id(t) not in self._origin and (is_fake(t) or t.requires_grad)]
        anything = frozenset(Inside(number) for number in range(len(self._calls)))
        found = super()._origin_of(*tensors)
        return found | Origin(data=True, weights=True, sources=anything) if unseen else found

    def _note_changes(self, changed: Sequence[Tensor], origin: Origin) -> None:
        """Note what was written into, and all that share its memory."""
        for tensor in self._sharing(changed):
            self._origin[id(tensor)] = origin if self._running is not None else self._origin_of(tensor) | origin
            if id(tensor) in self._first:
                self._written_into.add(self._first[id(tensor)])

    def _check(self, name: str, tensors: Sequence[Tensor], args: tuple[Any, ...]) -> None:
        """Refuse decisions by numbers that depend on weights, or on samples, but for a library's short cuts."""
        asks = asked(name, args, inside=False)
        if asks is None:
            return
        known = self._origin_of(*tensors)
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


@dataclass(frozen=True, kw_only=True, eq=False)
class StubPart(UnitPart):
    """What one unit runs for itself of a forward: the calls from `first` up to `end`."""

    first: int
    end: int
    modules: tuple[str, ...]
    """Paths of the modules that it calls, in order."""
    weights: tuple[str, ...]
    """Names of weights outside of those that it uses."""
    reads: tuple[int, ...]
    """What it reads of the samples; see `models.units.Rows`."""


class CallCutter(StepCutter[BlockCall, StubPart]):
    """Cuts a row of calls."""

    nothing_crosses = "no tensor crosses (behind {})"
    _where = _inside_of = attrgetter("path")

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls.calls, calls.facts)
        self.calls = calls
        self._made_at = {
            sign.index: number
            for number, call in enumerate(calls.calls)
            for sign in call.template.leaves()
            if isinstance(sign, Value)
        }
        needs = [
            *((number, call.needs) for number, call in enumerate(calls.calls)),
            (len(calls.calls), calls.result_needs),
        ]
        uses = {source: number for number, sources in needs for source in sources}
        self._last_use = {source.index: number for source, number in uses.items() if isinstance(source, Value)}
        self._inside = [(source.call, number) for source, number in uses.items() if isinstance(source, Inside)]
        """Numbers of calls, and of the last ones that need what those did and cannot be given again."""

    def _part(self, lo: int, hi: int) -> StubPart:
        calls, last = self._steps[lo:hi], hi == len(self._steps)
        needs = {*self.calls.looked_at, *(source for call in calls for source in call.needs)}
        needs |= self.calls.result_needs if last else set()
        reads = {source.number for source in needs if isinstance(source, Row)} | ({LABELS} if last else set())
        if lo == 0 and not reads:
            reads = {0}  # which tells how many samples there are
        return StubPart(
            first=lo,
            end=hi,
            modules=tuple(dict.fromkeys(call.path for call in calls)),
            weights=tuple(sorted(source.name for source in needs if isinstance(source, NamedWeight))),
            takes=self._crossing(lo) if lo else (),
            gives=() if last else self._crossing(hi),
            reads=tuple(sorted(reads)),
        )

    def _why_not(self, place: int) -> str | None:
        if any(call < place <= used for call, used in self._inside):
            where = self._where(self._steps[place - 1])
            return f"a tensor goes on that is neither given nor returned (behind {where})"
        return super()._why_not(place)


def follow_calls(spec: ModelSpec) -> Explored[CallCutter]:
    """Load a model and find what its forward calls: without numbers if that can be, else for real on its example batch.

    Raises:
        ConfigError: the model cannot be built, fails on its example batch, or decides by numbers of the data.
    """

    def calls_of(loaded: Loaded, structure: Structure, given: Given) -> tuple[CallCutter, DrawnShapes]:
        small, large, draws = watched(BlockWatch, spec, loaded, structure.opened, given)
        return CallCutter(calls_for_any(small, large)), draws

    return explored(spec, _structure_of, calls_of)


def _structure_of(model: nn.Module) -> Structure:
    """Return a model's structure, whose blocks are the modules that its class says not to split, if it says so."""
    found, names = find_structure(model), set(getattr(model, "_no_split_modules", None) or ())
    whole = [path for path, module in model.named_modules() if path and type(module).__name__ in names]
    whole = [path for path in whole if not any(path.startswith(f"{other}.") for other in whole)]
    if len(whole) < 2:
        return found
    inside = tuple(f"{path}." for path in whole)
    above = {path[:end] for path in whole for end in [0, *(n for n, char in enumerate(path) if char == ".")]}
    opened = frozenset(path for path in found.opened if path not in whole and not path.startswith(inside)) | above
    elements = frozenset(path for path in found.elements if not path.startswith(inside)) - above
    return Structure(opened=opened, nested=found.nested & opened - above, elements=elements | set(whole))
