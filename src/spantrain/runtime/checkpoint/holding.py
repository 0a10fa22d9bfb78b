"""What one device holds of a model, by the names of the unsplit model, and what of it goes into a checkpoint."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain
from typing import Any

import torch

from spantrain.core.checkpoint import StoredTensor
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.core.shares import TensorPart
from spantrain.core.units import ModelSpec, UnitGraph
from spantrain.errors import ConfigError
from spantrain.formats.precision import EXPORTED
from spantrain.formats.tensor_bytes import dtype_name
from spantrain.models.build import empty_unit
from spantrain.models.randomness.draws import torch_state
from spantrain.models.statistics import named_statistics
from spantrain.models.units import UnitModule, parameter_names
from spantrain.runtime.gradients.own_rows import OwnRows
from spantrain.runtime.redistribution.exchange import Described

PARAMETER, STATE, BUFFER = "parameter/", "optimizer/", "buffer/"
"""What names of stored tensors begin with."""
RANDOM_TORCH = "random/torch"
PartTensors = dict[str, tuple[torch.Tensor, TensorPart]]
"""Tensors by stored name, each with the part of the unsplit model's that it is."""


class Holding(Record):
    """A device's parameters and running statistics, and their places in the unsplit model."""

    parameters: Mapping[str, torch.nn.Parameter]
    """By name in the unsplit model; one that several units share has the name that it has in the first of them."""
    parts: Mapping[str, TensorPart]
    """Of all of them."""
    writes: frozenset[str]
    """Those that this device saves: of every tensor's every part, one device does."""
    writes_state: frozenset[str] = frozenset()
    """Those of whose optimizer state it saves what it has, where replicas divide it."""
    statistics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By name: what normalizations keep of batches (`models.statistics`)."""
    own_rows: Mapping[str, OwnRows] | None = None
    """What it updates of the parameters, where replicas divide that; None: all."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name."""
        return {**self.parameters, **self.statistics}

    def updated(self, name: str) -> OwnRows | None:
        """Return what of a parameter or statistic has optimizer state here; None: nothing."""
        if self.own_rows is not None:
            return self.own_rows.get(name)
        own = self.parameters.get(name)
        return None if own is None else OwnRows(rows=own, whole=own, part=self.parts[name])

    @property
    def without_others_rows(self) -> "Holding":
        """The same, but of parameters of which it has rows only those."""
        rows = self.own_rows or {}
        still = {name: one for name, one in self.parameters.items() if not one.requires_grad and name not in rows}
        whole = {name: self.parts[name] for name in (*still, *self.statistics)}
        return replace(
            self,
            parameters=still | {name: own.rows for name, own in rows.items()},
            parts=whole | {name: own.part for name, own in rows.items()},
        )

    def stored_name(self, name: str) -> str:
        """Return what one of them is called in files."""
        return (PARAMETER if name in self.parameters else BUFFER) + name

    def of(self, names: Collection[str]) -> "Holding":
        """Return these of them alone."""
        return Holding(
            parameters={name: tensor for name, tensor in self.parameters.items() if name in names},
            statistics={name: tensor for name, tensor in self.statistics.items() if name in names},
            parts={name: self.parts[name] for name in names},
            writes=self.writes & set(names),
            writes_state=self.writes_state & set(names),
            own_rows=None if self.own_rows is None else {n: own for n, own in self.own_rows.items() if n in names},
        )


def holding_of(
    plan: Plan,
    device: str,
    graph: UnitGraph,
    parameters: Mapping[str, torch.nn.Parameter],
    parts: Mapping[str, TensorPart] | None = None,
    units: Sequence[UnitModule] = (),
    rows: Mapping[str, OwnRows] | None = None,
) -> Holding:
    """Return what a device holds under a plan.

    Args:
        plan: what runs where.
        device: its name.
        graph: of the plan's model.
        parameters: of its stage, by name in the unsplit model (`StageExecutor.named_parameters`).
        parts: which part of each, and of statistics, the device holds, by name; what is left out is whole.
        units: of its stage, which keep the statistics.
        rows: what it updates of each, by the same names; None: all.
    """
    crew = plan.crew_of(device)
    stage_index, replica_index, stage = crew.numbers[0], crew.replica_index(device), crew.first
    replica = stage.replicas[replica_index]
    names, first_stages = _tied(plan, graph)
    own = {names.get(name, name): parameter for name, parameter in parameters.items()}
    statistics = named_statistics(units)
    own_parts: dict[str, TensorPart] = {}
    writes, held_first = set(), set()
    for name, tensor in {**parameters, **statistics}.items():
        first = names.get(name, name)
        part = (parts or {}).get(name) or TensorPart(full_shape=tuple(tensor.shape))
        own_parts[first] = part
        if first_stages.get(first, stage_index) != stage_index:
            continue
        held_first.add(first)
        if replica_index == 0 and (device == replica.devices[0] or not part.is_whole):
            writes.add(first)
    holding = Holding(
        parameters=own,
        statistics=statistics,
        parts=own_parts,
        writes=frozenset(writes),
        writes_state=frozenset(held_first),
        own_rows=None if rows is None else {names.get(name, name): one for name, one in rows.items()},
    )
    if not stage.keeps_rows:
        return holding
    divided = holding.without_others_rows
    kept = writes - own.keys() | held_first & (holding.own_rows or {}).keys()
    return replace(divided, writes=frozenset(kept))


def _tied(plan: Plan, graph: UnitGraph) -> tuple[dict[str, str], dict[str, int]]:
    """Return, of parameters that units share, the first unit's name by each name, and the first stage by that name;
    of stages of the same devices the first stands for all.
    """
    names = first_names(plan.model, graph)
    stages: dict[str, int] = {}
    by_unit = {unit: crew.numbers[0] for crew in plan.crews for unit in crew.units}
    for index, _, name in _shared(plan.model, graph):
        stages.setdefault(names[name], by_unit[index])
    return names, stages


def first_names(spec: ModelSpec, graph: UnitGraph) -> dict[str, str]:
    """Return, by every name of a parameter that units share, the name that it has in the first of them."""
    first: dict[str, str] = {}
    return {name: first.setdefault(group, name) for _, group, name in _shared(spec, graph)}


def _shared(spec: ModelSpec, graph: UnitGraph) -> Iterator[tuple[int, str, str]]:
    """Yield the parameters that units share with others: the unit, the group, and the full name there."""
    for index in (index for index, unit in enumerate(graph.units) if unit.shared):
        unit = empty_unit(spec, index)
        full = parameter_names(unit)
        yield from ((index, group, full[local]) for group, local in unit.shared.items())


def tensors_of(holding: Holding, optimizer: torch.optim.Optimizer) -> PartTensors:
    """Return what a device saves, by stored name, with the part that each is: parameters, their optimizer state,
    running statistics, and the state of its random numbers.
    """
    found = held_tensors(holding, optimizer, holding.writes)
    if holding.own_rows is not None:
        found |= _states(holding, optimizer, holding.own_rows.keys() & holding.writes_state)
    state = torch_state()
    return found | {RANDOM_TORCH: (state, TensorPart(full_shape=tuple(state.shape)))}


def _states(holding: Holding, optimizer: torch.optim.Optimizer, names: Collection[str]) -> PartTensors:
    """Return the optimizer's state of parameters by stored name, with the part that each is.

    Where replicas divide it, what it keeps of a parameter as a whole is of the device that updates the first row.
    """
    found = {}
    for name in sorted(names):
        updated = holding.updated(name)
        if updated is None:
            continue
        tells_whole = holding.own_rows is None or updated.is_first
        for key, value in optimizer.state.get(updated.rows, {}).items():
            if isinstance(value, torch.Tensor) and (value.shape == updated.rows.shape or tells_whole):
                whole = TensorPart(full_shape=tuple(value.shape))
                found[f"{STATE}{key}/{name}"] = value, updated.part if value.shape == updated.rows.shape else whole
    return found


def held_tensors(holding: Holding, optimizer: torch.optim.Optimizer, names: Collection[str]) -> PartTensors:
    """Return these tensors and their optimizer state by stored name, not copied, with the part that each is."""
    held = holding.tensors
    found = {holding.stored_name(name): (held[name].detach(), holding.parts[name]) for name in sorted(names)}
    return found | _states(holding, optimizer, names)


def described(tensors: PartTensors) -> dict[str, StoredTensor]:
    """Return what others are told of tensors, by stored name."""
    return {name: StoredTensor(part=part, dtype=dtype_name(value.dtype)) for name, (value, part) in tensors.items()}


def wanted_of(holding: Holding, files: Mapping[str, Described]) -> dict[str, TensorPart]:
    """Return which parts of the tensors in files a device needs.

    Raises:
        ConfigError: it is a checkpoint of another model: tensors are missing, or of other shapes or types.
    """
    stored = {name: tensor for file in files.values() for name, tensor in file.tensors.items()}
    problems = []
    for name, tensor in holding.tensors.items():
        problems += _differences(name, holding.parts[name], tensor, stored.get(holding.stored_name(name)))
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ConfigError(
            f"the checkpoint is of another model: {'; '.join(problems[:3])}{more}; give a plan for its own"
        )
    wanted = {holding.stored_name(name): part for name, part in holding.parts.items()}
    for name, there in stored.items():
        if name.startswith(STATE):
            parameter = name.split("/", 2)[2]
            updated = holding.updated(parameter) if parameter in holding.parameters else None
            if updated is not None and holding.parameters[parameter].requires_grad:
                own, full_shape = updated.part, there.part.full_shape
                wanted[name] = own if full_shape == own.full_shape else TensorPart(full_shape=full_shape)
    return wanted


def _differences(name: str, part: TensorPart, parameter: torch.Tensor, stored: StoredTensor | None) -> list[str]:
    if stored is None:
        return [f"it lacks {name}"]
    found = []
    if stored.part.full_shape != part.full_shape:
        found.append(f"{name} has shape {list(stored.part.full_shape)} there, {list(part.full_shape)} here")
    here = dtype_name(parameter.dtype)
    holds = here == "float32" and stored.dtype in EXPORTED  # exactly
    rounds = not parameter.requires_grad and (stored.dtype, here) == ("float32", "bfloat16")
    if stored.dtype != here and not holds and not rounds:
        found.append(f"{name} has type {stored.dtype} there, {here} here")
    return found


def put_back(
    holding: Holding,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    kept: Mapping[torch.nn.Parameter, Mapping[str, Any]] | None = None,
) -> None:
    """Give parameters, statistics and optimizer what a checkpoint holds, in place; state that it lacks begins anew.

    `kept` is the state of parameters of the optimizer that are not among the holding's, and stay as they are.
    """
    with torch.no_grad():
        for name, own in holding.tensors.items():
            own.copy_(tensors[holding.stored_name(name)])
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for stored, value in tensors.items():
        if stored.startswith(STATE):
            _, key, name = stored.split("/", 2)
            by_parameter.setdefault(name, {})[key] = value
    # In the order in which `state_dict` numbers them.
    listed = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    numbers = {id(parameter): number for number, parameter in enumerate(listed)}
    updated = {name: holding.updated(name) for name in by_parameter}
    state = {numbers[id(own.rows)]: dict(by_parameter[name]) for name, own in updated.items() if own is not None}
    state |= {numbers[id(parameter)]: dict(values) for parameter, values in (kept or {}).items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
