"""An adapter that re-cuts at random, whenever it may: what no network could make a sensible one do."""

import random
from itertools import pairwise

from spantrain.adaptation.local import LocalAdapter
from spantrain.core.messages import Recut
from spantrain.core.span import Span
from spantrain.schedule.dispatch.machine import DispatchMachine


class RestlessLocal(LocalAdapter):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.recuts = 0

    def recut(self, now_s: float, policy: DispatchMachine) -> Recut | None:
        runs = policy.uncut
        if not runs or self._random.random() < 0.5:
            return None
        chosen = self._random.sample(runs, self._random.randint(1, len(runs)))
        spans = tuple(part for run in sorted(chosen) for part in self._cut(run))
        self.recuts += 1
        return Recut(spans, "a test likes it so")

    def piece_samples(self, peer: str, samples: int) -> int:
        return self._random.randint(1, samples)

    def _cut(self, span: Span) -> list[Span]:
        inner = self._random.sample(range(span.lo + 1, span.hi), self._random.randint(0, span.size - 1))
        return [Span(lo, hi) for lo, hi in pairwise(sorted({span.lo, span.hi, *inner}))]
