"""The command table, and the one place where errors become exit codes."""

import os
import sys

import typer

from spantrain import __version__
from spantrain.cli import commands, outer, schedule, testbed
from spantrain.cli.compare import compare
from spantrain.cli.explain import explain
from spantrain.cli.export import export, import_
from spantrain.cli.plan import plan
from spantrain.cli.simulate import simulate
from spantrain.cli.train import train
from spantrain.cli.validate import validate
from spantrain.errors import SpanTrainError

__all__ = ["app", "main"]

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
app.command("compare")(compare)
app.command("export")(export)
app.command("import")(import_)
app.command("validate")(validate)
app.command("worker")(commands.worker)
app.add_typer(outer.app, name="outer")
app.add_typer(schedule.app, name="schedule")
app.add_typer(testbed.app, name="testbed")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spantrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    del version


def main(arguments: list[str] | None = None) -> None:
    """Run the program; exit 0: done, 1: failed, 2: wrong input, 130: interrupted."""
    try:
        app(arguments)
    except SpanTrainError as error:
        sys.stderr.write(f"{'Stopped' if error.exit_code == 130 else 'Error'}: {error}\n")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # Whoever read the output has gone; that is no failure of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
