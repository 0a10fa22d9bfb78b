"""Which clusters' pseudo-gradients are left out of an update, judged by their norms alone.

Di-PS, 4.1, steps 1 and 2. Kept: an exponentially weighted mean and deviation for each cluster, by the paper's two
recurrences with factor alpha; the score (G - mean) / deviation; and that a push is left out whose score is over beta.
Not kept, and decided here:

- The paper's limit is beta times the largest score that was ever let in. That is a ratchet: who always sends just under
  three times the limit is let in for ever, each time at almost three times the norm. Here the limit is beta itself.
- Norms are taken by their logarithm, since they vary by factors. One push moves the mean by `smoothing` times `_REACH`
  at most, however far off it is (the first ones by a plain mean, to follow a rate that warms up), and the deviation
  stays between two bounds. So a usual norm grows by 2 % a push at most, a limit is at most six times that, and what
  widened it fades with a half-life of ln 2 / alpha pushes (34).
- A cluster is judged by its own earlier norms (slow clusters push fewer steps, so smaller ones), and by nobody else's
  but for a cap: `wild` times the largest usual norm among the others, where two or more of them train. So one cluster
  cannot climb away from the rest, however patient it is; and one of two or more others cannot have an honest one left
  out, since the largest of them counts. With a single other the cap is not there: nobody can tell which of two is
  right.
- A cluster of which too little is known is judged by the others: `wild` times the largest usual norm among them. Where
  most of them are not known either, `wild` times the lower median of what all send.
- Whoever was left out often enough in a row is from then on judged as a newcomer. So nobody gets in by insisting who
  would not get in under a new name; but where most clusters moved, none of these is known any more, and the level has
  moved for all. `restart_after` pushes are shared evenly among those that train.
- Norms are those of a cluster's usual push: of one that brings more tokens than usual, since the cluster was away for
  some rounds or its first pushes came early, the norm is divided by how many times as many they are, but by `wild` at
  most: what was learned while the master could not be reached is no outlier, and tokens that are only claimed carry
  nobody far.
- A norm is the root of the sum of squares over all shards. (The paper adds the shards' norms up, which depends on how
  the model is cut.) What is 0 is let in, and tells nothing.
- A window's norms are all judged by what was known before it, but for those of clusters of which nothing is known.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import field, replace
from statistics import fmean, median, median_low, pstdev
from typing import Annotated

from spantrain.core.records import Bounds, NotNegative, Record, check_bounds

_REACH = 1.0
"""How far from the mean a norm counts at most, as a logarithm: a factor of 2.7."""
_DEVIATIONS = (0.25, 0.6)
"""Least and most, of logarithms: with a factor of 3, limits of 2.1 and 6.0 times the usual norm."""
_MIN_IN_A_ROW = 2


class GuardSettings(Record):
    """How strict to be."""

    smoothing: Annotated[float, Bounds(over=0, under=1)] = 0.02
    """The paper's alpha."""
    factor: Annotated[float, Bounds(low=1)] = 3.0
    """The paper's beta."""
    warm_up: Annotated[int, Bounds(low=2, high=10**6)] = 8
    """Pushes of a cluster until it is judged by its own."""
    wild: Annotated[float, Bounds(over=1)] = 10.0
    """How many times the others' usual norm a cluster may have that is new, and any at most; and how many times the
    usual norm may be looked for in a push of more tokens than usual."""
    restart_after: Annotated[int, Bounds(low=1, high=10**6)] = 8
    """Pushes left out in a row, of all clusters, after which those that sent them are judged as new ones."""


class NormLevel(Record):
    """What is known of one cluster's norms."""

    norms: tuple[float, ...] = ()
    """Let in since it was new; empty when there are enough."""
    mean: float | None = None
    """Of the norms' logarithms; None while it is new."""
    deviation: NotNegative = 0.0
    """Of the logarithms."""
    count: Annotated[int, Bounds(low=0)] = 0
    """Norms that were let in since it was new, up to those that alpha remembers."""
    last: float | None = None
    """The last norm that was finite and not 0, let in or not."""
    tokens: NotNegative = 0.0
    """Of a usual push among those that were let in, by the mean of the logarithms; 0: not known."""
    refused_in_row: Annotated[int, Bounds(low=0)] = 0

    def __post_init__(self) -> None:
        check_bounds(self)
        norms = (*self.norms, 1.0 if self.last is None else self.last)
        if not all(math.isfinite(norm) and norm > 0 for norm in norms) or not math.isfinite(self.mean or 0.0):
            raise ValueError(f"a cluster's norms must be finite and positive, and a mean finite; got {self}")

    @property
    def usual(self) -> float | None:
        """The norm that is to be expected; None while it is new."""
        return None if self.mean is None else _exp(self.mean)

    @property
    def seen(self) -> float | None:
        """What it sends, as far as is known."""
        return self.usual or (median(self.norms) if self.norms else self.last)

    def limit(self, settings: GuardSettings) -> float | None:
        """Return the largest norm that is let in by this alone; None while it is new."""
        return None if self.mean is None else _exp(self.mean + settings.factor * self.deviation)

    def times(self, tokens: float, settings: GuardSettings) -> float:
        """Return how many times the usual norm is to be looked for in a push of so many tokens: 1 or more."""
        return min(settings.wild, max(1.0, tokens / self.tokens)) if self.tokens else 1.0


class GuardState(Record):
    """What is known of earlier norms; can be written as JSON and taken up again."""

    clusters: Mapping[str, NormLevel] = field(default_factory=dict)


class PushVerdict(Record):
    """Whether one cluster takes part in an update, and why."""

    cluster: str
    norm: float
    """As of a usual push."""
    accepted: bool
    reason: str


def judge(
    state: GuardState,
    norms: Mapping[str, float],
    settings: GuardSettings | None = None,
    *,
    trains: Collection[str] = (),
    tokens: Mapping[str, float] | None = None,
) -> tuple[GuardState, tuple[PushVerdict, ...]]:
    """Return what is known after a window, and a verdict for each cluster, by name.

    `trains`: clusters that push from time to time, besides those of the window; `tokens`: of its pushes, by cluster,
    where they are known.

    >>> state = GuardState()
    >>> for norm in (1.0, 1.2, 0.9, 1.1, 1.0, 0.8, 1.0, 1.1):
    ...     state, _ = judge(state, {"a": norm})
    >>> state, verdicts = judge(state, {"a": 1.05, "b": 90.0, "c": math.nan}, trains=["a"])
    >>> [(verdict.cluster, verdict.accepted) for verdict in verdicts]
    [('a', True), ('b', False), ('c', False)]
    """
    settings, tokens = settings or GuardSettings(), tokens or {}
    here = {*norms, *trains}
    levels = {name: state.clusters.get(name, NormLevel()) for name in norms}
    norms = {name: one / levels[name].times(tokens.get(name, 0), settings) for name, one in norms.items()}
    patience = max(_MIN_IN_A_ROW, -(-settings.restart_after // len(here)))
    verdicts = tuple(_verdict(state, name, norms, here, settings) for name in sorted(norms))
    known = dict(state.clusters)
    for verdict in verdicts:
        if math.isfinite(verdict.norm) and verdict.norm > 0:
            name = verdict.cluster
            known[name] = _after(levels[name], verdict, settings, patience, tokens.get(name, 0))
    return GuardState(clusters=known), verdicts


def _verdict(
    state: GuardState, cluster: str, norms: Mapping[str, float], here: Collection[str], settings: GuardSettings
) -> PushVerdict:
    norm = norms[cluster]
    if not math.isfinite(norm):
        return PushVerdict(cluster=cluster, norm=norm, accepted=False, reason=f"norm is {norm}, not finite")
    limit, why = _limit(state, cluster, norms, here, settings)
    accepted = norm <= limit
    reason = f"norm {norm:.4g} {'within' if accepted else 'over'} {limit:.4g}, {why}"
    return PushVerdict(cluster=cluster, norm=norm, accepted=accepted, reason=reason)


def _limit(
    state: GuardState, cluster: str, norms: Mapping[str, float], here: Collection[str], settings: GuardSettings
) -> tuple[float, str]:
    """Return the largest norm that a cluster may have now, and what that is."""
    known = state.clusters
    others = [known[name] for name in here if name != cluster and name in known]
    usual = [one.usual for one in others if one.usual is not None]
    of_others = settings.wild * max(usual, default=math.inf)
    told = f"{settings.wild:g} times the largest usual norm of the others"
    own = known.get(cluster, NormLevel())
    limit = own.limit(settings)
    if limit is not None:
        if len(usual) > 1 and of_others < limit:
            return of_others, told
        return limit, f"{settings.factor:g} deviations over its usual {own.usual:.4g}"
    if 2 * len(usual) > len(others):
        return of_others, f"{told}, since it is new"
    seen = [(known[name].seen if name in known else None) or norms.get(name) for name in here]
    limit = settings.wild * median_low([one for one in seen if one and math.isfinite(one)] or [math.inf])
    return limit, f"{settings.wild:g} times the median of all, since most are new"


def _after(
    before: NormLevel, verdict: PushVerdict, settings: GuardSettings, patience: int, tokens: float
) -> NormLevel:  # fmt: skip
    """Take in a norm that is finite and not 0."""
    if verdict.accepted:
        after = (
            _warmer(before, verdict.norm, settings) if before.mean is None else _moved(before, verdict.norm, settings)
        )
        return replace(after, last=verdict.norm, tokens=_usual_tokens(before, tokens, settings), refused_in_row=0)
    if before.refused_in_row + 1 >= patience:
        return NormLevel(last=verdict.norm)
    return replace(before, last=verdict.norm, refused_in_row=before.refused_in_row + 1)


def _moved(before: NormLevel, norm: float, settings: GuardSettings) -> NormLevel:
    """Follow a norm that was let in, by the paper's recurrences, as far as one may move them."""
    assert before.mean is not None
    alpha = max(settings.smoothing, 1 / (before.count + 1))
    step = max(-_REACH, min(_REACH, math.log(norm) - before.mean))
    squares = (1 - alpha) * before.deviation**2 + alpha * ((1 - alpha) * step) ** 2
    count = before.count + (alpha > settings.smoothing)
    return replace(before, mean=before.mean + alpha * step, deviation=_bounded(math.sqrt(squares)), count=count)


def _usual_tokens(before: NormLevel, tokens: float, settings: GuardSettings) -> float:
    if not (before.tokens and tokens):
        return before.tokens or float(tokens)
    alpha = max(settings.smoothing, 1 / (max(before.count, len(before.norms)) + 1))
    return before.tokens * math.exp(alpha * max(-_REACH, min(_REACH, math.log(tokens / before.tokens))))


def _warmer(before: NormLevel, norm: float, settings: GuardSettings) -> NormLevel:
    """Take in one of the first; after enough of them, leave out those that were wild by all of them."""
    norms = (*before.norms, norm)
    if len(norms) < settings.warm_up:
        return replace(before, norms=norms)
    kept = [math.log(one) for one in norms if one <= settings.wild * median(norms)]
    return NormLevel(mean=fmean(kept), deviation=_bounded(pstdev(kept)), count=len(kept))


def _bounded(deviation: float) -> float:
    least, most = _DEVIATIONS
    return max(least, min(most, deviation))


def _exp(logarithm: float) -> float:
    """Return what a logarithm is of, or the largest number if that is larger."""
    return math.exp(min(logarithm, 700.0))
