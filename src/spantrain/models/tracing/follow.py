"""Follows an unedited model's forward: what it does outside its blocks, for any number of samples."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.tracing.cut import crossing_counts, needed_steps
from spantrain.models.tracing.factory import what_was_raised
from spantrain.models.tracing.losses import OwnLoss
from spantrain.models.tracing.plain import uncompiled
from spantrain.models.tracing.record import record
from spantrain.models.tracing.source import Loaded, load_empty, load_model, picked
from spantrain.models.tracing.structure import Structure, find_structure
from spantrain.models.tracing.tape import Step, Tape, TraceProblem, Value
from spantrain.models.tracing.widen import LARGE, SMALL, widened


@dataclass(frozen=True, kw_only=True, eq=False)
class Followed:
    """A model and the tape of its forward."""

    loaded: Loaded
    structure: Structure
    tape: Tape
    labels: Value | None
    """The input that is the labels, of a model that computes its own loss from them."""
    notices: tuple[str, ...]


def follow(spec: ModelSpec) -> Followed:
    """Write a model's forward down: without numbers if that can be, else for real on its example batch.

    Raises:
        ConfigError: the model cannot be built, fails on its example batch, or decides by numbers of the data.
    """
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with _quiet():
            loaded = load_empty(spec, mode)
            with uncompiled():
                return _explored(loaded, spec, mode.from_tensor)
    except TraceProblem as problem:
        raise ConfigError(_told(spec, problem)) from problem
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001 - any code of the model may be unable to do without numbers: then do it with them
        return _followed_for_real(spec)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from reporting what cannot be done without numbers: it is done with them, then."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _followed_for_real(spec: ModelSpec) -> Followed:
    loaded = load_model(spec, seed=0)
    try:
        with uncompiled():
            return _explored(loaded, spec, torch.clone)
    except TraceProblem as problem:
        raise ConfigError(_told(spec, problem)) from problem
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"model {spec.name}: fails on its example batch: {what_was_raised(error)}") from error


def _explored(loaded: Loaded, spec: ModelSpec, fake: Callable[[Tensor], Tensor]) -> Followed:
    """Open as much of the model as can be followed, and as makes no larger cuts."""
    structure, notices = find_structure(loaded.module), []
    labels = None
    for _ in range(len(structure.opened) + 1):  # each attempt that fails closes one at least
        try:
            tape, labels = _tape(loaded, structure, spec, fake)
        except TraceProblem as problem:
            if not problem.module or problem.module not in structure.opened:
                raise
            structure = structure.without(problem.module)
            notices.append(f"{problem.module} is one unit: {problem}")
            continue
        worse = _opened_for_nothing(structure, needed_steps(tape), labels)
        if not worse:
            return Followed(loaded=loaded, structure=structure, tape=tape, labels=labels, notices=tuple(notices))
        for path in worse:
            structure = structure.without(path)
    raise AssertionError(f"{spec.name}: no end in closing modules")


def _tape(
    loaded: Loaded, structure: Structure, spec: ModelSpec, fake: Callable[[Tensor], Tensor]
) -> tuple[Tape, Value | None]:
    """Return the tape for any number of samples, and which of its inputs is the labels."""
    takes_labels = isinstance(loaded.loss, OwnLoss) and loaded.batch.has_labels
    tapes = []
    for samples in (SMALL, LARGE):
        batch = loaded.batch.resized(samples)
        args, names = list(batch.inputs), list(batch.names)
        if takes_labels:
            assert batch.labels is not None
            args.append(batch.labels)
            names.append(batch.labels_name)
        pick = partial(picked, loaded.loss, source=f"model {spec.name}")
        tapes.append(record(loaded.module, structure.opened, [fake(arg) for arg in args], names, pick))
    tape = widened(tapes[0], tapes[1])
    return tape, tape.inputs[-1] if takes_labels else None


def _opened_for_nothing(structure: Structure, tape: Tape, labels: Value | None) -> tuple[str, ...]:
    """Return the opened elements of lists in which more tensors cross than around them: the innermost of them."""
    worse = []
    for path in structure.nested:
        between, around = crossing_counts(tape, labels, partial(_is_inside, path))
        if between > around:
            worse.append(path)
    return tuple(path for path in worse if not any(other.startswith(f"{path}.") for other in worse))


def _is_inside(path: str, step: Step) -> bool:
    return step.inside == path or step.inside.startswith(f"{path}.")


def _told(spec: ModelSpec, problem: TraceProblem) -> str:
    inside = f" in {problem.module}" if problem.module else ""
    return (
        f"model {spec.name}: cannot be cut: {problem.why}, at {problem.where}{inside}; write it without looking at "
        "numbers (torch.where, masks), or so that it does not depend on the other samples of a batch"
    )
