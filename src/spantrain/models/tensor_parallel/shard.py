"""Divide the units of a stage among the members of a tensor-parallel group, in any ratio of whole pieces."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from spantrain.core.shares import TensorPart
from spantrain.models.tensor_parallel.blocks import Block, sequence_blocks
from spantrain.models.tensor_parallel.divided import gathered
from spantrain.models.tensor_parallel.division import Change, Divider, Task
from spantrain.models.tensor_parallel.find import find_rules, full_module_names, heavy_modules
from spantrain.models.tensor_parallel.functions import InputCopy
from spantrain.models.tensor_parallel.group import TensorGroup
from spantrain.models.tensor_parallel.logits import DividedLogits
from spantrain.models.tensor_parallel.multihead import leave_fast_paths
from spantrain.models.tensor_parallel.rules import child, counts
from spantrain.models.tensor_parallel.sequence import SequenceSlices
from spantrain.models.tensor_parallel.slices import take, whole_of
from spantrain.models.units import UnitModule, parameter_names

_NOTES = "_tensor_notes"


@dataclass(frozen=True, kw_only=True)
class _Notes:
    """What a divided unit says of itself."""

    whole: tuple[str, ...]
    """Why something that costs work is held whole."""
    partial: tuple[str, ...]
    """Full names of parameters held whole whose gradients are sums over the group."""


def sums_of(unit: UnitModule) -> int:
    """Return how often a group sums in a unit, each way (`core.units.Unit.tensor_sums`); 0: nothing is divided.

    Sums of the size of the unit's output count, and the exchange at the loss. Smaller ones do not: of an EfficientNet
    block's squeezed channels, and the gathering inside of a ResNet bottleneck.
    """
    return find_rules(unit).sums


def divides_sequence(unit: UnitModule) -> bool:
    """Whether members of a group can hold slices of the sequence somewhere in a unit, if there are pieces for all."""
    return bool(sequence_blocks(unit, find_rules(unit).regions))


def shard_units(
    units: Sequence[UnitModule],
    shares: Sequence[float],
    rank: int,
    group: TensorGroup,
    *,
    sequence_parallel: bool = False,
) -> dict[str, TensorPart]:
    """Leave of a stage's units what one member of a group holds, in place; return the parts by full parameter names.

    Modules become divided ones, parameters new ones; parameters that units share stay one object. Each member calls
    it on units with the same weights. A forward and a backward pass of a unit then give what the whole unit would, on
    every member; gradients are those of the parts. All parameters are returned, whole ones too.

    Args:
        units: consecutive, on one device.
        shares: of the members, by rank, in any unit; each gets whole pieces (heads, columns, channels).
        rank: of this member.
        group: the members.
        sequence_parallel: hold slices of the sequence between the divided layers of transformer blocks (`sequence`).

    Raises:
        ValueError: the shares are not one positive number for each member.
    """
    if len(shares) != group.size or rank != group.rank or min(shares) <= 0:
        raise ValueError(f"a group of {group.size} needs as many positive shares, got {list(shares)} at rank {rank}")
    if group.size == 1:
        return {full: whole_of(unit.get_parameter(local)) for unit, local, full in _named(units)}
    left: dict[int, list[str]] = {id(unit): [] for unit in units}
    dividers = {id(unit): _divider(unit, tuple(shares), group) for unit in units}
    tasks = [(unit, task) for unit in units for task in _tasks(dividers[id(unit)], left[id(unit)].append)]
    tasks = _without_conflicts(units, tasks, lambda unit, why: left[id(unit)].append(why))
    blocks = {id(unit): list[Block]() for unit in units}
    if sequence_parallel:
        for unit in units:
            done = [task for other, task in tasks if other is unit]
            blocks[id(unit)] += _slice_sequence(dividers[id(unit)], done, left[id(unit)].append)
    replaced = _Replaced()
    for unit, task in tasks:
        for change in task.changes:
            _put_in_place(units, change.module, change.build(replaced.parameters_of(change)))
        _set_heads(unit, task)
    replaced.put_in_place(units)
    for unit in units:
        leave_fast_paths(unit)
        done = [task for other, task in tasks if other is unit]
        object.__setattr__(unit, _NOTES, _notes(unit, done, blocks[id(unit)], left[id(unit)]))
    return {full: replaced.part_of(unit.get_parameter(local)) for unit, local, full in _named(units)}


def notices(units: Sequence[UnitModule]) -> tuple[str, ...]:
    """Return what of divided units every member computes whole, and why; one line for units that are alike."""
    said: dict[str, list[str]] = {}
    for unit in units:
        for text in _notes_of(unit).whole:
            said.setdefault(text, []).append(unit.name)
    return tuple(f"{_listed(names)}: {text}" for text, names in said.items())


def partial_parameters(units: Sequence[UnitModule]) -> tuple[str, ...]:
    """Return the parameters held whole whose gradients are to be summed over the group once, after a step's last W."""
    return tuple(dict.fromkeys(name for unit in units for name in _notes_of(unit).partial))


def _divider(unit: UnitModule, shares: tuple[float, ...], group: TensorGroup) -> Divider:
    """Return what divides a unit, which from now on leaves no own parts of classes to those behind it."""
    copy = InputCopy(group)
    slices = SequenceSlices(group, shares, copy)
    unit.register_forward_hook(lambda *_: copy.forget(), always_call=True)
    unit.register_forward_hook(lambda *_: slices.forget(), always_call=True)
    unit.register_forward_hook(lambda _unit, _inputs, outputs: gathered(outputs, DividedLogits))
    return Divider(unit=unit, shares=shares, group=group, copy=copy, slices=slices)


def _tasks(divider: Divider, leave: Callable[[str], None]) -> Iterator[Task]:
    rules = find_rules(divider.unit)
    found = [(region.anchor, region.pieces, divider.region(region)) for region in rules.regions]
    found += [(path, 0, divider.embedding(path)) for path in rules.embeddings]
    found += [(path, 0, divider.output(path)) for path in rules.outputs]
    found += [(path, 0, divider.attention(path)) for path in rules.attentions]
    found += [(path, 0, divider.experts(path)) for path in rules.experts]
    for path, pieces, task in found:
        if task is None:
            leave(f"{path or 'it'} has {pieces or 'too few'} pieces, fewer than the {divider.group.size} members")
        else:
            yield task


def _slice_sequence(divider: Divider, done: Sequence[Task], leave: Callable[[str], None]) -> tuple[Block, ...]:
    """Have the unit's blocks work on slices of the sequence; to be called before their layers are built."""
    regions = [task.region for task in done if task.region is not None]
    blocks = sequence_blocks(divider.unit, regions)
    for block in blocks:
        divider.sliced.update(block.regions)
        at, attentions = child(divider.unit, block.path), [child(divider.unit, path) for path in block.attentions]
        assert at is not None, block.path
        divider.slices.attach(at, [module for module in attentions if module is not None])
    if any(region.counts_at is not None and region not in divider.sliced for region in regions):
        leave("its sequence is held whole by every member: not all of its blocks' layers are known")
    return blocks


class _Replaced:
    """The parts that have taken the place of parameters, so that a shared parameter is divided once."""

    def __init__(self) -> None:
        self._by_old: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        self._parts: dict[int, TensorPart] = {}

    def parameters_of(self, change: Change) -> Mapping[str, nn.Parameter]:
        """Return a module's own parts."""
        return {name: self._new(change.module.get_parameter(name), part) for name, part in change.parts.items()}

    def _new(self, old: nn.Parameter, part: TensorPart) -> nn.Parameter:
        if part.is_whole:
            return old
        if id(old) not in self._by_old:
            new = nn.Parameter(take(old, part), requires_grad=old.requires_grad)
            # The old one is kept until all are replaced, or its id could be another's.
            self._by_old[id(old)] = (old, new)
            self._parts[id(new)] = part
        return self._by_old[id(old)][1]

    def put_in_place(self, units: Sequence[UnitModule]) -> None:
        """Replace other names of divided parameters (of tied ones, on a parent of the layer)."""
        for module in _modules(units):
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and id(parameter) in self._by_old:
                    setattr(module, name, self._by_old[id(parameter)][1])

    def part_of(self, parameter: nn.Parameter) -> TensorPart:
        """Return the part that a parameter of the divided units is."""
        return self._parts.get(id(parameter)) or whole_of(parameter)


def _without_conflicts(
    units: Sequence[UnitModule], tasks: list[tuple[UnitModule, Task]], leave: Callable[[UnitModule, str], None]
) -> list[tuple[UnitModule, Task]]:
    """Leave whole what shares a parameter with something that is not divided in the same way."""
    while True:
        wanted = _wanted_parts(units, [task for _, task in tasks])
        kept = []
        for unit, task in tasks:
            own = [change.module.get_parameter(name) for change in task.changes for name in change.parts]
            if all(len(wanted[id(parameter)]) == 1 for parameter in own):
                kept.append((unit, task))
            else:
                leave(unit, f"{task.title} shares a parameter with something that is not divided alike")
        if len(kept) == len(tasks):
            return kept
        tasks = kept


def _wanted_parts(units: Sequence[UnitModule], tasks: Sequence[Task]) -> dict[int, set[TensorPart]]:
    """Return by parameter the parts of it that modules want; who has no task wants it whole."""
    wanted: dict[int, set[TensorPart]] = {}
    changed = {id(change.module): change for task in tasks for change in task.changes}
    for module in _modules(units):
        change = changed.get(id(module))
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if change is not None:
                wanted.setdefault(id(parameter), set()).add(change.parts[name])
            elif not _is_second_name(module, parameter):
                wanted.setdefault(id(parameter), set()).add(whole_of(parameter))
    return wanted


def _is_second_name(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether a module only names a parameter that a child of it works with."""
    return any(parameter is other for below in module.children() for other in below.parameters(recurse=False))


def _put_in_place(units: Sequence[UnitModule], old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, wherever that is."""
    new.train(old.training)
    for module in _modules(units):
        for name, below in list(module._modules.items()):
            if below is old:
                module._modules[name] = new


def _set_heads(unit: UnitModule, task: Task) -> None:
    """Tell attention how many heads it has, and which."""
    if task.region is None or task.own is None or task.region.counts_at is None:
        return
    module = child(unit, task.region.counts_at)
    assert module is not None, task.region.counts_at
    for name, value in counts(module, task.region.pieces, task.own.size).items():
        setattr(module, name, value)
    if task.bias is not None:
        task.bias.attach(module)


def _notes(unit: UnitModule, done: Sequence[Task], blocks: Sequence[Block], left: Sequence[str]) -> _Notes:
    divided = {change.path for task in done for change in task.changes}
    names, partial = full_module_names(unit), []
    whole = [names.get(path, path) for path, _ in heavy_modules(unit, names) if path not in divided]
    inside = [name.removeprefix(f"{unit.name}.") for name in whole]
    text = [f"computed whole by every member, for want of a rule: {', '.join(inside)}"] if whole else []
    for path in (path for task in done if task.region is not None for path in task.region.partial):
        module = child(unit, path)
        assert module is not None, path
        partial += [f"{names[path]}.{name}" for name, _ in module.named_parameters()]
    for path, name in (parameter for block in blocks for parameter in block.partial):
        module = child(unit, path)
        if module is not None and module._parameters.get(name) is not None:
            partial.append(f"{names[path]}.{name}")
    return _Notes(whole=(*left, *text), partial=tuple(partial))


def _notes_of(unit: UnitModule) -> _Notes:
    found = getattr(unit, _NOTES, None)
    return found if isinstance(found, _Notes) else _Notes(whole=(), partial=())


def _named(units: Sequence[UnitModule]) -> Iterator[tuple[UnitModule, str, str]]:
    """Yield each parameter's unit, local name and name in the unsplit model."""
    for unit in units:
        for local, full in parameter_names(unit).items():
            yield unit, local, full


def _modules(units: Sequence[UnitModule]) -> list[nn.Module]:
    """Return all modules of all units, each once."""
    seen = torch.nn.ModuleList(units)
    return [module for module in seen.modules() if module is not seen]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} units)"
