"""Loads an unedited model: module, example batch and loss, from a transformers configuration or a user's function.

A library's model may have some of its parameters empty; the others have the numbers that all together would have.
"""

import contextlib
import copy
import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from spantrain.core.records import Record
from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.randomness.draws import global_seed
from spantrain.models.sampler import derive_seed
from spantrain.models.sources import DROPOUT
from spantrain.models.statistics import leave_frozen, without_exchange
from spantrain.models.tracing.batch import LabelLoss, Loss, ModelBatch, OwnLoss, shifts_labels
from spantrain.models.tracing.factory import call_factory, plain_module
from spantrain.models.tracing.tape import TraceProblem
from spantrain.models.tracing.transformers_classes import library_batch, library_model, undrawn
from spantrain.models.units import keeps_statistics, left_behind, set_training

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
_NO_PARAMETER = -1


class Registered:
    """Parameters, numbered in the order in which a model's modules were given them."""

    def __init__(self, replaced: Callable[[int, nn.Parameter], nn.Parameter]) -> None:
        """Have each new parameter replaced by what `replaced(number, parameter)` returns."""
        self._replaced = replaced
        self._parameters: list[nn.Parameter] = []
        self._number: dict[int, int] = {}
        self._number_by_address: dict[tuple[int, int], int] = {}

    def number_of(self, parameter: nn.Parameter) -> int | None:
        """Return a parameter's number; None: no module was given it."""
        return self._number.get(id(parameter))

    def number_at(self, tensor: Tensor) -> int | None:
        """Return the number of the parameter whose memory a tensor is; None: it is no parameter's."""
        address = _address(tensor)
        number = self._number_by_address.get(address)
        if number is None or _address(self._parameters[number]) != address:
            # A parameter may have been given other memory since.
            self._number_by_address = {_address(entry): number for number, entry in enumerate(self._parameters)}
            number = self._number_by_address.get(address)
        return number

    def enter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what stands for a parameter; one that is known already (tied, say) stands for itself."""
        if self.number_of(parameter) is not None:
            return parameter
        number = len(self._parameters)
        parameter = self._replaced(number, parameter)
        self._parameters.append(parameter)
        self._number[id(parameter)] = number
        return parameter


@contextlib.contextmanager
def registering(replaced: Callable[[int, nn.Parameter], nn.Parameter]) -> Iterator[Registered]:
    """Number and replace every parameter as soon as a module is given it, before anything is drawn for it."""
    registered = Registered(replaced)
    # What such a hook returns takes the parameter's place, whatever torch annotates.
    hook = register_module_parameter_registration_hook(lambda _module, _name, param: registered.enter(param))  # type: ignore[arg-type]
    try:
        yield registered
    finally:
        hook.remove()


class OwnDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every draw of random numbers a seed of its own: the run's, the parameter's number, and how often it was.

    So what a parameter begins with does not depend on which others are empty. What a rule of torch's draws in other
    memory is the parameter's that it makes: truncated numbers are drawn again where they fell out of bounds, which an
    empty one's cannot. Draws for no parameter are counted together; they are the same everywhere.
    """

    def __init__(self, seed: int, registered: Registered) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._registered = registered
        self._counts: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; seed the processor's generator before one that draws."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            number = self._registered.number_at(args[0]) if args and isinstance(args[0], Tensor) else None
            number = self._made_by_torch() if number is None else number
            number = _NO_PARAMETER if number is None else number
            torch.default_generator.manual_seed(derive_seed(self._seed, "draw", number, self._counts[number]))
            self._counts[number] += 1
        return func(*args, **(kwargs or {}))

    def _made_by_torch(self) -> int | None:
        frame = inspect.currentframe()
        while frame is not None:
            made = frame.f_locals.get("tensor") if frame.f_globals.get("__name__") == "torch.nn.init" else None
            if isinstance(made, Tensor):
                return self._registered.number_at(made)
            frame = frame.f_back
        return None


def empty_like(tensor: AnyTensor) -> AnyTensor:
    """Return a tensor, or a parameter, with its shape and type, and no numbers."""
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)  # type: ignore[return-value]
    return empty  # type: ignore[return-value]


def _address(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
Given = Callable[[Tensor], Tensor]
"""Makes an input of a tensor of the example batch."""

_PARAMETER_BYTES = 4
_QUANTIZED = ("bitsandbytes", "torchao")


class Loaded(Record):
    """A model as its author wrote it, in evaluation mode."""

    module: nn.Module
    batch: ModelBatch
    loss: Loss
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Numbers of its parameters, by name, in the order in which they are made; of a user's function none."""
    given: frozenset[str] = frozenset()
    """Paths of the modules that its author has in training mode while it is trained."""
    trains: frozenset[str] = frozenset()
    """Those of them that are so here."""
    left_out: tuple[str, ...] = ()
    """What of the model as it was given is not done, a line each."""

    @property
    def shifts_labels(self) -> bool:
        """Whether it compares its outputs with the labels of the tokens behind, and is told the tokens themselves."""
        return isinstance(self.loss, OwnLoss) and shifts_labels(self.module)

    def set_mode(self, *, trains: bool) -> None:
        """Have the model's modules be in training mode as they are trained here, or all in evaluation mode."""
        set_training(self.module, self.trains if trains else ())


def load_model(spec: ModelSpec, *, seed: int, only: Collection[int] | None = None) -> Loaded:
    """Build the model on the CPU, with weights drawn by its own rules under a seed.

    The global random state is left as it was.

    Args:
        spec: the model.
        seed: of its weights.
        only: numbers of the parameters that are wanted (`Loaded.numbers`); others of a library's model are left
            empty, on the meta device, where its rules do not need their numbers. None: all are wanted.

    Raises:
        ConfigError: the model cannot be built.
    """
    with global_seed(derive_seed(seed, "model")):
        if spec.family != "hf":
            return _load(spec)
        if only is not None:
            with contextlib.suppress(ConfigError):
                loaded = _drawn(spec, seed, only)
                named = loaded.module.named_parameters(remove_duplicate=False)
                there = {loaded.numbers.get(name) for name, tensor in named if not tensor.is_meta}
                if there >= set(only) and not any(buffer.is_meta for buffer in loaded.module.buffers()):
                    return loaded
        return _drawn(spec, seed, None)


def _drawn(spec: ModelSpec, seed: int, only: Collection[int] | None) -> Loaded:
    def replaced(number: int, parameter: nn.Parameter) -> nn.Parameter:
        return parameter if only is None or number in only else empty_like(parameter)

    with registering(replaced) as registered, OwnDraws(seed, registered):
        return _numbered(_load(spec), registered)


def _numbered(loaded: Loaded, registered: Registered) -> Loaded:
    named = loaded.module.named_parameters(remove_duplicate=False)
    found = {name: number for name, tensor in named if (number := registered.number_of(tensor)) is not None}
    return replace(loaded, numbers=found)


def load_empty(spec: ModelSpec, mode: FakeTensorMode) -> Loaded:
    """Build the model with fake parameters, which have shapes and no numbers; buffers and example batch are real.

    A user's function runs as it is, and the parameters of its model are replaced.
    """
    with global_seed(derive_seed(0, "model")):
        if spec.family == "hf":
            with undrawn(), registering(lambda _, parameter: _fake(parameter, mode)) as registered:
                loaded = _numbered(_load(spec), registered)
        else:
            loaded = _load(spec)
            loaded = replace(loaded, module=emptied(loaded.module, lambda parameter: _fake(parameter, mode)))
    for part in loaded.module.modules():  # without numbers, a mixture's grouped products are of bfloat16 alone
        if callable(change := getattr(part, "set_experts_implementation", None)):
            change("batched_mm")
    return loaded


def with_or_without_numbers(spec: ModelSpec, work: Callable[[Loaded, Given], T]) -> T:
    """Do work on a model without numbers, and with them if any code of it is unable to do without.

    `work` is given the model, not to be used any more, and what makes an input of a tensor.

    Raises:
        ConfigError: the model cannot be built, or work raised it.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    empty = None
    try:
        with unreported():
            empty = load_empty(spec, mode)
            return work(empty, mode.from_tensor)
    except Exception as error:
        known = isinstance(error, (ConfigError, TraceProblem))
        # A class of the library may not be built without numbers: then it has raised something.
        if known and (empty is not None or spec.family != "hf" or error.__cause__ is None):
            raise
    return work(load_model(spec, seed=0), torch.clone)


@contextlib.contextmanager
def unreported() -> Iterator[None]:
    """Keep torch from reporting what cannot be done without numbers: it is done with them, then."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():  # copies are made of tensors without numbers
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            yield
    finally:
        logger.disabled = before


def emptied(module: M, replaced: Any, *, buffers: bool = False) -> M:
    """Return a copy of a module with other parameters (and buffers), which are not copied first."""
    tensors: list[Tensor] = list(module.parameters())
    if buffers:
        tensors += list(module.buffers())
    memo = {id(tensor): replaced(tensor) for tensor in tensors}
    return copy.deepcopy(module, memo | left_behind(module))


def _load(spec: ModelSpec) -> Loaded:
    if spec.family == "hf":
        module, router_weight, left_out = library_model(spec)
        batch: ModelBatch = library_batch(spec)
        loss: Loss = OwnLoss() if spec.rows else LabelLoss(router_weight)
    else:
        module, batch, loss = call_factory(spec)
        module, left_out = plain_module(module, f"model {spec.name}")
        if exchanging := without_exchange(module):
            told = f"SyncBatchNorm is BatchNorm in {exchanging} modules, which exchange with --batch-norm replicas"
            left_out = (*left_out, told)
        _check_parameters(spec, module.cpu())
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(
            f"model {spec.name}: has no parameter that requires gradients, so there is nothing to train; have some"
        )
    given = frozenset(path for path, part in module.named_modules() if part.training or not module.training)
    leave_frozen(module, given)
    frozen = spec.config.get(DROPOUT) == "off"
    trains = [path for path in given if not frozen and not keeps_statistics(module.get_submodule(path))]
    checkpointing = [part for part in module.modules() if getattr(part, "gradient_checkpointing", False) is True]
    for part in checkpointing:
        part.gradient_checkpointing = False  # type: ignore[assignment]
    if checkpointing:
        again = f"gradient checkpointing is off in {len(checkpointing)} modules: the plan says what is run again"
        left_out = (*left_out, again)
    return Loaded(
        module=module.eval(), batch=batch, loss=loss, given=given, trains=frozenset(trains), left_out=left_out
    )


def _check_parameters(spec: ModelSpec, module: nn.Module) -> None:
    """Refuse parameters that cannot be trained: too short to add small updates to."""
    for name, parameter in module.named_parameters():
        if parameter.dtype in (torch.int8, torch.uint8) or type(parameter).__module__.startswith(_QUANTIZED):
            raise ConfigError(
                f"model {spec.name}: parameter {name} is quantized ({type(parameter).__name__}): bases of bitsandbytes "
                "or torchao are not trained on here, with adapters neither; load the base in bfloat16"
            )
        if parameter.is_complex() and parameter.dtype != torch.complex64:
            own = str(parameter.dtype).removeprefix("torch.")
            raise ConfigError(f"model {spec.name}: parameter {name} is {own}; make it torch.complex64")
        if parameter.requires_grad and parameter.element_size() < _PARAMETER_BYTES:
            raise ConfigError(
                f"model {spec.name}: parameter {name} is {str(parameter.dtype).removeprefix('torch.')}, wanted "
                "float32: return module.float(); products are computed in 16 bits with --dtype bfloat16 or float16"
            )


def _fake(parameter: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    if is_fake(parameter):
        return parameter
    return nn.Parameter(mode.from_tensor(parameter.detach()), requires_grad=parameter.requires_grad)
