"""Commands that installed packages add by entry points; of the studies' own, what to install where they are not."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import typer

from spantrain.errors import UsageError
from spantrain.plugins import with_plugins

ENTRY_POINTS = "spantrain.commands"
"""The group of entry points of which each names a function as typer has them."""


def add_commands(app: typer.Typer, words: Sequence[str]) -> None:
    """Add what is installed, unless the words of the command line ask for a command of ours.

    Raises:
        UsageError: a package's command cannot be loaded, is none, or has the name of one that is there already.
    """
    asked = next((word for word in words if not word.startswith("-")), "")
    if asked not in {*_commands(app), *(group.name for group in app.registered_groups)}:
        _add_all(app)


def _commands(app: typer.Typer) -> dict[str, Callable[..., Any]]:
    return {one.name: one.callback for one in app.registered_commands if one.name and one.callback}


@cache
def _add_all(app: typer.Typer) -> None:
    ours = _commands(app)
    found: Mapping[str, Callable[..., Any]] = with_plugins(ours, ENTRY_POINTS, FunctionType, "command")
    for name in found.keys() - ours.keys():
        app.command(name)(found[name])
    if "compare" not in found:
        app.command("compare", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(_compare)


def _compare(_: typer.Context) -> None:
    """Train the same samples with torch's frameworks, too; comes with the studies: pip install ./studies."""
    raise UsageError("`spantrain compare` comes with the studies: `pip install ./studies` in a checkout of SpanTrain")
