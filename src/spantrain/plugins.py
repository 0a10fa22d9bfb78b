"""What is found by being there: modules of our own folders, and what installed packages add by entry points.

`docs/contributing.md` has the recipes.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType, ModuleType
from typing import TypeVar

from spantrain.errors import UsageError

T = TypeVar("T")


def modules_of(package: str) -> tuple[ModuleType, ...]:
    """Return all modules of a folder of ours, by name."""
    folder = importlib.import_module(package).__path__
    return tuple(importlib.import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules(folder))


def with_plugins(ours: Mapping[str, T], group: str, kind: type[T], word: str) -> Mapping[str, T]:
    """Return ours by name, then those of the entry points of a group, by name.

    `kind` is what each must be, `word` what a person calls it.

    Raises:
        UsageError: one cannot be loaded, is of another kind, or has the name of one that is there already.
    """
    found = dict(ours)
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        where = f"{word} {entry.name!r} of {entry.dist.name if entry.dist else 'an unknown package'} ({entry.value})"
        if entry.name in found:
            raise UsageError(f"{where}: there is a {word} of this name already; remove one of the packages")
        found[entry.name] = _loaded(entry, kind, where)
    return MappingProxyType(found)


def _loaded(entry: EntryPoint, kind: type[T], where: str) -> T:
    try:
        value = entry.load()
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{where} cannot be loaded: {error}; mend or remove that package") from error
    if not isinstance(value, kind):
        raise UsageError(f"{where} is a {type(value).__name__}, not a {kind.__name__}; mend that package")
    if getattr(value, "name", entry.name) != entry.name:
        raise UsageError(f"{where} calls itself {getattr(value, 'name', None)!r}; mend that package")
    return value
