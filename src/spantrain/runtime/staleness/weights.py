"""Two sets of a stage's weights, for even and for odd steps, and one optimizer that works on both in turn.

Step t works on the weights V_t of its set, and leaves its gradients there. When they are summed, nothing else needs V_t
any more: V_{t+1} is copied over it, and the optimizer makes V_{t+2} of it in place (`schedule.dispatch.two_steps` has
the rule). Where everything is quiet, both sets are made the newest: training goes on there as it begins.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from spantrain.core.plan import Plan
from spantrain.devices.device import Device
from spantrain.runtime.step.stage_member import StageMember, stage_executor

Parameters = Mapping[str, nn.Parameter]


class TwoSets:
    """The sets of one device by the parity of steps, and what the optimizer and checkpoints know: the newest weights.

    `newest` are parameters of their own, which share their memory with the set that was updated last; so what the
    optimizer keeps of them is one, whichever set it works on.
    """

    def __init__(self, even: Parameters, odd: Parameters) -> None:
        """Take two sets of the same names, with the same weights."""
        assert even.keys() == odd.keys(), "two sets of one stage have the same parameters"
        self._sets = (even, odd)
        # By `.data`: what is counted as a change of one set must not be one of the other, whose step is at work.
        self.newest = {
            name: nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            for name, parameter in even.items()
        }

    def of(self, step: int) -> Parameters:
        """Return the parameters that a step works on."""
        return self._sets[step % 2]

    @torch.no_grad()
    def aim(self, step: int) -> None:
        """Make `newest` the weights behind a step's own, in the step's memory, with the step's gradients."""
        own, other = self.of(step), self.of(step + 1)
        _copy(own, other)
        for name, newest in self.newest.items():
            newest.data = own[name].data
            newest.grad, own[name].grad = own[name].grad, None

    @torch.no_grad()
    def level(self) -> None:
        """Give both sets the newest weights."""
        for one in self._sets:
            behind = {name: own for name, own in one.items() if own.data_ptr() != self.newest[name].data_ptr()}
            _copy(behind, self.newest)


def _copy(into: Parameters, source: Parameters) -> None:
    if into:
        tensors: list[Tensor] = [source[name].detach() for name in into]
        torch._foreach_copy_([own.detach() for own in into.values()], tensors)


def with_second_set(plan: Plan, member: StageMember, device: Device) -> tuple[StageMember, TwoSets]:
    """Return the member with a second set of its units' weights."""
    second = stage_executor(plan, member.stage_index, deepcopy(list(member.units)), device)
    sets = TwoSets(member.executor.named_parameters(), second.named_parameters())
    return replace(member, second=second), sets
