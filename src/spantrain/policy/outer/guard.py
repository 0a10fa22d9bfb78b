"""Which clusters' pseudo-gradients are left out of an update, judged by their norms alone.

Di-PS, 4.1, steps 1 and 2. Kept: the exponentially weighted mean and deviation with factor alpha, the score
E = (G - mean) / deviation, and that a score over beta times the largest accepted one is left out. Decided here, where
the paper leaves holes or breaks:

- A norm is the root of the sum of squares over all shards. (The paper adds the shards' norms up, which depends on
  how the model is cut.)
- One mean and deviation serve all clusters; only accepted norms enter them. A window's norms are all judged by
  what was known before it and enter by the cluster's name, so the order of arrival does not matter.
- The first `warm_up` norms make up a plain mean and deviation. Until then only what is not finite, or over `wild` times
  the median, is left out.
- The largest accepted score counts as 1 at least, the deviation as a hundredth of the mean at least: a run whose
  norms hardly differ leaves nothing out for a small step.
- When `restart_after` finite norms in a row were left out with none accepted between, the level has moved for
  everybody, and the warm-up begins again. Without that rule nothing would ever be accepted again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median, pstdev

__all__ = ["GuardSettings", "GuardState", "Verdict", "judge"]

_LEAST_DEVIATION = 0.01
"""Of the mean."""
_LEAST_SCORE = 1.0


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """How strict to be."""

    smoothing: float = 0.02
    """The paper's alpha."""
    factor: float = 3.0
    """The paper's beta."""
    warm_up: int = 8
    wild: float = 10.0
    restart_after: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.smoothing < 1:
            raise ValueError(f"smoothing must be between 0 and 1, got {self.smoothing}")
        if not self.factor >= 1 or not self.wild > 1:
            raise ValueError(f"factor must be at least 1 and wild over 1, got {self.factor} and {self.wild}")
        if self.warm_up < 2 or self.restart_after < 1:
            raise ValueError(
                f"warm_up must be at least 2 and restart_after at least 1, got {self.warm_up} and {self.restart_after}"
            )


@dataclass(frozen=True, kw_only=True)
class GuardState:
    """What is known of earlier norms; can be written as JSON and taken up again."""

    warm_up_norms: tuple[float, ...] = ()
    """Accepted since the warm-up began; empty after it."""
    mean: float | None = None
    """None while warming up."""
    deviation: float = 0.0
    largest_score: float = 0.0
    refused_in_row: int = 0

    def __post_init__(self) -> None:
        numbers = (*self.warm_up_norms, self.mean or 0.0, self.deviation, self.largest_score)
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or self.refused_in_row < 0:
            raise ValueError(f"a guard's numbers must be finite and not negative, got {self}")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether one cluster takes part in an update, and why."""

    cluster: str
    norm: float
    score: float | None
    """None while warming up, or for what is not finite."""
    accepted: bool
    reason: str


def judge(
    state: GuardState, norms: Mapping[str, float], settings: GuardSettings | None = None
) -> tuple[GuardState, tuple[Verdict, ...]]:
    """Return what is known after a window, and a verdict for each cluster, by name.

    >>> state = GuardState()
    >>> for norm in (1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 1.0, 1.1):
    ...     state, _ = judge(state, {"a": norm})
    >>> state, verdicts = judge(state, {"a": 1.05, "b": 90.0, "c": math.nan})
    >>> [(verdict.cluster, verdict.accepted) for verdict in verdicts]
    [('a', True), ('b', False), ('c', False)]
    """
    settings = settings or GuardSettings()
    verdicts = tuple(_verdict(state, name, norms, settings) for name in sorted(norms))
    for verdict in verdicts:
        state = _after(state, verdict, settings)
    if state.refused_in_row >= settings.restart_after:
        state = GuardState()
    return state, verdicts


def _verdict(state: GuardState, cluster: str, norms: Mapping[str, float], settings: GuardSettings) -> Verdict:
    norm = norms[cluster]
    if not math.isfinite(norm):
        return Verdict(cluster=cluster, norm=norm, score=None, accepted=False, reason=f"norm is {norm}, not finite")
    if state.mean is None:
        finite = [other for other in (*state.warm_up_norms, *norms.values()) if math.isfinite(other)]
        limit = settings.wild * median(finite)
        accepted = norm <= limit
        reason = f"norm {norm:.4g} {'within' if accepted else 'over'} {limit:.4g} while warming up"
        return Verdict(cluster=cluster, norm=norm, score=None, accepted=accepted, reason=reason)
    score = _score(state, norm)
    limit = settings.factor * max(state.largest_score, _LEAST_SCORE)
    accepted = score <= limit
    reason = (
        f"score {score:.3g} {'within' if accepted else 'over'} {limit:.3g} (norm {norm:.4g}, mean {state.mean:.4g})"
    )
    return Verdict(cluster=cluster, norm=norm, score=score, accepted=accepted, reason=reason)


def _score(state: GuardState, norm: float) -> float:
    """Return by how many deviations a norm is over the mean; 0 where all norms were 0."""
    assert state.mean is not None
    deviation = max(state.deviation, _LEAST_DEVIATION * state.mean)
    return (norm - state.mean) / deviation if deviation > 0 else 0.0


def _after(state: GuardState, verdict: Verdict, settings: GuardSettings) -> GuardState:
    if not verdict.accepted:
        return replace(state, refused_in_row=state.refused_in_row + math.isfinite(verdict.norm))
    if state.mean is None:
        return _warmer(replace(state, refused_in_row=0), verdict.norm, settings)
    alpha = settings.smoothing
    mean = alpha * verdict.norm + (1 - alpha) * state.mean
    return replace(
        state,
        mean=mean,
        deviation=math.hypot(math.sqrt(1 - alpha) * state.deviation, math.sqrt(alpha) * (verdict.norm - mean)),
        largest_score=max(state.largest_score, verdict.score or 0.0),
        refused_in_row=0,
    )


def _warmer(state: GuardState, norm: float, settings: GuardSettings) -> GuardState:
    """Take in one more norm of the warm-up; after the last, leave out those that were wild by all of them."""
    norms = (*state.warm_up_norms, norm)
    if len(norms) < settings.warm_up:
        return replace(state, warm_up_norms=norms)
    kept = [one for one in norms if one <= settings.wild * median(norms)]
    return GuardState(mean=fmean(kept), deviation=pstdev(kept))
