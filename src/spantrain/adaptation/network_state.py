"""How fast links are, as a part of what the plan was made for, found from what monitors report.

What is expected of them comes from a simulation of the plan that runs. Its messages go through the same monitors as
live ones, so what those get wrong, for messages of these sizes and for devices that share a line, they get wrong on
both sides: like is compared with like.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import field
from itertools import pairwise, permutations, product
from statistics import median
from typing import Protocol

from spantrain.adaptation.monitor import LinkExpectation
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.core.speed import LinkReport

Pair = tuple[str, str]
"""Sender and receiver, leaders of their replicas."""
Reports = Mapping[str, tuple[LinkReport, ...]]
"""By device: what it knows of its links."""

SURE, UNSURE = 0.75, 0.25
"""The part of its runs of messages that must agree on a rate: for it to be believed at once, and to be heard at all.

A step in which a link changes has up to half of them at the rate that is no longer.
"""
_NORMAL = 0.9
"""Part of the plan's speed from which on a link counts as normal."""


class LinkState(Record):
    """The present speeds."""

    speeds: Mapping[Pair, float] = field(default_factory=dict)
    """Part of the planned bandwidth, by pair whose link is slower than planned."""

    def __post_init__(self) -> None:
        wrong = {pair: speed for pair, speed in self.speeds.items() if not 0 < speed < math.inf}
        if wrong:
            raise ValueError(f"speeds must be positive, got {wrong}")

    def speed(self, source: str, target: str) -> float:
        """Return the speed from one device to another."""
        return self.speeds.get((source, target), 1.0)

    @property
    def calm(self) -> bool:
        """Whether all links are as planned."""
        return not self.speeds

    def changed(self, factors: Mapping[Pair, float]) -> "LinkState":
        """Return the state with speeds so many times as large; never faster than planned."""
        pairs = self.speeds.keys() | factors.keys()
        speeds = {pair: self.speeds.get(pair, 1.0) * factors.get(pair, 1.0) for pair in sorted(pairs)}
        return LinkState(speeds={pair: speed for pair, speed in speeds.items() if speed < _NORMAL})

    def assumed(self, plan: Plan) -> "LinkState":
        """Return the state with a guess of links that the plan does not use, so that nobody measured them.

        They are as slow as the slowest that leaves the same site or comes to the same site: what is slow may be a
        site's line, or all there is, and a plan that moves over to links in the belief that they are calm is a gamble.
        """
        site = {name: plan.cluster.device_by_name[name].site for name in plan.devices}
        used = used_pairs(plan)
        speeds = dict(self.speeds)
        for a, b in permutations(plan.devices, 2):
            if (a, b) not in used and site[a] != site[b]:
                near = [speed for (c, d), speed in self.speeds.items() if site[c] == site[a] or site[d] == site[b]]
                speeds |= {(a, b): min(near)} if near else {}
        return LinkState(speeds=dict(sorted(speeds.items())))

    def __str__(self) -> str:
        if self.calm:
            return "links as planned"
        told = sorted(self.speeds.items(), key=lambda entry: entry[1])
        slow = ", ".join(f"{source}->{target} {speed:.0%}" for (source, target), speed in told[:4])
        return f"links at a part of the planned rate: {slow}{' and others' if len(told) > 4 else ''}"


def measured_rates(reports: Reports, *, least: float = UNSURE) -> dict[Pair, float]:
    """Return the rates that the devices are as sure of as that, in bytes per second."""
    return {
        (device, link.peer): link.bytes_per_s
        for device, links in reports.items()
        for link in links
        if link.bytes_per_s is not None and link.confidence >= least
    }


def busy_links(reports: Reports, least_s: float) -> frozenset[Pair]:
    """Return the links that were busy for so many seconds or more in the last step."""
    return frozenset(
        (device, link.peer) for device, links in reports.items() for link in links if link.busy_s >= least_s
    )


def used_pairs(plan: Plan) -> frozenset[Pair]:
    """Return the pairs of leaders between which a plan's stages send, in both directions."""
    down = {
        (a.devices[0], b.devices[0])
        for here, there in pairwise(plan.stages)
        for a, b in product(here.replicas, there.replicas)
        if a.devices != b.devices
    }
    return frozenset(down | {(b, a) for a, b in down})


def expected_links(plan: Plan, device: str) -> dict[str, LinkExpectation]:
    """Return what the plan's cluster says of the links from a leader to those of the stages beside its own."""
    numbers = [number + way for number in plan.crew_of(device).numbers for way in (-1, 1)]
    beside = [plan.stages[index] for index in numbers if 0 <= index < len(plan.stages)]
    peers = {replica.devices[0] for other in beside for replica in other.replicas} - {device}
    ways = {peer: plan.cluster.link(device, peer) for peer in sorted(peers)}
    return {
        peer: LinkExpectation(bytes_per_s=way.bandwidth_bytes_per_s, round_trip_s=2 * way.latency_s)
        for peer, way in ways.items()
    }


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
        """How many times the expected rate each pair's first reports were."""

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
        # How many times the expected rate is measured of a link when all is well; of one not known yet, as of others.
        known = {pair: median(first) for pair, first in self._first.items() if len(first) == _LEARNING}
        middle = median(known.values()) if known else 1.0
        return {
            pair: rates[pair] / expected[pair] / min(_TRUSTED, max(1 / _TRUSTED, known.get(pair, middle)))
            for pair in rates.keys() & expected.keys()
        }

    def expected(self, plan: Plan, state: LinkState) -> Mapping[Pair, float]:
        """Return the rates that monitors would report, simulated once for a plan and a state."""
        for known_plan, known_state, known in self._expected:
            if known_state == state and known_plan.stages == plan.stages:
                return known
        found = self._expects.rates(plan, state)
        self._expected = [*self._expected[-_KEPT + 1 :], (plan, state, found)]
        return found
