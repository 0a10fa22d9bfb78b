"""Runs a forward and writes it down: torch's functions as they are called, closed modules as one call each.

The model's own code runs, so lists, keyword arguments, masks and checks of shapes in it need no understanding.
Parameters and inputs are fake tensors, without numbers in them, while what depends on neither (positions, masks of
shapes) is computed for real: code may look at such values, and a look at a value of the data shows itself.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.overrides import TorchFunctionMode

from spantrain.models.randomness.draws import NOISE, DrawingModules, DrawnSamples, SeededDraws
from spantrain.models.tracing.foregone import ForegoneOutcomes
from spantrain.models.tracing.numbers import (
    OF_FIRST,
    OF_SHAPES,
    SHORT_CUTS,
    Asks,
    ShapesOfNumbers,
    agreed,
    asked,
    made_up,
    numbers_of,
    run_on_made_up,
    sizes,
)
from spantrain.models.tracing.tape import (
    Constant,
    Derivation,
    Deriving,
    Facts,
    NamedWeight,
    Origin,
    Tape,
    TapeStep,
    TraceProblem,
    UnitDevice,
    Value,
    line_of_model,
    mapped,
    parts,
    tensors_in,
    version_of,
)
from spantrain.models.tracing.watch import HookedResults, wrapped
from spantrain.models.units import Rows


def record(
    model: nn.Module,
    opened: frozenset[str],
    args: Mapping[int, Tensor],
    names: Mapping[int, str | None],
    pick: Callable[[Any], Any],
    rows: Rows,
) -> tuple[Tape, SeededDraws]:
    """Run a model's forward; return it as a tape for as many samples as the inputs have, and what it drew.

    Args:
        model: as it is trained; its code is run, its parameters may be fake tensors.
        opened: paths of the modules that are looked into.
        args: what of the samples the model is given, by number.
        names: the keyword of each; None: it goes in by position.
        pick: what of the model's outputs is wanted.
        rows: the samples, with their numbers.

    Raises:
        TraceProblem: the forward decides by numbers of the data, or does what cannot be written down.
    """
    samples = DrawnSamples(seed=0, step=0, first=0, count=next(iter(args.values())).shape[0])
    draws = SeededDraws(DrawingModules.of(model, {}), samples)
    recorder = _TapeRecorder(model, args, rows, draws)
    with draws, wrapped(recorder, model, opened), recorder:
        positional = [arg for number, arg in args.items() if names[number] is None]
        keyword = {name: args[number] for number, name in names.items() if name is not None}
        result = model(*positional, **keyword)
    return recorder.tape(pick(result)), draws


class _TapeRecorder(TorchFunctionMode):
    """Sees every call of torch's functions while it is active."""

    def __init__(self, model: nn.Module, args: Mapping[int, Tensor], rows: Rows, draws: SeededDraws) -> None:
        super().__init__()
        self._model = model
        self._draws = draws
        self._foregone = ForegoneOutcomes()
        self._steps: list[TapeStep] = []
        self._facts: dict[int, Facts] = {}
        self._alive: list[Tensor] = []  # so that no two tensors have one id
        self._value: dict[int, Value] = {}
        self._origin: dict[int, Origin] = {}
        self._weights: dict[int, str] = {}
        self.opened: list[str] = []
        """Paths of the opened modules whose forward is running, the innermost last."""
        self.closed = ""
        """Path of the closed module that is running; empty: none."""
        self._hooked = HookedResults()
        self._shapes = ShapesOfNumbers()
        self._decides = ""
        """Where the closed module that is running decides by numbers of its data."""
        self._derivations: dict[int, Derivation] = {}
        sizes: dict[str, int] = {}
        self._deriving = Deriving(self._weights, sizes)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._weights[id(tensor)] = name
            sizes[name] = tensor.numel() * tensor.element_size()
            self._origin[id(tensor)] = Origin(weights=isinstance(tensor, nn.Parameter))
        for arg in args.values():
            self._origin[id(arg)] = Origin(data=True)
        self._inputs = {number: self._new_value(arg) for number, arg in args.items()}
        self._rows = {value.index: rows[number] for number, value in self._inputs.items()}

    def tape(self, result: Any) -> Tape:
        """Return what was written down."""
        written = mapped(result, self._part)
        self._shapes.note(tensors_in(result), (), looks=True)
        return Tape(
            steps=self._shapes.needed(self._steps),
            inputs=self._inputs,
            result=written,
            facts=self._facts,
            derivations=self._derivations,
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and write it down unless a closed module called it."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        tensors = tensors_in((args, given))
        outcome = self._foregone.outcome(name, args)
        if outcome is not None:
            return outcome
        call = (None, func, args, given)
        match self._asked(name, tensors, args):
            case Asks.NUMBERS:
                return self._answered(func, args, given)
            case Asks.SHAPE:
                result = self._observed(lambda: self._of_rows(func, args, given), name, tensors, call)
                self._note_answer(sizes, (mapped(result, self._part),), sizes(result))
                self._shapes.begin(tensors_in(result), len(self._steps) - 1)
                return result
        return self._observed(lambda: func(*args, **given), name, tensors, call)

    def run_closed(self, path: str, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a closed module as one step."""
        if self.closed:
            result = forward(*args, **kwargs)
            if self._model.get_submodule(path)._forward_hooks:
                self._hooked.note(path, result, len(self._steps))
            return result

        def work() -> Any:
            self.closed, self._decides = path, ""
            try:
                return self._run(self._model.get_submodule(path), forward, args, kwargs)
            finally:
                self.closed = ""

        return self._observed(work, "", tensors_in((args, kwargs)), (path, None, args, kwargs))

    def _run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a module's forward; on made-up numbers, if it cannot without any, or has hooks that are to run once."""
        fake = any(is_fake(tensor) for tensor in (*module.parameters(), *tensors_in((args, kwargs))))
        if not fake or not any(part._forward_hooks for part in module.modules()):
            try:
                return forward(*args, **kwargs)
            except TraceProblem:
                raise
            except Exception:
                if not fake:
                    raise
        with contextlib.ExitStack() as forgetting:
            forgetting.callback(self._forget, len(self._alive))
            self._draws.chain.restart()
            result = run_on_made_up(module, forward, args, kwargs, self._stands_for)
            kept = (*tensors_in(result), *self._hooked.of_step(len(self._steps)))
            origins = [(tensor, self._origin[id(tensor)]) for tensor in kept]
        for tensor, origin in origins:
            self._origin[id(tensor)] = origin
            self._alive.append(tensor)
        return result

    def _stands_for(self, tensor: Tensor, other: Tensor) -> None:
        self._origin[id(tensor)] = self._origin.get(id(other), Origin())
        self._alive.append(tensor)

    def _forget(self, alive: int) -> None:
        """Forget the tensors that came to be since so many were alive."""
        for tensor in self._alive[alive:]:
            self._origin.pop(id(tensor), None)
        del self._alive[alive:]

    def _observed(
        self,
        work: Callable[[], Any],
        name: str,
        tensors: Sequence[Tensor],
        call: tuple[str | None, Callable[..., Any] | None, Any, dict[str, Any]],
    ) -> Any:
        """Do a call; note where its results come from, and write it down."""
        inside = bool(self.closed)
        versions = [version_of(tensor) for tensor in tensors]
        path, func, args, kwargs = call
        # As they are before the call, which may change them.
        written = None if inside else (mapped(tuple(args), self._part), mapped(kwargs, self._part))
        point, drawn = self._draws.chain.point(path), len(self._draws.noted)
        result = work()
        made = tensors_in(result)
        self._shapes.note(tensors, made, looks=path is not None)
        changed = [t for t, version in zip(tensors, versions, strict=True) if version_of(t) != version]
        if path is None:
            self._note_origins(name, tensors, made, changed, draws=len(self._draws.noted) > drawn)
        elif len(self._draws.noted) > drawn:
            # A block that was left out may be done another time.
            self._origin.update((id(t), Origin(data=True, weights=True)) for t in made if self._origin[id(t)].data)
        if inside and func is not None:
            self._note_derivation(func, args, kwargs, result, changed)
        if written is not None and (made or changed):
            if any(isinstance(sign, Constant) and self._is_made(sign.tensor) for sign in parts(written)):
                self._refuse(
                    "a tensor comes from where it cannot be seen (made in a closed module, and kept there): return it "
                    "from the block"
                )
            changes = self._changes(changed, made)
            self._steps.append(
                TapeStep(
                    module=path,
                    function=func,
                    args=written[0],
                    kwargs=written[1],
                    # What is no tensor stands for itself: the library's outputs leave out fields that are None.
                    result=mapped(result, lambda part: self._new_value(part) if isinstance(part, Tensor) else ...),
                    changes=tuple((before, self._value[id(tensor)]) for before, tensor in changes),
                    grad_enabled=torch.is_grad_enabled(),
                    inside=self.opened[-1],
                    where=line_of_model(),
                    point=point if len(self._draws.noted) > drawn else None,
                    decides="" if path is None else self._decides,
                )
            )
        return result

    def _note_derivation(
        self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any, changed: Sequence[Tensor]
    ) -> None:
        """Note what a closed module makes of weights, and of no data."""
        origins = [self._origin.get(id(tensor), Origin(data=True)) for tensor in tensors_in(result)]
        if not changed and origins and all(origin.weights and not origin.data for origin in origins):
            self._deriving.note(func, args, kwargs, result, self._is_constant)

    def _is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was made in this forward, of data or of weights."""
        return is_fake(tensor) or self._origin.get(id(tensor), Origin()) != Origin()

    def _is_constant(self, tensor: Tensor) -> bool:
        return self._origin.get(id(tensor), Origin(data=True)) == Origin()

    def _changes(self, changed: Sequence[Tensor], made: Sequence[Tensor]) -> list[tuple[Value, Tensor]]:
        """Give new values to tensors that were written into, and to those that share their memory."""
        memory = {tensor.untyped_storage()._cdata for tensor in changed}
        if not memory:
            return []
        returned = {id(tensor) for tensor in made}
        touched = [t for t in self._alive if id(t) in self._value and t.untyped_storage()._cdata in memory]
        found = []
        for tensor in dict.fromkeys(touched):
            before = self._value[id(tensor)]
            if id(tensor) not in returned:
                self._new_value(tensor)
            found.append((before, tensor))
        return found

    def _new_value(self, tensor: Tensor) -> Value:
        value = Value(len(self._facts))
        # Of a tensor that came to be unseen, nothing is known: it may depend on anything.
        origin = self._origin.setdefault(id(tensor), Origin(data=True, weights=True))
        from_data = origin.data or origin.drawn
        self._facts[value.index] = Facts(
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            from_data=from_data,
            from_weights=origin.weights,
            known=None if from_data or origin.weights else tensor,
        )
        self._value[id(tensor)] = value
        self._alive.append(tensor)
        derivation = self._deriving.of(tensor, value)
        if derivation is not None:
            self._derivations[value.index] = derivation
        return value

    def _note_origins(
        self, name: str, tensors: Sequence[Tensor], made: Sequence[Tensor], changed: Sequence[Tensor], *, draws: bool
    ) -> None:
        in_common = draws and name in NOISE and all(tensor.numel() == 1 for tensor in made)
        origin = Origin(data=draws and not in_common, weights=draws and not in_common, drawn=in_common)
        self._foregone.note(name, tensors, made, in_common=in_common)
        for tensor in () if name in OF_SHAPES else tensors[:1] if name in OF_FIRST else tensors:
            origin |= self._origin.get(id(tensor), Origin())
        for tensor in (*made, *changed):
            self._origin[id(tensor)] = origin
            self._alive.append(tensor)

    def _asked(self, name: str, tensors: Sequence[Tensor], args: tuple[Any, ...]) -> Asks | None:
        """Return what a call asks of the samples' numbers; refuse decisions by others."""
        origins = [self._origin.get(id(tensor), Origin()) for tensor in tensors]
        of_data, of_weights = any(origin.data for origin in origins), any(origin.weights for origin in origins)
        asks = asked(name, args, inside=bool(self.closed))
        if asks is Asks.NUMBERS and not self.closed and any(origin.drawn for origin in origins):
            self._refuse(f"control flow depends on a random number: `{name.strip('_')}` of it")
        if asks is None or not (of_data or (of_weights and asks is Asks.NUMBERS and not self.closed)):
            return None
        if self.closed:
            # The module stays whole, and decides by what it is given, as in plain PyTorch.
            where = line_of_model()
            if of_weights or not any(library in where for library in SHORT_CUTS):
                self._decides = self._decides or where
            return None
        if of_weights or name == "numpy":
            what = "control flow depends" if asks is Asks.NUMBERS else "a shape depends"
            self._refuse(f"{what} on data: `{name.strip('_')}` of a tensor that depends on the inputs")
        return asks

    def _answered(self, func: Callable[..., Any], args: Any, given: dict[str, Any]) -> Any:
        """Return what code reads of the samples, to be compared with what it would read of others."""
        answer = func(*self._with_numbers(args), **self._with_numbers(given))
        self._note_answer(func, mapped((*args, *given.values()), self._part), answer)
        return answer

    def _note_answer(self, read: Callable[..., Any], args: tuple[Any, ...], answer: Any) -> None:
        said = {"outcome": answer, "where": line_of_model()}
        self._steps.append(
            TapeStep(
                module=None, function=agreed, args=(read, args), kwargs=said, result=None, inside=self.opened[-1],
                where=said["where"],
            )
        )  # fmt: skip

    def _of_rows(self, func: Callable[..., Any], args: Any, given: dict[str, Any]) -> Any:
        """Do a call on samples' numbers; the result is fake if what was given is."""
        fake = next((tensor for tensor in tensors_in((args, given)) if isinstance(tensor, FakeTensor)), None)
        if fake is None:
            return func(*args, **given)
        result = func(*self._with_numbers(args), **self._with_numbers(given))
        return mapped(result, lambda part: fake.fake_mode.from_tensor(part) if isinstance(part, Tensor) else part)

    def _with_numbers(self, structure: Any) -> Any:
        """Give fake tensors that were made of samples alone their numbers."""

        def fill(part: Any) -> Any:
            if not is_fake(part):
                return part
            return numbers_of(self._value[id(part)], self._steps, self._facts, self._rows, self._named_numbers)

        return mapped(structure, fill)

    def _named_numbers(self, sign: Any) -> Any:
        if not isinstance(sign, NamedWeight):
            return sign
        path, _, name = sign.name.rpartition(".")
        tensor = getattr(self._model.get_submodule(path), name)
        return made_up(tensor.shape, tensor.dtype) if is_fake(tensor) else tensor

    def _refuse(self, why: str) -> None:
        raise TraceProblem(why, where=line_of_model(), module=self.closed or self.opened[-1])

    def _part(self, part: Any) -> Any:
        """Write a part of a call's arguments down."""
        if isinstance(part, Tensor):
            if id(part) in self._value:
                return self._value[id(part)]
            if id(part) in self._weights:
                return NamedWeight(self._weights[id(part)])
            if (hooked := self._hooked.take(part)) is not None:
                (number, tap), value = hooked, self._new_value(part)
                self._steps[number] = replace(self._steps[number], taps=(*self._steps[number].taps, (tap, value)))
                return value
            return Constant(part)
        if isinstance(part, torch.device):
            return UnitDevice()
        if type(part).__name__.endswith("Cache"):
            self._refuse(f"a {type(part).__name__} is passed on, which keeps tensors from call to call")
        if hasattr(part, "__dict__") and not isinstance(part, nn.Module):
            inside = tensors_in(list(vars(part).values()))
            if any(id(tensor) in self._value or self._is_made(tensor) for tensor in inside):
                self._refuse(f"a {type(part).__name__} with tensors in it is passed on, which cannot cross a cut")
        return part
