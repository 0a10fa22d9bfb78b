"""What each push of a window weighs in the mean, and what part of a step the window is.

Di-PS, 4.1, step 3 and algorithm 1. Kept: a push weighs as many tokens as were trained on for it. Decided here, since a
whole step for each window multiplies the outer rate by the windows of a round, and training may then diverge:

- A window is a part of a step: the weight of its pushes over the tokens of one push of every cluster. A shard steps
  accordingly, so that the parts of a round come to what one step of all would (see `numerics`).
- A cluster's next push is taken to be as large as its last; that of one that never pushed as the mean of the others.
- A cluster that has gone still counts for pushes that began no later than its own last: they are what is left of the
  round that it was in. Else the last one of all to end would go a whole step, momentum and all, with a few tokens.
- Asked for by name: a push weighs less, the more versions were made since the one that it began from. What it loses is
  missing from the part too, or a push alone in its window would lose nothing.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from spantrain.policy.outer.exchanges import Push
from spantrain.policy.outer.settings import OuterSettings

__all__ = ["Weighing", "weigh"]


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """Of one window."""

    part: float
    """Of a step of all clusters; over 0, at most 1."""
    weights: Mapping[str, float]
    """By cluster; only what they are to each other matters."""


def weigh(
    pushes: Collection[Push], *, version: int, last_tokens: Mapping[str, int], settings: OuterSettings
) -> Weighing:
    """Weigh the pushes of a window.

    `version` is the newest; `last_tokens` has, for each cluster that is registered, the tokens of its last push, or 0,
    and those of clusters that have gone in this round.

    >>> from spantrain.core.outer_events import Ticket
    >>> push = Push(ticket=Ticket(1, 1), cluster="a", base_version=2, tokens=600, progress=(), parameters=False)
    >>> weigh([push], version=5, last_tokens={"a": 500, "b": 200, "c": 0}, settings=OuterSettings()).part
    0.5
    """
    weights = {push.cluster: _weight(push, version, settings.staleness_power) for push in pushes}
    if not settings.part_steps or any(push.parameters for push in pushes):
        return Weighing(part=1.0, weights=weights)
    tokens = {name: count for name, count in last_tokens.items() if count}
    tokens |= {push.cluster: push.tokens for push in pushes}
    unknown = len(last_tokens.keys() - tokens.keys())
    expected = sum(tokens.values()) * (1 + unknown / len(tokens))
    return Weighing(part=min(1.0, sum(weights.values()) / expected), weights=weights)


def _weight(push: Push, version: int, staleness_power: float) -> float:
    if not staleness_power:
        return push.tokens
    return push.tokens / math.pow(1 + max(0, version - push.base_version), staleness_power)
