"""`spantrain page` and `spantrain why`: look at a run that is under way, or was."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli.failure import clean_interrupt
from spantrain.cli.options import PAGE_LISTEN, Json, print_json
from spantrain.cli.render.text import console_for_people, say
from spantrain.config.files.json_codec import to_json
from spantrain.core.quantities import format_seconds
from spantrain.errors import ConfigError

if TYPE_CHECKING:
    from spantrain.app.watching.view import RunView

_WIDTH = 120


def page(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")],
    listen: Annotated[
        str, typer.Option(help="HOST:PORT; port 0: any that is free. The token that it prints is needed, too.")
    ] = PAGE_LISTEN,
) -> None:
    """Serve a page that shows a run, while it goes on or afterwards, until Ctrl-C; it changes nothing."""
    from spantrain.app.watching.serve import page_of
    from spantrain.app.watching.view import read_view

    read_view(folder)
    with clean_interrupt("the page"), page_of(folder, listen, "--listen") as shown:
        typer.echo(f"{shown.url}{shown.warning}")
        shown.wait()


def why(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")],
    json_: Json = False,
) -> None:
    """Say who waited for whom in the last recorded step of a run, and which device or link made it late, since when."""
    from spantrain.app.watching.view import read_view

    view = read_view(folder)
    if view.reason is None:
        raise ConfigError(
            f"{folder}: no step was recorded by which to tell who waited for whom; one is, about once a second, "
            "unless steps overlap (--staleness 1)"
        )
    if json_:
        print_json({"reason": to_json(view.reason), "unfinished": to_json(view.unfinished)})
    else:
        _show_why(view)


def _show_why(view: "RunView") -> None:
    from spantrain.app.watching.chain import chain_lines, lateness_text, unfinished_lines

    reason = view.reason
    assert reason is not None, "it was asked for"
    console = console_for_people(_WIDTH)
    times = f"{format_seconds(reason.duration_s)}; forecast {format_seconds(reason.forecast_s)}"
    console.print(f"Step {reason.step + 1} of {view.run} took {times}.", highlight=False)
    late = "Nothing of it took longer than forecast" if reason.late is None else lateness_text(reason.late)
    console.print(f"{late[:1].upper()}{late[1:]}.", highlight=False)
    console.print("Who waited for whom, from the step's first work to its last:", highlight=False)
    for line in chain_lines(reason):
        say(console, line)
    say(console, f"{format_seconds(reason.rest_s)} besides: the barrier, the update, an evaluation, a checkpoint")
    if view.unfinished is not None:
        step = view.unfinished.step + 1
        console.print(f"Step {step} was never ended. What each device did last of it:", highlight=False)
        for line in unfinished_lines(view.unfinished, [one.name for one in view.devices if one.stage is not None]):
            say(console, line)
    if view.ending:
        console.print(f"The run failed: {view.ending}", highlight=False, markup=False)
