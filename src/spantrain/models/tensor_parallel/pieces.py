"""By which whole pieces the layers of a unit are divided, and how much of the unit they are: for the cost model."""

import copy
from collections.abc import Iterator, Mapping

from torch import nn

from spantrain.core.shares import TensorPieces
from spantrain.models.tensor_parallel.experts import expert_width
from spantrain.models.tensor_parallel.find import find_rules
from spantrain.models.tensor_parallel.group import ThreadGroup
from spantrain.models.tensor_parallel.rules import child
from spantrain.models.tensor_parallel.shard import shard_units
from spantrain.models.units import UnitModule, parameter_names


def pieces_of(unit: UnitModule) -> tuple[TensorPieces, ...]:
    """Return what of an undivided unit can be divided, layers of equally many pieces together; it stays as it is.

    Shapes are enough: a unit on the meta device will do. The work of a layer is reckoned by its matrices, as
    `runtime.step.stage_member.unit_shares` does.
    """
    pieces = _pieces_by_parameter(unit)
    shared = {id(unit.get_parameter(local)): group for group, local in unit.shared.items()}
    found: dict[int, list[nn.Parameter]] = {}
    for parameter in _divided(unit):
        found.setdefault(pieces[id(parameter)], []).append(parameter)
    matrices = sum(parameter.numel() for parameter in unit.parameters() if parameter.dim() > 1)
    return tuple(
        TensorPieces(
            pieces=count,
            parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in own),
            work_share=sum(parameter.numel() for parameter in own if parameter.dim() > 1) / max(1, matrices),
            shared=tuple(sorted(shared[id(parameter)] for parameter in own if id(parameter) in shared)),
        )
        for count, own in sorted(found.items())
    )


def _divided(unit: UnitModule) -> list[nn.Parameter]:
    """Return the parameters of which members of a group hold parts: which ones does not depend on the shares."""
    parts = shard_units([copy.deepcopy(unit)], (1.0, 1.0), 0, ThreadGroup.together(2)[0])
    return [unit.get_parameter(local) for local, full in parameter_names(unit).items() if not parts[full].is_whole]


def _pieces_by_parameter(unit: UnitModule) -> Mapping[int, int]:
    """Return how many pieces there are of each parameter that has a rule, by its identity."""
    return {
        id(parameter): count
        for path, count in _pieces_by_module(unit)
        for parameter in _module(unit, path).parameters(recurse=False)
    }


def _pieces_by_module(unit: UnitModule) -> Iterator[tuple[str, int]]:
    """Yield the paths of modules that have a rule, and their pieces."""
    rules = find_rules(unit)
    for region in rules.regions:
        yield from ((path, region.pieces) for path in region.paths)
    yield from ((path, _count(unit, path, "num_embeddings")) for path in rules.embeddings)
    yield from ((path, _count(unit, path, "out_features")) for path in rules.outputs)
    for path in rules.attentions:
        heads = _count(unit, path, "num_heads")
        yield from ((path, heads), (f"{path}.out_proj", heads))
    yield from ((path, expert_width(_module(unit, path)) or 1) for path in rules.experts)


def _count(unit: UnitModule, path: str, name: str) -> int:
    count = getattr(_module(unit, path), name)
    assert isinstance(count, int), f"{path}.{name} of {unit.name}"
    return count


def _module(unit: UnitModule, path: str) -> nn.Module:
    module = child(unit, path)
    assert module is not None, f"{unit.name} has no module {path}"
    return module
