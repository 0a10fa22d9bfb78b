"""Rows of samples as stages read them."""

from collections.abc import Sequence

from torch import Tensor

from spantrain.core.span import Span
from spantrain.models.units import COUNTED, LABELS, Rows, counted_labels


def rows_of(inputs: Sequence[Tensor], labels: Tensor | None = None, span: Span | None = None) -> Rows:
    """Number inputs and labels of a step; of a span, take its samples."""
    whole = {**dict(enumerate(inputs)), **({} if labels is None else {LABELS: labels})}
    if labels is not None and labels.dim() > 1 and not labels.is_floating_point():
        whole[COUNTED] = counted_labels(labels, labels.shape[0])
    return whole if span is None else {number: tensor[span.lo : span.hi] for number, tensor in whole.items()}
