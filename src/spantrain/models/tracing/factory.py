"""Models that a user's function returns: `FILE.py:FUNCTION` or `package.module:function`.

The function's code runs with the rights of whoever started this process; nothing that a network names gets here
(`runtime.worker.worker` puts the worker's own source in the place of an order's). Of what it returned the plain module
is taken: not compiled, without caches, of a kind to be followed.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError, SpanTrainError
from spantrain.models.sources import factory_file, look_here, source_digest
from spantrain.models.tracing.batch import FunctionLoss, Loss, ModelBatch, OwnLoss, split_batch

_NOT_THE_USERS = ("/torch/", "/spantrain/library/", "/spantrain/models/", "<frozen importlib")
"""What frames of other code than the user's have in their file's name."""
_PACKAGE = Path(__file__).resolve().parents[2]
_importing: list[Path] = []
"""Users' files whose import has begun and not ended."""


def call_factory(spec: ModelSpec) -> tuple[nn.Module, ModelBatch, Loss]:
    """Import the user's file, call the function, and return the model, an example batch and the loss.

    Raises:
        ConfigError: the file is not the one that the plan was made with, the function raises, or it returns
            something else than `(module, batch)` or `(module, batch, loss)`.
    """
    source = spec.source
    if source_digest(source) != spec.source_sha256:
        raise ConfigError(
            f"model {source}: {factory_file(source)} is not the file that this plan or profile was made with; profile "
            "and plan again, or bring back the file"
        )
    function = load_function(source)
    try:
        made = function()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"model {source}: the factory raised {what_was_raised(error)}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        got = f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__
        raise ConfigError(
            f"model {source}: the factory returned {got}; wanted (module, batch) or (module, batch, loss)"
        )
    model, batch, *rest = made
    if rest and not callable(rest[0]):
        raise ConfigError(
            f"model {source}: the loss is a {type(rest[0]).__name__}; wanted a function (outputs, labels)"
        )
    loss: Loss = FunctionLoss(rest[0]) if rest else OwnLoss()
    named = spec.config.get("loss")
    if isinstance(named, str):
        if source_digest(named) != spec.config.get("loss_sha256"):
            raise ConfigError(f"loss {named}: {factory_file(named)} is not the file that this plan was made with")
        loss = FunctionLoss(load_function(named, what="loss"))
    return model, split_batch(batch, source=f"model {source}"), loss


@contextlib.contextmanager
def told_as_the_models(what: str) -> Iterator[None]:
    """Tell what code that is not ours raises inside.

    Raises:
        ConfigError: it has raised something.
    """
    try:
        yield
    except SpanTrainError:
        raise
    except Exception as error:
        if Path(traceback.extract_tb(error.__traceback__)[-1].filename).is_relative_to(_PACKAGE):
            raise
        if "saved tensor hooks" in str(error):
            raise ConfigError(
                f"{what}: its forward takes gradients by torch.func.grad, vjp, jacrev or hessian, where it cannot be "
                "seen what is held for the backward pass; write the gradient itself"
            ) from error
        raise ConfigError(f"{what}: {what_was_raised(error)}") from error


def what_was_raised(error: BaseException) -> str:
    """Return what a user's code raised, in one line with the last place of that code: FILE:LINE in FUNCTION."""
    text = str(error).strip().splitlines()
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in _NOT_THE_USERS)]
    place = f" ({own[-1].filename}:{own[-1].lineno} in {own[-1].name})" if own else ""
    return f"{type(error).__name__}: {text[-1] if text else ''}{place}"


def check_not_importing() -> None:
    """Refuse to start training while a user's file is imported: every process that imports it would start its own.

    Raises:
        ConfigError: the file is named, with what to write in it.
    """
    if _importing:
        raise ConfigError(
            f"{_importing[-1]} starts training while it is imported for its functions; put that under "
            '`if __name__ == "__main__":`'
        )


def load_function(source: str, *, what: str = "model") -> Callable[..., Any]:
    """Import a user's file or module and return the function in it.

    Raises:
        ConfigError: importing raises, or there is no such function; `what` it was wanted for is named.
    """
    path, _, name = source.rpartition(":")
    look_here()
    try:
        module = _file_module(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} {source}: importing it raised {what_was_raised(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = ", ".join(sorted(key for key, value in vars(module).items() if _is_own(value, module))) or "none"
        raise ConfigError(f"{what} {source}: there is no function {name}; functions there: {found}")
    made: Callable[..., Any] = function
    return made


def called_data(dataset: str, *, held_out: bool) -> tuple[Any, bool]:
    """Return what a user's function returns, and whether it returns the part that is asked for.

    Raises:
        ConfigError: the function cannot be had, raises, or returns no data set.
    """
    source = f"data {dataset}"
    function = load_function(dataset, what="data")
    takes_held_out = "held_out" in inspect.signature(function).parameters
    try:
        samples = function(held_out=held_out) if takes_held_out else function()
        len(samples)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{source}: the function raised {what_was_raised(error)}") from error
    if not hasattr(samples, "__getitem__"):
        raise ConfigError(f"{source}: returned a {type(samples).__name__}; wanted `__len__` and `__getitem__`")
    return samples, takes_held_out


def sample_at(samples: Any, index: int, source: str) -> Any:
    """Return a sample of a user's data set.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return samples[index]
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{source}: sample {index} raised {what_was_raised(error)}") from error


def _is_own(value: object, module: ModuleType) -> bool:
    return callable(value) and not isinstance(value, type) and getattr(value, "__module__", "") == module.__name__


def _file_module(path: Path) -> ModuleType:
    """Import a file under a name of its own; what lies beside it can be imported by it."""
    content = path.read_bytes()
    name = f"spantrain_model_{hashlib.sha256(content).hexdigest()[:12]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    _importing.append(path)
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _importing.remove(path)
        sys.path.remove(str(path.parent.resolve()))
    return module


_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"})


def plain_module(module: nn.Module, source: str) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the module without `torch.compile` and without caches, and what was left out, a line each.

    Raises:
        ConfigError: it is of a kind that cannot be followed, or has parameters without numbers; `source` names it.
    """
    module, compiled = _uncompiled(module)
    problem = next(_problems(module), None)
    if problem:
        raise ConfigError(f"{source}: {problem}")
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if getattr(config, "use_cache", False) is True:
            # Of keys and values from call to call: for generating, without effect on a loss.
            config.use_cache = False
    left_out = f"torch.compile is left out in {compiled} modules; names of parameters have no `_orig_mod` in them"
    return module, (left_out,) if compiled else ()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Have functions that a model's code compiled run as they are written: what they call can be seen then."""
    if "torch._dynamo" not in sys.modules:  # it takes seconds to import, and has compiled nothing
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def calls_compiled(module: nn.Module) -> bool:
    """Whether code of its modules, or beside it in its files, was compiled by `torch.compile`."""
    return any(_has_compiled(kind) for kind in {type(part) for part in module.modules()})


def _has_compiled(kind: type) -> bool:
    file = sys.modules.get(kind.__module__)
    names = [*(vars(base) for base in kind.__mro__), {} if file is None else vars(file)]
    return any(
        "_torchdynamo_orig_callable" in getattr(value, "__dict__", ()) for own in names for value in own.values()
    )


def _uncompiled(module: nn.Module) -> tuple[nn.Module, int]:
    """Return the module that was compiled, or in which some were, and how many."""
    count = 0
    if _is_compiled(module):
        module, count = module._orig_mod, 1  # type: ignore[assignment]
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if child is not None and _is_compiled(child):
                part._modules[name] = child._orig_mod  # type: ignore[assignment]
                count += 1
    for part in module.modules():
        if part._compiled_call_impl is not None:
            part._compiled_call_impl = None
            count += 1
    return module, count


def _is_compiled(module: nn.Module) -> bool:
    # By name: the class's module takes seconds to import.
    return type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")


def _problems(module: nn.Module) -> Iterator[str]:
    for path, part in module.named_modules():
        name = f"{path or 'the module'} ({type(part).__name__})"
        if isinstance(part, torch.jit.ScriptModule):
            yield f"{name} is of torch.jit, and its code cannot be followed; return the module that it was made of"
        if {base.__name__ for base in type(part).__mro__} & _WRAPPERS:
            yield f"{name} divides the work itself, which the plan does here; return the module inside it"
        made_of = [key for key, value in vars(part).items() if isinstance(value, torch.Tensor) and value.grad_fn]
        if made_of:
            yield (
                f"{name} keeps {made_of[0]}, a tensor made of parameters (torch.nn.utils.weight_norm does so), which "
                "would not follow them; make it in forward (torch.nn.utils.parametrizations.weight_norm)"
            )
        for key, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
                yield f"{name}: {key} has hooks on its gradient, which comes in parts here; do that in forward instead"
            if is_lazy(tensor):
                yield f"{name}: {key} has no shape before the first call; call the module once before returning it"
            elif tensor.is_meta:
                yield f"{name}: {key} is on the meta device, so it has no numbers; return a module with weights"
