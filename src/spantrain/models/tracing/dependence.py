"""Whether samples depend on each other, and gradients are the unedited model's: of several at once, and one by one.

Where they do, as in a loss over pairs, micro-batches are run as they were planned, like plain PyTorch where gradients
are accumulated over the same ones. Sequences that are packed into one sample must not, by positions that begin again.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError

from spantrain.core.units import ModelSpec, WholeMicroBatch
from spantrain.errors import ConfigError
from spantrain.models.randomness.draws import DrawingModules, DrawnSamples, SeededDraws, seeded
from spantrain.models.randomness.operations import DrawnOperations
from spantrain.models.tracing.batch import ModelBatch, picked
from spantrain.models.tracing.check import as_it_trains, called_on, calls_of, is_close
from spantrain.models.tracing.factory import told_as_the_models, uncompiled, what_was_raised
from spantrain.models.tracing.source import Loaded
from spantrain.models.units import (
    COUNTED,
    IGNORED_LABEL,
    LABELS,
    CheckedUnits,
    UnitModule,
    counted_labels,
    outputs_of,
    parameter_names,
)

_SAMPLES, _FEW = 4, 2
_TOLERANCE = 1e-3
"""Relative; rounding is far below."""
_TOLERANCE_OF_16_BITS = 0.05
"""The same where the model's own code computes in 16 bits."""

_UNNAMED = (
    "the loss leaves labels out, or weighs them, and the batch names none `labels`, by which they would be counted "
    "over the whole step"
)

_Tensors = tuple[Tensor, ...]


def deciding(units: Sequence[UnitModule]) -> dict[int, WholeMicroBatch]:
    """Return the units whose code decides by numbers of its data."""
    return {
        index: WholeMicroBatch(why=f"{unit.name} decides by numbers of its data, at {unit.decides}")
        for index, unit in enumerate(units)
        if unit.decides
    }


def check_samples(spec: ModelSpec, units: Sequence[UnitModule], loaded: Loaded) -> CheckedUnits:
    """Compare losses and gradients of the example batch: of samples at once, and of one at a time.

    Raises:
        ConfigError: gradients are not the unsplit model's, or there is no loss of a part of the batch.
    """
    with as_it_trains(loaded, units):
        found = _apart(spec, units, loaded)
        with told_as_the_models(f"model {spec.name}: its backward pass fails"):
            return _check_gradients(spec, units, loaded, found)


def _apart(spec: ModelSpec, units: Sequence[UnitModule], loaded: Loaded) -> CheckedUnits:
    """Return which units make something else of samples one by one."""
    batch, last = loaded.batch.resized(_SAMPLES), len(units) - 1
    with torch.no_grad():
        unlike = batch.mapped(_unlike)
        with suppress(RuntimeError, ValueError, IndexError, ConfigError):  # there are no such numbers
            batch = unlike if _outputs(units, unlike, 0, _SAMPLES)[last][0].isfinite() else batch
        together = _outputs(units, batch, 0, _SAMPLES)
        norms = (one for one in calls_of(loaded.module, lambda: called_on(loaded, batch)) if one.own_statistics)
        without = next((norm.module for norm in norms if norm.name == "batch_norm"), None)
        how = f"{without} has no running statistics, and takes those of the batch" if without else ""
        try:
            alone = [_outputs(units, batch, row, 1, together) for row in range(_SAMPLES)]
            pairs = [_outputs(units, batch, row, _FEW, together) for row in range(0, _SAMPLES, _FEW)]
        except (RuntimeError, ValueError, ConfigError) as error:
            raise ConfigError(
                f"model {spec.name}: {_SAMPLES} samples together have a loss, and one by one there is none "
                f"({what_was_raised(error)}{f'; {how}' if how else ''}): write it so that it takes a part of a batch, "
                "and numbers rows itself where it has to (torch.arange(len(logits)))"
            ) from error
    whole = deciding(units)
    for index, unit in enumerate(units[:-1]):
        if not all(_same(one[index], together[index], row) for row, one in enumerate(alone)):
            why = how or f"what {unit.name} makes of a sample depends on the others beside it"
            whole.setdefault(index, WholeMicroBatch(why=why))
    loss, by_two, by_one = (sum(float(some[last][0]) for some in found) for found in ([together], pairs, alone))
    counts = _UNNAMED if batch.weighs and batch.labels is None else ""
    if is_close(loss, by_one) and not (counts := counts or _counting_by_hand(units, batch)):
        return CheckedUnits(at=units.__getitem__, whole=whole)
    if is_close(loss, _SAMPLES * by_one) and is_close(by_two, _FEW * by_one) and by_one:
        return CheckedUnits(at=units.__getitem__, whole=whole, sums_samples=True)
    why = counts or how or f"the loss of {units[last].name} is over all samples at once, not over each by itself"
    fewest = 2 if abs(by_one) <= _TOLERANCE * abs(loss) else 1
    return CheckedUnits(
        at=units.__getitem__, whole={**whole, last: replace(whole.get(last, WholeMicroBatch(why=why)), fewest=fewest)}
    )


def _unlike(tensor: Tensor) -> Tensor:
    """Return a batch's tensor with its first sample unlike the others where all are alike, as masks of ones are."""
    some = tensor.clone()
    if torch.equal(tensor, tensor[:1].expand_as(tensor)):
        end = some[0, some.shape[1] // 2 :] if some.dim() > 1 else some[0]
        end.copy_(2 * end + 1 if some.is_floating_point() else end == 0)
    return some


@torch.no_grad()
def _counting_by_hand(units: Sequence[UnitModule], batch: ModelBatch) -> str:
    """Return how the loss is over all samples at once where one has labels that stand for none; empty: it is not."""
    labels = batch.labels
    for number in (0, -1) if labels is not None and labels.dim() > 1 and not labels.is_floating_point() else ():
        assert labels is not None
        some = labels.clone()
        some[0, : (labels.shape[1] + 1) // 2] = number
        other = replace(batch, labels=some)
        with suppress(RuntimeError, ValueError, IndexError, ConfigError):  # there is no such label
            together = float(_outputs(units, other, 0, _SAMPLES)[-1][0])
            alone = sum(float(_outputs(units, other, row, 1)[-1][0]) for row in range(_SAMPLES))
            if not is_close(together, alone):
                return (
                    f"the loss is a mean over labels that are not {number}, made without torch's cross_entropy for it"
                )
    return ""


def _outputs(
    units: Sequence[UnitModule], batch: ModelBatch, first: int, count: int, made: Sequence[_Tensors] = ()
) -> list[_Tensors]:
    """Return what each unit makes of some samples, the last one their loss sum.

    Each is given what came from the one before, or was `made` of all samples.
    """
    here = slice(first, first + count)
    rows = {number: tensor[here] for number, tensor in batch.rows.items()}
    takes = [tuple(tensor[here] for tensor in tensors) for tensors in made[:-1]]
    return list(outputs_of(units, rows, DrawnSamples(seed=0, step=0, first=first, count=count), takes))


def _same(alone: _Tensors, together: _Tensors, row: int) -> bool:
    """Whether what is made of one sample is what is made of it among others."""
    pairs = [(one.double(), other[row : row + 1].double()) for one, other in zip(alone, together, strict=True)]
    return all(float((a - b).norm()) <= _TOLERANCE * max(float(b.norm()), _TOLERANCE) for a, b in pairs)


def _check_gradients(spec: ModelSpec, units: Sequence[UnitModule], loaded: Loaded, found: CheckedUnits) -> CheckedUnits:
    """Compare gradients of some samples at once: the unsplit model's, and the units', also of one at a time."""
    batch = loaded.batch.resized(_FEW)
    types = _whole_gradients(spec, units, loaded, batch)
    tolerance = _TOLERANCE_OF_16_BITS if types & {torch.bfloat16, torch.float16} else _TOLERANCE
    if not found.whole:
        weight = float(_FEW) if found.sums_samples else 1.0
        for row in range(_FEW):
            (weight * _outputs(units, batch, row, 1)[-1][0]).backward()  # type: ignore[no-untyped-call]
        if _differing(units, loaded, tolerance) is None:
            return found
    for unit in units:
        unit.zero_grad()
    apart, small = found.whole, "a term of the loss of {} is over all samples at once: a mixture's router, say"
    _outputs(units, batch, 0, _FEW)[-1][0].backward()  # type: ignore[no-untyped-call]
    name = _differing(units, loaded, tolerance)
    if name is not None:
        raise ConfigError(
            f"model {spec.name}: the gradient of {name} is another one by its parts than by its own: its forward could "
            "not be followed rightly; please report this, with the model"
        )
    last = len(units) - 1
    return replace(found, whole=apart or {last: WholeMicroBatch(why=small.format(units[last].name))})


def _whole_gradients(
    spec: ModelSpec, units: Sequence[UnitModule], loaded: Loaded, batch: ModelBatch
) -> set[torch.dtype]:
    """Have the unsplit model's parameters their gradients; return the types of what was held for that."""
    types = set()

    def seen(tensor: Tensor) -> Tensor:
        types.add(tensor.dtype)
        return tensor

    shapes = next((unit.draws for unit in units if unit.draws), {})
    again = SeededDraws(DrawingModules.of(loaded.module, {}), DrawnSamples(seed=0, step=0, first=0, count=1))
    with uncompiled(), torch.enable_grad():
        hooks = torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor)
        with hooks, seeded(loaded.module, seed=0, step=0, shapes=shapes):
            result = picked(loaded.loss, called_on(loaded, batch), f"model {spec.name}")
        try:
            with DrawnOperations(again):
                loaded.loss(result, batch.labels, batch.samples).backward()  # type: ignore[no-untyped-call]
        except CheckpointError:
            again.noted[""] = "", ()
    sparse = [name for name, p in loaded.module.named_parameters() if p.grad is not None and p.grad.is_sparse]
    if sparse:
        raise ConfigError(
            f"model {spec.name}: {sparse[0]} has sparse gradients, which are not added up; say sparse=False"
        )
    if again.noted or again.unlike:
        raise ConfigError(
            f"model {spec.name}: its own torch.utils.checkpoint does not run again what ran before, as where dropout "
            "is drawn inside of it; leave it out: the plan says what is run again (--recompute-all)"
        )
    return types


def _differing(units: Sequence[UnitModule], loaded: Loaded, tolerance: float) -> str | None:
    """Return the name of a parameter whose gradient is not the unsplit model's; None: none."""
    whole = {name: p for name, p in loaded.module.named_parameters(remove_duplicate=False) if p.requires_grad}
    found = {full: unit.get_parameter(local) for unit in units for local, full in parameter_names(unit).items()}
    largest = max((float(p.grad.norm()) for p in whole.values() if p.grad is not None), default=0.0)
    for name, parameter in found.items():
        wanted, got = (torch.zeros(()) if p.grad is None else p.grad for p in (whole.get(name, parameter), parameter))
        if float((got - wanted).norm()) > tolerance * max(float(wanted.norm()), tolerance * largest):
            return name
    return None


_KNOWN = 64
"""Tokens of which a few are drawn; all models know as many."""
_PACKED_TOLERANCE = 1e-6
"""Relative: sequences that are kept apart change nothing at all of each other's losses."""


def check_packing(spec: ModelSpec, units: Iterable[UnitModule], batch: ModelBatch) -> None:
    """Compare the loss of a sequence that is first in a sample, and behind two different ones.

    Units are taken one after the other, and let go: there may be no room for all of them.

    Raises:
        ConfigError: they differ: the model's attention, state or positions reach beyond a sequence.
    """
    size, orders = batch.inputs[0].shape[1] // 2, ((0, 1), (1, 0), (2, 0))
    drawn = torch.randint(1, _KNOWN, (3, size), generator=torch.Generator().manual_seed(0))
    rows = [_packed_rows(batch, drawn[list(order)], order.index(0)) for order in orders]
    tensors: list[tuple[torch.Tensor, ...]] = [()] * len(orders)
    with torch.no_grad():
        for unit in map(UnitModule.eval, units):
            made = (unit.run(before, own) for before, own in zip(tensors, rows, strict=True))
            tensors = [one if isinstance(one, tuple) else (one,) for one in made]
    losses = [float(loss) for (loss,) in tensors]
    if max(losses) - min(losses) > _PACKED_TOLERANCE * max(losses):
        raise ConfigError(
            f"model {spec.name}: packing cannot be used: this model does not tell sequences apart by position_ids, so "
            f"that one changes the loss of another in the same sample ({', '.join(f'{loss:.7g}' for loss in losses)}); "
            "leave --packing out"
        )


def _packed_rows(batch: ModelBatch, pieces: torch.Tensor, learnt: int) -> dict[int, torch.Tensor]:
    """Return what units read of one sample of pieces `(pieces, tokens)`, of which only one piece has labels."""
    count, size = pieces.shape
    rest = batch.inputs[0].shape[1] - count * size
    labels = torch.full((count, size), IGNORED_LABEL)
    labels[learnt, 1:] = pieces[learnt, 1:]
    positions = torch.cat([torch.arange(size).repeat(count), torch.arange(rest)])
    tokens = functional.pad(pieces.flatten(), (0, rest))
    given = {"position_ids": positions[None]}
    rows = {number: given.get(name or "", tokens[None]) for number, name in enumerate(batch.names)}
    rows[LABELS] = functional.pad(labels.flatten(), (0, rest), value=IGNORED_LABEL)[None]
    return rows | {COUNTED: counted_labels(rows[LABELS], 1)}
