"""The command table, and the one place where errors become exit codes."""

import contextlib
import os
import sys
import traceback

import typer

from spantrain.cli.additions import add_commands
from spantrain.cli.commands import basic as commands
from spantrain.cli.commands import outer, schedule, testbed
from spantrain.cli.commands.basic import export, import_
from spantrain.cli.commands.explain import explain, validate
from spantrain.cli.commands.plan import plan
from spantrain.cli.commands.simulate import simulate
from spantrain.cli.commands.train import train
from spantrain.cli.failure import tell_internal_error
from spantrain.errors import InternalError, SpanTrainError
from spantrain.version import VERSION

_TRACEBACK = "--traceback"

app = typer.Typer(
    name="spantrain",
    help="Train one PyTorch model on unlike GPUs in several places: measure, plan, train.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("demo")(commands.demo)
app.command("profile")(commands.profile)
app.command("groups")(commands.groups)
app.command("plan")(plan)
app.command("explain")(explain)
app.command("simulate")(simulate)
app.command("train")(train)
app.command("export")(export)
app.command("import")(import_)
app.command("validate")(validate)
app.command("worker")(commands.worker)
app.command("drain")(commands.drain)
app.add_typer(outer.app, name="outer")
app.add_typer(schedule.app, name="schedule")
app.add_typer(testbed.app, name="testbed")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spantrain {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    show: bool = typer.Option(False, _TRACEBACK, help="Show the traceback of an internal error here, too."),
) -> None:
    del version, show


def main(arguments: list[str] | None = None) -> None:
    """Run the program.

    Exit 0: done, or its reader has gone, 1: failed, 2: wrong input, 70: an error of SpanTrain itself, 130: interrupted.
    """
    words = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            add_commands(app, words)
            app(arguments)
        finally:
            sys.stdout.flush()  # what is left is told here, not when Python ends
    except SpanTrainError as error:
        _tell(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("Stopped: interrupted\n")
        sys.exit(130)
    except MemoryError:
        sys.stderr.write("Error: this machine's memory does not suffice for that\n")
        sys.exit(1)
    except BrokenPipeError:
        _leave_readers()
    except SystemExit as end:
        # So typer and rich end a program whose reader has gone.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        _leave_readers()
    except Exception as error:  # noqa: BLE001 - one of the outermost loops: whatever it is, it is told in one message
        sys.stderr.write(f"Error: {_shown(tell_internal_error(error, words))}\n")
        if _TRACEBACK in words:
            traceback.print_exception(error)
        sys.exit(InternalError.exit_code)


def _tell(error: SpanTrainError) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(f"{'Stopped' if error.exit_code == 130 else 'Error'}: {_shown(str(error))}\n")


def _shown(text: str) -> str:
    """Return a text that cannot steer the terminal, whatever a file that it tells of had in it."""
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)


def _leave_readers() -> None:
    """End well: whoever read the output has gone, as `head` does; that is no failure of ours."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    sys.exit(0)


def run() -> None:
    """Be the program: as `main`, and the process ends with it.

    At its own end Python would take apart all that was loaded, which takes seconds with torch, and wait for threads
    that nobody waits for any more.
    """
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    status = code if isinstance(code, int) else 0 if code is None else 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            pass  # whoever read it has gone
        except OSError:
            status = status or 1
    os._exit(status)
