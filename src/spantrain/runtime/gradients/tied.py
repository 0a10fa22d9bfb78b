"""Parameters that several stages hold copies of (tied embeddings): their gradients are summed across the stages."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from spantrain.core.messages import MessageKey
from spantrain.core.plan import Plan
from spantrain.core.span import Span
from spantrain.core.units import UnitGraph
from spantrain.models.units import UnitModule, parameter_names, shared_parameters
from spantrain.runtime.gradients.gradients import StageSum
from spantrain.runtime.step.recorder import Recorder

_LANE = "tied:"


@dataclass(frozen=True, kw_only=True)
class Tied:
    """A parameter of this stage of which other stages hold copies."""

    group: str
    parameter: str
    other_stages: tuple[int, ...]


def tied_across_stages(plan: Plan, stage_index: int, graph: UnitGraph, units: Sequence[UnitModule]) -> tuple[Tied, ...]:
    """Find the parameters that other stages hold copies of."""
    holders: dict[str, set[int]] = {}
    for index, stage in enumerate(plan.stages):
        for unit in stage.units:
            for group in graph.units[unit].shared:
                holders.setdefault(group, set()).add(index)
    found = []
    for group, members in sorted(shared_parameters(units).items()):
        others = tuple(sorted(holders.get(group, set()) - {stage_index}))
        if others:
            position, local = members[0]
            found.append(Tied(group=group, parameter=parameter_names(units[position])[local], other_stages=others))
    return tuple(found)


class Messenger(Protocol):
    """Carries messages outside the pipeline's routes."""

    def send_message(self, target: str, key: MessageKey, tensors: tuple[Tensor, ...]) -> None:
        """Send to another device."""

    def wait_for_message(self, step: int, lane: str) -> tuple[Tensor, ...]:
        """Wait for a lane's message of a step."""


class TiedSums:
    """The sums of shared parameters, as one device takes part in them.

    The leader of each stage's first replica puts the gradient together, if its group divides it, and sends it to those
    of the other stages; then it hands the sum to all devices of its stage.
    """

    def __init__(
        self,
        tied: Sequence[Tied],
        *,
        plan: Plan,
        stage_index: int,
        driver: Messenger | None,
        stage_sum: StageSum,
        recorder: Recorder,
    ) -> None:
        """Take part; `driver` sends and receives, on the leader of the first replica only."""
        self._tied = tuple(tied)
        self._plan = plan
        self._stage = stage_index
        self._driver = driver
        self._stage_sum = stage_sum
        self._recorder = recorder

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """Parameters whose gradients a stage before counts in the global norm."""
        return frozenset(tied.parameter for tied in self._tied if min(tied.other_stages) < self._stage)

    def run(self, step: int, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum all of them, one after another."""
        for tied in self._tied:
            start_s = time.monotonic()
            own = self._stage_sum.whole(tied.parameter, parameters)
            total = None if own is None or self._driver is None else self._summed(tied, own, self._driver, step)
            self._stage_sum.replace(tied.parameter, total, parameters)
            self._recorder.communicated(f"tied gradient sum {tied.group}", step, start_s, time.monotonic())

    def _summed(self, tied: Tied, own: Tensor, driver: Messenger, step: int) -> Tensor:
        """Sum the stages' gradients in the order of stages, so that all copies stay equal."""
        for stage in tied.other_stages:
            key = MessageKey(self._plan.generation, step, f"{_LANE}{tied.group}:{self._stage}", 0, Span(0, 1))
            driver.send_message(self._leader(stage), key, (own.unsqueeze(0).clone(),))
        total = torch.zeros_like(own)
        for stage in sorted((self._stage, *tied.other_stages)):
            if stage == self._stage:
                total += own
            else:
                total += driver.wait_for_message(step, f"{_LANE}{tied.group}:{stage}")[0][0].to(own.device)
        return total

    def _leader(self, stage: int) -> str:
        return self._plan.stages[stage].replicas[0].devices[0]
