"""What each push of a window weighs in the mean, and what part of a step the window is.

Di-PS, 4.1, step 3 and algorithm 1. Kept: a push weighs as many tokens as were trained on for it. Decided here, since a
whole step for each window multiplies the outer rate by the windows of a round, and training may then diverge:

- A window is a part of a step: the weight of its pushes over the tokens of one push of every cluster. A shard steps
  accordingly, so that the parts of a round come to what one step of all would (see `numerics`).
- A cluster's next push is taken to be as large as its last; that of one that never pushed as the mean of the others.
  Who does not train (`trainers`) and whose last push was left out (`guard`) is taken to be away.
- A cluster that has gone still counts for pushes that began no later than its own last: they are what is left of the
  round that it was in. Else the last one of all to end would go a whole step, momentum and all, with a few tokens.
- Asked for by name: a push weighs less, the more versions were made since the one that it began from. What it loses is
  missing from the part too, or a push alone in its window would lose nothing.
- Tokens are what clusters say. One counts for `_MOST` times as many a second as the next fastest at most, whatever it
  says and however often it pushes.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.policy.transfers.exchanges import Push

_MOST = 10.0
_PUSHES = 4
"""Of each cluster, whose largest tokens a second count."""


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """Of one window."""

    weights: Mapping[str, float]
    """By cluster; only what they are to each other matters."""
    tokens: Mapping[str, float]
    """Of its pushes, by cluster."""
    others: Mapping[str, float]
    """Tokens of the last pushes of clusters that have none in it."""
    unknown: int = 0
    """Clusters of which nothing is known."""
    whole: bool = False
    """Whether it is a step of all in any case."""

    def part(self, clusters: Collection[str]) -> float:
        """Return what part of a step the pushes of these are: over 0, at most 1. The rest of the window is as away."""
        if self.whole:
            return 1.0
        known = [*self.others.values(), *(self.tokens[name] for name in clusters)]
        expected = sum(known) * (1 + self.unknown / len(known))
        return min(1.0, sum(self.weights[name] for name in clusters) / expected)


class TokenRates:
    """The tokens a second that clusters say, and what of it counts.

    >>> rates = TokenRates()
    >>> rates.counted({"a": 600, "b": 10**12}, {"a": 60.0, "b": 2.0}, {"a": 500.0, "b": 0.0})
    ({'a': 600.0, 'b': 200.0}, {'a': 500.0, 'b': 0.0})
    """

    def __init__(self) -> None:
        self._told: dict[str, deque[float]] = {}

    def counted(
        self, tokens: Mapping[str, int], spans_s: Mapping[str, float], last_tokens: Mapping[str, float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return what counts of the tokens of pushes, and of those of each cluster's last push.

        `spans_s`: the seconds that each push took; 0 where that is not known, which is as it says.
        """
        here = {*tokens, *last_tokens}
        self._told = {name: told for name, told in self._told.items() if name in here}
        for name, span_s in spans_s.items():
            if span_s > 0:
                self._told.setdefault(name, deque(maxlen=_PUSHES)).append(tokens[name] / span_s)
        rates = {name: max(told) for name, told in self._told.items()}
        most = _MOST * sorted(rates.values())[-2] if len(rates) > 1 else math.inf
        fair = {name: min(1.0, most / rate) if rate else 1.0 for name, rate in rates.items()}
        counted = {
            name: min(float(count), most * spans_s[name]) if spans_s[name] > 0 else float(count)
            for name, count in tokens.items()
        }
        return counted, {name: count * fair.get(name, 1.0) for name, count in last_tokens.items()}


def weigh(
    pushes: Collection[Push], *, version: int, tokens: Mapping[str, float], last_tokens: Mapping[str, float],
    settings: OuterSettings,
) -> Weighing:  # fmt: skip
    """Weigh the pushes of a window.

    `version` is the newest; `tokens`: what counts of each push's; `last_tokens` has, for each cluster that trains, the
    tokens of its last push, or 0, and those of clusters that have gone in this round.

    >>> from spantrain.core.outer.events import Ticket
    >>> push = Push(ticket=Ticket(1, 1), cluster="a", base_version=2, tokens=600, progress=(), parameters=False)
    >>> last = {"a": 500.0, "b": 200.0, "c": 0.0}
    >>> weigh([push], version=5, tokens={"a": 600.0}, last_tokens=last, settings=OuterSettings()).part("a")
    0.5
    """
    others = {name: count for name, count in last_tokens.items() if name not in tokens}
    return Weighing(
        weights={one.cluster: tokens[one.cluster] / _age(one, version, settings.staleness_power) for one in pushes},
        tokens=tokens,
        others={name: count for name, count in others.items() if count},
        unknown=sum(not count for count in others.values()),
        whole=not settings.part_steps or any(push.parameters for push in pushes),
    )


def _age(push: Push, version: int, staleness_power: float) -> float:
    """Return by what an old push's weight is divided."""
    return math.pow(1 + max(0, version - push.base_version), staleness_power) if staleness_power else 1.0
