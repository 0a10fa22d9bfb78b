"""Copies of what only one device holds, on devices of other stages, which follow it step by step.

A keeper begins with parameters, optimizer state and running statistics of a stage. After each step the stage's first
device sends it the gradients that are summed, and it does the same update: a third of what AdamW's state and the
parameters would take. It reports a step at the barrier (`runtime.coordinator.barrier`) when it has them: of whatever
is committed, keepers have all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from spantrain.core.plan import Plan
from spantrain.errors import ProtocolError
from spantrain.models.build import blank_units, build_units
from spantrain.models.units import parameter_names, tie_parameters
from spantrain.runtime.checkpoint.holding import Holding, holding_of, put_back, wanted_of
from spantrain.runtime.gradients.optimizer import build_optimizer
from spantrain.runtime.redistribution.transfer import ExchangeChannel, TensorExchange, group_of
from spantrain.runtime.step.context import WorkerContext
from spantrain.runtime.worker.plan_part import PlanPart
from spantrain.runtime.worker.switch import Held, LocalTensorSource, describe

_CHUNK_BYTES = 4 * 2**20

_Pair = tuple[str, range, str]
"""A stage's first device, the stage's units, a device that keeps a copy."""


@dataclass(frozen=True, kw_only=True)
class KeptStage:
    """A copy of a stage, in host memory."""

    ward: str
    """The stage's first device, which it follows."""
    units: range
    holding: Holding
    optimizer: torch.optim.Optimizer
    statistics: dict[str, Tensor] = field(default_factory=dict)
    """Running ones behind the step that is under way."""


class Keeping:
    """What one device keeps for stages of others under a plan, and what others keep of its own."""

    def __init__(self, here: WorkerContext, part: PlanPart, *, begins: bool, before: "Keeping | None" = None) -> None:
        """Have room for what is kept, until `take` has filled it.

        Args:
            here: this device.
            part: its own part of the plan.
            begins: whether devices begin with new parameters: a keeper makes the same.
            before: under the plan before; of stages that stay what they are, copies stay.
        """
        self._here, self._part = here, part
        pairs, known = _pairs(part.plan), _pairs(before._part.plan) if before else set()
        self._keepers = sorted(keeper for ward, _, keeper in pairs if ward == here.name)
        old = {(kept.ward, kept.units): kept for kept in before.kept} if before else {}
        own = sorted((ward, units) for ward, units, keeper in pairs if keeper == here.name)
        self.kept: tuple[KeptStage, ...] = tuple(
            old.get(pair) or _copy_of(here, part.plan, *pair, begins=begins) for pair in own
        )
        self._new = set() if begins else {pair for pair in pairs - known if here.name in (pair[0], pair[2])}

    def take(self, step: int, held: Sequence[Held] = ()) -> None:
        """Fill copies that are new, before a step; those that do not change who they are take no part.

        `held` is what this device had before, in the same step: of that nothing is sent.

        Raises:
            PeerLostError, Interrupted: another device went away, or the run was ended.
            ProtocolError: another device sends something else than it should.
        """
        own = self._here.name
        takers = sorted(keeper for ward, _, keeper in self._new if ward == own)
        new = [kept for kept in self.kept if (kept.ward, kept.units, own) in self._new]
        givers = [kept.ward for kept in new]
        if not takers and not givers:
            return
        post = _OwnLanes(self._part.post(self._here, step))
        source = LocalTensorSource(own, (self._part, *held))
        files = describe(source.held, takers=takers, givers=givers, post=post)
        group = group_of(self._part.plan.cluster, own, tuple(sorted({own, *takers, *givers})))
        wanted = [wanted_of(kept.holding, {kept.ward: files[kept.ward]}) for kept in new]
        taken = TensorExchange(group, files, source, post).run(
            {name: part for one in wanted for name, part in one.items()}
        )
        for kept, names in zip(new, wanted, strict=True):
            put_back(kept.holding, kept.optimizer, {name: taken[name].clone() for name in names})

    def follow(self, step: int) -> None:
        """Send what is summed to those that keep this device's stage, and have it of those whose stages are kept here.

        Raises:
            Interrupted: another device went away, or the run was ended.
            ProtocolError: another device sends something else than it should.
        """
        if not self._keepers and not self.kept:
            return
        post = self._part.post(self._here, step, at_end=True)
        if self._keepers:
            flat = _flattened(self._part.holding)
            for keeper in self._keepers:
                for number, piece in enumerate(torch.split(flat, _CHUNK_BYTES)):
                    post.send(keeper, f"kept-gradients:{self._here.name}:{number}", piece)
        for kept in self.kept:
            kept.statistics.clear()
            kept.statistics.update(_put_gradients(kept, post))

    def committed(self) -> None:
        """Have running statistics be those behind the step that was under way, whose update is done."""
        for kept in self.kept:
            for name, value in kept.statistics.items():
                kept.holding.statistics[name].copy_(value)
            kept.statistics.clear()

    def drop(self) -> None:
        """Forget a step that never happened."""
        for kept in self.kept:
            kept.optimizer.zero_grad(set_to_none=True)
            kept.statistics.clear()


class _OwnLanes:
    """An exchange beside another one of the same step."""

    def __init__(self, post: ExchangeChannel) -> None:
        self._post = post

    def send(self, target: str, lane: str, tensor: Tensor) -> None:
        self._post.send(target, f"kept/{lane}", tensor)

    def receive(self, lane: str) -> Tensor:
        return self._post.receive(f"kept/{lane}")


def _pairs(plan: Plan) -> set[_Pair]:
    return {(stage.devices[0], stage.units, keeper) for stage in plan.stages for keeper in stage.keepers}


def _copy_of(here: WorkerContext, plan: Plan, ward: str, units: range, *, begins: bool) -> KeptStage:
    build = build_units if begins else blank_units
    built = build(plan.model, units, seed=here.job.seed)
    tie_parameters(built)
    named: dict[str, torch.nn.Parameter] = {}
    for unit in built:
        for local, name in parameter_names(unit).items():
            parameter = unit.get_parameter(local)
            if all(parameter is not other for other in named.values()):
                named[name] = parameter
    holding = holding_of(plan, ward, here.graph, named, units=built)
    optimizer = build_optimizer(here.job, named.values(), named)
    return KeptStage(ward=ward, units=units, holding=holding, optimizer=optimizer)


def _trained(holding: Holding) -> list[torch.nn.Parameter]:
    return [own for _, own in sorted(holding.parameters.items()) if own.requires_grad]


def _flattened(holding: Holding) -> Tensor:
    """Return a byte for each parameter that is trained, whether it has a gradient; then gradients and statistics."""
    gradients = [own.grad for own in _trained(holding)]
    marks = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
    tensors = [one for one in gradients if one is not None] + [value for _, value in sorted(holding.statistics.items())]
    return torch.cat([marks, *(_bytes_of(tensor.detach()) for tensor in tensors)])


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def _put_gradients(kept: KeptStage, post: ExchangeChannel) -> Mapping[str, Tensor]:
    """Take what a ward sends of a step; return its running statistics."""
    parameters, statistics = _trained(kept.holding), dict(sorted(kept.holding.statistics.items()))
    pieces = _Pieces(kept.ward, post)
    marks = pieces.take(len(parameters))
    for own, mark in zip(parameters, marks.tolist(), strict=True):
        own.grad = pieces.take_like(own) if mark else None
    found = {name: pieces.take_like(value) for name, value in statistics.items()}
    pieces.end()
    return found


class _Pieces:
    """The bytes that come from a ward in a step."""

    def __init__(self, ward: str, post: ExchangeChannel) -> None:
        self._ward, self._post, self._numbers = ward, post, count()
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return the next bytes."""
        found: list[Tensor] = []
        while size:
            if not self._left.numel():
                self._left = self._post.receive(f"kept-gradients:{self._ward}:{next(self._numbers)}")
                if self._left.dtype != torch.uint8 or not 0 < self._left.numel() <= _CHUNK_BYTES:
                    raise ProtocolError(f"{self._ward}: sent {self._left.numel()} of {self._left.dtype} as gradients")
            found.append(self._left[:size])
            self._left = self._left[size:]
            size -= found[-1].numel()
        return torch.cat(found) if found else torch.empty(0, dtype=torch.uint8)

    def take_like(self, tensor: Tensor) -> Tensor:
        """Return the next bytes as a tensor."""
        return self.take(tensor.nbytes).clone().view(tensor.dtype).reshape(tensor.shape)

    def end(self) -> None:
        """Raise a `ProtocolError` if there is more than belongs to the stage."""
        if self._left.numel():
            raise ProtocolError(f"{self._ward}: sent {self._left.numel()} bytes more than its gradients have")
