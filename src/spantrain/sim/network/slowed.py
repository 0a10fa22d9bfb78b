"""Costs over links that are slower than those they were made for."""

from collections.abc import Mapping
from dataclasses import replace

from spantrain.adaptation.network_state import LinkState
from spantrain.core.action import Action, Direction
from spantrain.core.span import Span
from spantrain.sim.costs import EndOfStep, OverlappedSums, StepCosts, TiedSum, tied_sums
from spantrain.sim.network.sending import TransferCost
from spantrain.sim.network.sums import SharedSums


class SlowedCosts:
    """Other costs, with messages between stages that take longer; all else is as it was.

    Sums inside a stage keep their seconds: monitors hear of messages between stages only.
    """

    def __init__(self, costs: StepCosts, state: LinkState, num_stages: int) -> None:
        self._costs = costs
        self._state = state
        self._num_stages = num_stages

    @property
    def action_overhead_s(self) -> float:
        """Seconds that the runtime takes before each action."""
        return self._costs.action_overhead_s

    def action_s(self, device: str, action: Action) -> float:
        """Return the seconds of an action on a device."""
        return self._costs.action_s(device, action)

    def transfer(self, source: str, target: str, direction: Direction, stage: int, span: Span) -> TransferCost:
        """Return what it takes to send a span, over the link as it is now."""
        transfer = self._costs.transfer(source, target, direction, stage, span)
        speed = self._state.speed(source, target)
        return transfer if speed == 1 else replace(transfer, occupancy_s=transfer.occupancy_s / speed)

    def gradient_sum_s(self, stage: int) -> float:
        """Return the seconds in which a stage's replicas sum their gradients."""
        return self._costs.gradient_sum_s(stage)

    @property
    def tied_exchange_s(self) -> float:
        """Seconds in which stages sum the gradients of parameters that they share."""
        return self._costs.tied_exchange_s

    def tied_sums(self) -> tuple[TiedSum, ...]:
        """Return the sums of shared parameters in their order."""
        return tied_sums(self._costs, self._num_stages)

    def gradient_bucket_s(self, stage: int) -> tuple[float, ...]:
        """Return the seconds of each bucket of a stage's gradient sum."""
        costs = self._costs
        return costs.gradient_bucket_s(stage) if isinstance(costs, EndOfStep) else (costs.gradient_sum_s(stage),)

    def bucket_parts(self, device: str, action: Action) -> tuple[float, ...]:
        """Return, for each bucket, after which part of a last backward action on a device its gradients are whole."""
        costs = self._costs
        if isinstance(costs, OverlappedSums):
            return costs.bucket_parts(device, action)
        return (1.0,) * len(self.gradient_bucket_s(action.stage))

    def sum_slowdowns(self, stages: frozenset[int]) -> Mapping[int, float]:
        """Return by stage how many times as long its gradient sum takes while those of all these stages run."""
        costs = self._costs
        return costs.sum_slowdowns(stages) if isinstance(costs, SharedSums) else dict.fromkeys(stages, 1.0)

    @property
    def commit_s(self) -> float:
        """Seconds of the barrier at the end of a step."""
        return self._costs.commit_s

    def optimizer_s(self, device: str) -> float:
        """Return the seconds of a device's update of its parameters."""
        return self._costs.optimizer_s(device)
