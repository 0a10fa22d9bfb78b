"""Options that the verbs of `spantrain outer` share."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="A file as docs/outer.md shows, e.g. outer.yaml.")]
TokenFile = Annotated[
    Path | None, typer.Option("--token-file", help="A file with the master's token; default: in its state folder.")
]
TokenText = Annotated[str | None, typer.Option("--token", envvar="SPANTRAIN_OUTER_TOKEN", help="The master's token.")]
EndWithInput = Annotated[bool, typer.Option("--end-with-input", hidden=True, help="End when standard input ends.")]
