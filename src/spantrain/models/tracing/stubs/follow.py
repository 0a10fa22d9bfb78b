"""Finds the blocks of a model and what crosses between them, to be cut by its own forward."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from spantrain.core.units import ModelSpec
from spantrain.models.randomness.shapes import DrawnShapes
from spantrain.models.tracing.batch import Loss, ModelBatch, OwnLoss, picked
from spantrain.models.tracing.follow import (
    LARGE,
    SMALL,
    Structure,
    explored,
    find_structure,
    is_composite,
    shapes_drawn,
)
from spantrain.models.tracing.source import Loaded
from spantrain.models.tracing.stubs.calls import Calls, calls_for_any, find_calls
from spantrain.models.tracing.stubs.cut import CallCutter, StubPart, paths_of
from spantrain.models.tracing.stubs.shell import Shell
from spantrain.models.tracing.stubs.unit import StubbedUnit
from spantrain.models.tracing.tape import TraceProblem
from spantrain.models.units import LABELS


@dataclass(frozen=True, kw_only=True, eq=False)
class StubbedModel:
    """What there is to know of a model to build units that run its own forward."""

    opened: frozenset[str]
    calls: Calls
    parts: tuple[StubPart, ...]
    blocks: frozenset[str]
    draws: DrawnShapes
    """Where samples are in what is drawn while it trains."""
    notices: tuple[str, ...]

    def shell(self, model: nn.Module, trained: frozenset[str]) -> Shell:
        """Take a model apart, of which units are to be made; given the paths of the modules that train."""
        return Shell(model, paths_of(self.parts), self.opened, self.calls.direct, trained)

    def unit(self, index: int, name: str, shell: Shell, batch: ModelBatch, loss: Loss, *, model: str) -> StubbedUnit:
        """Return a unit of a shell; arguments are those of `StubbedUnit`."""
        return StubbedUnit(name, self.parts[index], self.calls, shell, batch, loss, model=model)


def follow_calls(spec: ModelSpec) -> tuple[Loaded, StubbedModel]:
    """Load a model and find what its forward calls: without numbers if that can be, else for real on its example batch.

    Raises:
        ConfigError: the model cannot be built, fails on its example batch, or decides by numbers of the data.
    """
    return explored(spec, partial(_stubbed, spec))


def _stubbed(spec: ModelSpec, loaded: Loaded, fake: Callable[[Tensor], Tensor]) -> tuple[Loaded, StubbedModel]:
    """Find the calls, with as much of the model opened as can be."""
    structure, notices = blocks_of(loaded.module), []
    loaded.set_mode(trains=True)
    while True:
        try:
            calls, draws = _calls(loaded, structure, spec, fake)
        except TraceProblem as problem:
            if not problem.module or problem.module not in structure.opened:
                raise
            structure = structure.without(problem.module)
            notices.append(f"{problem.module} is one unit: {problem}")
            continue
        cutter = CallCutter(calls)
        counts = {path: cutter.crossing_counts(path) for path in structure.nested}
        worse = [path for path, (between, around) in counts.items() if between > around]
        if not worse:
            break
        structure = structure.without(max(worse, key=len))
    paths = dict.fromkeys(call.path for call in calls.calls)
    large = [path for path in paths if path in structure.elements or is_composite(loaded.module.get_submodule(path))]
    blocks = frozenset(path for path in large or paths if _counts(loaded.module.get_submodule(path)))
    parts, uncut = cutter.cut(blocks.__contains__)
    loaded.set_mode(trains=False)
    return loaded, StubbedModel(
        opened=structure.opened,
        calls=calls,
        parts=parts,
        blocks=blocks,
        draws=draws,
        notices=(*notices, *uncut),
    )


def _counts(module: nn.Module) -> bool:
    return is_composite(module) or "Norm" not in type(module).__name__


def blocks_of(model: nn.Module) -> Structure:
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
    return replace(found, opened=opened, nested=found.nested & opened - above, elements=elements | set(whole))


def _calls(
    loaded: Loaded, structure: Structure, spec: ModelSpec, fake: Callable[[Tensor], Tensor]
) -> tuple[Calls, DrawnShapes]:
    """Return the calls for any number of samples, and where they are in what is drawn."""
    takes_labels = isinstance(loaded.loss, OwnLoss) and loaded.batch.has_labels
    found, drawn = [], []
    for samples in (SMALL, LARGE):
        batch = loaded.batch.resized(samples)
        names = dict(enumerate(batch.names)) | ({LABELS: batch.labels_name} if takes_labels else {})
        args = {number: fake(batch.rows[number]) for number in names}
        pick = partial(picked, loaded.loss, source=f"model {spec.name}")
        calls, drew = find_calls(loaded.module, structure.opened, args, names, pick)
        found.append(calls)
        drawn.append(drew)
    return calls_for_any(found[0], found[1]), shapes_drawn(spec, drawn[0], drawn[1])
