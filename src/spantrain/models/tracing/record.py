"""Runs a forward and writes it down: torch's functions as they are called, closed modules as one call each.

The model's own code runs, so lists, keyword arguments, masks and checks of shapes in it need no understanding.
Parameters and inputs are fake tensors, without numbers in them, while what depends on neither (positions, masks of
shapes) is computed for real: code may look at such values, and a look at a value of the data shows itself.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.autograd import Function

from spantrain.models.randomness.draws import SeededDraws
from spantrain.models.tracing import tape
from spantrain.models.tracing.numbers import (
    SHORT_CUTS,
    Asks,
    ShapesOfNumbers,
    agreed,
    asked,
    counting,
    made_up,
    numbers_of,
    run_on_made_up,
    sizes,
)
from spantrain.models.tracing.watch import CallDone, ForwardWatch, Origin
from spantrain.models.units import Rows


class HookedResults:
    """What modules inside of closed ones returned, whose hooks may keep it for code outside."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, int, tape.Tap]] = {}

    def note(self, path: str, result: Any, step: int) -> None:
        """Note what a module returned in the step of this number."""
        calls = {tap.call for _, at, tap in self._found.values() if (at, tap.path) == (step, path)}
        for part, tensor in enumerate(tape.tensors_in(result)):
            self._found[id(tensor)] = tensor, step, tape.Tap(path, len(calls), part)

    def of_step(self, step: int) -> list[Tensor]:
        """Return all that came of a step."""
        return [tensor for tensor, at, _ in self._found.values() if at == step]

    def take(self, tensor: Tensor) -> tuple[int, tape.Tap] | None:
        """Return the number of the step that a tensor comes of, and where there; None: it is none of them."""
        found = self._found.pop(id(tensor), None)
        return None if found is None else found[1:]


class TapeWatch(ForwardWatch[tape.Tape]):
    """Writes a tape of a forward, for as many samples as the inputs have."""

    def __init__(
        self, model: nn.Module, opened: frozenset[str], args: Mapping[int, Tensor], rows: Rows, draws: SeededDraws
    ) -> None:
        """Watch a model; arguments are those of `watch.Watching`."""
        super().__init__(model, opened, draws)
        self._steps: list[tape.TapeStep] = []
        self._facts: dict[int, tape.Facts] = {}
        self._value: dict[int, tape.Value] = {}
        self._weights: dict[int, str] = {}
        self._modules = {id(one): path for path, one in model.named_modules() if path not in opened}
        self.closed = ""
        """Path of the closed module that is running; empty: none."""
        self._hooked = HookedResults()
        self._shapes = ShapesOfNumbers()
        self._decides = ""
        """Where the closed module that is running decides by numbers of its data."""
        self._derivations: dict[int, tape.Derivation] = {}
        sizes: dict[str, int] = {}
        self._deriving = tape.Deriving(self._weights, sizes)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._weights[id(tensor)] = name
            sizes[name] = tensor.numel() * tensor.element_size()
            self._note(tensor, Origin(weights=isinstance(tensor, nn.Parameter)))
        for arg in args.values():
            self._note(arg, Origin(data=True))
        self._inputs = {number: self._new_value(arg) for number, arg in args.items()}
        self._rows = {value.index: rows[number] for number, value in self._inputs.items()}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """See what runs inside the `with` block; of a function with a backward pass of its own, that cannot be seen."""
        own = Function.__dict__["apply"]

        def apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
            if not (self.closed or kind.__module__.startswith("torch.")):
                self._refuse(f"{kind.__name__} has a backward pass of its own")
            return own.__func__(kind, *args, **kwargs)

        Function.apply = classmethod(apply)  # type: ignore[assignment]
        try:
            with super().watching():
                yield
        finally:
            Function.apply = own  # type: ignore[method-assign]

    def found(self, result: Any) -> tape.Tape:
        """Return what was written down."""
        written = tape.mapped(result, self._part)
        self._shapes.note(tape.tensors_in(result), (), looks=True)
        return tape.Tape(
            steps=self._shapes.needed(self._steps),
            inputs=self._inputs,
            result=written,
            facts=self._facts,
            derivations=self._derivations,
        )

    def see(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, and write it down unless a closed module called it."""
        tensors = tape.tensors_in((args, kwargs))
        call = (None, func, args, kwargs)
        match self._asked(name, tensors, args):
            case Asks.NUMBERS:  # what code reads of the samples is compared with what it would read of others
                answer = func(*self._with_numbers(args), **self._with_numbers(kwargs))
                self._note_answer(func, tape.mapped((*args, *kwargs.values()), self._part), answer)
                return answer
            case Asks.SHAPE:
                result = self._observed(lambda: self._of_rows(func, args, kwargs), name, tensors, call)
                self._note_answer(sizes, (tape.mapped(result, self._part),), sizes(result))
                self._shapes.begin(tape.tensors_in(result), len(self._steps) - 1)
                return result
        return self._observed(lambda: func(*args, **kwargs), name, tensors, call)

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

        return self._observed(work, "", tape.tensors_in((args, kwargs)), (path, None, args, kwargs))

    def _run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a module's forward; on made-up numbers, if it cannot without any, or has hooks that are to run once."""
        fake = any(is_fake(tensor) for tensor in (*module.parameters(), *tape.tensors_in((args, kwargs))))
        if not fake or not any(part._forward_hooks for part in module.modules()):
            try:
                return forward(*args, **kwargs)
            except tape.TraceProblem:
                raise
            except Exception:
                if not fake:
                    raise
        with contextlib.ExitStack() as forgetting:
            forgetting.callback(self._forget, len(self._alive))
            self._draws.chain.restart()
            result = run_on_made_up(
                module, forward, args, kwargs, lambda tensor, other: self._note(tensor, self._origin_of(other))
            )
            kept = (*tape.tensors_in(result), *self._hooked.of_step(len(self._steps)))
            origins = [(tensor, self._origin[id(tensor)]) for tensor in kept]
        for tensor, origin in origins:
            self._note(tensor, origin)
        return result

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
        path, func, args, kwargs = call
        # As they are before the call, which may change them.
        written = None if inside else (tape.mapped(tuple(args), self._part), tape.mapped(kwargs, self._part))
        point = self._draws.chain.point(path)
        done = self._do(work, tensors)
        self._shapes.note(tensors, done.made, looks=path is not None)
        if path is None:
            self._note_origins(name, tensors, done)
        elif done.draws:
            # A block that was left out may be done another time.
            self._origin |= {id(t): Origin(data=True, weights=True) for t in done.made if self._origin[id(t)].data}
        if inside and func is not None:
            self._note_derivation(func, args, kwargs, done)
        if written is not None and (done.made or done.changed):
            if any(isinstance(sign, tape.Constant) and self._is_made(sign.tensor) for sign in tape.parts(written)):
                self._refuse(
                    "a tensor comes from where it cannot be seen (made in a closed module, and kept there): return it "
                    "from the block"
                )
            changes = self._changes(done)
            self._steps.append(
                tape.TapeStep(
                    module=path,
                    function=func,
                    args=written[0],
                    kwargs=written[1],
                    # What is no tensor stands for itself: the library's outputs leave out fields that are None.
                    result=tape.mapped(
                        done.result, lambda one: self._new_value(one) if isinstance(one, Tensor) else ...
                    ),
                    changes=tuple((before, self._value[id(tensor)]) for before, tensor in changes),
                    grad_enabled=torch.is_grad_enabled(),
                    inside=self.opened[-1],
                    where=tape.line_of_model(),
                    point=point if done.draws else None,
                    decides="" if path is None else self._decides,
                )
            )
        return done.result

    def _note_derivation(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], done: CallDone) -> None:
        """Note what a closed module makes of weights, and of no data."""
        origins = [self._origin.get(id(tensor), Origin(data=True)) for tensor in done.made]
        if not done.changed and origins and all(origin.weights and not origin.data for origin in origins):
            self._deriving.note(
                func, args, kwargs, done.result, lambda one: self._origin.get(id(one), Origin(data=True)) == Origin()
            )

    def _is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was made in this forward, of data or of weights."""
        return is_fake(tensor) or self._origin_of(tensor) != Origin()

    def _changes(self, done: CallDone) -> list[tuple[tape.Value, Tensor]]:
        """Give new values to tensors that were written into, and to those that share their memory."""
        returned, found = {id(tensor) for tensor in done.made}, []
        for tensor in dict.fromkeys(t for t in self._sharing(done.changed) if id(t) in self._value):
            before = self._value[id(tensor)]
            if id(tensor) not in returned:
                self._new_value(tensor)
            found.append((before, tensor))
        return found

    def _new_value(self, tensor: Tensor) -> tape.Value:
        value = tape.Value(len(self._facts))
        # Of a tensor that came to be unseen, nothing is known: it may depend on anything.
        origin = self._origin.setdefault(id(tensor), Origin(data=True, weights=True))
        from_data = origin.data or origin.drawn
        self._facts[value.index] = tape.Facts(
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

    def _note_origins(self, name: str, tensors: Sequence[Tensor], done: CallDone) -> None:
        in_common = self._is_in_common(name, tensors, done)
        by_sample = done.draws and not in_common
        origin = Origin(data=by_sample, weights=by_sample, drawn=in_common)
        origin |= self._origin_of(*counting(name, tensors))
        for tensor in (*done.made, *done.changed):
            self._note(tensor, origin)

    def _asked(self, name: str, tensors: Sequence[Tensor], args: tuple[Any, ...]) -> Asks | None:
        """Return what a call asks of the samples' numbers; refuse decisions by others."""
        origin = self._origin_of(*tensors)
        asks = asked(name, args, inside=bool(self.closed))
        if asks is Asks.NUMBERS and not self.closed and origin.drawn:
            self._refuse(f"control flow depends on a random number: `{name.strip('_')}` of it")
        if asks is None or not (origin.data or (origin.weights and asks is Asks.NUMBERS and not self.closed)):
            return None
        if self.closed:
            # The module stays whole, and decides by what it is given, as in plain PyTorch.
            where = tape.line_of_model()
            if origin.weights or not any(library in where for library in SHORT_CUTS):
                self._decides = self._decides or where
            return None
        if origin.weights or name == "numpy":
            what = "control flow depends" if asks is Asks.NUMBERS else "a shape depends"
            self._refuse(f"{what} on data: `{name.strip('_')}` of a tensor that depends on the inputs")
        return asks

    def _note_answer(self, read: Callable[..., Any], args: tuple[Any, ...], answer: Any) -> None:
        said = {"outcome": answer, "where": tape.line_of_model()}
        self._steps.append(
            tape.TapeStep(
                module=None, function=agreed, args=(read, args), kwargs=said, result=None, inside=self.opened[-1],
                where=said["where"],
            )
        )  # fmt: skip

    def _of_rows(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Do a call on samples' numbers; the result is fake if what was given is."""
        fake = next((tensor for tensor in tape.tensors_in((args, kwargs)) if isinstance(tensor, FakeTensor)), None)
        if fake is None:
            return func(*args, **kwargs)
        result = func(*self._with_numbers(args), **self._with_numbers(kwargs))
        return tape.mapped(result, lambda part: fake.fake_mode.from_tensor(part) if isinstance(part, Tensor) else part)

    def _with_numbers(self, structure: Any) -> Any:
        """Give fake tensors that were made of samples alone their numbers."""

        def fill(part: Any) -> Any:
            if not is_fake(part):
                return part
            return numbers_of(self._value[id(part)], self._steps, self._facts, self._rows, self._named_numbers)

        return tape.mapped(structure, fill)

    def _named_numbers(self, sign: Any) -> Any:
        if not isinstance(sign, tape.NamedWeight):
            return sign
        tensor = tape.weight_of(self._model, sign.name)
        return made_up(tensor.shape, tensor.dtype) if is_fake(tensor) else tensor

    def _refuse(self, why: str) -> None:
        raise tape.TraceProblem(why, where=tape.line_of_model(), module=self.closed or (self.opened or [""])[-1])

    def _part(self, part: Any) -> Any:
        """Write a part of a call's arguments down."""
        if isinstance(part, Tensor):
            if id(part) in self._value:
                return self._value[id(part)]
            if id(part) in self._weights:
                return tape.NamedWeight(self._weights[id(part)])
            if (hooked := self._hooked.take(part)) is not None:
                (number, tap), value = hooked, self._new_value(part)
                self._steps[number] = replace(self._steps[number], taps=(*self._steps[number].taps, (tap, value)))
                return value
            return tape.Constant(part)
        if isinstance(part, torch.device):
            return tape.UnitDevice()
        if id(part) in self._modules:
            return tape.NamedModule(self._modules[id(part)])
        if type(part).__name__.endswith("Cache"):
            self._refuse(f"a {type(part).__name__} is passed on, which keeps tensors from call to call")
        if hasattr(part, "__dict__") and not isinstance(part, nn.Module):
            inside = tape.tensors_in(list(vars(part).values()))
            if any(id(tensor) in self._value or self._is_made(tensor) for tensor in inside):
                self._refuse(f"a {type(part).__name__} with tensors in it is passed on, which cannot cross a cut")
        return part
