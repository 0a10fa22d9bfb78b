"""Costs by stage and sample, with all else that a step may take."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from spantrain.core.action import Action
from spantrain.sim.costs import TableCosts, TiedSum


@dataclass(frozen=True, kw_only=True)
class MadeUpCosts(TableCosts):
    """A table, factors on the seconds of devices, and seconds that are the same for all stages and devices."""

    slowness: Mapping[str, float] = field(default_factory=dict)
    action_overhead_s: float = 0.0
    tied_exchange_s: float = 0.0
    commit_s: float = 0.0
    update_s: float = 0.0
    sum_s: float = 0.0

    def action_s(self, device: str, action: Action) -> float:
        return self.slowness.get(device, 1.0) * super().action_s(device, action)

    def gradient_bucket_s(self, stage: int) -> tuple[float, ...]:
        return (self.sum_s,)

    def tied_sums(self) -> tuple[TiedSum, ...]:
        stages = tuple(range(len(self.sample_s)))
        return (TiedSum(stages=stages, seconds=self.tied_exchange_s),) if self.tied_exchange_s else ()

    def optimizer_s(self, device: str) -> float:
        return self.update_s
