"""Plans for what Megatron-like frameworks run, on a folder of figures measured by others: search, simulate, compare."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from spantrain.errors import InfeasiblePlanError
from spantrain.planner.request import Constraints, Objective
from spantrain.planner.strategies.pools.costs import DevicePool, Goal, PoolPlan
from spantrain.planner.strategies.pools.search import PoolSearch
from spantrain_studies.reference.costs import predict_plan
from spantrain_studies.reference.platform import Platform
from spantrain_studies.reference.pools import ReferencePools, pools_of, reference_plan
from spantrain_studies.reference.types import Reference, ReferencePlan

_SIMULATED = 8


@dataclass(frozen=True, kw_only=True)
class ReferenceFigures:
    """What a plan would do, by the simulator that `spantrain validate` checks against measured runs."""

    plan: ReferencePlan
    step_s: float
    usd_per_step: float
    """Devices and traffic between zones."""
    peak_bytes: int
    """Of the fullest device."""
    over_memory: tuple[str, ...]
    """Stages and kinds that hold more than they have, by our figures."""
    counted_bytes: tuple[int, ...]
    """By stage: what that framework's own planner counts on the device that needs most."""
    over_counted: tuple[int, ...]
    """Stages of which a device has less than that."""
    devices: Mapping[str, int]
    """In use, by `kind in zone`."""
    over_available: tuple[str, ...]
    """Kinds and zones of which more are used than there are."""
    search_s: float = 0.0
    """Of the search that found it, simulations included."""
    simulated: int = 0

    @property
    def valid(self) -> bool:
        """Whether it fits, by both ways to count memory, and uses what is there."""
        return not (self.over_memory or self.over_counted or self.over_available)


class ReferencePlanner:
    """Plans and judges plans for one model of a folder on so many devices.

    Raises:
        PlanError: the folder does not have the model, a kind, or prices.
    """

    def __init__(
        self,
        reference: Reference,
        platform: Platform,
        *,
        model: str,
        global_batch: int,
        available: Mapping[tuple[str, str], int],
    ) -> None:
        """Keep them; devices are counted by kind and zone."""
        self._reference, self._platform, self._model, self._batch = reference, platform, model, global_batch
        self.pools: tuple[DevicePool, ...] = pools_of(reference, available)
        self._costs = ReferencePools(reference, model, global_batch, self.pools, platform)

    def plan(
        self, objective: Objective = Objective.THROUGHPUT, constraints: Constraints | None = None
    ) -> ReferenceFigures:
        """Search, simulate the best few, and return the best of those.

        Raises:
            InfeasiblePlanError: nothing fits, or nothing keeps the constraints.
        """
        started_s = time.perf_counter()
        goal = Goal.of(objective, constraints or Constraints(), self._batch)
        ranked = PoolSearch(self._costs, goal).ranked()[:_SIMULATED]
        if goal.counts_money and not goal.cheapest:
            # All that is expected just under a limit may be over it when it is simulated.
            ranked += PoolSearch(self._costs, Goal(cheapest=True)).ranked()[:_SIMULATED]
        rows = [self.figures(plan) for plan in dict.fromkeys(entry.plan for entry in ranked)]
        kept = [row for row in rows if row.valid and goal.score(row.step_s, row.usd_per_step / row.step_s)[0] == 0]
        if not kept:
            why = "nothing fits into memory" if not any(row.valid for row in rows) else "no plan keeps the constraints"
            raise InfeasiblePlanError(f"{self._model} on {', '.join(f'{p.count} {p.kind}' for p in self.pools)}: {why}")
        best = min(kept, key=lambda row: goal.score(row.step_s, row.usd_per_step / row.step_s))
        return replace(best, search_s=time.perf_counter() - started_s, simulated=len(rows))

    def figures(self, plan: PoolPlan) -> ReferenceFigures:
        """Return what a plan would do, whoever made it.

        Raises:
            ProfileError: something that it needs was not measured.
        """
        written = reference_plan(self._model, self._batch, plan, self.pools)
        predicted = predict_plan(self._reference, written, self._platform)
        used = plan.devices_by_pool
        usd_per_s = sum(count * self._costs.usd_per_s(pool) for pool, count in used.items())
        traffic = self._costs.usd_of_traffic(plan)
        counted = [self._counted(plan, index) for index in range(len(plan.stages))]
        return ReferenceFigures(
            plan=written,
            step_s=predicted.step_s,
            usd_per_step=usd_per_s * predicted.step_s + traffic,
            peak_bytes=predicted.peak_bytes,
            over_memory=predicted.over_memory,
            counted_bytes=tuple(size for size, _ in counted),
            over_counted=tuple(index for index, (_, over) in enumerate(counted) if over),
            devices={self._name(pool): count for pool, count in sorted(used.items())},
            over_available=tuple(
                self._name(pool) for pool, count in sorted(used.items()) if count > self.pools[pool].count
            ),
        )

    def _counted(self, plan: PoolPlan, index: int) -> tuple[int, bool]:
        """Return the most that is counted for a stage, and whether that is too much for any of its devices."""
        stage, left = plan.stages[index], len(plan.stages) - index
        i, j = stage.units.start, stage.units.stop
        sizes = {
            member: round(float(self._costs.counted_bytes(member, plan.micro_batch, left)[i, j]))
            for member, _ in stage.runs
        }
        over = any(size > self._costs.memory_bytes(member.pool) for member, size in sizes.items())
        return max(sizes.values()), over

    def _name(self, pool: int) -> str:
        return f"{self.pools[pool].kind} in {self.pools[pool].site}"
