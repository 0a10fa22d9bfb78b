"""Predictions of measured runs as tables: `python -m spantrain_studies.reference DIR` prints them."""

from typing import Any

from rich.console import Console
from rich.table import Table

from spantrain.config.files.json_codec import to_json
from spantrain_studies.reference.validate import CaseValidation, ReferenceValidation, SetValidation

_GB = 1e9


def set_json(found: SetValidation) -> dict[str, Any]:
    """Return a set of validated runs as plain JSON values."""
    document: dict[str, Any] = to_json(found)
    return document


def show_validation(console: Console, validation: ReferenceValidation, *, explain: bool) -> None:
    """Print a table for each set of runs, and one of absolute errors."""
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
    platform = validation.platform
    bases = ", ".join(f"{size / _GB:.2f}" for size in sorted(set(platform.base_bytes.values())))
    of_what = (
        "each run is predicted by constants fitted to all others; fitted to all they are"
        if validation.left_out
        else "constants as they ship (--leave-one-out fits them to these runs)"
    )
    console.print(
        f"  Platform {platform.name}: {of_what}: launch exposure {platform.launch_exposure:.3f}, workspace "
        f"{platform.workspace_ratio:.2f}, base {bases} GB.",
        style="dim",
        highlight=False,
    )


def _left_out(case: CaseValidation) -> str:
    return f"left out: {' and '.join(case.excluded)}" if case.excluded else "nothing left out"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _error(ratio: float, *, counts: bool) -> str:
    text = f"{ratio:+.1%}"
    return text if counts else f"({text})"


def _case_table(name: str, found: SetValidation) -> Table:
    columns = ("run", "predicted", "measured", "error", "predicted", "measured", "error")
    table = _table(f"{name}: seconds of a step, peak GB of a device; figures in brackets do not count", *columns)
    for case in found.cases:
        table.add_row(
            case.id.removeprefix(f"{name}/"),
            f"{case.predicted_s:.3f}",
            f"{case.measured_s:.3f}",
            _error(case.time_error_ratio, counts="time" not in case.excluded),
            f"{case.predicted_bytes / _GB:.2f}",
            f"{case.measured_bytes / _GB:.2f}",
            _error(case.memory_error_ratio, counts="memory" not in case.excluded),
        )
    return table


def _time_table(name: str, found: SetValidation) -> Table:
    columns = ("run", "computing", "receiving", "sending", "waiting", "gradient sum", "update", "as seen by")
    table = _table(f"{name}: what predicted seconds are made of", *columns)
    for case in found.cases:
        parts = case.time_parts
        seconds = (parts.compute_s, parts.receive_s, parts.send_s, parts.wait_s, parts.gradient_sum_s, parts.update_s)
        table.add_row(case.id.removeprefix(f"{name}/"), *(f"{abs(value):.3f}" for value in seconds), case.longest)
    return table


def _byte_table(name: str, found: SetValidation) -> Table:
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


def _summary_table(validation: ReferenceValidation) -> Table:
    table = _table("Absolute errors", "set", "runs", "time, mean", "time, most", "memory, mean", "memory, most")
    for name, found in validation.sets.items():
        figures = (found.time_mape, found.time_max_ape, found.memory_mape, found.memory_max_ape)
        cells = ("-" if figure is None else f"{figure:.1%}" for figure in figures)
        table.add_row(name, str(len(found.cases)), *cells)
    return table
