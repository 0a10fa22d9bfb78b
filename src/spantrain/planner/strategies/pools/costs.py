"""What the search over pools is about: devices that stand for each other, plans of them, their costs, and the goal."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple, Protocol, TypeVar

import numpy as np

from spantrain.core.records import Bounds, Record
from spantrain.cost.span_tables import Array
from spantrain.cost.sums import around
from spantrain.planner.request import Constraints, Objective


class DevicePool(Record):
    """Devices of one kind, in hosts of one size, in one site."""

    kind: str
    site: str
    count: Annotated[int, Bounds(low=1)]
    host_size: Annotated[int, Bounds(low=1)]
    """Devices in one host, which is as many as a tensor-parallel group may have."""


class PoolReplica(NamedTuple):
    """One replica of a stage."""

    pool: int
    """Index of its pool."""
    tp_degree: int


Runs = tuple[tuple[PoolReplica, int], ...]
"""Replicas in an order, of those that are alike only how many follow each other."""


def devices_of(runs: Iterable[tuple[PoolReplica, int]]) -> Counter[int]:
    """Return how many devices of each pool replicas have."""
    found: Counter[int] = Counter()
    for member, count in runs:
        found[member.pool] += member.tp_degree * count
    return found


class PoolStage(Record):
    """Consecutive units and who runs them; the k-th replicas of all stages are one pipeline."""

    units: range
    runs: Runs
    """Its replicas in their order."""

    @property
    def members(self) -> tuple[PoolReplica, ...]:
        """All its replicas, one by one."""
        return tuple(member for member, count in self.runs for _ in range(count))

    @property
    def hops(self) -> Counter[tuple[PoolReplica, PoolReplica]]:
        """Who follows whom in a ring of them, the first one the last one, and how often."""
        found = Counter(around([member for member, _ in self.runs]))
        found.update({(member, member): count - (len(self.runs) > 1) for member, count in self.runs})
        return +found

    @property
    def width(self) -> int:
        """How many they are."""
        return sum(count for _, count in self.runs)


class PoolPlan(Record):
    """What runs where, by pool: 1F1B, one micro-batch size, as many replicas in every stage."""

    micro_batch: int
    """Samples of one replica at a time."""
    micro_batches: int
    """Micro-batches of each replica in a step."""
    stages: tuple[PoolStage, ...]
    estimate_s: float = 0.0
    """What the search expects of it."""

    @property
    def width(self) -> int:
        """Replicas of each stage."""
        return self.stages[0].width

    @property
    def devices_by_pool(self) -> Counter[int]:
        """How many devices of each pool it uses."""
        return devices_of(run for stage in self.stages for run in stage.runs)

    def pipelines(self) -> dict[tuple[PoolReplica, ...], int]:
        """Return the different pipelines, each with how many are like it."""
        found: Counter[tuple[PoolReplica, ...]] = Counter()
        ends = [list(accumulate(count for _, count in stage.runs)) for stage in self.stages]
        at, begin = [0] * len(ends), 0
        for end in sorted(set().union(*ends)):
            found[tuple(stage.runs[place][0] for stage, place in zip(self.stages, at, strict=True))] += end - begin
            at = [place + (own[place] == end) for own, place in zip(ends, at, strict=True)]
            begin = end
        return dict(found)


class HopSeconds(NamedTuple):
    """What the messages of one micro-batch between two neighbours take, by the cut they cross: entry j, the cut in
    front of unit j. Forward goes from the lower stage to the upper one, backward the other way.
    """

    lower_forward_s: Array
    """Seconds for which the sender of an activation is kept from its next action."""
    upper_forward_s: Array
    """Seconds for which its receiver is."""
    upper_backward_s: Array
    lower_backward_s: Array
    delay_forward_s: Array
    """From the end of the sending action until the receiver may begin, when no device is kept."""
    delay_backward_s: Array
    link_s: Array
    """Seconds for which the busier direction of the link is taken."""
    through_s: Array
    """Seconds for which a host between two others is at it: it passes on what goes up and what comes down."""


class PoolCosts(Protocol):
    """Seconds, bytes and money, for one model and one global batch."""

    @property
    def pools(self) -> tuple[DevicePool, ...]:
        """Who is there."""

    @property
    def units(self) -> int:
        """How many there are."""

    @property
    def global_batch(self) -> int:
        """Samples in a step."""

    def sizes(self) -> tuple[int, ...]:
        """Return the micro-batch sizes of one replica that may be tried, rising."""

    def degrees(self, pool: int, size: int) -> tuple[int, ...]:
        """Return the tensor-parallel degrees for which a micro-batch's seconds are known."""

    def fits_a_host(self, pool: int, devices: int) -> bool:
        """Whether a pipeline may have so many devices of a pool: not more than a host, where it must stay inside."""

    def forward_s(self, member: PoolReplica, size: int) -> Array:
        """Return running sums over units; entry j is the seconds of units 0 to j-1."""

    def backward_s(self, member: PoolReplica, size: int) -> Array:
        """Return running sums over units of the full backward."""

    def need_bytes(self, member: PoolReplica, size: int, left: int, micro_batches: int) -> Array:
        """Return the bytes of units i to j-1 as [i, j]; `left`: the stages from this one to the last."""

    def memory_bytes(self, pool: int) -> int:
        """Return what a device has."""

    @property
    def inside_hosts(self) -> bool:
        """Whether the devices of a pool that a pipeline has must be in one host."""

    @property
    def width_matters(self) -> bool:
        """Whether what messages take depends on how many pipelines there are, since they share links."""

    def hop(self, lower: PoolReplica, upper: PoolReplica, size: int, width: int) -> HopSeconds:
        """Return what messages between replicas on different hosts take when so many pipelines send at once."""

    def site_distance_s(self, a: int, b: int) -> float:
        """Return the seconds of a message of a mebibyte from one host of a pool to one of another, or to the next."""

    def least_step_s(self, sites: Sequence[str]) -> float:
        """Return what no step is under that devices of several of these sites do, or of the only one."""

    def gradient_sums_s(self, plan: PoolPlan) -> list[float]:
        """Return by stage the seconds of the sum of its gradients over its replicas."""

    def tied_s(self, plan: PoolPlan) -> float:
        """Return the seconds of the sums of parameters that several stages share."""

    def sums_across_s(self, a: int, b: int, width: int, stages: Array) -> Array:
        """Return what sums over so many replicas take, by the number of stages, if all cross these pools' sites."""

    def update_s(self, stage: PoolStage, size: int) -> float:
        """Return the seconds of the slowest member's update."""

    def sums_s(self, member: PoolReplica, width: int) -> Array:
        """Return about what summing gradients over so many replicas of one pool takes, as running sums over units."""

    def usd_per_s(self, pool: int) -> float:
        """Return what a device costs."""

    def usd_of_traffic(self, plan: PoolPlan) -> float:
        """Return what a step's traffic between sites costs."""


_Figures = TypeVar("_Figures", float, Array)
_ROUGHLY = 1.25
"""Factor by which a guess may be wrong."""


class Goal(Record):
    """Seconds or US dollars of a step, with limits on both."""

    cheapest: bool = False
    """Whether money is what has to be little, and not time."""
    most_step_s: float = math.inf
    most_usd: float = math.inf
    """Per step."""
    most_usd_per_s: float = math.inf

    @staticmethod
    def of(objective: Objective, constraints: Constraints, global_batch: int) -> "Goal":
        """Return the goal of a request; energy is taken for money, which it mostly follows."""
        limits = constraints
        return Goal(
            cheapest=objective is not Objective.THROUGHPUT,
            most_step_s=limits.slowest_step_s(global_batch),
            most_usd=math.inf if limits.max_usd_per_step is None else limits.max_usd_per_step,
            most_usd_per_s=math.inf if limits.max_usd_per_hour is None else limits.max_usd_per_hour / 3600,
        )

    @property
    def counts_money(self) -> bool:
        """Whether money matters at all."""
        return self.cheapest or min(self.most_usd, self.most_usd_per_s) < math.inf

    @property
    def has_limits(self) -> bool:
        """Whether anything may be too much."""
        return min(self.most_step_s, self.most_usd, self.most_usd_per_s) < math.inf

    def score(self, step_s: float, usd_per_s: float, usd_of_traffic: float = 0.0) -> tuple[float, float, float]:
        """Return what is compared: by how much limits are broken, the value, then the seconds."""
        usd = usd_per_s * step_s + usd_of_traffic
        broken = max(0.0, step_s / self.most_step_s - 1) + max(0.0, usd / self.most_usd - 1)
        broken += max(0.0, usd_per_s / self.most_usd_per_s - 1)
        return broken, usd if self.cheapest else step_s, step_s

    def value(self, step_s: _Figures, usd: _Figures) -> _Figures:
        """Return what has to be little: of a plan, or of many guesses."""
        return usd if self.cheapest else step_s

    def hopeless(self, least_s: float, least_usd: float, best: tuple[float, float]) -> bool:
        """Whether what takes at least so much breaks a limit, or is no better than what is known, by far.

        `best`: seconds and US dollars of the best plan that keeps all limits.
        """
        if least_s > self.most_step_s * _ROUGHLY or least_usd > self.most_usd * _ROUGHLY:
            return True
        return (least_usd > best[1] * _ROUGHLY) if self.cheapest else (least_s > best[0] * _ROUGHLY)

    def most_step_to_look_at_s(self, best_s: float) -> float:
        """Return the longest step that is worth a closer look, when one that keeps the limits takes so long."""
        return self.most_step_s * _ROUGHLY if self.cheapest else best_s * _ROUGHLY

    def tightness(self, step_s: Array, usd_per_s: Array) -> Array:
        """Return what is used up of the tightest limit; over 1: it is broken."""
        usd = usd_per_s * step_s
        found: Array = np.maximum(step_s / self.most_step_s, usd / self.most_usd)
        return np.maximum(found, usd_per_s / self.most_usd_per_s)
