"""Which layers of an outer optimizer each stage of a plan moves, and which stages hold their parameters."""

from collections.abc import Mapping
from dataclasses import dataclass

from spantrain.core.outer.layers import Layer, ParameterSpec
from spantrain.core.plan import Plan
from spantrain.core.units import UnitGraph
from spantrain.models.build import empty_unit
from spantrain.models.units import parameter_names
from spantrain.outer.client.grouping import group_layers, spec_of
from spantrain.runtime.checkpoint.holding import first_names


@dataclass(frozen=True, kw_only=True)
class Route:
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


@dataclass(frozen=True, kw_only=True)
class StageLayers:
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


def leader_of(plan: Plan, stage: int) -> str:
    """Return the device that moves a stage's layers."""
    return plan.stages[stage].replicas[0].devices[0]


def moves_layers(before: Plan, after: Plan) -> bool:
    """Whether under another plan some layers are other devices' to move."""
    return _movers(before) != _movers(after)


def _movers(plan: Plan) -> list[tuple[str, int, int]]:
    return [(leader_of(plan, index), stage.first_unit, stage.end_unit) for index, stage in enumerate(plan.stages)]


def stage_layers(plan: Plan, graph: UnitGraph) -> StageLayers:
    """Find the layers of a plan's stages.

    A layer is moved by the first stage that holds any of it: of a parameter that several stages hold, and of a layer
    that a cut runs through, of which the other stage's parameters go between the two (at most `grouping.LAYER_BYTES`
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
    """Return all parameters, and the stages that hold each, by name in the unsplit model."""
    first = first_names(plan.model, graph)
    specs: dict[str, ParameterSpec] = {}
    holders: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for unit in (empty_unit(plan.model, number) for number in stage.units):
            for local, full in parameter_names(unit).items():
                name = first.get(full, full)
                specs.setdefault(name, spec_of(name, unit.get_parameter(local)))
                if index not in holders.setdefault(name, []):
                    holders[name].append(index)
    return specs, holders
