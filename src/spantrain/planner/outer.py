"""Which sites an outer optimizer should join, who serves it, and how long an exchange takes.

After DiLoCo (Douillard et al., 2023): each group takes H inner steps by itself, then the mean of their
pseudo-gradients is an outer step. Kept: the round, and that all parameters go there and back once in it. Not kept: any
claim on how many samples such training needs. Parameters travel as float32, up to the server all at once and down
again; the server is the group's leader that makes this shortest. Groups get parts of the global batch by their speed,
so that their inner steps end together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from spantrain.core.spans import apportion
from spantrain.cost.network import NetworkCost

__all__ = ["Exchange", "Joined", "best_join", "exchange_of"]

_ALL_SETS_UP_TO = 8


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The exchange at the end of a round."""

    server: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Sites that train by themselves, with their parts of the global batch."""

    samples: Mapping[str, int]
    """By site."""
    exchange: Exchange
    samples_per_s: float
    """If a site's speed were the same for its part as for the whole global batch."""


def exchange_of(network: NetworkCost, leaders: Sequence[str], parameter_bytes: int) -> Exchange:
    """Return the quickest exchange between leaders of groups, one of which serves.

    Raises:
        ProfileError: a link between two of them was not measured.
    """
    found = []
    for server in leaders:
        up = [(leader, server) for leader in leaders if leader != server]
        down = [(server, leader) for leader, _ in up]
        seconds = sum(
            max(network.latency_s(*pair) + busy_s for pair, busy_s in zip(pairs, busy, strict=True))
            for pairs in (up, down)
            for busy in (network.busy_together_s(pairs, parameter_bytes),)
        )
        found.append(Exchange(server=server, seconds=seconds))
    return min(found, key=lambda exchange: exchange.seconds)


def best_join(
    network: NetworkCost,
    speeds: Mapping[str, float],
    leaders: Mapping[str, str],
    parameter_bytes: int,
    global_batch: int,
    inner_steps: int,
) -> Joined | None:
    """Return the sites (two at least) that do most samples a second; None if no two can share the global batch.

    `speeds` are samples per second by site, `leaders` a device of each that speaks for it. Of many sites, only the
    fastest ones of each number are tried.
    """
    names = sorted(speeds, key=lambda name: -speeds[name])
    if len(names) <= _ALL_SETS_UP_TO:
        sets = [chosen for count in range(2, len(names) + 1) for chosen in combinations(names, count)]
    else:
        sets = [tuple(names[:count]) for count in range(2, len(names) + 1)]
    found = []
    for chosen in sets:
        samples = apportion(global_batch, [speeds[name] for name in chosen])
        if min(samples) == 0:
            continue
        exchange = exchange_of(network, [leaders[name] for name in chosen], parameter_bytes)
        step_s = max(count / speeds[name] for name, count in zip(chosen, samples, strict=True))
        rate = inner_steps * global_batch / (inner_steps * step_s + exchange.seconds)
        joined = Joined(samples=dict(zip(chosen, samples, strict=True)), exchange=exchange, samples_per_s=rate)
        found.append(joined)
    return max(found, key=lambda joined: joined.samples_per_s, default=None)
