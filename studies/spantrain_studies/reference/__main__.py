"""`python -m spantrain_studies.reference DIR`: measured runs of others, and what our models predict of them."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from spantrain.cli.options import Json, print_json
from spantrain.cli.render.text import console_for_people
from spantrain.errors import ConfigError, SpanTrainError
from spantrain_studies.reference.show import set_json, show_validation
from spantrain_studies.reference.validate import validate_reference

_WIDTH = 150
"""Where there is no terminal."""


def validate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder with measured.json.")],
    explain: Annotated[bool, typer.Option("--explain", help="Say what predicted times and bytes are made of.")] = False,
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="Predict each run by constants that were fitted to all others.")
    ] = False,
    json_: Json = False,
) -> None:
    """Run measured runs through the cost model and the simulator, and print how far off they are."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name one with measured.json")
    with Console(stderr=True).status("reading") as status:

        def progress(done: int, total: int, name: str) -> None:
            status.update(f"{done + 1} of {total}: {name}")

        validation = validate_reference(folder, leave_one_out=leave_one_out, progress=progress)
    console = console_for_people(_WIDTH, stderr=json_)
    show_validation(console, validation, explain=explain)
    if json_:
        print_json({name: set_json(found) for name, found in validation.sets.items()})


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    app = typer.Typer(add_completion=False)
    app.command()(validate)
    try:
        app(arguments, standalone_mode=False)
    except SpanTrainError as error:
        sys.stderr.write(f"Error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
