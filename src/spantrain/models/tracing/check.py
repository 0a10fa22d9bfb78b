"""Whether a user's model was followed rightly, and what it would do otherwise in training mode.

Losses are compared: the model's and its units'.
What of a model as its author gave it is otherwise here (batch statistics are frozen, dropout may be off) is found by
running its forward in both ways and comparing the calls, to be told before it is trained.
"""

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.overrides import TorchFunctionMode

from spantrain.core.names import few
from spantrain.core.records import Record
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.randomness.draws import CHANCES, RECURRENT, DrawnSamples, chance_of, global_seed, seeded
from spantrain.models.randomness.places import CallChain, DrawnShapes
from spantrain.models.statistics import trained_norms
from spantrain.models.tracing.batch import LabelLoss, LabelsWeighed, ModelBatch, call_named, picked, taken_names
from spantrain.models.tracing.factory import told_as_the_models, uncompiled, what_was_raised
from spantrain.models.tracing.source import Given, Loaded
from spantrain.models.tracing.tape import line_of_model, parts
from spantrain.models.units import (
    IGNORED_LABEL,
    LABELS,
    UnitModule,
    keeps_statistics,
    loss_of,
    parameter_names,
    set_training,
)

_STATISTICS: Mapping[str, str] = MappingProxyType({"batch_norm": "training", "instance_norm": "use_input_stats"})
"""With the argument that says whether the batch's own are taken."""
_COMPARED = 2


class Call(Record):
    """One call of a function of torch, outside of torch's own."""

    name: str
    module: str
    """The innermost module that was running: its path and class."""
    where: str
    """FILE:LINE."""
    chance: float
    """With which it drops what it is given; 0: it does not."""
    own_statistics: bool
    """Whether it normalizes by the statistics of the batch, or of the sample."""
    trains: bool
    """Whether it was told otherwise that it is in training mode."""


def differences(loaded: Loaded, given: Given = torch.clone) -> Iterator[str]:
    """Yield what of a user's model is not done when it is trained here, a line each; none: all of it is done.

    Args:
        loaded: the model, not to be used any more.
        given: makes an input of a tensor of its example batch.
    """
    module, batch = loaded.module, loaded.batch.resized(_COMPARED).mapped(given)
    yield from loaded.left_out
    loaded.set_mode(trains=True)
    as_it_trains = calls_of(module, lambda: called_on(loaded, batch))
    set_training(module, loaded.given)
    kept, written = module.state_dict().keys(), list[str]()

    def run_as_given() -> None:
        before = _buffers(module)
        called_on(loaded, batch)
        written.extend(name for name, state in _buffers(module).items() if name in kept and state != before.get(name))

    try:
        as_given = calls_of(module, run_as_given)
    except Exception as error:
        if any(is_fake(tensor) for tensor in batch.inputs):
            raise
        yield f"it is in evaluation mode; in training mode its forward fails: {what_was_raised(error)}"
        return
    known = {id(norm) for norm in trained_norms([module])}
    norms = {
        f"{path or 'the model'} ({type(part).__name__})" for path, part in module.named_modules() if id(part) in known
    }
    yield from _told(as_it_trains, as_given, norms)
    if written:
        yield f"what its forward writes into {few(written)} is not kept: they stay as given"


def _buffers(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return which tensors a model's buffers are, and how often they were written into, but for running statistics."""
    return {
        f"{path}.{name}".lstrip("."): (id(buffer), buffer._version)
        for path, part in module.named_modules()
        if not keeps_statistics(part)
        for name, buffer in part.named_buffers(recurse=False)
    }


def called_on(loaded: Loaded, batch: ModelBatch) -> Any:
    """Return what a model makes of a batch; with the labels, if it computes its own loss."""
    tensors = dict(enumerate(batch.inputs)) | ({} if batch.labels is None else {LABELS: batch.labels})
    return call_named(loaded.module, tensors, taken_names(batch, loaded.loss))


def weighed_batch(loaded: Loaded) -> ModelBatch:
    """Return a model's example batch, which says whether its loss counts labels unlike.

    The model is run for that; its parameters may be fake. If it cannot be, the loss may do so where that costs little:
    where all labels of a step are counted in any case.
    """
    batch, labels = loaded.batch, loaded.batch.labels
    if isinstance(loaded.loss, LabelLoss) or (labels is not None and labels.is_floating_point()):
        return batch
    fake = next((one for one in loaded.module.parameters() if isinstance(one, FakeTensor)), None)
    here = batch.resized(_COMPARED).mapped(torch.clone if fake is None else fake.fake_mode.from_tensor)
    unseen, weighed = labels is not None and labels.dim() > 1, LabelsWeighed()
    with suppress(Exception), global_seed(), uncompiled(), torch.no_grad(), weighed:
        loaded.loss(picked(loaded.loss, called_on(loaded, here), "the model"), here.labels, here.samples)
        unseen = False
    left_out = labels is not None and labels.dim() == 1 and bool((labels == IGNORED_LABEL).any())
    return replace(batch, weighs=weighed.seen or unseen or left_out)


def _told(as_it_trains: Sequence[Call], as_given: Sequence[Call], norms: Collection[str]) -> list[str]:
    """Say what differs, but for normalizations that take statistics of batches as the job says."""
    now, then = ([(call.name, call.module, call.where) for call in calls] for calls in (as_it_trains, as_given))
    dropped, normalized, others = list[Call](), list[Call](), list[Call]()
    for tag, lo, hi, other_lo, other_hi in difflib.SequenceMatcher(None, now, then, autojunk=False).get_opcodes():
        if tag != "equal":
            others += as_given[other_lo:other_hi] or as_it_trains[lo:hi]
            continue
        for call, given in zip(as_it_trains[lo:hi], as_given[other_lo:other_hi], strict=True):
            if given.chance > 0 and call.chance == 0:
                dropped.append(given)
            if given.own_statistics and not call.own_statistics:
                normalized.append(given)
            if given.trains and not call.trains:
                others.append(given)
    # Such modules count batches besides.
    others = [call for call in others if call.module not in {one.module for one in normalized}]
    normalized = [call for call in normalized if call.module not in norms]
    told = []
    if dropped:
        chances = ", ".join(f"{chance:g}" for chance in sorted({call.chance for call in dropped}))
        told.append(f"dropout is off in {_places(dropped)}, with probability {chances} as given")
    if normalized:
        told.append(f"batch statistics are frozen, at what the module begins with, in {_places(normalized)}")
    if others:
        where = f" at {others[0].where}" if others[0].where else ""
        told.append(
            f"it is in evaluation mode; in training mode {_places(others)} would do otherwise, first "
            f"`{others[0].name}`{where}"
        )
    return told


def _places(calls: Sequence[Call]) -> str:
    modules = list(dict.fromkeys(call.module for call in calls))
    return f"{len(modules)} module{'s' if len(modules) > 1 else ''} ({few(modules)})"


def calls_of(module: nn.Module, run: Callable[[], object]) -> list[Call]:
    """Run something with a module and return the calls of torch's functions; random state and buffers stay."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    # With gradients, since some modules take a shorter way without.
    names = {id(part): f"{path or 'the model'} ({type(part).__name__})" for path, part in module.named_modules()}
    chain = CallChain(names)
    try:
        with global_seed(), torch.enable_grad(), uncompiled(), chain.watching():
            watch = _CallWatch(chain)
            with watch:
                run()
            return watch.calls
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


class _CallWatch(TorchFunctionMode):
    """Writes down which functions are called."""

    def __init__(self, running: CallChain) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._running = running

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, and write it down."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        result = func(*args, **given)
        if any(isinstance(part, Tensor) for part in parts(result)):
            named = _arguments(func, name, args, given)
            self.calls.append(
                Call(
                    name=name,
                    module=self._running.module or "the model",
                    where=line_of_model(),
                    chance=chance_of(name, args, given) if name in CHANCES else _chance(name, named),
                    own_statistics=name in _STATISTICS and bool(named.get(_STATISTICS[name])),
                    trains=not _drops(name) and name not in _STATISTICS and named.get("training") is True,
                )
            )
        return result


def _arguments(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the arguments of a call by name, as far as names are known."""
    try:
        bound = inspect.signature(func).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {"p": args[1], "training": args[2]} if _drops(name) and len(args) > 2 else kwargs
    bound.apply_defaults()
    return bound.arguments


def _drops(name: str) -> bool:
    return "dropout" in name or "attention" in name or name in RECURRENT


def _chance(name: str, arguments: Mapping[str, Any]) -> float:
    """Return the probability of dropping with which a function was called; 0: it drops nothing."""
    chance = arguments.get("p", arguments.get("dropout_p", 0.0))
    return float(chance) if _drops(name) and arguments.get("training", False) else 0.0


_SAMPLES = 4
"""Unlike the numbers that forwards are written down for."""
_TOLERANCE = 1e-3
"""Relative; rounding is far below, and what mixes samples far above."""
_ROUNDING = 1e-6
"""Relative difference of one and the same sum, done twice."""


def check_units(spec: ModelSpec, units: Sequence[UnitModule], loaded: Loaded) -> None:
    """Compare losses of the example batch: the unsplit model's, and the units', which have one memory from here on.

    Raises:
        ConfigError: they differ, or weights do: the model cannot be trained exactly in parts.
    """
    batch = loaded.batch.resized(_SAMPLES)
    given = dict(loaded.module.named_parameters(remove_duplicate=False))
    parts = {full: unit.get_parameter(local) for unit in units for local, full in parameter_names(unit).items()}
    for full, own in parts.items():
        other = given.get(full, own)
        if not torch.equal(own.detach().nan_to_num(), other.detach().nan_to_num()):
            why = "begins with other numbers each time that the model is made; draw them by functions of torch or NumPy"
            raise ConfigError(f"model {spec.name}: {full} {why}")
        other.data = own.data
    with as_it_trains(loaded, units), torch.no_grad():
        shapes = next((unit.draws for unit in units if unit.draws), {})
        whole = _steady_loss(spec, loaded, batch, shapes)
        samples = DrawnSamples(seed=0, step=0, first=0, count=_SAMPLES)
        with told_as_the_models(f"model {spec.name}: does not run in parts as it does as a whole"):
            together = float(loss_of(units, batch.rows, samples))
    if not is_close(whole, together):
        hooked = hooked_module(loaded.module, [path for path, _ in loaded.module.named_modules()])
        why = "its forward could not be followed rightly; please report this, with the model"
        if hooked:
            why = f"its forward could not be followed through the hooks of {hooked}; do in forward what they do"
        raise ConfigError(f"model {spec.name}: the loss of its parts is {together:.6g} and its own {whole:.6g}: {why}")


@contextmanager
def as_it_trains(loaded: Loaded, units: Sequence[UnitModule]) -> Iterator[None]:
    """Have a model be as it trains inside the `with` block; behind it, its units too are in evaluation mode.

    Gradients do not outlast the block.
    """
    loaded.set_mode(trains=True)
    try:
        yield
    finally:
        loaded.set_mode(trains=False)
        for unit in units:
            unit.eval()
        for part in (loaded.module, *units):
            part.zero_grad()


def _steady_loss(spec: ModelSpec, loaded: Loaded, batch: ModelBatch, shapes: DrawnShapes) -> float:
    """Return a model's loss; refuse a forward that does not do the same every time."""
    losses, before = list[float](), _buffers(loaded.module)
    for seed in (0, 1):
        with global_seed(seed), seeded(loaded.module, seed=0, step=0, shapes=shapes) as draws:
            losses.append(_loss_of_model(spec, loaded, batch))
    if is_close(losses[0], losses[1], tolerance=_ROUNDING):
        return losses[0]
    if not any(map(math.isfinite, losses)):
        raise ConfigError(
            f"model {spec.name}: the loss of its example batch is {losses[0]}, from which nothing is learnt: look at "
            "the numbers of that batch, and of the weights"
        )
    written = [name for name, state in _buffers(loaded.module).items() if state != before.get(name)]
    why = (
        f"{draws.unlike[0]}, which cannot be told by sample; use torch.rand, torch.randn or torch.bernoulli"
        if draws.unlike
        else f"it writes into {few(written)}, "
        "and goes by that in its next call, so that a micro-batch would depend on others; leave that out (in the place "
        "of torch.nn.utils.spectral_norm, take that of torch.nn.utils.parametrizations)"
        if written
        else "it keeps something between calls, which a forward must not do, or draws random numbers otherwise than by "
        "functions of torch; leave that out (of models of sound: apply_spec_augment false in their configuration)"
    )
    raise ConfigError(
        f"model {spec.name}: its forward does not do the same every time, the loss is {losses[0]:.6g} and then "
        f"{losses[1]:.6g}: {why}"
    )


_KNOWN_HOOKS = ("torch.", "transformers.utils.output_capturing", "transformers.modeling_utils")


def hooked_module(model: nn.Module, paths: Iterable[str]) -> str | None:
    """Return the first of some modules that has hooks; None: none has.

    Not counted are torch's own, which make weights, and the library's, which keep what modules return.
    """
    for path in paths:
        part = model.get_submodule(path)
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        if any(not str(getattr(hook, "__module__", "")).startswith(_KNOWN_HOOKS) for hook in hooks):
            return f"{path or 'the model'} ({type(part).__name__})"
    return None


def _loss_of_model(spec: ModelSpec, loaded: Loaded, batch: ModelBatch) -> float:
    with uncompiled(), told_as_the_models(f"model {spec.name}: fails where no gradients are wanted"):
        result = picked(loaded.loss, called_on(loaded, batch), f"model {spec.name}")
    own = _ParametersUsed()
    try:
        with own:
            loss = float(loaded.loss(result, batch.labels, batch.samples))
        if own.used is None:
            return loss
        name = next((name for name, one in loaded.module.named_parameters() if one is own.used), None)
        why = (
            f"{name} of the model, which other devices may have"
            if name
            else "parameters of its own, which nobody trains"
        )
        raise ConfigError(f"the loss function uses {why}; return the loss from the model's forward, with them in it")
    except ConfigError as error:
        raise ConfigError(f"model {spec.name}: {error}") from error
    except Exception as error:
        raise ConfigError(f"model {spec.name}: the loss function raised {what_was_raised(error)}") from error


class _ParametersUsed(TorchFunctionMode):
    """Sees whether anything is made of parameters that are trained."""

    used: nn.Parameter | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        result = func(*args, **(kwargs or {}))
        if self.used is None and any(isinstance(part, Tensor) for part in parts(result)):
            given = (one for one in parts((args, kwargs or {})) if isinstance(one, nn.Parameter))
            self.used = next((one for one in given if one.requires_grad), None)
        return result


def is_close(one: float, other: float, *, tolerance: float = _TOLERANCE) -> bool:
    """Whether two losses are the same but for rounding."""
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-6)
