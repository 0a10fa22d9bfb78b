"""What links give beside what a simulation of the plan that runs expects of them: like with like.

The simulation's messages go through the same monitors as live ones, so what those get wrong, for messages of these
sizes and for devices that share a line, they get wrong on both sides.
"""

from collections.abc import Collection, Mapping
from statistics import median
from typing import Protocol

from spantrain.adaptation.network_state import LinkState, Pair
from spantrain.core.plan import Plan

_LEARNING = 3
"""Reports of a link after which it is known how this runtime measures its expected rate: their median, ..."""
_TRUSTED = 1.5
"""... within this factor; a link that is slow by more than that from the first step on is noticed all the same."""
_KEPT = 3
"""Simulated states of the links: the calm one, the present one, and one that is looked at."""


class Expects(Protocol):
    """What monitors should report of a plan."""

    def rates(self, plan: Plan, state: LinkState) -> Mapping[Pair, float]:
        """Return the rates that monitors would report, in bytes per second."""


class LinkWatch:
    """Learns on calm links how this runtime measures them, and compares."""

    def __init__(self, expects: Expects) -> None:
        self._expects = expects
        self._expected: list[tuple[Plan, LinkState, Mapping[Pair, float]]] = []
        """What was simulated last, the newest at the end."""
        self._first: dict[Pair, list[float]] = {}
        """Of each pair's first reports: how many times the expected rate it was."""

    def learn(self, plan: Plan, rates: Mapping[Pair, float], state: LinkState) -> dict[Pair, float]:
        """Return the rates of links of which it is known how this runtime measures them; learn of the others.

        While links are taken to be slow nothing is learnt: whether a link is fast again, or a link in use for the first
        time slow, is what is asked. It is taken for measured as the others are.
        """
        expected = self.expected(plan, state)
        learned = {}
        for pair, rate in rates.items():
            first = self._first.setdefault(pair, [])
            if len(first) == _LEARNING or not state.calm:
                learned[pair] = rate
            elif pair in expected:
                first.append(rate / expected[pair])
        return learned

    def factors(
        self, plan: Plan, rates: Mapping[Pair, float], state: LinkState, matter: Collection[Pair]
    ) -> dict[Pair, float]:
        """Return how many times the rate of a state each link gives.

        Links that are not slow in it get no faster, and those that do not matter no slower: what is measured of them is
        mostly software.
        """
        return {
            pair: factor
            for pair, factor in self.given(plan, rates, state).items()
            if (pair in matter if factor < 1 else state.speed(*pair) < 1)
        }

    def given(self, plan: Plan, rates: Mapping[Pair, float], state: LinkState) -> dict[Pair, float]:
        """Return the same of all links, whatever they matter."""
        expected = self.expected(plan, state)
        return {pair: rates[pair] / expected[pair] / self._usual(pair) for pair in rates.keys() & expected.keys()}

    def expected(self, plan: Plan, state: LinkState) -> Mapping[Pair, float]:
        """Return the rates that monitors would report, simulated once for a plan and a state."""
        for known_plan, known_state, known in self._expected:
            if known_state == state and known_plan.stages == plan.stages:
                return known
        found = self._expects.rates(plan, state)
        self._expected = [*self._expected[-_KEPT + 1 :], (plan, state, found)]
        return found

    def _usual(self, pair: Pair) -> float:
        """Return how many times the expected rate is measured of a link when all is well."""
        known = {other: median(first) for other, first in self._first.items() if len(first) == _LEARNING}
        usual = known[pair] if pair in known else median(known.values()) if known else 1.0
        return min(_TRUSTED, max(1 / _TRUSTED, usual))
