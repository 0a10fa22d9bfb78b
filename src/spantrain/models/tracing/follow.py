"""Follows an unedited model's forward: what it does outside its blocks, for any number of samples.

The structure says which modules are blocks, which run as they are, and which only hold them, so that cuts lie between.
Two tapes, of two numbers of samples, become one for any number.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from spantrain.core.records import Record
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.randomness.places import DrawnShapes
from spantrain.models.tracing import tape
from spantrain.models.tracing.cut import StepCutter, TapeCutter, needed_steps
from spantrain.models.tracing.factory import uncompiled, what_was_raised
from spantrain.models.tracing.record import TapeWatch
from spantrain.models.tracing.source import Given, Loaded, with_or_without_numbers
from spantrain.models.tracing.watch import watched


class Structure(Record):
    """The modules that are looked into; all others run as they are."""

    opened: frozenset[str]
    """Paths of modules whose forward is written down; the model itself is the empty path."""
    nested: frozenset[str] = frozenset()
    """Those of them that are elements of a list themselves: opened only if cuts in them are as small as around."""
    elements: frozenset[str] = frozenset()
    """Elements of the lists that are in the opened modules: blocks, also where they have no modules in them."""

    def without(self, path: str) -> "Structure":
        """Return it with one module closed, and all in it."""
        inside = f"{path}."
        kept = frozenset(name for name in self.opened if name != path and not name.startswith(inside))
        elements = frozenset(name for name in self.elements if not name.startswith(inside))
        return replace(self, opened=kept, nested=self.nested & kept, elements=elements)


def is_composite(module: nn.Module) -> bool:
    """Whether a module is made of others."""
    return next(module.children(), None) is not None


def find_structure(model: nn.Module) -> Structure:
    """Open the modules on the way to every outermost list, and elements of lists that have lists of like elements.

    A list is a `ModuleList` or `Sequential`. A model without any is opened itself, and no further.
    """
    opened, nested, elements = {""}, set(), set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        lists = _outermost_lists(path, module)
        # Lists of plain layers (a stem, a classifier) stay closed where there are lists of larger modules.
        larger = [entry for entry in lists if any(is_composite(child) for child in entry[1].children())]
        for list_path, members in larger or lists:
            opened.update(_between(path, list_path))
            for name, element in members.named_children():
                element_path = f"{list_path}.{name}" if list_path else name
                elements.add(element_path)
                if any(_alike(inner) for _, inner in _outermost_lists(element_path, element)):
                    opened.add(element_path)
                    nested.add(element_path)
                    waiting.append((element_path, element))
    return Structure(opened=frozenset(opened), nested=frozenset(nested), elements=frozenset(elements))


def _outermost_lists(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return [(path, module)] if len(module) > 1 or any(is_composite(child) for child in module) else []
    found = []
    for name, child in module.named_children():
        found += _outermost_lists(f"{path}.{name}" if path else name, child)
    return found


def _alike(members: nn.Module) -> bool:
    """Whether a list is a row of composite modules of one class."""
    classes = [type(child) for child in members.children() if is_composite(child)]
    return bool(classes) and len(set(classes)) == 1 and len(classes) == sum(1 for _ in members.children())


def _between(start: str, end: str) -> set[str]:
    """Return the paths from below `start` to `end`, both included."""
    words = end.split(".") if end else []
    return {".".join(words[:count]) for count in range(len(words) + 1)} - {start} | {start}


def widened(small: tape.Tape, large: tape.Tape) -> tape.Tape:
    """Return the tape for any number of samples.

    All else than integers must be equal (`Samples.seen`).

    Raises:
        TraceProblem: the forward does something else for another number of samples.
    """
    for one, other in zip(small.steps, large.steps, strict=False):
        if (one.module, _name(one), one.changes, one.taps) != (other.module, _name(other), other.changes, other.taps):
            raise tape.TraceProblem("what is done depends on the number of samples", where=one.where, module="")
    if len(small.steps) != len(large.steps):
        where = small.steps[-1].where if small.steps else "its forward"
        raise tape.TraceProblem("how much is done depends on the number of samples", where=where, module="")
    steps = tuple(_step(one, other) for one, other in zip(small.steps, large.steps, strict=True))
    facts = {index: found.joined(large.facts[index]) for index, found in small.facts.items()}
    derivations = {
        index: derivation
        for index, found in small.derivations.items()
        if (derivation := _derivation(found, large.derivations.get(index))) is not None
    }
    return tape.Tape(steps=steps, inputs=small.inputs, result=small.result, facts=facts, derivations=derivations)


def _derivation(one: tape.Derivation, other: tape.Derivation | None) -> tape.Derivation | None:
    """Return a derivation for any number of samples; None if it is another one for each."""
    if other is None or [_name(step) for step in one.steps] != [_name(step) for step in other.steps]:
        return None
    try:
        steps = tuple(_step(step, large) for step, large in zip(one.steps, other.steps, strict=True))
    except tape.TraceProblem:
        return None
    signs = [
        [sign for step in both.steps for sign in tape.parts((step.args, dict(step.kwargs)))] for both in (one, other)
    ]
    agree = all(
        torch.equal(small.tensor, large.tensor)
        for small, large in zip(*signs, strict=True)
        if isinstance(small, tape.Constant) and isinstance(large, tape.Constant)
    )
    return replace(one, steps=steps) if agree else None


def _name(step: tape.TapeStep) -> str:
    return getattr(step.function, "__qualname__", str(step.function))


def _step(one: tape.TapeStep, other: tape.TapeStep) -> tape.TapeStep:
    args = _joined(one.args, other.args, one.where)
    kwargs = _joined(dict(one.kwargs), dict(other.kwargs), one.where)
    return replace(one, args=args, kwargs=kwargs)


def _joined(one: Any, other: Any, where: str) -> Any:
    others = iter(list(tape.parts(other)))
    return tape.mapped(one, lambda part: _part(part, next(others, None), where))


def _part(one: Any, other: Any, where: str) -> Any:
    if type(one) is int and type(other) is int:
        return tape.Samples.seen(one, other)
    if type(one) is float and type(other) is float and one != other and one.is_integer() and other.is_integer():
        number = tape.Samples.seen(int(one), int(other))
        return tape.RealSamples(number) if isinstance(number, tape.Samples) else one
    plain = isinstance(one, (str, bool, float, complex, torch.dtype, tape.Value))
    if type(one) is not type(other) or (plain and one != other and one == one):
        raise tape.TraceProblem(
            f"an argument depends on the number of samples: {one} and {other}", where=where, module=""
        )
    return one


C = TypeVar("C", bound=StepCutter[Any, Any])
Attempt = Callable[[Loaded, Structure, Given], tuple[C, DrawnShapes]]
"""Writes a forward down, for who cuts it; says also where samples are in what is drawn."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Explored(Generic[C]):
    """A model whose forward was written down, and who can cut it."""

    loaded: Loaded
    structure: Structure
    cutter: C
    draws: DrawnShapes
    """Where samples are in what is drawn while it trains."""
    notices: tuple[str, ...]

    def blocks(self, called: Iterable[str]) -> frozenset[str]:
        """Return which of the modules that are called are blocks: larger ones, if there are any."""
        modules = {path: self.loaded.module.get_submodule(path) for path in called}
        # A normalization stays with what is before it.
        counted = [path for path, one in modules.items() if is_composite(one) or "Norm" not in type(one).__name__]
        counted = [path for path in counted if next(modules[path].parameters(), None) is not None]
        large = [path for path in counted if path in self.structure.elements or is_composite(modules[path])]
        return frozenset(large or counted)


class NotFollowedError(ConfigError):
    """A model whose forward cannot be cut in one of the two ways."""

    def __init__(self, source: str, why: str, remedy: str = "") -> None:
        super().__init__(f"model {source}: {why}{remedy}")
        self.why = why


def follow(spec: ModelSpec) -> Explored[TapeCutter]:
    """Write a model's forward down; errors are those of `explored`."""

    def tape_of(loaded: Loaded, structure: Structure, given: Given) -> tuple[TapeCutter, DrawnShapes]:
        small, large, draws = watched(TapeWatch, spec, loaded, structure.opened, given)
        return TapeCutter(needed_steps(widened(small, large))), draws

    return explored(spec, find_structure, tape_of)


def explored(spec: ModelSpec, structure_of: Callable[[nn.Module], Structure], attempt: Attempt[C]) -> Explored[C]:
    """Write a model's forward down: without numbers if that can be, else for real on its example batch.

    Args:
        spec: the model.
        structure_of: says what is opened at first.
        attempt: writes the forward down.

    Raises:
        NotFollowedError: the model fails on its example batch, or decides by numbers of the data.
        ConfigError: it cannot be built.
    """
    try:
        with uncompiled():
            return with_or_without_numbers(
                spec, lambda loaded, given: _opened(loaded, structure_of(loaded.module), given, attempt)
            )
    except tape.TraceProblem as problem:
        inside = f" in {problem.module}" if problem.module else ""
        raise NotFollowedError(
            spec.name,
            f"cannot be cut: {problem.why}, at {problem.where or 'its forward'}{inside}",
            "; write it without looking at numbers (torch.where, masks), or so that it does not depend on the other "
            "samples of a batch",
        ) from problem
    except ConfigError:
        raise
    except Exception as error:
        raise NotFollowedError(spec.name, f"fails on its example batch: {what_was_raised(error)}") from error


def _opened(loaded: Loaded, structure: Structure, given: Given, attempt: Attempt[C]) -> Explored[C]:
    """Open as much of the model as can be followed, and as makes no larger cuts."""
    notices: list[str] = []
    loaded.set_mode(trains=True)
    while True:  # each attempt that fails closes a module at least
        try:
            cutter, draws = attempt(loaded, structure, given)
        except tape.TraceProblem as problem:
            if not problem.module or problem.module not in structure.opened:
                raise
            structure = structure.without(problem.module)
            notices.append(f"{problem.module} is one unit: {problem}")
            continue
        worse = cutter.opened_for_nothing(structure.nested)
        if not worse:
            break
        for path in worse:
            structure = structure.without(path)
    loaded.set_mode(trains=False)
    return Explored(loaded=loaded, structure=structure, cutter=cutter, draws=draws, notices=tuple(notices))
