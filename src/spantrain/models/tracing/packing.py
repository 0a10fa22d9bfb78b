"""Whether a model keeps sequences apart that are packed into one sample, by positions that begin again."""

from collections.abc import Sequence

import torch

from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.tracing.batch import ModelBatch
from spantrain.models.units import COUNTED, IGNORED_LABEL, LABELS, UnitModule, counted_labels, loss_of

_KNOWN = 64
"""Tokens of which a few are drawn; all models know as many."""
_TOLERANCE = 1e-6
"""Relative: sequences that are kept apart change nothing at all of each other's losses."""


def check_packing(spec: ModelSpec, units: Sequence[UnitModule], batch: ModelBatch) -> None:
    """Compare the loss of a sequence that is first in a sample, and behind two different ones.

    Raises:
        ConfigError: they differ: the model's attention, state or positions reach beyond a sequence.
    """
    length = batch.inputs[0].shape[1]
    size = length // 2
    drawn = torch.randint(1, _KNOWN, (3, size), generator=torch.Generator().manual_seed(0))
    losses = [_loss(units, batch, drawn[list(order)], order.index(0)) for order in ((0, 1), (1, 0), (2, 0))]
    if max(losses) - min(losses) > _TOLERANCE * max(losses):
        raise ConfigError(
            f"model {spec.name}: packing cannot be used: this model does not tell sequences apart by position_ids, so "
            f"that one changes the loss of another in the same sample ({', '.join(f'{loss:.7g}' for loss in losses)}); "
            "leave --packing out"
        )


def _loss(units: Sequence[UnitModule], batch: ModelBatch, pieces: torch.Tensor, learnt: int) -> float:
    """Return the loss of one sample of pieces `(pieces, tokens)`, of which only one piece has labels."""
    count, size = pieces.shape
    rest = batch.inputs[0].shape[1] - count * size
    labels = torch.full((count, size), IGNORED_LABEL)
    labels[learnt, 1:] = pieces[learnt, 1:]
    positions = torch.cat([torch.arange(size).repeat(count), torch.arange(rest)])
    tokens = torch.nn.functional.pad(pieces.flatten(), (0, rest))
    given = {"position_ids": positions[None]}
    rows = {number: given.get(name or "", tokens[None]) for number, name in enumerate(batch.names)}
    rows[LABELS] = torch.nn.functional.pad(labels.flatten(), (0, rest), value=IGNORED_LABEL)[None]
    rows[COUNTED] = counted_labels(rows[LABELS], 1)
    with torch.no_grad():
        return float(loss_of(units, rows))
