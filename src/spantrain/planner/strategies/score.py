"""What is best: among plans that keep the constraints the least value, else the least that is broken.

An objective counts by weights: value = per_step + per_second * seconds + busy seconds and bytes, weighted.

Time, money and energy (`cost.money`) are all of this form for a given set of devices, with weights that
are not negative. So whatever bounds the seconds from below bounds the value from below.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TypeVar

from spantrain.config.prices import load_prices
from spantrain.core.cluster import Cluster, Device
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.cost.money import IDLE_POWER_RATIO, NETWORK_J_PER_BYTE, Prices, usd_per_second
from spantrain.errors import PlanError, ScheduleError
from spantrain.planner.request import Constraints, Evaluation, Objective, PlanRequest, Proposal

T = TypeVar("T")


def few_of_each(items: Iterable[T], sort: Callable[[T], object], *, each: int = 1, most: int) -> list[T]:
    """Return the first items, so many of each sort and so many in all.

    >>> few_of_each("aabac", str, each=2, most=3)
    ['a', 'a', 'b']
    """
    taken: Counter[object] = Counter()
    found: list[T] = []
    for item in items:
        taken[sort(item)] += 1
        if taken[sort(item)] <= each:
            found.append(item)
        if len(found) >= most:
            break
    return found


def sites_of(plan: Plan) -> frozenset[str]:
    """Return the sites that a plan uses."""
    return frozenset(plan.cluster.device_by_name[name].site for name in plan.devices)


def structure_of(plan: Plan) -> tuple[object, ...]:
    """Return the micro-batch of a plan and the kinds in each of its stages."""
    own = plan.cluster.device_by_name
    kinds = (tuple(sorted(own[name].kind for name in stage.devices)) for stage in plan.stages)
    return plan.stages[0].micro_batches[0].size, *kinds


def looks_of(plan: Plan, value: float) -> tuple[object, ...]:
    """Return what tells a plan of such a value from others, but for the names of devices, hosts and sites."""
    stages = ((stage.first_unit, tuple(replica.sample_share for replica in stage.replicas)) for stage in plan.stages)
    return structure_of(plan), f"{value:.9g}", *stages


class Weights(Record):
    """Weights of one objective on one cluster."""

    second: float
    """Weight of a second of the step, whatever is used."""
    second_by_device: Mapping[str, float]
    """Weight of a second of the step for each device in use."""
    busy_by_device: Mapping[str, float]
    """Weight of a second in which the device computes."""
    byte: float
    """Weight of a byte that leaves a site for another one."""
    usd_per_byte: Callable[[str, str], float]
    """What it costs besides, from a site to another."""
    paying: frozenset[str]
    """The sites that certainly pay that."""
    site_by_device: Mapping[str, str]

    @cached_property
    def counts_traffic(self) -> bool:
        """Whether bytes between sites count."""
        return self.byte > 0 or bool(self.paying)

    @cached_property
    def counts_more(self) -> bool:
        """Whether anything but the seconds of the step counts."""
        return self.counts_traffic or any(any(own.values()) for own in (self.second_by_device, self.busy_by_device))

    def per_byte(self, source: str, target: str) -> float:
        """Return the weight of a byte from a device to another."""
        here, there = self.site_by_device[source], self.site_by_device[target]
        if here == there:
            return 0.0
        return self.byte + (self.usd_per_byte(here, there) if here in self.paying else 0.0)

    def per_second(self, devices: Iterable[str]) -> float:
        """Return the weight of a second of the step when these devices are used."""
        if not self.counts_more:
            return self.second
        return self.second + sum(self.second_by_device[name] for name in devices)


def weights_of(cluster: Cluster, objective: Objective, global_batch: int) -> Weights:
    """Return the weights of an objective; infinite where a device has no price."""
    second, busy = {}, {}
    prices = Prices(cluster, load_prices()) if objective is Objective.COST else None
    for device in cluster.devices:
        second[device.name], busy[device.name] = _of_device(cluster, device, prices, objective, global_batch)
    several = len(cluster.sites) > 1
    return Weights(
        second=1.0 if objective is Objective.THROUGHPUT else 0.0,
        second_by_device=second,
        busy_by_device=busy,
        byte=NETWORK_J_PER_BYTE / global_batch if several and objective is Objective.ENERGY else 0.0,
        usd_per_byte=cache(prices.usd_per_byte) if prices is not None else lambda _here, _there: 0.0,
        paying=_paying(cluster, prices) if several else frozenset(),
        site_by_device={device.name: device.site for device in cluster.devices},
    )


def _of_device(
    cluster: Cluster, device: Device, prices: Prices | None, objective: Objective, global_batch: int
) -> tuple[float, float]:
    """Return the weights of a second in use and of a busy second."""
    power_w = cluster.kind_by_name[device.kind].power_w
    idle, work = IDLE_POWER_RATIO * power_w, (1 - IDLE_POWER_RATIO) * power_w
    if objective is Objective.ENERGY:
        return idle / global_batch, work / global_batch
    if prices is None:
        return 0.0, 0.0
    price = prices.of(device)
    return (float("inf"), 0.0) if price is None else usd_per_second(price, power_w)


def _paying(cluster: Cluster, prices: Prices | None) -> frozenset[str]:
    """Return the sites that certainly pay for what leaves them: those where everything is rented.

    Others do once one of their rented devices is in use.
    """
    if prices is None:
        return frozenset()
    owned = {device.site for device in cluster.devices if (price := prices.of(device)) is None or not price.is_rented}
    return frozenset(site.name for site in cluster.sites) - owned


_WORTH = 1.01
"""Factor by which a plan must be better to have cuts rounded."""
_NO_PRICE = 10.0
"""How much is broken, relative to a limit on money, where the money is not known."""


@dataclass(frozen=True, order=True)
class Score:
    """Compared in this order."""

    broken: float
    """By how much limits are broken, each relative to itself; 0 if none is."""
    value: float
    """The objective's value."""

    def is_clearly_under(self, other: "Score", worth: float = _WORTH) -> bool:
        """Whether it is better by enough to pay for what plans have for nothing else."""
        return self.broken < other.broken or (self.broken == other.broken and self.value * worth < other.value)


class Scorer:
    """Simulates plans and scores them; asks for each plan once."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        money = (request.constraints.max_usd_per_step, request.constraints.max_usd_per_hour)
        self._usd = None
        if any(limit is not None for limit in money):
            self._usd = weights_of(request.profile.cluster, Objective.COST, request.job.global_batch)
        self._by_devices: dict[frozenset[str], tuple[float, float]] = {}
        self.most_s = request.constraints.slowest_step_s(request.job.global_batch)
        """The longest step that keeps the constraints on time."""
        self.is_free = request.constraints == Constraints()
        """Whether there are no constraints that a plan could break."""
        self.simulated = 0
        """How many plans have been simulated."""

    def score(self, plan: Plan) -> tuple[Score, Evaluation] | None:
        """Return the score of a plan, lower is better; None if it cannot run, as under a static order without room."""
        self.simulated += 1
        try:
            evaluation = self._request.evaluate(plan)
        except (PlanError, ScheduleError):
            return None
        broken = self.broken_by_devices(plan.devices) + self._broken_by_figures(evaluation)
        broken += len(evaluation.over_memory)
        return Score(broken, evaluation.value(self._request.objective)), evaluation

    def broken_by_devices(self, devices: tuple[str, ...]) -> float:
        """Return how many demands on devices are broken."""
        return float(len(self._request.constraints.broken_by_devices(self._request.profile.cluster, devices)))

    def least_broken(self, devices: tuple[str, ...], step_s: float) -> float:
        """Return by how much a plan on these devices breaks limits at least, if its step takes at least so long."""
        if self.is_free:
            return 0.0
        key = frozenset(devices)
        known = self._by_devices.get(key)
        if known is None:
            usd_per_s = self._usd.per_second(devices) if self._usd is not None else 0.0
            known = self._by_devices[key] = (self.broken_by_devices(devices), usd_per_s)
        broken, usd_per_s = known
        limits = self._request.constraints
        broken += max(0.0, step_s / self.most_s - 1)
        for most, usd in ((limits.max_usd_per_step, usd_per_s * step_s), (limits.max_usd_per_hour, usd_per_s * 3600)):
            if most is not None:
                broken += min(_NO_PRICE, max(0.0, usd / most - 1))
        return broken

    def _broken_by_figures(self, evaluation: Evaluation) -> float:
        limits, step_s, usd = self._request.constraints, evaluation.step_s, evaluation.usd_per_step
        broken = max(0.0, step_s / self.most_s - 1)
        for most, got in (
            (limits.max_usd_per_step, usd),
            (limits.max_usd_per_hour, None if usd is None else usd * 3600 / step_s),
        ):
            if most is not None:
                broken += _NO_PRICE if got is None else max(0.0, got / most - 1)
        return broken


def scored(request: PlanRequest, proposals: Iterable[Proposal]) -> list[tuple[Score, Proposal]]:
    """Return proposals with their scores, best first; what cannot run comes last."""
    scorer, worst = Scorer(request), Score(math.inf, math.inf)
    rows = [(worst if (found := scorer.score(one.plan)) is None else found[0], one) for one in proposals]
    return sorted(rows, key=lambda row: row[0])


_SITES, _NEAR_SITES = 3, 1.1
"""Sites whose best plans are proposed in any case, and by how much those may be over the best of them."""


def best_inside(rows: Iterable[tuple[Score, T]], plan_of: Callable[[T], Plan]) -> list[T]:
    """Return the best inside each of the best sites, of what is given best first."""
    alone = [(score, sites_of(plan_of(found)), found) for score, found in rows]
    alone = [row for row in alone if len(row[1]) == 1]
    near = (row for row in alone if row[0].value <= _NEAR_SITES * alone[0][0].value)
    return [found for _, _, found in few_of_each(near, lambda row: row[1], most=_SITES)]
