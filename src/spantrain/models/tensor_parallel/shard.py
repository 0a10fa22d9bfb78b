"""Divides the units of a stage among the members of a tensor-parallel group, in any ratio of whole pieces.

Says for the cost model, too, by which pieces the layers of a unit are divided, and how much of the unit they are.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from spantrain.core.shares import TensorPart, TensorPieces
from spantrain.models.tensor_parallel.divided import DividedLogits, gathered
from spantrain.models.tensor_parallel.division import Change, Divider, DivisionTask, take, whole_of
from spantrain.models.tensor_parallel.find import find_rules, full_module_names, heavy_modules
from spantrain.models.tensor_parallel.group import LoneGroup, TensorGroup
from spantrain.models.tensor_parallel.modules import leave_fast_paths
from spantrain.models.tensor_parallel.rules import Region
from spantrain.models.tensor_parallel.sequence import SequenceBlock, sequence_blocks
from spantrain.models.units import UnitModule, copied, parameter_names


def sums_of(unit: UnitModule) -> int:
    """Return how often a group sums in a unit, each way (`core.units.Unit.tensor_sums`); 0: nothing is divided.

    Sums of the size of the unit's output count, and the exchange at the loss. Smaller ones do not: of an EfficientNet
    block's squeezed channels, and the gathering inside of a ResNet bottleneck.
    """
    return sum(rule.output_sums for rule in find_rules(unit))


def divides_sequence(unit: UnitModule) -> bool:
    """Whether members of a group can hold slices of the sequence somewhere in a unit, if there are pieces for all."""
    return bool(sequence_blocks(unit, [rule for rule in find_rules(unit) if isinstance(rule, Region)]))


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
    works = [_UnitWork(unit, tuple(shares), group) for unit in units]
    _leave_conflicts(units, works)
    if sequence_parallel:
        for work in works:
            work.slice_sequence()
    replaced = _Replaced()
    for work in works:
        for task in work.tasks:
            for change in task.changes:
                _put_in_place(units, change.module, change.build(replaced.parameters_of(change)))
            work.set_heads(task)
    replaced.put_in_place(units)
    for work in works:
        leave_fast_paths(work.unit)
        work.unit.group = lambda: group
        work.note()
    return {full: replaced.part_of(unit.get_parameter(local)) for unit, local, full in _named(units)}


def notices(units: Sequence[UnitModule]) -> tuple[str, ...]:
    """Return what of divided units every member computes whole, and why; one line for units that are alike."""
    said: dict[str, list[str]] = {}
    for unit in units:
        for text in unit.held_whole:
            said.setdefault(text, []).append(unit.name)
    return tuple(f"{_listed(names)}: {text}" for text, names in said.items())


def partial_parameters(units: Sequence[UnitModule]) -> tuple[str, ...]:
    """Return the parameters held whole whose gradients are to be summed over the group once, after a step's last W."""
    return tuple(dict.fromkeys(name for unit in units for name in unit.partial))


class _UnitWork(Divider):
    """What is done to one unit, which from now on leaves no own parts of classes to those behind it."""

    def __init__(self, unit: UnitModule, shares: tuple[float, ...], group: TensorGroup) -> None:
        super().__init__(unit, shares, group)
        for kept in (self.copy, self.slices):
            unit.register_forward_hook(lambda *_, kept=kept: kept.forget(), always_call=True)
        unit.register_forward_hook(lambda _unit, _inputs, outputs: gathered(outputs, DividedLogits))
        self.tasks: list[DivisionTask] = []
        self.left: list[str] = []
        """Why something is not divided."""
        self._blocks: tuple[SequenceBlock, ...] = ()
        for rule in find_rules(unit):
            task = self.task(rule)
            if task is None:
                self.left.append(f"{rule.anchor or 'it'} has {rule.pieces} pieces, fewer than the {group.size} members")
            else:
                self.tasks.append(task)

    def slice_sequence(self) -> None:
        """Have the unit's blocks work on slices of the sequence; to be called before their layers are built."""
        regions = [task.region for task in self.tasks if task.region is not None]
        self._blocks = sequence_blocks(self.unit, regions)
        for block in self._blocks:
            self.sliced.update(block.regions)
            attentions = [self.unit.get_submodule(path) for path in block.attentions]
            self.slices.attach(self.unit.get_submodule(block.path), attentions)
        if any(region.counts_at is not None and region not in self.sliced for region in regions):
            self.left.append("its sequence is held whole by every member: not all of its blocks' layers are known")

    def note(self) -> None:
        """Have the divided unit say what is held whole."""
        divided = {change.path for task in self.tasks for change in task.changes}
        names = full_module_names(self.unit)
        whole = [names.get(path, path) for path, _ in heavy_modules(self.unit, names) if path not in divided]
        inside = [name.removeprefix(f"{self.unit.name}.") for name in whole]
        text = [f"computed whole by every member, for want of a rule: {', '.join(inside)}"] if whole else []
        held = [path for task in self.tasks if task.region is not None for path in task.region.partial]
        partial = [(path, name) for path in held for name, _ in self.unit.get_submodule(path).named_parameters()]
        partial += [pair for block in self._blocks for pair in block.partial]
        partial = [pair for pair in partial if self._is_trained(*pair)]
        self.unit.held_whole = (*self.left, *text)
        self.unit.partial = tuple(f"{names[path]}.{name}" for path, name in partial)

    def _is_trained(self, path: str, name: str) -> bool:
        try:
            return self.unit.get_parameter(f"{path}.{name}").requires_grad
        except AttributeError:  # left out, such as a bias
            return False


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


def _leave_conflicts(units: Sequence[UnitModule], works: Sequence[_UnitWork]) -> None:
    """Leave whole what shares a parameter with something that is not divided in the same way."""
    changed = True
    while changed:
        changed = False
        wanted = _wanted_parts(units, [task for work in works for task in work.tasks])
        for work in works:
            for task in list(work.tasks):
                own = [change.module.get_parameter(name) for change in task.changes for name in change.parts]
                if any(len(wanted[id(parameter)]) > 1 for parameter in own):
                    work.tasks.remove(task)
                    work.left.append(f"{task.title} shares a parameter with something that is not divided alike")
                    changed = True


def _wanted_parts(units: Sequence[UnitModule], tasks: Sequence[DivisionTask]) -> dict[int, set[TensorPart]]:
    """Return by parameter the parts of it that modules want; who has no task wants it whole."""
    wanted: dict[int, set[TensorPart]] = {}
    changed = {id(change.module): change for task in tasks for change in task.changes}
    for module in _modules(units):
        change = changed.get(id(module))
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            below = (other for child in module.children() for other in child.parameters(recurse=False))
            if change is not None:
                wanted.setdefault(id(parameter), set()).add(change.parts[name])
            elif not any(parameter is other for other in below):  # else a child works with it, and has another name
                wanted.setdefault(id(parameter), set()).add(whole_of(parameter))
    return wanted


def _put_in_place(units: Sequence[UnitModule], old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, wherever that is."""
    new.train(old.training)
    for module in _modules(units):
        for name, below in list(module._modules.items()):
            if below is old:
                module._modules[name] = new


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


def pieces_of(unit: UnitModule) -> tuple[TensorPieces, ...]:
    """Return what of an undivided unit can be divided, layers of equally many pieces together; it stays as it is.

    Shapes are enough: a unit on the meta device will do. The work of a layer is reckoned by its matrices, as
    `runtime.step.stage_member.unit_shares` does.
    """
    pieces = {
        id(parameter): rule.pieces
        for rule in find_rules(unit)
        for path in rule.paths
        for parameter in unit.get_submodule(path).parameters(recurse=False)
    }
    shared = {id(unit.get_parameter(local)): group for group, local in unit.shared.items()}
    # Which parameters members of a group hold parts of does not depend on the shares.
    parts = shard_units([copied(unit)], (1.0, 1.0), 0, LoneGroup(0, 2))
    found: dict[int, list[nn.Parameter]] = {}
    for _, local, full in _named([unit]):
        if not parts[full].is_whole:
            parameter = unit.get_parameter(local)
            found.setdefault(pieces[id(parameter)], []).append(parameter)
    matrices = sum(parameter.numel() for parameter in unit.parameters() if parameter.dim() > 1)
    return tuple(
        TensorPieces(
            pieces=count,
            parameter_bytes=sum(parameter.nbytes for parameter in own),
            frozen_bytes=sum(parameter.nbytes for parameter in own if not parameter.requires_grad),
            work_share=sum(parameter.numel() for parameter in own if parameter.dim() > 1) / max(1, matrices),
            shared=tuple(sorted(shared[id(parameter)] for parameter in own if id(parameter) in shared)),
        )
        for count, own in sorted(found.items())
    )
