"""All that one device has of the plan that runs: its stage's units, their optimizer, its actions and sums."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from spantrain.core.plan import Plan
from spantrain.runtime.checkpoint.holding import Holding, holding_of
from spantrain.runtime.gradients.stage_sums import StageSum, TiedGradientSums, tied_across_stages
from spantrain.runtime.redistribution.transfer import ExchangeChannel
from spantrain.runtime.step.channels import DriverChannel, MailboxChannel
from spantrain.runtime.step.stage_actions import StageActions
from spantrain.runtime.step.stage_member import StageMember
from spantrain.runtime.worker.context import WorkerContext


@dataclass(frozen=True, kw_only=True)
class PlanPart:
    """A device's part of one plan."""

    plan: Plan
    member: StageMember
    optimizer: torch.optim.Optimizer
    """Of the member's parameters."""
    holding: Holding
    actions: StageActions
    stage_sum: StageSum
    tied_sums: TiedGradientSums

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """By name in the unsplit model; one that two units share has the first's name."""
        return self.member.executor.named_parameters()

    @property
    def reads_data(self) -> bool:
        """Whether its stage takes inputs or labels."""
        return self.member.stage_index in (0, len(self.plan.stages) - 1)

    def close(self) -> None:
        """Leave the groups and end the thread that sums over them."""
        self.stage_sum.close()
        self.member.groups.close()

    def post(self, here: WorkerContext, step: int, *, at_end: bool = False) -> ExchangeChannel:
        """Return how an exchange before a step, or at its end, reaches the others, with nothing lost of the step's."""
        address = {"generation": self.plan.generation, "step": step}
        driver = self.actions.messenger if at_end else self.actions.driver
        if driver is not None:
            return DriverChannel(driver, **address)
        return MailboxChannel(here.mailbox, **address, check_abort=here.check_abort)


def make_plan_part(
    here: WorkerContext,
    plan: Plan,
    member: StageMember,
    optimizer: torch.optim.Optimizer,
    holding: Holding | None = None,
) -> PlanPart:
    """Make all that a step needs besides the stage's units and their optimizer; `holding` is found if it is not known.

    It takes a few milliseconds.
    """
    actions = StageActions(here, plan, member)
    stage_sum = StageSum(
        member.groups,
        member.parts,
        levels=member.unlike,
        partial=member.partial,
        sums=plan.stages[member.stage_index].sums,
    )
    tied_sums = TiedGradientSums(
        tied_across_stages(plan, member.stage_index, member.graph, member.units),
        plan=plan,
        stage_index=member.stage_index,
        driver=actions.messenger,
        stage_sum=stage_sum,
        recorder=here.recorder,
    )
    named = member.executor.named_parameters()
    return PlanPart(
        plan=plan,
        member=member,
        optimizer=optimizer,
        holding=holding or holding_of(plan, here.name, member.graph, named, member.parts.own),
        actions=actions,
        stage_sum=stage_sum,
        tied_sums=tied_sums,
    )
