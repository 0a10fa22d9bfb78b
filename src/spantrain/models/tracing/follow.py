"""Follows an unedited model's forward: what it does outside its blocks, for any number of samples.

The structure says which modules are blocks, which run as they are, and which only hold them, so that cuts lie between.
Two tapes, of two numbers of samples, become one for any number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.randomness.draws import SeededDraws
from spantrain.models.randomness.shapes import DrawnShapes, seen_shapes
from spantrain.models.tracing.batch import OwnLoss, picked
from spantrain.models.tracing.cut import TapeCutter, needed_steps
from spantrain.models.tracing.factory import uncompiled, what_was_raised
from spantrain.models.tracing.record import record
from spantrain.models.tracing.source import Loaded, with_or_without_numbers
from spantrain.models.tracing.tape import (
    Constant,
    Derivation,
    Facts,
    RealSamples,
    Samples,
    Tape,
    TapeStep,
    TraceProblem,
    Value,
    mapped,
    parts,
)
from spantrain.models.units import LABELS

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Structure:
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
        for list_path, members in _worth_opening(_outermost_lists(path, module)):
            opened.update(_between(path, list_path))
            for name, element in members.named_children():
                element_path = f"{list_path}.{name}" if list_path else name
                elements.add(element_path)
                if any(_alike(inner) for _, inner in _outermost_lists(element_path, element)):
                    opened.add(element_path)
                    nested.add(element_path)
                    waiting.append((element_path, element))
    return Structure(opened=frozenset(opened), nested=frozenset(nested), elements=frozenset(elements))


def _worth_opening(lists: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Leave out lists of plain layers (a stem, a classifier) where there are lists of larger modules."""
    rows = [entry for entry in lists if any(is_composite(child) for child in entry[1].children())]
    return rows or lists


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


SMALL, LARGE = 2, 3
"""Numbers of samples that forwards are written down for; of one sample much is decided otherwise."""


def widened(small: Tape, large: Tape) -> Tape:
    """Return the tape for any number of samples.

    Integers that differ between the two are taken to grow in proportion; all else must be equal.

    Raises:
        TraceProblem: the forward does something else for another number of samples.
    """
    for one, other in zip(small.steps, large.steps, strict=False):
        if (one.module, _name(one), one.changes, one.taps) != (other.module, _name(other), other.changes, other.taps):
            raise TraceProblem("what is done depends on the number of samples", where=one.where, module="")
    if len(small.steps) != len(large.steps):
        where = small.steps[-1].where if small.steps else "its forward"
        raise TraceProblem("how much is done depends on the number of samples", where=where, module="")
    steps = tuple(_step(one, other) for one, other in zip(small.steps, large.steps, strict=True))
    facts = {index: _facts(found, large.facts[index]) for index, found in small.facts.items()}
    derivations = {
        index: derivation
        for index, found in small.derivations.items()
        if (derivation := _derivation(found, large.derivations.get(index))) is not None
    }
    return Tape(steps=steps, inputs=small.inputs, result=small.result, facts=facts, derivations=derivations)


def _derivation(one: Derivation, other: Derivation | None) -> Derivation | None:
    """Return a derivation for any number of samples; None if it is another one for each."""
    if other is None or [_name(step) for step in one.steps] != [_name(step) for step in other.steps]:
        return None
    try:
        steps = tuple(_step(step, large) for step, large in zip(one.steps, other.steps, strict=True))
    except TraceProblem:
        return None
    return replace(one, steps=steps) if _constants_agree(one.steps, other.steps) else None


def _constants_agree(one: Sequence[TapeStep], other: Sequence[TapeStep]) -> bool:
    found = [[sign for step in steps for sign in parts((step.args, dict(step.kwargs)))] for steps in (one, other)]
    pairs = zip(*found, strict=True)
    return all(
        torch.equal(small.tensor, large.tensor)
        for small, large in pairs
        if isinstance(small, Constant) and isinstance(large, Constant)
    )


def _name(step: TapeStep) -> str:
    return getattr(step.function, "__qualname__", str(step.function))


def _step(one: TapeStep, other: TapeStep) -> TapeStep:
    args = _joined(one.args, other.args, one.where)
    kwargs = _joined(dict(one.kwargs), dict(other.kwargs), one.where)
    return replace(one, args=args, kwargs=kwargs)


def _joined(one: Any, other: Any, where: str) -> Any:
    others = iter(list(parts(other)))
    return mapped(one, lambda part: _part(part, next(others, None), where))


def _part(one: Any, other: Any, where: str) -> Any:
    if type(one) is int and type(other) is int:
        return _integer(one, other)
    if type(one) is float and type(other) is float and one != other and one.is_integer() and other.is_integer():
        number = _integer(int(one), int(other))
        return RealSamples(number) if isinstance(number, Samples) else one
    plain = isinstance(one, (str, bool, float, complex, torch.dtype, Value))
    if type(one) is not type(other) or (plain and one != other and one == one):
        raise TraceProblem(f"an argument depends on the number of samples: {one} and {other}", where=where, module="")
    return one


def _integer(one: int, other: int) -> int | Samples:
    each = (other - one) // (LARGE - SMALL)
    return one if one == other else Samples(each, one - SMALL * each)


def _facts(one: Facts, other: Facts) -> Facts:
    sizes = zip(one.shape, other.shape, strict=True)
    shape = tuple(_integer(a, b) if isinstance(a, int) and isinstance(b, int) else a for a, b in sizes)
    grows = any(isinstance(size, Samples) for size in shape)
    return Facts(
        shape=shape,
        dtype=one.dtype,
        from_data=one.from_data or other.from_data,
        from_weights=one.from_weights or other.from_weights,
        known=None if grows else _same(one.known, other.known),
    )


def _same(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return a tensor whose numbers were seen and do not depend on the number of samples."""
    if one is None or other is None or type(one) is not Tensor or type(other) is not Tensor:
        return None
    return one.detach() if torch.equal(one, other) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Followed:
    """A model and the tape of its forward."""

    loaded: Loaded
    structure: Structure
    tape: Tape
    draws: DrawnShapes
    """Where samples are in what is drawn while it trains."""
    notices: tuple[str, ...]


class NotFollowedError(ConfigError):
    """A model whose forward cannot be cut in one of the two ways."""

    def __init__(self, source: str, why: str, remedy: str = "") -> None:
        super().__init__(f"model {source}: {why}{remedy}")
        self.why = why


def follow(spec: ModelSpec) -> Followed:
    """Write a model's forward down: without numbers if that can be, else for real on its example batch.

    Raises:
        NotFollowedError: the model fails on its example batch, or decides by numbers of the data.
        ConfigError: it cannot be built.
    """
    return explored(spec, partial(_explored, spec))


def explored(spec: ModelSpec, work: Callable[[Loaded, Callable[[Tensor], Tensor]], T]) -> T:
    """Do work on a model as `with_or_without_numbers` does; errors are those of `follow`."""
    try:
        with uncompiled():
            return with_or_without_numbers(spec, work)
    except TraceProblem as problem:
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


def _explored(spec: ModelSpec, loaded: Loaded, fake: Callable[[Tensor], Tensor]) -> Followed:
    """Open as much of the model as can be followed, and as makes no larger cuts."""
    structure, notices = find_structure(loaded.module), []
    loaded.set_mode(trains=True)
    for _ in range(len(structure.opened) + 1):  # each attempt that fails closes one at least
        try:
            tape, draws = _tape(loaded, structure, spec, fake)
        except TraceProblem as problem:
            if not problem.module or problem.module not in structure.opened:
                raise
            structure = structure.without(problem.module)
            notices.append(f"{problem.module} is one unit: {problem}")
            continue
        worse = _opened_for_nothing(structure, needed_steps(tape))
        if not worse:
            loaded.set_mode(trains=False)
            return Followed(loaded=loaded, structure=structure, tape=tape, draws=draws, notices=tuple(notices))
        for path in worse:
            structure = structure.without(path)
    raise AssertionError(f"{spec.name}: no end in closing modules")


def _tape(
    loaded: Loaded, structure: Structure, spec: ModelSpec, fake: Callable[[Tensor], Tensor]
) -> tuple[Tape, DrawnShapes]:
    """Return the tape for any number of samples, and where they are in what is drawn."""
    takes_labels = isinstance(loaded.loss, OwnLoss) and loaded.batch.has_labels
    tapes, drawn = [], []
    for samples in (SMALL, LARGE):
        batch = loaded.batch.resized(samples)
        names = dict(enumerate(batch.names)) | ({LABELS: batch.labels_name} if takes_labels else {})
        args = {number: fake(batch.rows[number]) for number in names}
        pick = partial(picked, loaded.loss, source=f"model {spec.name}")
        tape, drew = record(loaded.module, structure.opened, args, names, pick, batch.rows)
        tapes.append(tape)
        drawn.append(drew)
    return widened(tapes[0], tapes[1]), shapes_drawn(spec, drawn[0], drawn[1])


def shapes_drawn(spec: ModelSpec, small: SeededDraws, large: SeededDraws) -> DrawnShapes:
    """Return where the samples are in what was drawn for `SMALL` and `LARGE`.

    Raises:
        ConfigError: that cannot be told.
    """
    if spec.family == "hf" and (operations := small.unlike or large.unlike):
        raise ConfigError(f"model {spec.name}: {operations[0]}, not by sample; train with --dropout off")
    draws, unlike = seen_shapes(small.noted, large.noted, (SMALL, LARGE), in_loops=spec.family != "hf")
    if unlike:
        raise ConfigError(
            f"model {spec.name}: {unlike[0]}, so what is drawn cannot be told by sample: have it draw with the samples "
            "as one dimension, or train with --dropout off"
        )
    return draws


def _opened_for_nothing(structure: Structure, tape: Tape) -> tuple[str, ...]:
    """Return the opened elements of lists in which more tensors cross than around them: the innermost of them."""
    worse = []
    for path in structure.nested:
        between, around = TapeCutter(tape).crossing_counts(partial(_is_inside, path))
        if between > around:
            worse.append(path)
    return tuple(path for path in worse if not any(other.startswith(f"{path}.") for other in worse))


def _is_inside(path: str, step: TapeStep) -> bool:
    return step.inside == path or step.inside.startswith(f"{path}.")
