"""A unit that does its part of a tape, on the modules of the unedited model."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spantrain.errors import ConfigError
from spantrain.models.randomness.draws import without_dropout
from spantrain.models.randomness.places import CallPoint, chain_at
from spantrain.models.tracing import tape
from spantrain.models.tracing.batch import Loss, WholeMeans
from spantrain.models.tracing.cut import Carried, TapePart, UnitPart
from spantrain.models.tracing.factory import calls_compiled, uncompiled, what_was_raised
from spantrain.models.units import COUNTED, EACH, LABELS, Rows, UnitModule


class BroughtUnit(UnitModule, ABC):
    """Modules and weights of a model, its own objects; what `repr` prints tells units of unlike work apart."""

    _start: CallPoint | None = None
    """Where calls of modules in it begin; None: where those of the unit before ended."""

    def __init__(self, name: str, part: UnitPart, loss: Loss | None) -> None:
        """Hold nothing yet; `loss` is the last unit's."""
        super().__init__(name, prefixes={})
        self._crossing = part
        self._loss = loss
        self._local: dict[str, str] = {}
        self._calls_compiled = False
        self._known_means: dict[int, int] = {}

    @property
    def class_name(self) -> str:
        """Class of the largest module in it."""
        held = [self.get_submodule(child) for child in self.prefixes]
        sizes = [(sum(p.numel() for p in module.parameters()), type(module).__name__) for module in held]
        return max(sizes, key=lambda entry: entry[0])[1] if sizes else type(self).__name__

    def forward(self, *tensors: Tensor) -> Any:
        """Return the tensors that cross the cut behind it; the last unit, the loss sum.

        Raises:
            ConfigError: a number of the data is none that the model, or the loss, has a row for.
        """
        try:
            with uncompiled() if self._calls_compiled else nullcontext():
                return self._run(tensors)
        except IndexError as error:
            raise ConfigError(
                f"{self.name}: {what_was_raised(error)}: a token or a label of the data is out of range; give numbers "
                "from 0 to one less than the model, or its last layer, knows"
            ) from error

    def _run(self, tensors: tuple[Tensor, ...]) -> Any:
        takes, gives = self._crossing.takes, self._crossing.gives
        rows = dict(zip(self.reads, tensors[len(takes) :], strict=True))
        samples, place = tensors[0].shape[0], tensors[0].device
        found = {one.value.index: unpacked(one, tensor) for one, tensor in zip(takes, tensors, strict=False)}
        # Means over labels are those over the whole step, in the last unit.
        counted = rows.get(COUNTED, rows.get(EACH))
        means = None if self._loss is None else WholeMeans(rows[LABELS], counted, self._known_means)
        with nullcontext() if counted is None or means is None else means, chain_at(self._start):
            result = self._result(found, rows, samples, place)
            if self._loss is None:
                return tuple(packed(one, found[one.value.index], samples) for one in gives)
            return self._loss(result, rows[LABELS], samples, means)

    @abstractmethod
    def _result(self, found: dict[int, Tensor], rows: Rows, samples: int, place: torch.device) -> Any:
        """Run the part; add the values that it gives to those that were found, and return what the loss is made of."""

    def _read(self, reads: Iterable[int], counted: int | None) -> None:
        """Note what it reads; the last unit also labels, and if those of a whole step are counted, what they are."""
        ends = () if self._loss is None else (LABELS,) if counted is None else (LABELS, counted)
        self.reads = tuple(dict.fromkeys((*reads, *ends)))

    def _hold(self, child: str, path: str, module: nn.Module) -> None:
        self.add_module(child, module)
        self.prefixes[child] = path
        self._local[path] = child

    def _hold_weight(self, name: str, weight: Tensor) -> None:
        """Hold one parameter or buffer of an opened module, in a module that stands for that one."""
        path, _, attribute = name.rpartition(".")
        holder = f"{path}:"
        if holder not in self._local:
            own = self._local.get(path)
            self._hold(f"w{len(self.prefixes)}", path, nn.Module())
            self._local[holder] = self._local.pop(path)
            self._local |= {} if own is None else {path: own}
        module = self.get_submodule(self._local[holder])
        if isinstance(weight, nn.Parameter):
            module.register_parameter(attribute, weight)
        else:
            module.register_buffer(attribute, weight)

    def _weight(self, name: str) -> Tensor:
        path, _, attribute = name.rpartition(".")
        weight = getattr(self.get_submodule(self._local[f"{path}:"]), attribute)
        assert isinstance(weight, Tensor)
        return weight


class TracedUnit(BroughtUnit):
    """The steps of a tape that call its modules."""

    def __init__(self, name: str, part: TapePart, model: nn.Module, loss: Loss | None, *, counted: int | None) -> None:
        """Take what the part needs out of a model; `loss` is the last unit's, over labels of the whole step or not."""
        super().__init__(name, part, loss)
        self._part = part
        for path in part.modules:
            self._hold(f"m{len(self.prefixes)}", path, model.get_submodule(path))
        for name in part.weights:
            self._hold_weight(name, tape.weight_of(model, name))
        self._constants = nn.Module()
        for constant in (sign for sign in part.signs if isinstance(sign, tape.Constant)):
            self._constants.register_buffer(f"c{id(constant)}", constant.tensor.detach(), persistent=False)
        for index, tensor in part.known.items():
            self._constants.register_buffer(f"v{index}", tensor, persistent=False)
        self._calls_compiled = calls_compiled(self)
        self._read(part.reads, counted)
        self.decides = next((step.decides for step in part.steps if step.decides), "")
        self._written_into = {before.index for step in part.steps for before, _ in step.changes}
        self.eval()

    @property
    def layers(self) -> Iterator[nn.Module]:
        """Those of its steps, but for those that something inside of is used of."""
        called = dict.fromkeys(step.module for step in self._part.steps if step.module is not None)
        inside = {step.module for step in self._part.steps if step.taps}
        return (self.get_submodule(self._local[path]) for path in called if path not in inside)

    def extra_repr(self) -> str:
        """List what comes in, the steps, and what goes out, with values numbered from the unit's own first one."""
        part, numbers = self._part, dict[int, int]()
        lines = [f"takes {carried_line(part.takes, numbers)}", f"reads {_short(dict(part.reads), numbers)}"]
        lines += [_line(step, self._local, numbers) for step in part.steps]
        return "\n".join((*lines, f"gives {carried_line(part.gives, numbers)} {_short(part.result, numbers)}"))

    def _result(self, found: dict[int, Tensor], rows: Rows, samples: int, place: torch.device) -> Any:
        part = self._part
        found |= {value.index: rows[number] for number, value in part.reads.items()}
        # Those that the model writes into are others'.
        found |= {index: found[index].clone() for index in self._written_into & found.keys()}
        found |= {index: self._constants.get_buffer(f"v{index}") for index in part.known}
        for step in part.steps:
            self._do(step, found, samples, place)
        return self._filled(part.result, found, samples, place)

    def _do(self, step: tape.TapeStep, found: dict[int, Tensor], samples: int, place: torch.device) -> None:
        work: Callable[..., Any] | None = step.function
        if step.module is not None:
            module = self.get_submodule(self._local[step.module])
            # As the model's own code does: draws are named by the calls that are under way.
            is_called = step.point is None or step.module in step.point.called
            work = module if is_called else module.forward
        assert work is not None
        args = self._filled(step.args, found, samples, place)
        kwargs = self._filled(dict(step.kwargs), found, samples, place)
        if step.point is not None and step.module is None and not self.training:
            work = partial(without_dropout, work)
        with (
            torch.set_grad_enabled(torch.is_grad_enabled() and step.grad_enabled),
            chain_at(step.point),
            self._tapping(step, found),
        ):
            result = work(*args, **kwargs)
        for value, tensor in tape.zipped(step.result, result):
            if isinstance(value, tape.Value):
                found[value.index] = tensor
        for before, after in step.changes:
            found.setdefault(after.index, found[before.index])

    @contextmanager
    def _tapping(self, step: tape.TapeStep, found: dict[int, Tensor]) -> Iterator[None]:
        """Keep what modules inside of a step return, where it is used besides."""
        wanted, calls = {tap: value.index for tap, value in step.taps}, Counter[str]()

        def note(path: str, _module: nn.Module, _args: Any, result: Any) -> None:
            for number, tensor in enumerate(tape.tensors_in(result)):
                index = wanted.get(tape.Tap(path, calls[path], number))
                if index is not None:
                    found[index] = tensor
            calls[path] += 1

        with ExitStack() as undo:
            for path in {tap.path for tap in wanted}:
                assert step.module is not None
                inner = self.get_submodule(self._local[step.module] + path.removeprefix(step.module))
                undo.callback(inner.register_forward_hook(partial(note, path)).remove)
            yield

    def _filled(self, structure: Any, found: Mapping[int, Tensor], samples: int, place: torch.device) -> Any:
        """Put tensors, numbers and the device where the tape has signs for them."""

        def fill(sign: Any) -> Any:
            match sign:
                case tape.Value():
                    return found[sign.index]
                case tape.NamedWeight():
                    return self._weight(sign.name)
                case tape.NamedModule():
                    return self.get_submodule(self._local[sign.path])
                case tape.Constant():
                    return self._constants.get_buffer(f"c{id(sign)}")
                case tape.Samples():
                    return sign.of(samples)
                case tape.RealSamples():
                    return float(sign.number.of(samples))
                case tape.UnitDevice():
                    return place
                case tape.StandIn():
                    return stand_in(sign, samples, place)
            return sign

        return tape.mapped(structure, fill)


def stand_in(sign: tape.StandIn, samples: int, place: torch.device) -> Tensor:
    """Return a tensor of the right shape that takes no memory."""
    shape = [size.of(samples) if isinstance(size, tape.Samples) else size for size in sign.shape]
    return torch.zeros((), dtype=sign.dtype, device=place).expand(shape)


def packed(carried: Carried, tensor: Tensor, samples: int) -> Tensor:
    """Bring the samples to the first dimension."""
    if carried.dim is None:
        return tensor.unsqueeze(0).expand(samples, *tensor.shape)
    if carried.each > 1:
        before, after = tensor.shape[: carried.dim], tensor.shape[carried.dim + 1 :]
        tensor = tensor.reshape(*before, samples, carried.each, *after)
    return tensor.movedim(carried.dim, 0)


def unpacked(carried: Carried, tensor: Tensor) -> Tensor:
    """Bring the samples back to where the model has them."""
    if carried.dim is None:
        return tensor[0]
    tensor = tensor.movedim(0, carried.dim)
    return tensor.flatten(carried.dim, carried.dim + 1) if carried.each > 1 else tensor


def carried_line(carried: Sequence[Carried], numbers: dict[int, int]) -> str:
    """Say how values cross a cut; `numbers` are those that they have so far, and are given."""
    how = ("none" if one.dim is None else "along" if one.each == 1 else "grouped" for one in carried)
    return ", ".join(
        f"{_short(one.value, numbers)} {word} {one.dim or 0}" for one, word in zip(carried, how, strict=True)
    )


def _line(step: tape.TapeStep, local: Mapping[str, str], numbers: dict[int, int]) -> str:
    name = local[step.module] if step.module is not None else getattr(step.function, "__name__", str(step.function))
    given = f"{_short(step.args, numbers)} {_short(dict(step.kwargs), numbers)}"
    also = "".join(f", {_short(value, numbers)} of {tap.path.rpartition('.')[2]}" for tap, value in step.taps)
    return f"{_short(step.result, numbers)}{also} = {name}{given}"


def _short(structure: Any, numbers: dict[int, int]) -> str:
    def sign(part: Any) -> str:
        match part:
            case tape.Value():
                return f"%{numbers.setdefault(part.index, len(numbers))}"
            case tape.NamedWeight():
                return part.name.rpartition(".")[2]
            case tape.UnitDevice():
                return "Place"  # as profiles made before know it
            case tape.Samples():
                return f"{part.each}n{part.fixed:+d}"
            case None | bool() | int() | float() | str() | torch.dtype():
                return repr(part)
        return type(part).__name__

    return str(tape.mapped(structure, sign)).replace("'", "")
