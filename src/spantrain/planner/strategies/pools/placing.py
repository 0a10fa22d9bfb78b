"""Which sites run which replicas: stages along the sites, or whole pipelines inside of them.

The seconds of one pipeline under 1F1B (Narayanan et al., PipeDream, SOSP 2019), all micro-batches alike.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from spantrain.planner.strategies.pools.costs import PoolCosts, PoolPlan, PoolReplica, PoolStage, Runs, devices_of
from spantrain.planner.strategies.pools.recipes import ChainCosts, Guess

_ENDS = 2
"""Hosts of a pipeline that send in one direction only: the first one and the last one."""
_SETTLED = 8
"""Micro-batches beyond the pipeline's depth after which each one takes as long as the one before."""


class StageSeconds(NamedTuple):
    """What a stage of one pipeline does with one micro-batch, its part in messages included."""

    forward_s: float
    backward_s: float
    hold_forward_s: float = 0.0
    """Seconds for which it is kept after a forward, while the next stage may begin."""
    hold_backward_s: float = 0.0
    delay_up_s: float = 0.0
    """Until the stage after it may begin with what it sent."""
    delay_down_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds for which a micro-batch keeps it."""
        return self.forward_s + self.backward_s + self.hold_forward_s + self.hold_backward_s


def one_f_one_b_ends_s(stages: Sequence[StageSeconds], micro_batches: int, *, deep: bool = False) -> list[float]:
    """Return when each stage is done with a step.

    Stage s of P does P-s forwards, then a backward and a forward in turn; `deep`: 2(P-s)-1 of them, so that messages
    pass behind other work (the in-flight count K_p of Ye et al., Asteroid, MobiCom 2024). When the first micro-batches
    have settled the pipeline, each further one takes as long as the slowest stage; that part is not gone through.

    >>> one_f_one_b_ends_s([StageSeconds(1, 2), StageSeconds(1, 2)], 4)
    [15.0, 13.0]
    """
    gone_through = min(micro_batches, (2 if deep else 1) * len(stages) + _SETTLED)
    rest_s = (micro_batches - gone_through) * max(stage.busy_s for stage in stages)
    return [end + rest_s for end in _gone_through_s(stages, gone_through, deep=deep)]


def _gone_through_s(stages: Sequence[StageSeconds], count: int, *, deep: bool) -> list[float]:
    """Go through the actions of all stages, each in its order, as far as what they need is there."""
    depth = len(stages)
    free, forwards, backwards = [0.0] * depth, [0] * depth, [0] * depth
    activations = [[0.0] * count, *([] for _ in range(depth - 1))]
    gradients: list[list[float]] = [[] for _ in range(depth)]
    waiting = list(range(depth))
    while waiting:
        s = waiting.pop()
        stage, left = stages[s], depth - s
        warm_up = min(2 * left - 1 if deep else left, count)
        while backwards[s] < count:
            f, b = forwards[s], backwards[s]
            if f < count and f - b < warm_up:
                if f >= len(activations[s]):
                    break
                end = max(free[s], activations[s][f]) + stage.forward_s
                forwards[s], free[s] = f + 1, end + stage.hold_forward_s
                if s + 1 < depth:
                    activations[s + 1].append(end + stage.delay_up_s)
                    waiting.append(s + 1)
                else:
                    gradients[s].append(end)
            else:
                if b >= len(gradients[s]):
                    break
                end = max(free[s], gradients[s][b]) + stage.backward_s
                backwards[s], free[s] = b + 1, end + stage.hold_backward_s
                if s:
                    gradients[s - 1].append(end + stage.delay_down_s)
                    waiting.append(s - 1)
    return free


Timing = tuple[float, float]
"""Seconds of a step, and US dollars of its traffic (nothing where money does not count)."""


class Placer:
    """Makes plans of guesses on given sites, and reckons what they take."""

    def __init__(
        self, chains: ChainCosts, members: Mapping[int, Sequence[int]], *, counts_money: bool, deep: bool
    ) -> None:
        """Keep, for the pool that stands for a kind, all pools of that kind in the order in which they are used.

        `deep`: stages may hold more micro-batches than 1F1B does.
        """
        self._chains, self._pools_of = chains, members
        self._counts_money, self._deep = counts_money, deep
        self._costs: PoolCosts = chains.costs

    def plans(self, guess: Guess) -> Iterator[PoolPlan]:
        """Yield the ways to place a guess, each once; none where hosts are too small for what remains of a pool."""
        several = any(len(pools) > 1 for pools in self._pools_of.values())
        rows = [self._inside(guess)] if several else []
        if not (several and self._costs.inside_hosts):
            rows.append(self._along(guess))
        for row in dict.fromkeys(filter(None, rows)):
            yield self._plan(guess, row)

    def least_s(self, plan: PoolPlan, most_s: float = math.inf) -> float:
        """Return what `timing` is not under, for a part of its effort; less of that once it is over `most_s`."""
        sums = self._costs.gradient_sums_s(plan)
        found = max(sums)
        for pipeline in self._unlike(plan):
            carried_s = plan.micro_batches * self._slowest_link_s(plan, pipeline)
            first_s = 0.0
            for stage, sum_s in zip(self._seconds(plan, pipeline), sums, strict=True):
                found = max(found, max(first_s + plan.micro_batches * stage.busy_s, carried_s) + sum_s)
                first_s += stage.forward_s + stage.delay_up_s
        return found if found > most_s else found + self._costs.tied_s(plan)

    def timing(self, plan: PoolPlan) -> Timing:
        """Return what a plan takes: the slowest of its pipelines, and each stage's gradients when all of it is done."""
        ends = [0.0] * len(plan.stages)
        for pipeline in self._unlike(plan):
            found = one_f_one_b_ends_s(self._seconds(plan, pipeline), plan.micro_batches, deep=self._deep)
            # What messages wait for each other is no delay that other work hides.
            carried_s = plan.micro_batches * self._slowest_link_s(plan, pipeline)
            ends = [max(*pair, carried_s) for pair in zip(ends, found, strict=True)]
        sums = self._costs.gradient_sums_s(plan)
        update_s = max(self._costs.update_s(stage, plan.micro_batch) for stage in plan.stages)
        step_s = max(end + seconds for end, seconds in zip(ends, sums, strict=True)) + update_s
        step_s += self._costs.tied_s(plan)
        if not self._counts_money:
            return step_s, 0.0
        return step_s, self._costs.usd_of_traffic(plan)

    def _unlike(self, plan: PoolPlan) -> list[tuple[PoolReplica, ...]]:
        """Return the pipelines that differ: those of the same kinds over ways that are as fast take as long."""
        return list({self._looks(pipeline): pipeline for pipeline in plan.pipelines()}.values())

    def _looks(self, pipeline: Sequence[PoolReplica]) -> tuple[object, ...]:
        pools = [self._costs.pools[member.pool] for member in pipeline]
        members = ((pool.kind, pool.host_size, member.tp_degree) for pool, member in zip(pools, pipeline, strict=True))
        memory = (self._chains.memory_bytes(member.pool) for member in pipeline)
        return (*members, *memory, *(self._chains.distance_s(a.pool, b.pool) for a, b in pairwise(pipeline)))

    def _plan(self, guess: Guess, rows: Sequence[Runs]) -> PoolPlan:
        ends = (*guess.begins[1:], self._costs.units)
        return PoolPlan(
            micro_batch=guess.candidate.size,
            micro_batches=guess.candidate.micro_batches,
            stages=tuple(
                PoolStage(units=range(first, end), runs=runs)
                for first, end, runs in zip(guess.begins, ends, rows, strict=True)
            ),
            estimate_s=guess.step_s,
        )

    def _along(self, guess: Guess) -> tuple[Runs, ...] | None:
        """Fill stage after stage, from site after site; the wider groups of a stage first."""
        left = Counter({pool: self._costs.pools[pool].count for pools in self._pools_of.values() for pool in pools})
        rows = []
        for recipe in guess.candidate.recipes:
            row: list[tuple[PoolReplica, int]] = []
            for member, count in recipe:
                for pool in self._pools_of[member.pool]:
                    taken = min(count, left[pool] // member.tp_degree)
                    row += [(PoolReplica(pool, member.tp_degree), taken)] if taken else []
                    left[pool] -= taken * member.tp_degree
                    count -= taken
                if count:
                    return None
            rows.append(tuple(row))
        return tuple(rows)

    def _inside(self, guess: Guess) -> tuple[Runs, ...] | None:
        """Give every site as many whole pipelines as it has devices for, with one kind in every stage."""
        chain = [recipe[0][0] for recipe in guess.candidate.recipes]
        if any(len(recipe) > 1 for recipe in guess.candidate.recipes):
            return None
        needed = devices_of((member, 1) for member in chain)
        at_site: dict[str, dict[int, int]] = {}
        for family in needed:
            for pool in self._pools_of[family]:
                at_site.setdefault(self._costs.pools[pool].site, {})[family] = pool
        columns: list[tuple[dict[int, int], int]] = []
        left = guess.candidate.width
        for pools in at_site.values():
            if len(pools) == len(needed):
                room = min(self._costs.pools[pools[family]].count // count for family, count in needed.items())
                columns += [(pools, min(room, left))] if room and left else []
                left -= min(room, left)
        if left:
            return None
        return tuple(tuple((PoolReplica(column[m.pool], m.tp_degree), n) for column, n in columns) for m in chain)

    def _slowest_link_s(self, plan: PoolPlan, pipeline: Sequence[PoolReplica]) -> float:
        """Return for how long a micro-batch's messages keep the busiest link, or port of a host, between stages."""
        hops = [self._chains.hop(*pair, plan.micro_batch, plan.width) for pair in pairwise(pipeline)]
        through = self._hosts_in_line(plan, pipeline) > _ENDS
        cuts = (stage.units.start for stage in plan.stages[1:])
        kept = (max(hop.link_s[cut], hop.through_s[cut] * through) for hop, cut in zip(hops, cuts, strict=True))
        return float(max(kept, default=0.0))

    def _hosts_in_line(self, plan: PoolPlan, pipeline: Sequence[PoolReplica]) -> int:
        """Return how many hosts a pipeline goes through, about: stages of a pool fill hosts one after the other."""
        total = stage = 0
        for pool, run in groupby(pipeline, key=lambda member: member.pool):
            members = list(run)
            beside = sum(count for member, count in plan.stages[stage].runs if member.pool == pool)
            devices = sum(member.tp_degree for member in members) * beside
            total += min(len(members), -(-devices // self._costs.pools[pool].host_size))
            stage += len(members)
        return total

    def _seconds(self, plan: PoolPlan, pipeline: Sequence[PoolReplica]) -> list[StageSeconds]:
        size, count = plan.micro_batch, len(pipeline)
        hops = [self._chains.hop(pipeline[s], pipeline[s + 1], size, plan.width) for s in range(count - 1)]
        found = []
        for s, (stage, member) in enumerate(zip(plan.stages, pipeline, strict=True)):
            i, j = stage.units.start, stage.units.stop
            up, down = (hops[s] if s + 1 < count else None), (hops[s - 1] if s else None)
            forward, backward = self._chains.forward_s(member, size), self._chains.backward_s(member, size)
            found.append(
                StageSeconds(
                    forward_s=float(forward[j] - forward[i]) + (float(down.upper_forward_s[i]) if down else 0.0),
                    backward_s=float(backward[j] - backward[i]) + (float(up.lower_backward_s[j]) if up else 0.0),
                    hold_forward_s=float(up.lower_forward_s[j]) if up else 0.0,
                    hold_backward_s=float(down.upper_backward_s[i]) if down else 0.0,
                    delay_up_s=float(up.delay_forward_s[j]) if up else 0.0,
                    delay_down_s=float(down.delay_backward_s[i]) if down else 0.0,
                )
            )
        return found
