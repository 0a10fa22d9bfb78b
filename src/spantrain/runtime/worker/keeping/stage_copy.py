"""A copy of units of another device's stage, in host memory, that does the same updates."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.core.units import UnitGraph
from spantrain.errors import ProtocolError
from spantrain.formats.tensor_bytes import raw_bytes
from spantrain.models.build import blank_units, build_units
from spantrain.models.low_weights import frozen_rounded
from spantrain.models.units import parameter_names, tie_parameters
from spantrain.runtime.checkpoint.holding import Holding, holding_of
from spantrain.runtime.gradients.optimizer import build_optimizer, update


class Summed(Record):
    """What a stage has summed in a step."""

    gradients: list[Tensor | None]
    """Of parameters that are trained, by name."""
    statistics: dict[str, Tensor]
    """Running ones behind the step."""


@dataclass(kw_only=True)
class StageCopy:
    """What is kept of a stage."""

    ward: str
    """Who has it, and is followed."""
    units: Sequence[int]
    holding: Holding
    optimizer: torch.optim.Optimizer

    def update(self, job: TrainJob, step: int, grad_norm: float | None, summed: Summed) -> None:
        """Do the update of a step; without a norm there is none."""
        for own, gradient in zip(trained(self.holding), summed.gradients, strict=True):
            own.grad = gradient
        update(self.optimizer, job, step, grad_norm)
        for name, value in summed.statistics.items():
            self.holding.statistics[name].copy_(value)


def copy_of(
    plan: Plan, graph: UnitGraph, job: TrainJob, ward: str, units: Sequence[int], *, begins: bool = False
) -> StageCopy:
    """Return room for a copy of units of a device's stage; `begins`: with the weights that new ones begin with."""
    build = build_units if begins else blank_units
    built = build(plan.model, units, seed=job.seed)
    tie_parameters(built)
    named: dict[str, torch.nn.Parameter] = {}
    for unit in built:
        for local, name in parameter_names(frozen_rounded(unit, plan.dtype)).items():
            parameter = unit.get_parameter(local)
            if all(parameter is not other for other in named.values()):
                named[name] = parameter
    holding = holding_of(plan, ward, graph, named, units=built)
    return StageCopy(ward=ward, units=units, holding=holding, optimizer=build_optimizer(job, named.values(), named))


def trained(holding: Holding) -> list[torch.nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return [own for _, own in sorted(holding.parameters.items()) if own.requires_grad]


def bytes_of_step(holding: Holding) -> Tensor:
    """Return what is sent of a step that is summed.

    A byte for each parameter that is trained, whether it has a gradient; then gradients, and running statistics.
    """
    gradients = [own.grad for own in trained(holding)]
    marks = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
    tensors = [one for one in gradients if one is not None]
    tensors += [value for _, value in sorted(holding.statistics.items())]
    return torch.cat([marks, *(raw_bytes(tensor.cpu()) for tensor in tensors)])


def size_of_step(pieces: Sequence[Tensor], holding: Holding) -> int:
    """Return the bytes of a step by those that have come: of its marks as long as not all are there, else of all."""
    count = len(trained(holding))
    marks = torch.cat([piece[:count] for piece in pieces])[:count]
    return count if marks.numel() < count else count + sum(one.nbytes for one in _like(marks, holding))


def _like(marks: Tensor, holding: Holding) -> list[Tensor]:
    """Return tensors as those that come behind a step's marks."""
    given = (own for own, mark in zip(trained(holding), marks.tolist(), strict=True) if mark)
    return [*given, *(value for _, value in sorted(holding.statistics.items()))]


def summed_of(flat: Tensor, holding: Holding, ward: str) -> Summed:
    """Return what is in the bytes of a step.

    Raises:
        ProtocolError: they are not of what the copy holds.
    """
    if flat.numel() != size_of_step([flat], holding):
        raise ProtocolError(f"{ward}: sent {flat.numel()} bytes of a step, its units have other gradients")
    marks, behind = flat.tensor_split([len(trained(holding))])
    like = _like(marks, holding)
    pieces = torch.split(behind, [one.nbytes for one in like])
    values = iter([piece.clone().view(one.dtype).reshape(one.shape) for piece, one in zip(pieces, like, strict=True)])
    return Summed(
        gradients=[next(values) if mark else None for mark in marks.tolist()],
        statistics={name: next(values) for name in sorted(holding.statistics)},
    )


def most_bytes_of_step(holding: Holding) -> int:
    """Return how many bytes a step has at most."""
    parameters = trained(holding)
    return len(parameters) + sum(one.nbytes for one in (*parameters, *holding.statistics.values()))
