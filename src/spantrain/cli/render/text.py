"""Text for people: lines that wrap under themselves in a terminal and not at all in a file, tables, names of links."""

import os
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_NARROWEST = 20
_PLAIN_WIDTH = 120


def console_for_people(plain_width: int = _PLAIN_WIDTH, *, stderr: bool = False) -> Console:
    """Return standard output, or standard error, with no markup in what it prints: names of files may look like some.

    It is as wide as the terminal; where it is a file or a pipe as COLUMNS says, or else so many characters.
    """
    console = Console(stderr=stderr, markup=False, emoji=False)
    if console.is_terminal:
        return console
    console.width = _columns() or plain_width
    return console


def _columns() -> int:
    """Return the width that the environment asks for; 0 if none that a table fits in."""
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 4 and int(text) >= _NARROWEST else 0


def say(console: Console, text: str, *, mark: str = "") -> None:
    """Print a line two characters in, behind a mark if there is one; it wraps under itself unless in a file or a pipe
    whose width nobody asked for.
    """
    start = f"  {mark} " if mark else "  "
    if not console.is_terminal and not _columns():
        console.print(f"{start}{text}", highlight=False, markup=False, soft_wrap=True)
        return
    grid = Table.grid()
    grid.add_column(width=len(start))
    grid.add_column()
    grid.add_row(Text(start), Text(text))
    console.print(grid, highlight=False)


def figures_table(first: str, *others: str, **more: Any) -> Table:
    """Return a table whose first column says what the others, which end at their right, are figures of.

    Args:
        first: head of that column.
        others: heads of the others.
        more: for `rich.table.Table`, such as its title.
    """
    return Table(first, *(Column(name, justify="right") for name in others), **more)


def short_way(name: str) -> str:
    """Return a link's name without the places that both ends are in.

    >>> short_way("cloud/host-0/gpu0->cloud/host-0/gpu1"), short_way("lab->office"), short_way("lab up")
    ('gpu0->gpu1', 'lab->office', 'lab up')
    """
    source, arrow, target = name.partition("->")
    a, b = source.split("/"), target.split("/")
    shared = 0
    while arrow and shared < min(len(a), len(b)) - 1 and a[shared] == b[shared]:
        shared += 1
    return f"{'/'.join(a[shared:])}{arrow}{'/'.join(b[shared:])}"
