"""Commands that installed packages add by entry points; of the studies' own, what to install where they are not."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import typer

from spantrain.errors import UsageError
from spantrain.plugins import with_plugins

ENTRY_POINTS = "spantrain.commands"
"""The group of entry points of which each names a function as typer has them; `outer.x` is `spantrain outer x`."""
_OF_STUDIES = {
    "compare": "Train the same samples with torch's frameworks, too",
    "outer.demo": "Train one language model at four unequal places, none of which waits for another",
}


def add_commands(app: typer.Typer, words: Sequence[str]) -> None:
    """Add what is installed, unless the words of the command line ask for a command of ours.

    Raises:
        UsageError: a package's command cannot be loaded, is none, or has the name of one that is there already.
    """
    first, second, *_ = [*(word for word in words if not word.startswith("-")), "", ""]
    if (f"{first}.{second}" if first in _groups(app) else first) not in _commands(app):
        _add_all(app)


def _groups(app: typer.Typer) -> dict[str, typer.Typer]:
    return {one.name: one.typer_instance for one in app.registered_groups if one.name and one.typer_instance}


def _commands(app: typer.Typer) -> dict[str, Callable[..., Any]]:
    """Return all of ours, those of groups as `outer.run`."""
    found = {one.name or "": one.callback for one in app.registered_commands}
    for group, commands in _groups(app).items():
        for one in commands.registered_commands:
            found[f"{group}.{one.name or getattr(one.callback, '__name__', '')}"] = one.callback
    return {name: callback for name, callback in found.items() if callback}


@cache
def _add_all(app: typer.Typer) -> None:
    ours, groups = _commands(app), _groups(app)
    found: Mapping[str, Callable[..., Any]] = with_plugins(ours, ENTRY_POINTS, FunctionType, "command")
    for full in found.keys() - ours.keys():
        group, _, name = full.rpartition(".")
        groups.get(group, app).command(name)(found[full])
    for full in _OF_STUDIES.keys() - found.keys():
        group, _, name = full.rpartition(".")
        loose = {"ignore_unknown_options": True, "allow_extra_args": True}
        groups.get(group, app).command(name, context_settings=loose)(_missing(full))


def _missing(full: str) -> Callable[[typer.Context], None]:
    def command(_: typer.Context) -> None:
        raise UsageError(
            f"`spantrain {full.replace('.', ' ')}` comes with the studies: `pip install ./studies` in a checkout of "
            "SpanTrain"
        )

    command.__doc__ = f"{_OF_STUDIES[full]}; comes with the studies: pip install ./studies."
    return command
