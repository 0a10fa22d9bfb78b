"""A model's units, found once for each process: which parts it has, what they are called, what they share."""

import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import nn

from spantrain.config.files.json_codec import from_json, render_json, to_json
from spantrain.config.files.parsing import parse_json
from spantrain.core.units import ModelSpec, WholeMicroBatch
from spantrain.errors import ConfigError
from spantrain.models.adapters import FROZEN
from spantrain.models.randomness.places import DrawnShapes
from spantrain.models.sources import OWN
from spantrain.models.statistics import read_gradients_in_order
from spantrain.models.tracing.batch import LabelLoss, Loss, ModelBatch
from spantrain.models.tracing.check import check_units, differences, hooked_module, weighed_batch
from spantrain.models.tracing.cut import TapePart
from spantrain.models.tracing.dependence import check_packing, check_samples, deciding
from spantrain.models.tracing.follow import Explored, NotFollowedError, follow
from spantrain.models.tracing.source import Loaded, emptied, empty_like, load_model, with_or_without_numbers
from spantrain.models.tracing.stubs.calls import Calls, StubPart, follow_calls
from spantrain.models.tracing.stubs.shell import Shell, StubbedUnit
from spantrain.models.tracing.tape import NamedWeight, TapeStep
from spantrain.models.tracing.tape import parts as in_structure
from spantrain.models.tracing.unit import TracedUnit
from spantrain.models.units import CheckedUnits, UnitModule, copied, module_names, parameter_names

_LOGGER = logging.getLogger(__name__)

WAY, OWN_FORWARD = "cut", "own forward"
"""Entry of a spec's configuration, and its value, for a model whose units run its own forward."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CutModel:
    """What there is to know of a model to build any of its units."""

    name: str
    names: tuple[str, ...]
    """Names of the units, in order."""
    parts: tuple[TapePart, ...] | tuple[StubPart, ...]
    groups: Mapping[str, str]
    """Full name of a parameter -> the group it is in, for those that several units have."""
    whole: Loaded
    """The model on the meta device, its example batch on the CPU."""
    draws: DrawnShapes
    """Where samples are in what is drawn while it trains."""
    notices: tuple[str, ...]
    """What could not be cut, and why."""
    calls: Calls | None = None
    """What the forward calls, where units run it."""
    opened: frozenset[str] = frozenset()
    """Paths of the modules that call others, where units run the forward."""


def cut_model(spec: ModelSpec) -> CutModel:
    """Return the units of a model of family `hf` or `factory`; found once for each spec.

    Raises:
        ConfigError: the model cannot be built or run, or its forward decides by numbers of the data.
    """
    return _cut(render_json(to_json(spec)))


def as_given(spec: ModelSpec, given: object) -> ModelSpec:
    """Return the model of a folder that an object was saved to, with what of the object is frozen; others as they are.

    Raises:
        ConfigError: the object has what its configuration does not say, or nothing of it is trained.
    """
    if not isinstance(given, nn.Module):
        return spec
    made = with_or_without_numbers(spec, lambda loaded, _: _described(loaded.module))
    own = _described(given)
    for path in {**own, **made}:
        if own.get(path) != made.get(path):
            raise ConfigError(
                f"model: {path or 'it'} is {own.get(path)} in the object, and {made.get(path)} by its configuration, "
                "by which each device makes a model of the library: change the configuration instead; or return the "
                "model from a function in a file, with an example batch, and give that"
            )
    frozen = "\n".join(name for name, parameter in given.named_parameters() if not parameter.requires_grad)
    return replace(spec, config={**spec.config, FROZEN: frozen}) if frozen else spec


def _described(model: nn.Module) -> dict[str, str]:
    """Return what modules say of themselves, and what they do besides by hooks or functions of their own, by path."""
    found, strange = {}, ("forward", "_loss_function", "_backward_hooks", "_backward_pre_hooks")
    for path, part in model.named_modules():
        more = [name for name in strange if vars(part).get(name)] + ["hooks"] * bool(hooked_module(part, [""]))
        more += [f"hooks of {name}" for name, one in part.named_parameters(recurse=False) if one._backward_hooks]
        found[path] = ", ".join([f"{type(part).__name__}({part.extra_repr()})", *more])
    return found


class TracedUnits:
    """The units of an unedited model, which is built by its own rules (`models.build.unit_source`).

    Of a library's model only the parameters of the units asked for are made; of a function's, the others are dropped.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all units, in order."""
        return cut_model(self._spec).names

    @property
    def draws(self) -> bool:
        """Whether anything in it draws at random while it trains."""
        return bool(cut_model(self._spec).draws)

    def build(self, indices: Iterable[int], *, seed: int) -> list[UnitModule]:
        """Build units."""
        cut, wanted = cut_model(self._spec), list(indices)
        units, numbers = _empty_units(cut), cut.whole.numbers
        names = {full for index in wanted for full in parameter_names(units[index]).values()}
        only = {numbers[name] for name in names} if names <= numbers.keys() else None  # None: not all are known
        loaded = load_model(self._spec, seed=seed, only=only)
        return _units(cut, wanted, loaded.module, loaded.loss)

    def blank(self, indices: Iterable[int], *, seed: int) -> list[UnitModule]:
        """Build units as ever: an unedited model may draw what is no parameter, by the rules of its author."""
        return self.build(indices, seed=seed)

    def empty(self, index: int) -> UnitModule:
        """Build a unit on the meta device."""
        # A copy: whoever gets it may divide its modules in place.
        return copied(_empty_units(cut_model(self._spec))[index]).to("meta")

    def to_measure(self) -> CheckedUnits:
        """Return all units, of a model that was checked to be what they are.

        Raises:
            ConfigError: they are not what a user's model is.
        """
        cut = cut_model(self._spec)
        if self._spec.chat.packing:
            each = (self.build([unit], seed=0)[0] for unit in range(len(self.names)))
            check_packing(self._spec, each, self.batch())
        if self._spec.objective != OWN:  # no more of it has numbers than is looked at
            loss, whole = cut.whole.loss, deciding(_empty_units(cut))
            if isinstance(loss, LabelLoss) and loss.router_weight:
                why = "the loss that balances its routers is over all tokens at once"
                whole[len(self.names) - 1] = WholeMicroBatch(why=why)
            left_out = with_or_without_numbers(self._spec, lambda made, given: tuple(differences(made, given)))
            return CheckedUnits(at=lambda unit: self.build([unit], seed=0)[0], left_out=left_out, whole=whole)
        units = self.build(range(len(self.names)), seed=0)
        loaded = replace(load_model(self._spec, seed=0), trains=cut.whole.trains, batch=cut.whole.batch)
        check_units(self._spec, units, loaded)
        found = check_samples(self._spec, units, loaded)
        return replace(found, left_out=tuple(differences(loaded)))

    def batch(self) -> ModelBatch:
        """Return the example batch."""
        return cut_model(self._spec).whole.batch

    def unsplit(self, *, seed: int, weights: bool = True) -> tuple[nn.Module, ModelBatch]:
        """Build the model as its author wrote it, with the weights of its units; without, only buffers have numbers."""
        loaded = load_model(self._spec, seed=seed, only=None if weights else ())
        return loaded.module, loaded.batch


def partly_drawn(spec: ModelSpec, names: Collection[str], *, seed: int) -> nn.Module:
    """Build a library's model of which these parameters have numbers under a seed; the others have shapes alone."""
    numbers = cut_model(spec).whole.numbers
    return load_model(spec, seed=seed, only={numbers[name] for name in names}).module


@lru_cache(maxsize=8)
def _empty_units(cut: CutModel) -> list[UnitModule]:
    return _units(cut, range(len(cut.names)), copied(cut.whole.module), cut.whole.loss)


def _units(cut: CutModel, indices: Iterable[int], model: nn.Module, loss: Loss) -> list[UnitModule]:
    """Make units of a model, which is not to be used otherwise any more."""
    units: list[UnitModule] = []
    read_gradients_in_order(model)
    names = {id(module): path for path, module in model.named_modules()}
    called = dict.fromkeys(path for part in cut.parts for path in part.modules)
    shell = None if cut.calls is None else Shell(model, called, cut.opened, cut.calls.direct, cut.whole.trains)
    for index in indices:
        name, part = cut.names[index], cut.parts[index]
        if isinstance(part, TapePart):
            own_loss = loss if index == len(cut.parts) - 1 else None
            unit: UnitModule = TracedUnit(name, part, model, own_loss, counted=cut.whole.batch.counted)
            draws = any(step.point for step in part.steps)
        else:
            assert cut.calls is not None
            assert shell is not None
            unit = StubbedUnit(name, part, cut.calls, shell, cut.whole.batch, loss, model=cut.name)
            draws = True  # what is around its modules does
        unit.draws = cut.draws if draws else {}
        _set_names(unit, names, cut.whole.trains)
        unit.shared = {cut.groups[full]: local for local, full in parameter_names(unit).items() if full in cut.groups}
        units.append(unit)
    return units


def _set_names(unit: UnitModule, names: Mapping[int, str], trains: frozenset[str]) -> None:
    """Tell a unit what its modules are called that have several names, and which of them train.

    Args:
        unit: made of a model's own modules.
        names: of the model's modules, by identity; the outermost of a unit that has stubs around it are others.
        trains: names of those that train.
    """
    own = module_names([unit])
    unit.other_names = {
        path: names[id(module)]
        for path, module in unit.named_modules()
        if id(module) in names and names[id(module)] != own.get(id(module))
    }
    unit.trained = frozenset(
        path
        for path, module in unit.named_modules()
        if (names.get(id(module)) or (own.get(id(module)) if unit.around else None)) in trains
    )


@lru_cache(maxsize=8)
def _cut(text: str) -> CutModel:
    spec: ModelSpec = from_json(ModelSpec, parse_json(text, "spec"), "spec")
    cut = _cut_by_stubs(spec) if spec.config.get(WAY) == OWN_FORWARD else _cut_either_way(spec)
    for notice in cut.notices:
        _LOGGER.warning("model %s: %s", spec.name, notice)
    return cut


def _cut_either_way(spec: ModelSpec) -> CutModel:
    """Cut a model's tape, or by its own forward: where the tape cannot be, makes fewer units, or would miss hooks."""
    try:
        cut = _cut_tape(spec)
    except NotFollowedError as refused:
        try:
            return _with_reason(_cut_by_stubs(spec), refused.why)
        except NotFollowedError as error:
            if error.why == refused.why:
                raise refused from error
            raise ConfigError(f"{refused}; nor can each unit run the whole forward: {error.why}") from error
    closed = next((notice for notice in cut.notices if " is one unit: " in notice), None)
    hooked = hooked_module(cut.whole.module, ["", *(path for part in cut.parts for path in part.modules)])
    if hooked or closed:
        with contextlib.suppress(NotFollowedError):
            other = _cut_by_stubs(spec)
            if hooked or len(other.names) > len(cut.names):
                return _with_reason(other, f"{hooked} has hooks" if hooked else str(closed))
    return cut


def _with_reason(cut: CutModel, why: str) -> CutModel:
    return replace(cut, notices=(f"each unit runs the model's own forward instead: {why}", *cut.notices))


def _cut_tape(spec: ModelSpec) -> CutModel:
    found = follow(spec)
    model = found.loaded.module
    blocks = found.blocks(step.module for step in found.cutter.tape.steps if step.module is not None)
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def has_weights(step: TapeStep) -> bool:
        if step.module is not None and _has_parameters(model, step.module):
            return True
        signs = in_structure((step.args, dict(step.kwargs)))
        return any(isinstance(sign, NamedWeight) and sign.name in weights for sign in signs)

    parts, uncut = found.cutter.cut(lambda step: step.module in blocks, has_weights)
    return _cut_model(spec, found, parts, uncut, blocks)


def _cut_by_stubs(spec: ModelSpec) -> CutModel:
    found = follow_calls(spec)
    calls = found.cutter.calls
    blocks = found.blocks(call.path for call in calls.calls)
    parts, uncut = found.cutter.cut(lambda call: call.path in blocks, lambda _: True)
    return replace(_cut_model(spec, found, parts, uncut, blocks), calls=calls, opened=found.structure.opened)


def _cut_model(
    spec: ModelSpec,
    found: Explored[Any],
    parts: tuple[TapePart, ...] | tuple[StubPart, ...],
    uncut: tuple[str, ...],
    blocks: frozenset[str],
) -> CutModel:
    loaded = found.loaded
    return CutModel(
        name=spec.name,
        names=_names(parts, loaded.module, blocks),
        parts=parts,
        groups=_groups(parts, loaded.module),
        whole=replace(loaded, module=emptied(loaded.module, empty_like, buffers=True), batch=weighed_batch(loaded)),
        draws=found.draws,
        notices=(*found.notices, *uncut),
    )


def _has_parameters(model: nn.Module, path: str) -> bool:
    return next(model.get_submodule(path).parameters(), None) is not None


def _names(parts: Sequence[TapePart | StubPart], model: nn.Module, blocks: frozenset[str]) -> tuple[str, ...]:
    """Name units by their blocks; the first and last, if they have none, by other modules of theirs."""
    names = []
    for number, part in enumerate(parts):
        starting = [path for path in part.modules if path in blocks]
        others = [path for path in part.modules if _has_parameters(model, path)]
        some = starting[:1] or (others[-1:] if number else others[:1]) or [f"part{number}"]
        names.append(some[0])
    seen: Counter[str] = Counter()
    for number, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[number] = f"{name}#{seen[name]}"
    return tuple(names)


def _groups(parts: Sequence[TapePart | StubPart], model: nn.Module) -> dict[str, str]:
    """Find the parameters that several units have; a group is called by the first name of its parameter."""
    named = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, parameter in named.items():
        first.setdefault(id(parameter), name)
    holders: Counter[str] = Counter()
    for part in parts:
        held = {id(p) for path in part.modules for p in model.get_submodule(path).parameters()}
        held |= {id(named[name]) for name in part.weights if name in named}
        holders.update(first[key] for key in held)
    return {name: first[id(p)] for name, p in named.items() if holders[first[id(p)]] > 1}
