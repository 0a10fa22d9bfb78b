"""Plain PyTorch with the random numbers of training here: one device's loss and gradients, to compare with."""

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from spantrain.models.randomness.draws import DrawingModules, DrawnSamples, SeededDraws
from spantrain.models.randomness.shapes import DrawnShapes


@contextlib.contextmanager
def seeded(
    model: nn.Module, *, seed: int, step: int, first_sample: int = 0, shapes: DrawnShapes | None = None
) -> Iterator[SeededDraws]:
    """Have a whole model in training mode draw what it draws when it is trained here, for the samples it is given.

    The first tensor that the model is called with has the samples as its first dimension.

    Args:
        model: as it was given; its mode stays as it is.
        seed: of the run.
        step: of the run, from 0.
        first_sample: number of the first sample within the step.
        shapes: where samples are in what is drawn; None: guessed, which goes wrong where other sizes are like theirs.

    >>> layer = nn.Dropout(0.5)
    >>> with seeded(layer, seed=0, step=3):
    ...     whole = layer(torch.ones(4, 8))
    >>> with seeded(layer, seed=0, step=3, first_sample=2):
    ...     bool((layer(torch.ones(2, 8)) == whole[2:]).all())
    True
    """
    modules = DrawingModules.of(model, shapes or {})
    samples = DrawnSamples(seed=seed, step=step, first=first_sample, count=1)
    draws = SeededDraws(modules, samples)

    def count(_model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        given = next(entry for entry in (*args, *kwargs.values()) if isinstance(entry, Tensor))
        draws.resize(given.shape[0])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        with draws:
            yield draws
    finally:
        hook.remove()
