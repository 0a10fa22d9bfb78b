"""The parameters of a stage as an outer optimizer has them: whole, whichever devices hold them, or parts of them.

Di-PS, 3.1: the workers with the first data- and tensor-parallel rank gather what is to be sent, and give the others
theirs. Kept: that, by the parameter, so that never more than one is whole in memory beside the copies. Decided here:
replicas and members of tensor-parallel groups all get their part of what the stage's first device has, those that hold
a parameter whole included, so that all are equal bit for bit; what other stages hold of the stage's layers (copies of
tied parameters, layers that a cut runs through) comes and goes over the run's own connections.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from spantrain.outer.client.parameters import empty_copy
from spantrain.runtime.gradients.part_sums import hand_out
from spantrain.runtime.outer.layers import Route, StageLayers, leader_of
from spantrain.runtime.redistribution.transfer import Post
from spantrain.runtime.worker.plan_part import OwnPart, Surroundings

_LANE = "outer:"


class StageParameters:
    """Copies of a stage's parameters out and changes in (`outer.client.parameters.LiveParameters`).

    All devices of the run call the same at once; the first one of a stage has the copies.
    """

    def __init__(self, found: StageLayers, here: Surroundings, part: OwnPart, step: int) -> None:
        """Take a device's part of a plan, before a step."""
        self._found, self._here, self._step = found, here, step
        self._exchanges, self._at_end = 0, False
        self.hold(part)

    def hold(self, part: OwnPart) -> None:
        """From now on this is what the device has; the same devices lead the same units."""
        self._part, self._stage = part, part.member.stage_index
        self._routes = [route for route in self._found.routes if self._stage in route.stages]

    def come_to(self, step: int, *, at_end: bool) -> None:
        """Exchange what follows before a step, or at its end."""
        self._exchanges = self._exchanges if step == self._step else 0
        self._step, self._at_end = step, at_end

    @property
    def leads(self) -> bool:
        """Whether copies come to this device."""
        return self._here.name == leader_of(self._part.plan, self._stage)

    def memory(self) -> dict[str, Tensor]:
        """Return memory for a copy of all that the stage moves."""
        moved = [route for route in self._routes if route.mover == self._stage]
        return {route.spec.name: empty_copy(route.spec, fixed=self._on_card) for route in moved}

    @torch.no_grad()
    def copy(self, into: Mapping[str, Tensor]) -> None:
        """Copy all that the stage moves; `into` is used by its first device only."""
        post = self._next_exchange()
        for route in self._routes:
            whole = self._collected(route, post)
            if whole is not None:
                into[route.spec.name].copy_(whole, non_blocking=True)
        self._settle()

    @torch.no_grad()
    def move(self, since: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
        """Make each parameter `new` plus what it is beyond `since`; the first devices tell what these are."""
        post = self._next_exchange()
        for route in self._routes:
            name, whole = route.spec.name, self._collected(route, post)
            if whole is not None:
                whole.sub_(_at(since[name], whole)).add_(_at(new[name], whole))
            for stage in route.holders:
                got = self._carried(route, whole, stage, post)
                if stage == self._stage:
                    held = self._part.holding
                    one = held.parameters[name].detach()
                    hand_out(got, one, held.parts[name], self._part.member.groups.world)
        self._settle()

    def _collected(self, route: Route, post: Post) -> Tensor | None:
        """Return a parameter whole on the first device of the stage that moves it; None elsewhere."""
        source, member = route.holders[0], self._part.member
        whole = None
        if self._stage == source and member.groups.in_first_replica:
            one = self._part.holding.parameters[route.spec.name].detach()
            whole = member.parts.gather({route.spec.name: one}).get(route.spec.name)
        return whole if source == route.mover else self._sent(route, whole, source, route.mover, post)

    def _carried(self, route: Route, whole: Tensor | None, target: int, post: Post) -> Tensor | None:
        """Return on the first device of a stage what that of the moving one has; None elsewhere."""
        return whole if target == route.mover else self._sent(route, whole, route.mover, target, post)

    def _sent(self, route: Route, whole: Tensor | None, source: int, target: int, post: Post) -> Tensor | None:
        lane = f"{_LANE}{self._exchanges}:{route.number}"
        if self.leads and self._stage == source:
            assert whole is not None, f"{route.spec.name} is not whole on {self._here.name}"
            # As one of a batch, which all messages between stages are.
            post.send(leader_of(self._part.plan, target), lane, whole.cpu().clone().unsqueeze(0))
        elif self.leads and self._stage == target:
            return post.receive(lane)[0]
        return None

    def _next_exchange(self) -> Post:
        self._exchanges += 1
        return self._part.post(self._here, self._step, at_end=self._at_end)

    @property
    def _on_card(self) -> bool:
        return any(one.device.type == "cuda" for one in self._part.holding.parameters.values())

    def _settle(self) -> None:
        if self._on_card:
            torch.cuda.synchronize()


def _at(tensor: Tensor, where: Tensor) -> Tensor:
    return tensor.to(where.device, non_blocking=True)
