"""The plain module behind what a user's function returned: not compiled, without caches, of a kind to be followed."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from spantrain.errors import ConfigError

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
            if is_lazy(tensor):
                yield f"{name}: {key} has no shape before the first call; call the module once before returning it"
            elif tensor.is_meta:
                yield f"{name}: {key} is on the meta device, so it has no numbers; return a module with weights"
