"""`spantrain explain`: what limits a plan; `spantrain validate`: how far off the prediction of a run was."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli.options import Json, print_json
from spantrain.config.files.json_codec import to_json
from spantrain.core.quantities import format_bandwidth, format_bytes, format_seconds

if TYPE_CHECKING:
    from spantrain.app.planning.explain import Explanation


from spantrain.errors import ConfigError

_SHOWN = 10
_PLAIN_WIDTH = 130


def explain(
    plan_path: Annotated[Path, typer.Argument(help="What `spantrain plan` wrote, or a plan edited by hand.")],
    json_: Json = False,
) -> None:
    """Say what limits a plan (stage, link or memory), and what would help most, by re-simulation."""
    from spantrain.app.planning.explain import explain_plan
    from spantrain.app.planning.plan_files import open_plan

    plan, profile = open_plan(plan_path)
    explanation = explain_plan(plan, profile)
    if json_:
        print_json(to_json(explanation))
    else:
        _show(explanation)


def _show(explanation: "Explanation") -> None:
    from rich.table import Table

    from spantrain.cli.render.text import console_for_people, few, say, short_way

    console = console_for_people(_PLAIN_WIDTH)
    console.print(f"A step takes {format_seconds(explanation.step_s)}, simulated.", highlight=False)
    console.print(f"Limited by {explanation.limited_by}.", highlight=False, markup=False)
    for index, stage in enumerate(explanation.stages):
        memory = "; memory limits its samples in flight" if stage.held_by_memory else ""
        sums = f", gradient sum {format_seconds(stage.gradient_sum_s)}" if stage.gradient_sum_s else ""
        say(console, f"stage {index} ({few(stage.devices)}): busy {stage.busy_ratio:.0%}{sums}{memory}")
    for name, load in sorted(explanation.links.items(), key=lambda entry: -entry[1].busy_ratio)[:_SHOWN]:
        rate = format_bandwidth(load.bandwidth_bytes_per_s)
        say(
            console, f"{short_way(name)}: busy {load.busy_ratio:.0%} ({format_bytes(load.size_bytes)} a step at {rate})"
        )
    if not explanation.helps:
        console.print(f"None of {explanation.tried} single changes makes this plan faster.", highlight=False)
        return
    table = Table(
        title=f"What would help, the same plan simulated ({explanation.tried} changes tried)", title_justify="left"
    )
    table.add_column("change")
    table.add_column("s/step", justify="right")
    table.add_column("times as fast", justify="right")
    for help_ in explanation.helps[:_SHOWN]:
        table.add_row(help_.change, f"{help_.step_s:.4g}", f"{help_.times_as_fast:.3f}")
    console.print(table)


def validate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")],
    json_: Json = False,
) -> None:
    """Run a live run's plan through the simulator, and print how far off its prediction is."""
    from spantrain.app.validate_run import validate_run
    from spantrain.cli.render.validation import run_json, show_run

    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name the folder of a run (train --out)")
    validation = validate_run(folder)
    if json_:
        print_json(run_json(validation))
    else:
        show_run(validation)
