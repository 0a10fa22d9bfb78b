"""Which layers of an outer optimizer each stage of a plan moves."""

from collections.abc import Mapping
from dataclasses import dataclass

from spantrain.core.outer_layers import Layer, ParameterSpec
from spantrain.core.plan import Plan
from spantrain.core.units import UnitGraph
from spantrain.errors import ConfigError
from spantrain.models.build import empty_unit, parameter_names
from spantrain.outer.grouping import group_layers, spec_of
from spantrain.runtime.checkpoint.holding import first_names

__all__ = ["StageLayers", "leader_of", "moves_layers", "stage_layers"]


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """The layers of a model, the same in all clusters, and who moves them in this one."""

    layers: tuple[Layer, ...]
    by_stage: Mapping[int, tuple[int, ...]]
    """Places of layers by stage; a stage without parameters of its own is not in it."""

    @property
    def leader(self) -> int:
        """The stage that speaks for the cluster."""
        return min(self.by_stage)

    def names(self, stage: int) -> tuple[str, ...]:
        """Return the parameters that a stage moves."""
        return tuple(one.name for layer in self.by_stage.get(stage, ()) for one in self.layers[layer].parameters)


def leader_of(plan: Plan, stage: int) -> str:
    """Return the device that moves a stage's layers."""
    return plan.stages[stage].replicas[0].devices[0]


def moves_layers(before: Plan, after: Plan) -> bool:
    """Whether under another plan some layers are other devices' to move."""
    return _movers(before) != _movers(after)


def _movers(plan: Plan) -> list[tuple[str, int, int]]:
    return [(leader_of(plan, index), stage.first_unit, stage.end_unit) for index, stage in enumerate(plan.stages)]


def stage_layers(plan: Plan, graph: UnitGraph) -> StageLayers:
    """Find the layers of a plan's stages; a parameter that several stages hold is moved by the first.

    Raises:
        ConfigError: a cut between stages runs through a layer.
    """
    specs, stages = _parameters(plan, graph)
    layers = group_layers(specs.values())
    by_stage: dict[int, list[int]] = {}
    for place, layer in enumerate(layers):
        found = sorted({stages[one.name] for one in layer.parameters})
        if len(found) > 1:
            raise ConfigError(
                f"stages {' and '.join(map(str, found))} hold parts of {layer.name}, which an outer optimizer sends "
                "and gets as a whole; plan with a cut beside it"
            )
        by_stage.setdefault(found[0], []).append(place)
    return StageLayers(layers=layers, by_stage={stage: tuple(places) for stage, places in sorted(by_stage.items())})


def _parameters(plan: Plan, graph: UnitGraph) -> tuple[dict[str, ParameterSpec], dict[str, int]]:
    """Return all parameters, and the first stage that holds each, by name in the unsplit model."""
    first = first_names(plan.model, graph)
    specs: dict[str, ParameterSpec] = {}
    stages: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        for unit in (empty_unit(plan.model, number) for number in stage.units):
            for local, full in parameter_names(unit).items():
                name = first.get(full, full)
                if name not in specs:
                    specs[name], stages[name] = spec_of(name, unit.get_parameter(local)), index
    return specs, stages
