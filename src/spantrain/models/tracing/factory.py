"""Models that a user's function returns: `FILE.py:FUNCTION` or `package.module:function`.

The function's code runs with the rights of whoever started this process; nothing that a network names gets here
(`runtime.worker.worker` puts the worker's own source in the place of an order's).
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from spantrain.core.units import ModelSpec
from spantrain.errors import ConfigError
from spantrain.models.sources import factory_file, source_digest
from spantrain.models.tracing.batch import Batch, split_batch
from spantrain.models.tracing.losses import FunctionLoss, Loss, OwnLoss

_NOT_THE_USERS = ("/torch/", "/spantrain/library/", "/spantrain/models/", "<frozen importlib")
"""What frames of other code than the user's have in their file's name."""
_importing: list[Path] = []
"""Users' files whose import has begun and not ended."""


def call_factory(spec: ModelSpec) -> tuple[nn.Module, Batch, Loss]:
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


def _last_place(error: BaseException) -> str:
    """Return FILE:LINE in FUNCTION, the last of the user's code before an error was raised; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in _NOT_THE_USERS)]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def what_was_raised(error: BaseException) -> str:
    """Return what a user's code raised, in one line with its place."""
    text = str(error).strip().splitlines()
    place = _last_place(error)
    return f"{type(error).__name__}: {text[-1] if text else ''}" + (f" ({place})" if place else "")


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
