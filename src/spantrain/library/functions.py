"""A user's function as the file and the name under which every worker can import it."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spantrain.errors import ConfigError


def function_source(function: str | Callable[..., Any], what: str) -> str:
    """Return `FILE.py:FUNCTION` of a function; text stays as it is.

    Functions are not sent to workers: each imports the file, under another name than `__main__`.

    Args:
        function: the function, or text.
        what: it is wanted for, for the message.

    Raises:
        ConfigError: it cannot be imported: a lambda, a method, a function inside another, one typed in by hand.
    """
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or not name.isidentifier():
        raise ConfigError(
            f"{what}: {name or function!r} cannot be imported by workers; define it with `def` at the top of a file "
            "(no lambda, no method, not inside another function), or give 'FILE.py:FUNCTION'"
        )
    try:
        file = inspect.getsourcefile(function)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        raise ConfigError(
            f"{what}: {name} is not in a file, so workers cannot import it; save it to FILE.py and give it from there, "
            f"or give 'FILE.py:{name}'"
        )
    if getattr(inspect.getmodule(function), name, None) is not function:
        raise ConfigError(f"{what}: {name} of {file} is another object than this one: a decorator has replaced it")
    return f"{Path(file).resolve()}:{name}"
