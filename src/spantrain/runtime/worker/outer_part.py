"""A device's part in an outer optimizer, where the whole run is one of its clusters.

Di-PS, 3.1: workers with the first data-parallel rank send and get the layers of their pipeline rank, the others get
them from those. Kept: that. Here the first device of each stage moves the stage's layers; all others do their part
where copies are taken and versions come, behind the same step. Optimizer state stays each
cluster's own. Where steps overlap (`schedule.dispatch.policies`), the newest weights are the parameters: those that
the update at a step's end has made, and that no step works on yet. A version goes into these; a step that is under way
keeps its own weights, and its gradients update the version's, one step late as all gradients are.

An outer optimizer has a stage's parameters whole, whichever devices hold them, or parts of them; they are gathered by
the parameter, so that never more than one is whole in memory beside the copies. Decided here: replicas and members of
tensor-parallel groups all get their part of what the stage's first device has, those that hold a parameter whole
included, so that all are equal bit for bit; what other stages hold of the stage's layers (copies of tied parameters,
layers that a cut runs through) comes and goes over the run's own connections.
"""

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from spantrain.core.outer.layers import Layer, ParameterSpec, group_layers
from spantrain.core.outer.stages import OuterCluster, StageMeeting, StageReport
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.core.units import UnitGraph
from spantrain.devices.registry import settle
from spantrain.errors import UsageError
from spantrain.models.build import empty_unit
from spantrain.models.units import parameter_names
from spantrain.outer.client.parameters import empty_copy, spec_of
from spantrain.outer.client.replica import ClusterCopy
from spantrain.outer.pipeline import StageLeader, StageWorker, lead_stages, work_as_stage, worker_name
from spantrain.runtime.channels import DriverChannel
from spantrain.runtime.checkpoint.holding import first_names
from spantrain.runtime.gradients.part_sums import hand_out
from spantrain.runtime.step.context import WorkerContext
from spantrain.runtime.worker.plan_part import PlanPart


class Route(Record):
    """Between which stages a parameter goes when copies are taken and versions come."""

    number: int
    """Among all parameters of the model; the same on all devices."""
    spec: ParameterSpec
    """Of the whole parameter."""
    holders: tuple[int, ...]
    """Stages that hold it, in order; what the first of them has is copied."""
    mover: int
    """The stage that sends and gets its layer."""

    @property
    def stages(self) -> frozenset[int]:
        """All that have to do with it."""
        return frozenset((*self.holders, self.mover))


class StageLayers(Record):
    """The layers of a model, the same in all clusters, and who moves them in this one."""

    layers: tuple[Layer, ...]
    by_stage: Mapping[int, tuple[int, ...]]
    """Places of layers by stage; a stage that moves none is not in it."""
    routes: tuple[Route, ...]
    """Of all parameters, in the order of layers."""

    @property
    def leader(self) -> int:
        """The stage that speaks for the cluster."""
        return min(self.by_stage)

    def names(self, stage: int) -> tuple[str, ...]:
        """Return the parameters that a stage moves."""
        return tuple(route.spec.name for route in self.routes if route.mover == stage)


def moves_layers(before: Plan, after: Plan) -> bool:
    """Whether under another plan some layers are other devices' to move."""
    return _movers(before) != _movers(after)


def _movers(plan: Plan) -> list[tuple[str, int, int]]:
    return [(stage.devices[0], stage.first_unit, stage.end_unit) for stage in plan.stages]


def stage_layers(plan: Plan, graph: UnitGraph) -> StageLayers:
    """Find the layers of a plan's stages.

    A layer is moved by the first stage that holds any of it: of a parameter that several stages hold, and of a layer
    that a cut runs through, of which the other stage's parameters go between the two (at most `LAYER_BYTES`
    for each cut, or one parameter).
    """
    specs, holders = _parameters(plan, graph)
    layers = group_layers(specs.values())
    by_stage: dict[int, list[int]] = {}
    routes: list[Route] = []
    for place, layer in enumerate(layers):
        mover = min(holders[one.name][0] for one in layer.parameters)
        by_stage.setdefault(mover, []).append(place)
        for one in layer.parameters:
            routes.append(Route(number=len(routes), spec=one, holders=tuple(holders[one.name]), mover=mover))
    return StageLayers(
        layers=layers,
        by_stage={stage: tuple(places) for stage, places in sorted(by_stage.items())},
        routes=tuple(routes),
    )


def _parameters(plan: Plan, graph: UnitGraph) -> tuple[dict[str, ParameterSpec], dict[str, list[int]]]:
    """Return the parameters that are trained, and the stages that hold each, by name in the unsplit model."""
    first = first_names(plan.model, graph)
    specs: dict[str, ParameterSpec] = {}
    holders: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for unit in (empty_unit(plan.model, number) for number in stage.units):
            for local, full in parameter_names(unit).items():
                name, own = first.get(full, full), unit.get_parameter(local)
                if not own.requires_grad:
                    continue
                specs.setdefault(name, spec_of(name, own))
                if index not in holders.setdefault(name, []):
                    holders[name].append(index)
    return specs, holders


_LANE = "outer:"


class StageParameters:
    """Copies of a stage's parameters out and changes in (`outer.client.parameters.LiveParameters`).

    All devices of the run call the same at once; the first one of a stage has the copies.
    """

    def __init__(self, found: StageLayers, here: WorkerContext, part: PlanPart, step: int) -> None:
        """Take a device's part of a plan, before a step."""
        self._found, self._here, self._step = found, here, step
        self._exchanges, self._at_end = 0, False
        self.hold(part)

    def hold(self, part: PlanPart) -> None:
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
        return self._here.name == self._part.plan.stages[self._stage].devices[0]

    def memory(self) -> dict[str, Tensor]:
        """Return memory for a copy of all that the stage moves."""
        on_card = any(one.device.type != "cpu" for one in self._part.holding.parameters.values())
        moved = [route for route in self._routes if route.mover == self._stage]
        return {route.spec.name: empty_copy(route.spec, fixed=on_card) for route in moved}

    @torch.no_grad()
    def copy(self, into: Mapping[str, Tensor]) -> None:
        """Copy all that the stage moves; `into` is used by its first device only."""
        post = self._next_exchange()
        for route in self._routes:
            whole = self._collected(route, post)
            if whole is not None:
                into[route.spec.name].copy_(whole, non_blocking=True)
        settle(self._part.holding.parameters.values())

    @torch.no_grad()
    def move(self, since: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
        """Make each parameter `new` plus what it is beyond `since`; the first devices tell what these are."""
        post = self._next_exchange()
        for route in self._routes:
            name, whole = route.spec.name, self._collected(route, post)
            if whole is not None:
                whole.sub_(_at(since[name], whole)).nan_to_num_(0.0, 0.0, 0.0).add_(_at(new[name], whole))
            for stage in route.holders:
                got = whole if stage == route.mover else self._sent(route, whole, route.mover, stage, post)
                if stage == self._stage:
                    held = self._part.holding
                    one = held.parameters[name].detach()
                    hand_out(got, one, held.parts[name], self._part.member.groups.world)
        settle(self._part.holding.parameters.values())

    def _collected(self, route: Route, post: DriverChannel) -> Tensor | None:
        """Return a parameter whole on the first device of the stage that moves it; None elsewhere."""
        source, member = route.holders[0], self._part.member
        whole = None
        if self._stage == source and member.groups.in_first_replica:
            one = self._part.holding.parameters[route.spec.name].detach()
            whole = member.parts.gather({route.spec.name: one}).get(route.spec.name)
        return whole if source == route.mover else self._sent(route, whole, source, route.mover, post)

    def _sent(self, route: Route, whole: Tensor | None, source: int, target: int, post: DriverChannel) -> Tensor | None:
        """Return on the first device of one stage what that of another has; None elsewhere."""
        lane = f"{_LANE}{self._exchanges}:{route.number}"
        if self.leads and self._stage == source:
            assert whole is not None, f"{route.spec.name} is not whole on {self._here.name}"
            # As one of a batch, which all messages between stages are.
            post.send(self._part.plan.stages[target].devices[0], lane, whole.cpu().clone().unsqueeze(0))
        elif self.leads and self._stage == target:
            return post.receive(lane)[0]
        return None

    def _next_exchange(self) -> DriverChannel:
        self._exchanges += 1
        return self._part.post(self._here, self._step, at_end=self._at_end)


def _at(tensor: Tensor, where: Tensor) -> Tensor:
    return tensor.to(where.device, non_blocking=True)


_START_S = 30.0
"""How long to wait, before the first step, for the newest version or until this cluster brings the first."""
_FINISH_S = 60.0
"""How long to wait, behind the last step, for the version with all that was learned."""
_SLICE_S = 0.25

Meet = Callable[[StageReport | None], StageMeeting]
"""Comes to the next meeting outside of steps."""


class OuterPart:
    """Takes part at the boundaries of steps; all devices of the run do the same there."""

    def __init__(self, cluster: OuterCluster, here: WorkerContext, part: PlanPart, meet: Meet, *, step: int) -> None:
        """Begin to connect before a step; nothing is waited for but the other devices of the run.

        Raises:
            UsageError: address or token are none.
        """
        self._cluster, self._here, self._meet = cluster, here, meet
        plan = part.plan
        self._tokens = plan.global_batch * (plan.model.sequence_length or 1)
        self.notices: list[str] = []
        """What is to be told at the end."""
        found = stage_layers(plan, here.graph)
        self._parameters = StageParameters(found, here, part, step)
        self._copy = ClusterCopy(self._parameters)
        self._end = self._connected(plan, part.member.stage_index, found) if self._parameters.leads else None

    def hold(self, part: PlanPart) -> None:
        """From now on this is what the device has; the same devices lead the same units."""
        self._parameters.hold(part)

    def _connected(self, plan: Plan, stage: int, found: StageLayers) -> StageLeader | StageWorker | None:
        if stage not in found.by_stage:
            return None
        own, cluster = found.by_stage[stage], self._cluster
        if stage != found.leader:
            return work_as_stage(cluster, found.layers, self._copy, name=worker_name(cluster.cluster, stage), own=own)
        others = {
            plan.stages[other].devices[0]: (worker_name(cluster.cluster, other), layers)
            for other, layers in found.by_stage.items()
            if other != stage
        }
        return lead_stages(cluster, found.layers, self._copy, own=own, others=others)

    def close(self) -> None:
        """Leave: what was not pushed is this cluster's own."""
        end, self._end = self._end, None
        if end is not None:
            end.close()

    # Behind a step.

    def report(self) -> StageReport | None:
        """Count the step that ends; say how far this stage is, if this device leads one."""
        if isinstance(self._end, StageLeader):
            self._end.step(self._tokens)
        return self._end.report() if self._end else None

    def follow(self, meeting: StageMeeting, step: int, *, at_end: bool = True) -> None:
        """Do what the leader orders, at the end of a step, or before it."""
        self._parameters.come_to(step, at_end=at_end)
        if self._end:
            self._end.follow(meeting)
        else:
            self._copy.follow(meeting.order, {})

    # Outside of steps.

    def begin(self, step: int) -> None:
        """Wait, before a step, for the newest version, or until this cluster brings the first; not for long.

        Raises:
            UsageError: the master refuses this cluster.
        """
        if not self._until(lambda leader: leader.has_begun, _START_S, step, everything=False):
            self._note(f"no version came within {_START_S:.0f} s: trains by itself until the master is in reach")

    def finish(self, step: int) -> None:
        """Push what is left, and wait for the version with it; not for ever."""
        if not self._until(lambda leader: leader.has_given_all, _FINISH_S, step, everything=True):
            self._note(f"the last push was in no version after {_FINISH_S:.0f} s")
        if isinstance(self._end, StageLeader):
            metrics = self._end.meter.read()
            skipped = sum(metrics.skipped.values())
            self._note(f"version {metrics.version}, {metrics.outer_rounds} rounds, {skipped} of no use")

    def _until(self, over: Callable[[StageLeader], bool], limit_s: float, step: int, *, everything: bool) -> bool:
        """Meet until the leader says that it is over; return False on the leader if it came to its limit."""
        deadline_s = time.monotonic() + limit_s
        while True:
            self._here.check_abort()
            end, reached = self._end, True
            heard = end.heard if end else 0
            if end and end.refused and not everything:
                raise UsageError(f"the master does not let cluster {self._cluster.cluster} in: {end.refused}")
            report = None
            if isinstance(end, StageLeader):
                reached, late = over(end), time.monotonic() >= deadline_s or bool(end.refused)
                report = end.report(everything=everything, over=reached or late)
            elif end:
                report = end.report()
            meeting = self._meet(report)
            self.follow(meeting, step, at_end=False)
            if meeting.order.over:
                return reached
            if end:
                end.wait(heard, _SLICE_S)

    def _note(self, text: str) -> None:
        self.notices.append(f"outer optimizer, cluster {self._cluster.cluster}: {text}")
