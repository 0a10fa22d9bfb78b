"""Devices as a graph: how fast each two talk; which belong together, in which order, and how to deal them out."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, pairwise

import numpy as np

from spantrain.cost.network import NetworkCost

Devices = tuple[str, ...]
_SWAPS = 2
"""Swaps for each device, at most, when devices are dealt out."""


class DeviceGraph:
    """Bytes per second between each two of some devices: the slower way of both.

    Raises:
        ProfileError: a link between two of them was not measured.
    """

    def __init__(self, devices: Sequence[str], network: NetworkCost) -> None:
        self.devices = tuple(devices)
        self._place = {name: place for place, name in enumerate(self.devices)}
        self._rates = np.full((len(self.devices),) * 2, np.inf)
        for one, other in combinations(self.devices, 2):
            rate = min(network.link(*way).bandwidth_bytes_per_s for way in ((one, other), (other, one)))
            self._rates[self._place[one], self._place[other]] = rate
            self._rates[self._place[other], self._place[one]] = rate
        self.between = cache(self._between)
        """The mean rate between devices of two groups."""

    def _between(self, ones: Devices, others: Devices) -> float:
        return float(self._among(ones, others).mean())

    def _among(self, ones: Devices, others: Devices) -> np.ndarray:
        return self._rates[np.ix_([self._place[name] for name in ones], [self._place[name] for name in others])]

    def least_inside(self, group: Devices) -> float:
        """Return the rate of the slowest pair of a group; infinite for one device alone."""
        return float(self._among(group, group).min())

    def groupings(self) -> dict[int, tuple[Devices, ...]]:
        """Return groups of devices by their number: from each one alone, the two that talk fastest become one group.

        What is cut between few groups is so the slowest links (average linkage in the place of a minimum cut).
        """
        groups: list[Devices] = [(name,) for name in self.devices]
        found = {len(groups): tuple(groups)}
        means = {pair: self.between(*pair) for pair in combinations(groups, 2)}
        while len(groups) > 1:
            ones, others = max(means, key=lambda pair: means[pair])
            merged = (*ones, *others)
            groups = [merged if group == ones else group for group in groups if group != others]
            means = {pair: mean for pair, mean in means.items() if not {ones, others} & set(pair)}
            means |= {(merged, group): self.between(merged, group) for group in groups if group != merged}
            found[len(groups)] = tuple(groups)
        return found

    def chain(self, groups: Sequence[Devices], first: Devices) -> tuple[Devices, ...]:
        """Return groups in the order of a pipeline: next comes the one that talks fastest with the last."""
        order, left = [first], [group for group in groups if group != first]
        while left:
            order.append(max(left, key=lambda group: self.between(order[-1], group)))
            left.remove(order[-1])
        return tuple(order)

    def best_chain(self, groups: Sequence[Devices]) -> tuple[Devices, ...]:
        """Return the chain with the fastest hops in all, of those that begin with each of the groups."""
        chains = (self.chain(groups, first) for first in groups)
        return max(chains, key=lambda chain: sum(self.between(*pair) for pair in pairwise(chain)))

    def dealt(self, parts: int, weight: Mapping[str, float]) -> tuple[Devices, ...]:
        """Return devices dealt out evenly by weight, with slow links inside the parts and fast ones between them.

        For what crosses the parts is a model's gradients, and what crosses stages inside them activations.
        """
        part, held, counts = np.zeros(len(self.devices), dtype=int), [0.0] * parts, [0] * parts
        for name in sorted(self.devices, key=lambda name: -weight[name]):
            least = min(range(parts), key=lambda number: (held[number], counts[number]))
            part[self._place[name]] = least
            held[least] += weight[name]
            counts[least] += 1
        weights = np.array([weight[name] for name in self.devices])
        self._swap(part, weights[:, None] == weights[None, :])
        return tuple(
            tuple(name for name, own in zip(self.devices, part, strict=True) if own == number)
            for number in range(parts)
        )

    def _swap(self, part: np.ndarray, alike: np.ndarray) -> None:
        """Swap devices that are alike between parts, always the two that make links inside them slowest."""
        seconds = 1 / self._rates
        for _ in range(_SWAPS * len(part)):
            inside = seconds @ (part[:, None] == np.arange(part.max() + 1)[None, :])
            other = inside[:, part]
            own = other.diagonal()
            gained = other + other.T - 2 * seconds - own[:, None] - own[None, :]
            gained[~alike | (part[:, None] == part[None, :])] = 0.0
            one, two = np.unravel_index(gained.argmax(), gained.shape)
            if gained[one, two] <= 1e-9 * seconds.sum():
                return
            part[[one, two]] = part[[two, one]]
