"""Makes one tape for any number of samples out of two tapes of two numbers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spantrain.models.tracing.tape import (
    Constant,
    Derivation,
    Facts,
    Samples,
    Step,
    Tape,
    TraceProblem,
    Value,
    mapped,
    parts,
)

SMALL, LARGE = 2, 3
"""Numbers of samples that forwards are written down for; of one sample much is decided otherwise."""


def widened(small: Tape, large: Tape) -> Tape:
    """Return the tape for any number of samples.

    Integers that differ between the two are taken to grow in proportion; all else must be equal.

    Raises:
        TraceProblem: the forward does something else for another number of samples.
    """
    for one, other in zip(small.steps, large.steps, strict=False):
        if (one.module, _name(one)) != (other.module, _name(other)) or one.changes != other.changes:
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


def _constants_agree(one: Sequence[Step], other: Sequence[Step]) -> bool:
    found = [[sign for step in steps for sign in parts((step.args, dict(step.kwargs)))] for steps in (one, other)]
    pairs = zip(*found, strict=True)
    return all(
        torch.equal(small.tensor, large.tensor)
        for small, large in pairs
        if isinstance(small, Constant) and isinstance(large, Constant)
    )


def _name(step: Step) -> str:
    return getattr(step.function, "__qualname__", str(step.function))


def _step(one: Step, other: Step) -> Step:
    args = _joined(one.args, other.args, one.where)
    kwargs = _joined(dict(one.kwargs), dict(other.kwargs), one.where)
    return replace(one, args=args, kwargs=kwargs)


def _joined(one: Any, other: Any, where: str) -> Any:
    others = iter(list(parts(other)))
    return mapped(one, lambda part: _part(part, next(others, None), where))


def _part(one: Any, other: Any, where: str) -> Any:
    if type(one) is int and type(other) is int:
        return _integer(one, other)
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
