"""Sums of gradients: among the replicas of a stage, and of parameters that stages share.

Losses are divided by the global batch before the backward pass, so every sum is a plain sum.

Inside a tensor-parallel group each member has the gradient of its part, and all have the same one of what they hold
whole (of a few parameters that work on divided values, such as norms of heads, parts that are summed first). Where the
replicas' groups are alike, the k-th members hold the same parts and sum among themselves, all rings at once. Where they
are not, leaders put the parts of their group together, sum whole gradients among themselves, and hand the parts back.

Parameters that several stages hold copies of (tied embeddings): their gradients are summed across the stages.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn

from spantrain.core.messages import ControlKey
from spantrain.core.plan import OWN_SUMS, GradientSums, Plan
from spantrain.core.records import Record
from spantrain.core.shares import StateSharding
from spantrain.core.units import UnitGraph
from spantrain.models.units import UnitModule, parameter_names, shared_parameters
from spantrain.runtime.channels import Messenger
from spantrain.runtime.gradients.groups import StageGroups
from spantrain.runtime.gradients.members import MemberGroup
from spantrain.runtime.gradients.own_rows import begin_rows_sum, fill
from spantrain.runtime.gradients.part_sums import GroupParts, hand_out
from spantrain.runtime.gradients.step_sums import Background, Parameters, StepSums, buckets_of, gradient_of
from spantrain.runtime.recorder import StepRecorder


@dataclass(eq=False)
class StageSum:
    """The gradient sums of one device's stage."""

    groups: StageGroups
    """Of this device."""
    parts: GroupParts
    """What the members of its replica hold."""
    _: KW_ONLY
    levels: bool = False
    """Whether members round unlike, so that gradients of what all hold whole are made the leader's."""
    partial: Sequence[str] = ()
    """Names of parameters that all hold whole, each with a part of the sum only; all get the whole sum."""
    division: StateSharding = StateSharding.NONE
    """Each replica gets the sum of the rows that it updates (`own_rows`), where state is divided."""
    by_unit: bool = False
    """Whether what is not `partial` is taken behind each unit (`unit_shards`)."""
    sums: GradientSums = OWN_SUMS
    """The plan's settings: buckets, when they leave, how many at once."""

    def __post_init__(self) -> None:
        self.levels = self.levels and self.groups.replica.size > 1
        self._background = Background("gradient sums")

    @property
    def exchanges(self) -> bool:
        """Whether this device exchanges anything at the end of a step."""
        return self.groups.world.size > self.groups.replica.size

    def begin(self, parameters: Parameters) -> StepSums:
        """Return the sums of one step, to which gradients are told as they become final.

        Over rings they go on in the background. What needs the replica's own group waits for the end of the pass, as
        the group sums in its units: parameters that members hold a part of the sum of, leaders that put gradients
        together, gradients that are made the leader's. Several steps may be begun; their sums follow each other.
        """
        beside: list[list[str]] = []
        if self.by_unit:
            parameters = {name: parameters[name] for name in self.partial}
        elif self.groups.parts_meet and self.groups.ring.size > 1:
            # The last unit's gradients are final first.
            names = [name for name in reversed(list(parameters)) if name not in self.partial]
            sizes = {name: parameters[name].numel() for name in names}
            beside = buckets_of(((name, parameters[name]) for name in names), sizes, self.sums)
        leaders_sum = self.exchanges and not self.groups.parts_meet
        return StepSums(
            parameters,
            beside=beside,
            begin_sum=self._begin_sum,
            background=self._background,
            behind=self._sum_behind if self.partial or leaders_sum or self.levels else None,
            sums=self.sums,
        )

    def _begin_sum(self, gradients: Sequence[Tensor]) -> Callable[[], None]:
        if self.division is StateSharding.ZERO1:
            return begin_rows_sum(gradients, self.groups.ring, self.sums.bucket_bytes)
        return _begin_sum(gradients, self.groups.ring)

    def close(self) -> None:
        """End the thread that sums."""
        self._background.close()

    def _sum_behind(self, gradients: Mapping[str, Tensor]) -> None:
        """Do what comes behind the sums in the background."""
        if self.partial:
            _begin_sum([gradients[name] for name in self.partial], self.groups.replica)()
        if not self.groups.parts_meet:
            # Replicas of other degrees have their parameters in another order, and other sizes of parts.
            full_sizes = {name: torch.Size(part.full_shape).numel() for name, part in self.parts.own.items()}
            for bucket in buckets_of(sorted(gradients.items()), full_sizes, self.sums):
                own = {name: gradients[name] for name in bucket}
                whole = self.parts.gather(own)
                if whole:
                    _begin_sum(list(whole.values()), self.groups.ring)()
                self.parts.scatter(whole, own)
        elif self.partial:
            _begin_sum([gradients[name] for name in self.partial], self.groups.ring)()
        if self.levels:
            self.parts.level([gradient for name, gradient in gradients.items() if self.parts.whole_here(name)])

    def whole(self, name: str, parameters: Parameters) -> Tensor | None:
        """Return a parameter's whole gradient on the leader of the first replica; None on all others."""
        if not self.groups.in_first_replica:
            return None
        return self.parts.gather({name: gradient_of(parameters[name])}).get(name)

    def replace(self, name: str, whole: Tensor | None, parameters: Parameters) -> None:
        """Give all devices of the stage their parts of a whole gradient that the first replica's leader has."""
        hand_out(whole, gradient_of(parameters[name]), self.parts.own[name], self.groups.world)

    def square(self, updated: Parameters, *, leave_out: frozenset[str]) -> float | None:
        """Return this device's part of the stage's squared gradient norm; None where others have all of it.

        `updated` is what it updates of the parameters, by name.
        """
        if self.division is not StateSharding.NONE:
            return _square(updated, leave_out)
        if not self.groups.in_first_replica:
            return None
        if self.groups.replica.rank:
            leave_out |= {name for name in updated if self.parts.whole_here(name)}
        return _square(updated, leave_out)


def _square(parameters: Parameters, leave_out: Collection[str]) -> float:
    counted = [own.grad for name, own in parameters.items() if name not in leave_out and own.grad is not None]
    parts = [torch.view_as_real(one) if one.is_complex() else one for one in counted]
    norms = [torch.linalg.vector_norm(part.detach(), dtype=torch.float64) for part in parts]
    return float(torch.stack(norms).square().sum()) if norms else 0.0  # an accelerator is waited for once


def _begin_sum(gradients: Sequence[Tensor], group: MemberGroup) -> Callable[[], None]:
    """Begin to sum gradients, in place; return what waits until that is done."""
    if len(gradients) == 1 and gradients[0].is_contiguous():
        return group.begin_all_reduce(gradients[0])
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    wait = group.begin_all_reduce(flat)

    def finish() -> None:
        wait()
        fill(gradients, flat)

    return finish


_LANE = "tied:"


class Tied(Record):
    """A parameter of this stage of which other stages hold copies."""

    group: str
    parameter: str
    other_stages: tuple[int, ...]


def tied_across_stages(plan: Plan, stage_index: int, graph: UnitGraph, units: Sequence[UnitModule]) -> tuple[Tied, ...]:
    """Find the parameters that are trained and that other stages hold copies of.

    Stages of the same devices have one copy; the first of them stands for all, as `stage_index` does for this device's.
    """
    holders: dict[str, set[int]] = {}
    for crew in plan.crews:
        for unit in crew.units:
            for group in graph.units[unit].shared:
                holders.setdefault(group, set()).add(crew.numbers[0])
    found = []
    for group, members in sorted(shared_parameters(units).items()):
        others = tuple(sorted(holders.get(group, set()) - {stage_index}))
        if others:
            position, local = members[0]
            if units[position].get_parameter(local).requires_grad:
                found.append(Tied(group=group, parameter=parameter_names(units[position])[local], other_stages=others))
    return tuple(found)


class TiedGradientSums(Record):
    """The sums of shared parameters, as one device takes part in them.

    The leader of each stage's first replica puts the gradient together, if its group divides it, and sends it to those
    of the other stages; then it hands the sum to all devices of its stage.
    """

    tied: Sequence[Tied]
    plan: Plan
    stage_index: int
    driver: Messenger | None
    """It sends and receives, on the leader of the first replica only."""
    stage_sum: StageSum
    recorder: StepRecorder

    @property
    def counted_elsewhere(self) -> frozenset[str]:
        """Parameters whose gradients a stage before counts in the global norm."""
        return frozenset(tied.parameter for tied in self.tied if min(tied.other_stages) < self.stage_index)

    def run(self, step: int, parameters: Mapping[str, nn.Parameter]) -> None:
        """Sum all of them, one after another."""
        for tied in self.tied:
            start_s = time.monotonic()
            own = self.stage_sum.whole(tied.parameter, parameters)
            total = None if own is None or self.driver is None else self._summed(tied, own, self.driver, step)
            self.stage_sum.replace(tied.parameter, total, parameters)
            self.recorder.communicated(f"tied gradient sum {tied.group}", step, start_s, time.monotonic())

    def _summed(self, tied: Tied, own: Tensor, driver: Messenger, step: int) -> Tensor:
        """Sum the stages' gradients in the order of stages, so that all copies stay equal."""
        for stage in tied.other_stages:
            key = ControlKey(self.plan.generation, step, f"{_LANE}{tied.group}:{self.stage_index}")
            driver.send_message(self.plan.stages[stage].devices[0], key, (own.unsqueeze(0).clone(),))
        total = torch.zeros_like(own)
        for stage in sorted((self.stage_index, *tied.other_stages)):
            if stage == self.stage_index:
                total += own
            else:
                total += driver.wait_for_message(step, f"{_LANE}{tied.group}:{stage}")[0][0].to(own.device)
        return total
