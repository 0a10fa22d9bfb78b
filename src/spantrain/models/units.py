"""What a unit is: a module on tensors, whose parameters know their names in the unsplit model."""

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import field
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from spantrain.core.records import Record
from spantrain.core.units import WholeMicroBatch
from spantrain.models.randomness.draws import DrawingModules, DrawnSamples, SeededDraws
from spantrain.models.randomness.places import DrawnShapes

if TYPE_CHECKING:
    from spantrain.models.tensor_parallel.group import TensorGroup

Module = TypeVar("Module", bound=nn.Module)

IGNORED_LABEL = -100

LABELS = -1
"""The number of the labels among what is read of samples; inputs are numbered from 0."""

COUNTED, EACH = -2, -3
"""Numbers of what all samples of the step have in common: `counted_labels`, of all together or of each number."""

Rows = Mapping[int, Tensor]
"""What is read of samples, by number; the first dimension of each tensor is the samples."""


class UnitModule(nn.Module):
    """The smallest piece of a model that can be placed.

    `forward(*tensors, *rows)` takes the tensors alive at the cut before it, and what it reads of the samples (`reads`).
    It returns the tensors alive at the cut behind it; the last unit's returns the loss, a scalar summed over samples
    (`sample_losses`).

    In training mode are the modules that are so in the model as it is trained (`trained`); what they draw at random
    does not depend on how a batch is cut (`models.randomness`). Batch statistics are always frozen.
    """

    reads: tuple[int, ...] = ()
    """What it reads of the samples: numbers of inputs, `LABELS` and `COUNTED` or `EACH`."""

    def __init__(self, name: str, *, prefixes: Mapping[str, str], shared: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.name = name
        """Its own name, unique in the model."""
        self.prefixes = dict(prefixes)
        """For each child module: the prefix of its parameters in the unsplit model; empty for the model itself."""
        self.shared = dict(shared or {})
        """Groups of shared parameters with a member here: group -> local name of the parameter."""
        self.decides = ""
        """FILE:LINE of its model's code where it decides by numbers of its data; empty: nowhere, as far as is seen."""
        self.trained: frozenset[str] = frozenset()
        """Local paths of the modules that training mode is for."""
        self.draws: DrawnShapes = {}
        """Where samples are in what its model draws at random; empty: it draws nothing."""
        self.group: Callable[[], TensorGroup] | None = None
        """Returns the tensor-parallel group whose members have parts of it."""
        self.held_whole: tuple[str, ...] = ()
        """Why something in it that costs work is computed whole by every member of the group."""
        self.partial: tuple[str, ...] = ()
        """Full names of parameters held whole whose gradients are sums over the group."""
        self.other_names: Mapping[str, str] = {}
        """By local path: a module's full name, where that is not its prefix's; of one that several modules have."""
        self.around: Mapping[int, str] = {}
        """Full names of modules that run around its own, by identity."""
        self.compiled_by = ""
        """What compiles its layers, as `torch.compile` calls it; empty: nothing."""

    @property
    def class_name(self) -> str:
        """What it mostly is, for people: the class of its module."""
        return type(getattr(self, "body", self)).__name__

    @property
    def layers(self) -> Iterator[nn.Module]:
        """Modules that it calls, each by itself."""
        return map(self.get_submodule, self.prefixes)

    def run(self, tensors: Sequence[Tensor], rows: Rows) -> Any:
        """Call it on what came from the unit before, and what it reads."""
        return self(*tensors, *(rows[number] for number in self.reads))

    def train(self, mode: bool = True) -> Self:
        """Have its modules be as they are while it trains, or in evaluation mode."""
        set_training(self, self.trained if mode else ())
        self.training = mode
        return self


class ModuleUnit(UnitModule):
    """A unit that is one module from one tensor to one tensor."""

    def __init__(self, name: str, body: nn.Module) -> None:
        super().__init__(name, prefixes={"body": name})
        self.body = body
        self.eval()

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Run the module."""
        return (self.body(hidden),)


class HeadUnit(UnitModule, ABC):
    """A model's last unit that makes logits, and the loss of them."""

    reads = (LABELS,)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return `(samples, ..., classes)`."""

    def forward(self, hidden: Tensor, labels: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return the loss summed over samples: each one's mean, or by `counted_labels` all labels alike."""
        losses = sample_losses(self.logits(hidden), labels)
        if counted is None:
            return losses.sum()
        return (losses * (labels != IGNORED_LABEL).sum(dim=1)).sum() / counted[0, 0]


class CheckedUnits(Record):
    """A model's units, to be measured, and what was found of them."""

    at: Callable[[int], UnitModule]
    """Gives a unit by its index."""
    left_out: tuple[str, ...] = ()
    """What of the model as it was given is not done, a line each."""
    whole: Mapping[int, WholeMicroBatch] = field(default_factory=dict)
    """By index: those to which a sample is not by itself."""
    sums_samples: bool = False
    """Whether the model's own loss is a sum over samples."""


def rows_read(units: Iterable[UnitModule]) -> tuple[int, ...]:
    """Return what any of the units reads of the samples."""
    return tuple(sorted({number for unit in units for number in unit.reads}))


def counted_labels(labels: Tensor, samples: int, number: int = COUNTED) -> Tensor:
    """Return how many labels a sample has that count (are not -100): the mean over a step's `(samples, labels, ...)`.

    Returned is `(samples, 2)`, in float32, with the same in each row: of all labels; and without each sample's first,
    which models that predict the next token do not count. With `EACH`, `(samples, numbers, 3)`: every number that is
    among the labels, which may be `(samples,)`, too; and how many it is of a sample's labels, in both ways.
    """
    if number == EACH:
        numbers, places = torch.unique(labels, return_inverse=True)
        behind = places[:, 1:] if labels.dim() > 1 else places[:0]
        each = [torch.bincount(some.flatten(), minlength=len(numbers)) / len(labels) for some in (places, behind)]
        return for_samples(torch.stack([numbers.float(), *each], dim=1)[None], samples)
    counts = (labels != IGNORED_LABEL).flatten(2).sum(dim=2) if labels.dim() > 2 else (labels != IGNORED_LABEL).long()
    means = torch.stack([counts.sum(), counts[:, 1:].sum()]) / labels.shape[0]
    return means.to(torch.float32).expand(samples, 2)


def for_samples(row: Tensor, samples: int) -> Tensor:
    """Return what samples have in common, `(1, ...)`, as `(samples, ...)`."""
    return row.expand(samples, *row.shape[1:])


def chosen_rows(
    numbers: Sequence[int],
    inputs: Callable[[], Sequence[Tensor]],
    labels: Callable[[], Tensor],
    counted: Callable[[int], Tensor],
) -> Rows:
    """Return rows of samples, each kind asked for only if any of its numbers is wanted."""
    found = dict(enumerate(inputs())) if any(number >= 0 for number in numbers) else {}
    others = {number: labels() if number == LABELS else counted(number) for number in numbers if number < 0}
    return {number: found[number] if number >= 0 else others[number] for number in numbers}


def set_training(module: nn.Module, paths: Collection[str]) -> None:
    """Have the modules at some paths of a module be in training mode, and all others in evaluation mode."""
    for path, part in module.named_modules():
        part.training = path in paths


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module in training mode changes what it keeps: running statistics, or a vector of power iteration."""
    if isinstance(getattr(module, "running_mean", None), Tensor) or type(module).__name__ == "_SpectralNorm":
        return True
    called = getattr(type(module).forward, "__code__", None)
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or "batch_norm" in getattr(called, "co_names", ())


def loss_of(units: Sequence[UnitModule], rows: Rows, samples: DrawnSamples | None = None) -> Tensor:
    """Return the loss sum of samples, by all units of a model one after the other; arguments as of `outputs_of`."""
    (loss_sum,) = deque(outputs_of(units, rows, samples), maxlen=1).pop()
    return loss_sum


def outputs_of(
    units: Sequence[UnitModule],
    rows: Rows,
    samples: DrawnSamples | None = None,
    takes: Sequence[tuple[Tensor, ...]] = (),
) -> Iterator[tuple[Tensor, ...]]:
    """Yield what all units of a model make, one after the other: tensors alive behind each, and the loss sum.

    Args:
        units: all of them.
        rows: what they read.
        samples: in training mode, with what is drawn at random for these of a step; None: in evaluation mode.
        takes: what each unit but the first takes in the place of what the one before made; empty: that.
    """
    tensors: tuple[Tensor, ...] = ()
    for unit in units:
        unit.train(samples is not None)
    modules = None if samples is None else drawing_modules(units)
    with nullcontext() if modules is None or samples is None else SeededDraws(modules, samples):
        for index, unit in enumerate(units):
            made = unit.run(takes[index - 1] if takes and index else tensors, rows)
            tensors = made if isinstance(made, tuple) else (made,)
            yield tensors


def parameter_names(unit: UnitModule) -> dict[str, str]:
    """Return local name -> full name in the unsplit model, for every parameter (a tied one once)."""
    return {local: full_name(unit, local) for local, _ in unit.named_parameters()}


def full_name(unit: UnitModule, local: str) -> str:
    """Return the name in the unsplit model of a parameter, buffer or module of a unit."""
    child, _, rest = local.partition(".")
    return ".".join(word for word in (unit.prefixes[child], rest) if word)


def module_names(units: Iterable[UnitModule]) -> dict[int, str]:
    """Return the full names of units' modules in the unsplit model, by identity."""
    found: dict[int, str] = {}
    for unit in units:
        for path, module in unit.named_modules():
            if path.partition(".")[0] in unit.prefixes:
                found.setdefault(id(module), unit.other_names.get(path) or full_name(unit, path))
    return found


def drawing_modules(units: Sequence[UnitModule]) -> DrawingModules | None:
    """Return what is known of units that draw at random; None: they do not."""
    drawing = [unit for unit in units if unit.draws]
    if not drawing:
        return None
    shapes = {place: shape for unit in drawing for place, shape in unit.draws.items()}
    around = {key: name for unit in drawing for key, name in unit.around.items()}
    return DrawingModules(
        names=around | module_names(drawing), shapes=shapes, group=drawing[0].group and drawing[0].group()
    )


def shared_parameters(units: Sequence[UnitModule]) -> Mapping[str, list[tuple[int, str]]]:
    """Return the members of each group of shared parameters: (position in `units`, local name).

    Members in units of one stage are one object (`tie_parameters`); members on different stages are copies with
    equal initial values, whose gradients must be summed across the stages.
    """
    groups: dict[str, list[tuple[int, str]]] = {}
    for position, unit in enumerate(units):
        for group, local in unit.shared.items():
            groups.setdefault(group, []).append((position, local))
    return groups


def tie_parameters(units: Sequence[UnitModule]) -> None:
    """Make the members of each group of shared parameters one object."""
    for members in shared_parameters(units).values():
        position, local = members[0]
        parameter = units[position].get_parameter(local)
        for other, other_local in members[1:]:
            owner, _, attribute = other_local.rpartition(".")
            setattr(units[other].get_submodule(owner), attribute, parameter)


def left_behind(module: nn.Module) -> dict[int, Any]:
    """Return copies of what forwards have left behind in a module with their graph, for the `memo` of `deepcopy`.

    Torch copies no tensor that was computed.
    """
    kept = tree_leaves([list(vars(part).values()) for part in module.modules()])
    return {id(one): one.detach() for one in kept if isinstance(one, Tensor) and not one.is_leaf}


def copied(module: Module) -> Module:
    """Return a copy of a module, whatever forwards have left behind in it."""
    return copy.deepcopy(module, left_behind(module))


def sample_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each sample's cross-entropy, the mean over its counted labels (-100 is not counted).

    Shapes: logits `(samples, classes)` with labels `(samples,)`, or `(samples, tokens, classes)` with
    `(samples, tokens)`. Computed in float32, also under autocast.
    """
    flat = functional.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    counted = (labels != IGNORED_LABEL).reshape(labels.shape[0], -1).sum(dim=1).clamp(min=1)
    losses: Tensor = flat.reshape(labels.shape[0], -1).sum(dim=1) / counted.to(torch.float32)
    return losses
