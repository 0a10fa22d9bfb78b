"""`spantrain explain`: what limits a plan; `validate`: how far off the prediction of a run was; `page` and
`why`: look at a run that is under way, or was.
"""

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spantrain.cli.failure import clean_interrupt
from spantrain.cli.options import PAGE_LISTEN, Json, print_json
from spantrain.cli.render.text import console_for_people, figures_table, say, short_way
from spantrain.config.files.json_codec import to_json
from spantrain.core.names import few
from spantrain.core.quantities import format_bandwidth, format_bytes, format_seconds
from spantrain.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from spantrain.app.validate_run import RunValidation


_SHOWN = 10
_EXPLAIN_WIDTH = 130
"""Where there is no terminal."""


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
        return
    console = console_for_people(_EXPLAIN_WIDTH)
    console.print(f"A step takes {format_seconds(explanation.step_s)}, simulated.", highlight=False)
    console.print(f"Limited by {explanation.limited_by}.", highlight=False, markup=False)
    for index, stage in enumerate(explanation.stages):
        memory = "; memory limits its samples in flight" if stage.held_by_memory else ""
        sums = f", gradient sum {format_seconds(stage.gradient_sum_s)}" if stage.gradient_sum_s else ""
        say(console, f"stage {index} ({few(stage.devices)}): busy {stage.busy_ratio:.0%}{sums}{memory}")
    for name, load in sorted(explanation.links.items(), key=lambda entry: -entry[1].busy_ratio)[:_SHOWN]:
        carried = f"{format_bytes(load.size_bytes)} a step at {format_bandwidth(load.bandwidth_bytes_per_s)}"
        say(console, f"{short_way(name)}: busy {load.busy_ratio:.0%} ({carried})")
    if not explanation.helps:
        console.print(f"None of {explanation.tried} single changes makes this plan faster.", highlight=False)
        return
    title = f"What would help, the same plan simulated ({explanation.tried} changes tried)"
    table = figures_table("change", "s/step", "times as fast", title=title, title_justify="left")
    for help_ in explanation.helps[:_SHOWN]:
        table.add_row(help_.change, f"{help_.step_s:.4g}", f"{help_.times_as_fast:.3f}")
    console.print(table)


def validate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")], json_: Json = False
) -> None:
    """Run a live run's plan through the simulator, and print how far off its prediction is."""
    from spantrain.app.validate_run import validate_run

    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name the folder of a run (train --out)")
    validation = validate_run(folder)
    if json_:
        print_json(run_json(validation))
    else:
        show_run(validation)


def run_json(validation: "RunValidation") -> dict[str, Any]:
    """Return the run as one object; the keys that sets of measured cases have are there too."""
    error = abs(validation.step_error_ratio)
    memory = [
        (device.peak_bytes_predicted, device.peak_bytes_measured)
        for device in validation.devices.values()
        if device.peak_bytes_predicted is not None and device.peak_bytes_measured
    ]
    memory_errors = [abs(predicted / measured - 1.0) for predicted, measured in memory]
    case = {
        "id": validation.folder,
        "predicted_s": validation.step_s_predicted,
        "measured_s": validation.step_s_measured,
        "predicted_bytes": max((predicted for predicted, _ in memory), default=None),
        "measured_bytes": max((measured for _, measured in memory), default=None),
    }
    summary = {
        "cases": [case],
        "time_mape": error,
        "time_max_ape": error,
        "memory_mape": statistics.fmean(memory_errors) if memory else None,
        "memory_max_ape": max(memory_errors, default=None),
    }
    return {"run": {**summary, **to_json(validation), "replays": validation.replays}}


def show_run(validation: "RunValidation") -> None:
    """Print the tables, and what the log of decisions says."""
    console = console_for_people()
    title = f"{validation.folder}: {validation.model}, {validation.schedule}"
    steps = figures_table("", "predicted", "measured", "error", title=title)
    steps.add_row(
        f"step (median of {validation.steps_measured}, {validation.measured_by})",
        format_seconds(validation.step_s_predicted),
        format_seconds(validation.step_s_measured),
        f"{validation.step_error_ratio:+.1%}",
    )
    console.print(steps)
    console.print(_device_table(validation))
    if validation.links:
        heads = ("link", "predicted", "measured", "error")
        links = figures_table(*heads, title="A step, by link (bytes of tensors)")
        for name, link in validation.links.items():
            links.add_row(name, *_compared(link.bytes_predicted, link.bytes_measured, format_bytes))
        console.print(links)
    for line in _decision_lines(validation):
        console.print(f"  {line}", highlight=False, markup=False)


def _device_table(validation: "RunValidation") -> "Table":
    counted = any(device.peak_bytes_measured is not None for device in validation.devices.values())
    heads = ["busy, predicted", "measured", "error", "samples held, predicted", "measured"]
    heads += ["bytes held, predicted", "measured"] if counted else []
    table = figures_table("device", *heads, title="A step, by device")
    for name, device in validation.devices.items():
        held = device.peak_held_samples_measured
        sizes = (device.peak_bytes_predicted, device.peak_bytes_measured) if counted else ()
        table.add_row(
            name,
            *_compared(device.busy_s_predicted, device.busy_s_measured, format_seconds),
            str(device.peak_held_samples_predicted),
            "-" if held is None else str(held),
            *("-" if size is None else format_bytes(size) for size in sizes),
        )
    return table


def _compared(predicted: float, measured: float, shown: Callable[[float], str]) -> Iterator[str]:
    yield from (shown(predicted), shown(measured))
    yield f"{predicted / measured - 1.0:+.1%}" if measured else "-"


def _decision_lines(validation: "RunValidation") -> list[str]:
    if validation.decisions is None:
        return ["The run left no log of decisions (decisions.jsonl), so none were made again."]
    if validation.replays:
        return [
            f"All {validation.decisions} logged decisions were made again just so by fresh policies, and the simulator "
            "ran the actions in the same order when given the same arrival times."
        ]
    return [
        *(f"Fresh policies decide otherwise: {text}" for text in validation.differences),
        *(f"The simulator runs another order: {text}" for text in validation.order_differences),
    ]


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
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run.")], json_: Json = False
) -> None:
    """Say who waited for whom in the last recorded step of a run, and which device or link made it late, since when."""
    from spantrain.app.watching.reason_text import chain_lines, lateness_text, unfinished_lines
    from spantrain.app.watching.view import read_view

    view = read_view(folder)
    reason = view.reason
    if reason is None:
        raise ConfigError(
            f"{folder}: no step was recorded by which to tell who waited for whom; one is, about once a second, "
            "unless steps overlap (--staleness 1)"
        )
    if json_:
        about = {"run": view.run, "state": view.state, "ending": view.ending}
        print_json({**about, "reason": to_json(reason), "unfinished": to_json(view.unfinished)})
        return
    console = console_for_people()
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
