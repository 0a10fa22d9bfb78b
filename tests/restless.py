"""An adapter that re-cuts at random, whenever it may: what no network could make a sensible one do."""

import random
from itertools import pairwise

from spantrain.core.messages import Recut
from spantrain.core.spans import Span
from spantrain.policy.adapter.local import LocalAdapter
from spantrain.policy.dispatch import DispatchPolicy


class RestlessLocal(LocalAdapter):
    def __init__(self, planned: tuple[Span, ...], seed: int) -> None:
        super().__init__()
        self._planned = planned
        self._random = random.Random(seed)
        self.recuts = 0

    def recut(self, now_s: float, policy: DispatchPolicy) -> Recut | None:
        unbegun = policy.unbegun
        if not unbegun or self._random.random() < 0.5:
            return None
        runs = self._runs(unbegun)
        chosen = self._random.sample(runs, self._random.randint(1, len(runs)))
        spans = tuple(part for run in sorted(chosen) for part in self._cut(run))
        self.recuts += 1
        return Recut(spans, "a test likes it so")

    def piece_samples(self, peer: str, samples: int) -> int:
        return self._random.randint(1, samples)

    def _runs(self, unbegun: tuple[Span, ...]) -> list[Span]:
        """What has not begun of each planned micro-batch, where it hangs together."""
        runs: list[Span] = []
        for span in unbegun:
            whole = next(own for own in self._planned if own.contains(span))
            if runs and runs[-1].hi == span.lo and whole.contains(runs[-1]):
                runs[-1] = Span(runs[-1].lo, span.hi)
            else:
                runs.append(span)
        return runs

    def _cut(self, span: Span) -> list[Span]:
        inner = self._random.sample(range(span.lo + 1, span.hi), self._random.randint(0, span.size - 1))
        return [Span(lo, hi) for lo, hi in pairwise(sorted({span.lo, span.hi, *inner}))]
