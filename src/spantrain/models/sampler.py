"""Which samples belong to which step: seeded, stateless, resumable, by integers that are the same on every machine."""

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from spantrain.core.span import Span

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit integers one to one under a seed (the finalizer of splitmix64).

    Stages read their inputs and labels on their own (DESIGN 6), so they must agree on every draw; only integer
    arithmetic is used here because random streams of libraries may change between versions.
    """
    with np.errstate(over="ignore"):
        mixed = (values + np.uint64(seed % 2**64)) * _GOLDEN + _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)


def derive_seed(seed: int, *parts: str | int) -> int:
    """Return a 63-bit seed for one purpose, e.g. `derive_seed(0, "unit", 3)`."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class Sampler:
    """Deal a data set's samples to steps: each sample once an epoch, in an order of the epoch's own.

    Samples are dealt from one endless sequence of shuffled epochs; step k takes the k-th run of `global_batch` of
    it. So a step may span the end of an epoch, or several epochs if the data set is small, and any step's samples
    can be asked for at any time. A run that goes on with another global batch says how many samples were dealt
    before its first step. Who reads which part of a step makes no difference.

    >>> sampler = Sampler(dataset_size=6, global_batch=4, seed=1)
    >>> dealt = [index for step in range(3) for index in sampler.indices(step, Span(0, 4))]
    >>> sorted(dealt[:6]), sorted(dealt[6:])
    ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    """

    def __init__(
        self, *, dataset_size: int, global_batch: int, seed: int, first_step: int = 0, samples_before: int | None = None
    ) -> None:
        """Deal from the beginning, or from where another run ended.

        Args:
            dataset_size: samples in the data set.
            global_batch: samples of a step.
            seed: of the shuffling.
            first_step: from which step on steps have this size.
            samples_before: samples dealt before that step; None: as many as steps of this size have.
        """
        if dataset_size < 1 or global_batch < 1:
            raise ValueError(f"need at least one sample and a batch of one, got {dataset_size} and {global_batch}")
        if first_step < 0 or (samples_before is not None and samples_before < 0):
            raise ValueError(f"first_step and samples_before must not be negative, got {first_step}, {samples_before}")
        self.first_step = first_step
        self.samples_before = first_step * global_batch if samples_before is None else samples_before
        self.dataset_size = dataset_size
        self.global_batch = global_batch
        self.seed = seed

    def indices(self, step: int, span: Span) -> list[int]:
        """Return the data set's indices of some samples of a step.

        Raises:
            ValueError: the step is before the first, or the span reaches beyond the global batch.
        """
        if step < self.first_step or span.hi > self.global_batch:
            raise ValueError(
                f"step {step}, samples {span}: need step >= {self.first_step} and samples below {self.global_batch}"
            )
        start = self.dealt_before(step)
        found: list[int] = []
        position, end = start + span.lo, start + span.hi
        while position < end:
            epoch, offset = divmod(position, self.dataset_size)
            count = min(end - position, self.dataset_size - offset)
            found += _order(self.seed, epoch, self.dataset_size)[offset : offset + count].tolist()
            position += count
        return found

    def dealt_before(self, step: int) -> int:
        """Return how many samples of the endless sequence were dealt before a step: what a checkpoint keeps."""
        return self.samples_before + (step - self.first_step) * self.global_batch


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int) -> npt.NDArray[np.intp]:
    keys = mix(np.arange(size, dtype=np.uint64), derive_seed(seed, "epoch", epoch))
    return np.argsort(keys, kind="stable")
