"""The command table, with what installed packages add to it, and the one place where errors become exit codes."""

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import typer

from spantrain.cli.commands import faults, outer, schedule
from spantrain.cli.commands.basic import demo, drain, export, groups, import_, profile, relay, worker
from spantrain.cli.commands.explain import explain, page, validate, why
from spantrain.cli.commands.launch import launch
from spantrain.cli.commands.machines import doctor, init
from spantrain.cli.commands.plan import plan
from spantrain.cli.commands.simulate import simulate
from spantrain.cli.commands.train import train
from spantrain.cli.failure import NO_ROOM, outlive_listeners, software, tell_internal_error
from spantrain.errors import InternalError, SpanTrainError, UsageError
from spantrain.plugins import with_plugins

ENTRY_POINTS = "spantrain.commands"
"""The group of entry points of which each names a function as typer has them; `outer.x` is `spantrain outer x`."""
_OF_STUDIES = {
    "compare": "Train the same samples with torch's frameworks, too",
    "outer.demo": "Train one language model at four unequal places, none of which waits for another",
}
"""Commands of the studies, of which is said what to install where they are not."""
_TRACEBACK = "--traceback"

app = typer.Typer(
    name="spantrain",
    help="Train one PyTorch model on unlike GPUs in several places: measure, plan, train.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
COMMANDS = (
    demo, init, doctor, profile, groups, plan, explain, simulate, train, launch, page, why, export, import_,
    validate, worker, drain, relay,
)  # fmt: skip
for command in COMMANDS:
    app.command(command.__name__.rstrip("_"))(command)
for group in (outer, schedule, faults):  # the last adds to the group `testbed`
    app.add_typer(group.app, name=group.app.info.name)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo("\n".join(software()))
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print versions, for reports of errors."
    ),
    show: bool = typer.Option(False, _TRACEBACK, help="Show the traceback of an internal error here, too."),
) -> None:
    del version, show


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


def main(arguments: list[str] | None = None) -> None:
    """Run the program.

    Exit 0: done, or its reader has gone, 1: failed, 2: wrong input, 70: an error of SpanTrain itself, 130: interrupted.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            add_commands(app, words)
            app(arguments, prog_name="spantrain")  # by which shells ask how words go on, too
        finally:
            sys.stdout.flush()  # what is left is told here, not when Python ends
    except SpanTrainError as error:
        sys.stderr.write(f"{'Stopped' if error.exit_code == 130 else 'Error'}: {_shown(str(error))}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("Stopped: interrupted\n")
        sys.exit(130)
    except MemoryError:
        sys.stderr.write("Error: this machine's memory does not suffice for that\n")
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(0)  # whoever read the output has gone, as `head` does; that is no failure of ours
    except SystemExit as end:
        # So typer and rich end a program whose reader has gone.
        sys.exit(0 if isinstance(end.__context__, BrokenPipeError) else end.code)
    except Exception as error:  # noqa: BLE001 - one of the outermost loops: whatever it is, it is told in one message
        if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
            sys.stderr.write(f"Error: what it prints cannot be written: {error.strerror}; make room, and do it again\n")
            sys.exit(1)
        sys.stderr.write(f"Error: {_shown(tell_internal_error(error, words))}\n")
        if _TRACEBACK in words:
            traceback.print_exception(error)
        sys.exit(InternalError.exit_code)


def _shown(text: str) -> str:
    """Return a text that cannot steer the terminal, whatever a file that it tells of had in it."""
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)


def run() -> None:
    """Be the program: as `main`, and the process ends with it.

    At its own end Python would take apart all that was loaded, which takes seconds with torch, and wait for threads
    that nobody waits for any more.
    """
    code: object = 0
    outlive_listeners()
    try:
        main()
    except SystemExit as end:
        code = end.code
    status = code if isinstance(code, int) else 0 if code is None else 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = status or 1
    os._exit(status)
