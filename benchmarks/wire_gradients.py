"""What wire formats do to the gradients of one step: what `wire_formats.py` asks for `gradients`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from spantrain.formats.registry import WireFormat
from spantrain.runtime.step.rounding import for_wire, from_wire
from wire_loss import Send, Setting, Trained, back, there

BATCHES = 4
FORMS = (WireFormat.BFLOAT16, WireFormat.INT8, WireFormat.INT4)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of sending."""

    sent_as: str
    what: str
    error: float
    """Of the gradients of one batch: norm of the difference over the norm, mean of some batches."""
    error_of_sum: float
    """Of their sum over those batches: what does not cancel."""


def measure(setting: Setting, seed: int) -> list[Row]:
    """Train exactly, then compare the gradients of some more steps, sent in each way, with the exact ones."""
    trained = Trained(setting, seed)
    for _ in range(setting.steps):
        trained.step(_same, _same)
    exact = [trained.gradients(batch, _same, _same) for batch in range(BATCHES)]
    rows = []
    for form in FORMS:
        ways: dict[str, tuple[Send, Send]] = {
            "activations": (there(form), _same),
            "gradients, nearest": (_same, _nearest(form)),
        }
        if getattr(form.codec, "block_numbers", None) is not None:
            ways["gradients, error feedback"] = (_same, back(form))
            ways["activations, error feedback"] = (back(form), _same)
        for what, (forward, backward) in ways.items():
            found = [trained.gradients(batch, forward, backward) for batch in range(BATCHES)]
            errors = [_error(got, want) for got, want in zip(found, exact, strict=True)]
            whole = _error(torch.stack(found).sum(0), torch.stack(exact).sum(0))
            rows.append(Row(sent_as=form.value, what=what, error=sum(errors) / BATCHES, error_of_sum=whole))
    return rows


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _nearest(form: WireFormat) -> Send:
    return lambda tensor: from_wire(for_wire((tensor,), form), form)[0]


def _error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())
