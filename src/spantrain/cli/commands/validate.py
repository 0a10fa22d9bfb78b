"""The command that compares what was predicted with what a run measured."""

from pathlib import Path
from typing import Annotated

import typer

from spantrain.cli.options import Json, print_json
from spantrain.errors import ConfigError


def validate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")],
    json_: Json = False,
) -> None:
    """Run a live run's plan through the simulator, and print how far off its prediction is."""
    from spantrain.app.validation.validate_run import validate_run
    from spantrain.cli.render.validation import run_json, show_run

    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name the folder of a run (train --out)")
    validation = validate_run(folder)
    if json_:
        print_json(run_json(validation))
    else:
        show_run(validation)
