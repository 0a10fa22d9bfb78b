"""Whether gradients are those of the unedited model, however a batch is cut: losses do not show small terms."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.randomness.draws import DrawnSamples
from spantrain.models.randomness.reference import seeded
from spantrain.models.tracing.check import called_on
from spantrain.models.tracing.factory import uncompiled
from spantrain.models.tracing.source import Loaded, picked
from spantrain.models.units import UnitModule, loss_of, parameter_names

_SAMPLES = 2
_TOLERANCE = 1e-3
"""Relative; rounding is far below."""
_TOLERANCE_OF_16_BITS = 0.05
"""The same where the model's own code computes in 16 bits."""


@contextlib.contextmanager
def _its_checkpointing_named(spec: ModelSpec) -> Iterator[None]:
    """Refuse a model that runs parts of itself again in backward, where they draw other numbers than before."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(
            f"model {spec.name}: its own torch.utils.checkpoint does not run again what ran before, as where dropout "
            "is drawn inside of it; leave it out: the plan says what is run again (--recompute-all)"
        ) from error


def check_gradients(spec: ModelSpec, units: Sequence[UnitModule], loaded: Loaded) -> None:
    """Compare gradients of the example batch: the unsplit model's, and the sum of the units' of one sample at a time.

    Raises:
        ConfigError: they differ: what is too small to be seen in the loss would be trained otherwise.
    """
    batch = loaded.batch.resized(_SAMPLES)
    whole = {name: p for name, p in loaded.module.named_parameters(remove_duplicate=False) if p.requires_grad}
    types = set()

    def seen(tensor: Tensor) -> Tensor:
        types.add(tensor.dtype)
        return tensor

    loaded.set_mode(trains=True)
    shapes = next((unit.draws for unit in units if unit.draws), {})
    with uncompiled(), torch.enable_grad(), _its_checkpointing_named(spec):
        hooks = torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor)
        with hooks, seeded(loaded.module, seed=0, step=0, shapes=shapes):
            result = picked(loaded.loss, called_on(loaded, batch), f"model {spec.name}")
        loaded.loss(result, batch.labels, batch.samples).backward()  # type: ignore[no-untyped-call]
        for row in range(batch.samples):
            samples = DrawnSamples(seed=0, step=0, first=row, count=1)
            rows = {n: tensor[row : row + 1] for n, tensor in batch.rows.items()}
            loss_of(units, rows, samples).backward()  # type: ignore[no-untyped-call]
    found = {full: unit.get_parameter(local) for unit in units for local, full in parameter_names(unit).items()}
    tolerance = _TOLERANCE_OF_16_BITS if types & {torch.bfloat16, torch.float16} else _TOLERANCE
    largest = max((float(p.grad.norm()) for p in whole.values() if p.grad is not None), default=0.0)
    for name, parameter in found.items():
        wanted, got = (torch.zeros(()) if p.grad is None else p.grad for p in (whole.get(name, parameter), parameter))
        if float((got - wanted).norm()) > tolerance * max(float(wanted.norm()), tolerance * largest):
            raise ConfigError(
                f"model {spec.name}: the gradient of {name} is of size {float(wanted.norm()):.6g} for {batch.samples} "
                f"samples together, and {float(got.norm()):.6g} for the sum of them one by one: samples depend on each "
                "other (output_router_logits of a mixture, pairs, batch statistics), which would depend on how a "
                "batch is cut; leave that out, or return one loss for each sample"
            )
    loaded.set_mode(trains=False)
    for unit in units:
        unit.eval()
    for parameter in (*whole.values(), *found.values()):
        parameter.grad = None
