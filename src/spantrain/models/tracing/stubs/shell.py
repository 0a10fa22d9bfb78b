"""Units that run the unedited model's own forward, in a shell without weights: stubs are in the place of other blocks.

The model's own code and objects stay as they are, so that hooks, closures and whatever else refers to them still do.
Weights that a unit does not hold are zeros without memory: what is made of them is never used.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from spantrain.errors import ConfigError
from spantrain.models.randomness.places import START
from spantrain.models.tracing.batch import Loss, ModelBatch, call_named, picked, taken_names
from spantrain.models.tracing.factory import calls_compiled
from spantrain.models.tracing.stubs.calls import Calls, Row, StubPart
from spantrain.models.tracing.stubs.template import given_again, made, part_at
from spantrain.models.tracing.tape import Samples, StandIn, UnitDevice, Value
from spantrain.models.tracing.unit import BroughtUnit, carried_line, stand_in
from spantrain.models.units import Rows


class _PassEnded(BaseException):
    """All of a unit's own calls are done."""


@dataclass(kw_only=True, eq=False)
class StubRun:
    """One pass of one unit."""

    name: str
    """Of the model, for messages."""
    calls: Calls
    part: StubPart
    """The unit's: before its first call there are stubs, and behind its last one the pass ends."""
    child: Callable[[str], nn.Module]
    """Returns the unit's own module, by path."""
    tensor: Callable[[str], Tensor | None]
    """Returns a weight outside of blocks, by name; None: the unit does not hold it."""
    found: dict[int, Tensor]
    """Results of calls, by the value's index: those that came, and then those wanted of its own."""
    samples: int
    place: torch.device
    trains: bool
    """Whether modules are in training mode."""
    done: int = field(default=0, init=False)

    def call(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the forward's next call, if it is the unit's own; otherwise return something of the same form."""
        number, calls = self.done, self.calls.calls
        self.done += 1
        if number >= len(calls) or calls[number].path != path:
            raise ConfigError(
                f"model {self.name}: its forward calls {path} where it called "
                f"{calls[number].path if number < len(calls) else 'nothing'} on its example batch; write it so that "
                "it calls the same modules for any data"
            )
        template = calls[number].template
        if number < self.part.first:
            return given_again(template, partial(part_at, args, kwargs), self._leaf)
        containers = [part_at(args, kwargs, at) for at, _ in template.changed]
        result = self.child(path)(*args, **kwargs)
        wanted = {carried.value for carried in self.part.gives}
        for value, tensor in made(template, result, containers):
            if value in wanted:
                self.found[value.index] = tensor.clone() if value in self.calls.written_into else tensor
        if number == self.part.end - 1 and self.part.end < len(calls):
            raise _PassEnded
        return result

    def _leaf(self, sign: Any) -> Any:
        match sign:
            case Value():
                tensor = self.found.get(sign.index)
                if tensor is None:
                    facts = self.calls.facts[sign.index]
                    tensor = stand_in(StandIn(facts.shape, facts.dtype), self.samples, self.place)
                # What goes on to later units is as it came; without dropout, models write into other tensors.
                return tensor.clone() if sign in self.calls.written_into or not self.trains else tensor
            case UnitDevice():
                return self.place
            case Samples():
                return sign.of(self.samples)
        return sign


class Shell:
    """A model taken apart: the modules that are called, and the rest, which calls them."""

    def __init__(
        self,
        model: nn.Module,
        called: Iterable[str],
        opened: frozenset[str],
        direct: Iterable[str],
        trained: frozenset[str],
    ) -> None:
        """Take a model apart, which is not to be used otherwise any more.

        Args:
            model: with weights, or on the meta device.
            called: paths of modules that stubs may stand for.
            opened: paths of the modules that call them.
            direct: names of weights that are used outside of those.
            trained: paths of the modules that training mode is for.
        """
        self._root = model
        self._trained = trained
        self._trains: bool | None = None
        self.names = {id(module): path for path, module in model.named_modules()}
        """Full names of all modules as the model had them, by identity; those of units are among them."""
        self._now = threading.local()
        self._latest: StubRun | None = None
        self._used: dict[str, set[nn.Module]] = {}
        self._place: torch.device | None = None
        self._hollow: list[nn.Module] = []
        self.children: dict[str, nn.Module] = {}
        """What units hold, by path."""
        self.tensors: dict[str, Tensor] = {}
        """Weights and buffers that are used outside of those, by name."""
        self.fixed: list[str] = []
        """Paths of children without parameters, which all units hold."""
        modules = {path: model.get_submodule(path) for path in called}
        self._read_through(model, opened, set(direct))
        for path, module in self._others(model, opened, modules):
            if next(module.parameters(), None) is not None:
                self._empty(module)
            elif next(module.buffers(), None) is not None:
                modules[path] = module
                self.fixed.append(path)
        inside = tuple(f"{path}." for path in modules)
        self._own = [(module, path) for path, module in model.named_modules() if not path.startswith(inside)]
        """Modules that no unit holds, with their paths."""
        for path, module in modules.items():
            self.children[path] = _twin(module)
            self._empty(module)
            module.__dict__["forward"] = partial(self._dispatched, path)

    def __deepcopy__(self, memo: object) -> "Shell":
        """Return the shell itself: units bring what differs between them."""
        return self

    def run(self, run: StubRun, /, *args: Any, **kwargs: Any) -> Any:
        """Run the forward for a unit; return what it returned, or None where the pass ended before."""
        self._move(run.place)
        if run.trains != self._trains:  # modules that no unit holds are as they are while the model trains, or not
            self._trains = run.trains
            for module, path in self._own:
                module.training = run.trains and path in self._trained
        self._now.run, self._latest = run, run
        try:
            return self._root(*args, **kwargs)
        except _PassEnded:
            return None
        finally:
            self._now.run = None

    def _dispatched(self, path: str, *args: Any, **kwargs: Any) -> Any:
        run: StubRun | None = getattr(self._now, "run", None)
        if run is None:  # a backward pass runs it again, since the model's own code does so
            used = self._used.get(path, set())
            if len(used) != 1:
                raise ConfigError(
                    f"{path} is run again by the model's own code (torch.utils.checkpoint), and {len(used)} copies of "
                    "it are in use; leave that out: the plan says what is run again"
                )
            return next(iter(used))(*args, **kwargs)
        if path in self.fixed:
            return run.child(path)(*args, **kwargs)
        if run.part.first <= run.done < run.part.end:
            self._used.setdefault(path, set()).add(run.child(path))
        return run.call(path, args, kwargs)

    @staticmethod
    def _others(
        model: nn.Module, opened: frozenset[str], called: Mapping[str, nn.Module]
    ) -> list[tuple[str, nn.Module]]:
        """Return the outermost modules that are neither opened nor called."""
        found: list[tuple[str, nn.Module]] = []
        inside = tuple(f"{path}." for path in called)
        for path, module in model.named_modules():
            holds = any(other.startswith(f"{path}.") for other in called)
            if path in opened or path in called or path.startswith(inside) or holds:
                continue
            if not any(path.startswith(f"{other}.") for other, _ in found):
                found.append((path, module))
        return found

    def _read_through(self, model: nn.Module, opened: frozenset[str], direct: set[str]) -> None:
        """Have weights and buffers outside of called modules read from the unit that runs."""
        for path, module in list(model.named_modules()):
            prefix = f"{path}." if path else ""
            own = [*module._parameters, *(module._buffers if path in opened else ())]
            names = [name for name in own if prefix + name in direct or path in opened]
            names = [name for name in names if getattr(module, name) is not None]
            if not names:
                continue
            self.tensors |= {prefix + name: getattr(module, name) for name in names}
            looks = {name: property(partial(self._read, prefix + name, name)) for name in names}
            module.__class__ = type(
                type(module).__name__, (type(module),), {**looks, "__module__": type(module).__module__}
            )
            if path in opened:
                self._hollow.append(module)

    def _read(self, full: str, name: str, module: nn.Module) -> Any:
        run: StubRun | None = getattr(self._now, "run", None) or self._latest
        held = None if run is None else run.tensor(full)
        if held is not None:
            return held
        return module._parameters[name] if name in module._parameters else module._buffers[name]

    def _empty(self, module: nn.Module) -> None:
        """Take weights out of a module; those inside it are replaced by others without."""
        self._hollow.append(module)
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _twin(child)
                self._empty(module._modules[name])  # type: ignore[arg-type]

    def _move(self, place: torch.device) -> None:
        """Put zeros of the same shapes in the places of weights, on the device that the unit is on."""
        if place == self._place:
            return
        for module in self._hollow:
            for name, weight in module._parameters.items():
                if weight is not None:
                    zeros = torch.zeros((), dtype=weight.dtype, device=place).expand(weight.shape)
                    module._parameters[name] = nn.Parameter(zeros, requires_grad=False)
        self._place = place


_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def _twin(module: nn.Module) -> nn.Module:
    """Return another module with the same weights and modules, and without hooks, which stay with the first."""
    twin: nn.Module = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[name] = dict(module.__dict__[name])
    for name in _HOOKS:
        twin.__dict__[name] = OrderedDict()
    own = twin.__dict__.get("forward")
    if isinstance(own, MethodType) and own.__self__ is module:
        twin.__dict__["forward"] = MethodType(own.__func__, twin)
    return twin


class StubbedUnit(BroughtUnit):
    """The modules that the forward calls for this unit, and weights outside of those that it needs.

    The rest of the model is its shell, which all units that are built together have in common.
    """

    _start = START

    def __init__(
        self, name: str, part: StubPart, calls: Calls, shell: Shell, batch: ModelBatch, loss: Loss, *, model: str
    ) -> None:
        """Take what the part needs out of a shell; `batch` is an example, `model` a name for messages."""
        super().__init__(name, part, loss if part.end == len(calls.calls) else None)
        self._part, self._calls, self._shell, self._model = part, calls, shell, model
        self._batch, self._names = batch.resized(1), taken_names(batch, loss)
        self.around = shell.names
        for path in (*part.modules, *shell.fixed):
            self._hold(f"m{len(self.prefixes)}", path, shell.children[path])
        buffers = [full for full in shell.tensors if full not in calls.direct]
        for full in (*part.weights, *buffers):
            self._hold_weight(full, shell.tensors[full])
        self._has = {*part.weights, *buffers}
        self._calls_compiled = calls_compiled(self)
        self._read(part.reads, batch.counted)
        self.eval()

    @property
    def layers(self) -> Iterator[nn.Module]:
        """None: the model's own forward calls them."""
        return iter(())

    def extra_repr(self) -> str:
        """List what comes in, the calls, and what goes out, with values numbered from the unit's own first one."""
        part, numbers = self._part, dict[int, int]()
        lines = [f"takes {carried_line(part.takes, numbers)}", f"reads {part.reads}"]
        lines += [self._local[call.path] for call in self._calls.calls[part.first : part.end]]
        return "\n".join((*lines, f"gives {carried_line(part.gives, numbers)}"))

    def _result(self, found: dict[int, Tensor], rows: Rows, samples: int, place: torch.device) -> Any:
        run = StubRun(
            name=self._model,
            calls=self._calls,
            part=self._part,
            child=lambda path: self.get_submodule(self._local[path]),
            tensor=lambda full: self._weight(full) if full in self._has else None,
            found=found,
            samples=samples,
            place=place,
            trains=self.training,
        )
        given = {number: self._row(number, rows, run) for number in self._names}
        result = call_named(partial(self._shell.run, run), given, self._names)
        return None if self._loss is None else picked(self._loss, result, f"model {self._model}")

    def _row(self, number: int, rows: Rows, run: StubRun) -> Tensor:
        """Return what the model is given; what is not needed in this unit is zeros."""
        tensor = rows.get(number)
        if tensor is None:
            example = self._batch.rows[number]
            tensor = stand_in(StandIn((run.samples, *example.shape[1:]), example.dtype), run.samples, run.place)
        return tensor.clone() if Row(number) in self._calls.written_into else tensor
