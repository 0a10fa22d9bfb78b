"""The command that compares predictions with what was measured: runs of others in a folder, or a run of ours."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spantrain.cli.options import Json, print_json
from spantrain.config.json_codec import to_json
from spantrain.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from spantrain.app.validate import CaseValidation, ReferenceValidation, SetValidation

__all__ = ["validate"]

_WIDTH = 150
"""Where there is no terminal."""

_GB = 1e9


def validate(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder with measured.json (runs of others), or a run of ours.")
    ],
    explain: Annotated[bool, typer.Option("--explain", help="Say what predicted times and bytes are made of.")] = False,
    json_: Json = False,
) -> None:
    """Run measured runs through the cost model and the simulator, and print how far off they are."""
    from spantrain.app.validate import holds_reference

    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name one with measured.json, or the folder of a run")
    if holds_reference(folder):
        _validate_reference(folder, explain=explain, as_json=json_)
    else:
        _validate_run(folder, as_json=json_)


def _validate_run(folder: Path, *, as_json: bool) -> None:
    from spantrain.app.validate_run import validate_run
    from spantrain.cli.render_validation import run_json, show_run

    validation = validate_run(folder)
    if as_json:
        print_json(run_json(validation))
    else:
        show_run(validation)


def _validate_reference(folder: Path, *, explain: bool, as_json: bool) -> None:
    from rich.console import Console

    from spantrain.app.validate import validate_reference
    from spantrain.cli.text import console_for_people

    def progress(done: int, total: int, name: str) -> None:
        status.update(f"{done + 1} of {total}: {name}")

    with Console(stderr=True).status("reading") as status:
        validation = validate_reference(folder, progress=progress)
    console = console_for_people(_WIDTH, stderr=as_json)
    _show(console, validation, explain=explain)
    if as_json:
        print_json({name: _set_json(found) for name, found in validation.sets.items()})


def _set_json(found: "SetValidation") -> dict[str, Any]:
    document: dict[str, Any] = to_json(found)
    return document


def _show(console: "Console", validation: "ReferenceValidation", *, explain: bool) -> None:
    for name, found in validation.sets.items():
        console.print(_case_table(name, found))
        for case in found.cases:
            for flag in case.flags:
                console.print(f"  {case.id}: {_left_out(case)}: {flag}", highlight=False, markup=False, style="dim")
        if any(case.estimated_head for case in found.cases):
            console.print(
                "  The profile lacks the projection to the vocabulary; its time and bytes are estimated.", style="dim"
            )
        if explain:
            console.print(_time_table(name, found))
            console.print(_byte_table(name, found))
    console.print(_summary_table(validation))
    console.print(
        f"  Platform {validation.platform.name}; its constants were fitted on the runs marked 'calibrate' only "
        "(cost/platforms, docs/simulator.md).",
        style="dim",
        highlight=False,
    )


def _left_out(case: "CaseValidation") -> str:
    return f"left out: {' and '.join(case.excluded)}" if case.excluded else "nothing left out"


def _table(title: str, *columns: str) -> "Table":
    from rich.table import Table

    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _error(ratio: float, *, counts: bool) -> str:
    text = f"{ratio:+.1%}"
    return text if counts else f"({text})"


def _case_table(name: str, found: "SetValidation") -> "Table":
    columns = ("run", "use", "predicted", "measured", "error", "predicted", "measured", "error")
    table = _table(f"{name}: seconds of a step, peak GB of a device; figures in brackets do not count", *columns)
    for case in found.cases:
        table.add_row(
            case.id.removeprefix(f"{name}/"),
            case.use,
            f"{case.predicted_s:.3f}",
            f"{case.measured_s:.3f}",
            _error(case.time_error_ratio, counts="time" not in case.excluded),
            f"{case.predicted_bytes / _GB:.2f}",
            f"{case.measured_bytes / _GB:.2f}",
            _error(case.memory_error_ratio, counts="memory" not in case.excluded),
        )
    return table


def _time_table(name: str, found: "SetValidation") -> "Table":
    columns = ("run", "computing", "receiving", "sending", "waiting", "gradient sum", "update", "as seen by")
    table = _table(f"{name}: what predicted seconds are made of", *columns)
    for case in found.cases:
        parts = case.time_parts
        seconds = (
            parts.compute_s,
            parts.receive_s,
            parts.send_s,
            parts.wait_s,
            parts.gradient_sum_s,
            parts.update_s,
        )
        table.add_row(case.id.removeprefix(f"{name}/"), *(f"{abs(value):.3f}" for value in seconds), case.longest)
    return table


def _byte_table(name: str, found: "SetValidation") -> "Table":
    columns = ("run", "state", "activations", "messages", "workspace", "base", "of")
    table = _table(f"{name}: what predicted GB are made of", *columns)
    for case in found.cases:
        parts = case.byte_parts
        sizes = (
            parts.state_bytes,
            parts.activation_bytes,
            parts.message_bytes,
            parts.workspace_bytes,
            parts.base_bytes,
        )
        table.add_row(case.id.removeprefix(f"{name}/"), *(f"{size / _GB:.2f}" for size in sizes), case.fullest)
    return table


def _summary_table(validation: "ReferenceValidation") -> "Table":
    table = _table("Absolute errors", "set", "runs", "time, mean", "time, most", "memory, mean", "memory, most")
    for name, found in validation.sets.items():
        figures = (found.time_mape, found.time_max_ape, found.memory_mape, found.memory_max_ape)
        cells = ("-" if figure is None else f"{figure:.1%}" for figure in figures)
        table.add_row(name, str(len(found.cases)), *cells)
    return table
