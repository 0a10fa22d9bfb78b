"""Rows of samples as stages read them."""

from collections.abc import Sequence

from torch import Tensor

from spantrain.core.span import Span
from spantrain.models.units import LABELS, Rows


def rows_of(inputs: Sequence[Tensor], labels: Tensor | None = None, span: Span | None = None) -> Rows:
    """Number inputs and labels; of a span, take its samples."""
    whole = {**dict(enumerate(inputs)), **({} if labels is None else {LABELS: labels})}
    return whole if span is None else {number: tensor[span.lo : span.hi] for number, tensor in whole.items()}
