"""A live run beside its prediction: tables for people, one object for programs."""

import statistics
from typing import Any

from rich.table import Table

from spantrain.app.validation.validate_run import RunValidation
from spantrain.cli.render.text import console_for_people
from spantrain.config.files.json_codec import to_json
from spantrain.core.quantities import format_bytes, format_seconds

_WIDTH = 120
"""Where there is no terminal."""


def run_json(validation: RunValidation) -> dict[str, Any]:
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


def show_run(validation: RunValidation) -> None:
    """Print the tables, and what the log of decisions says."""
    console = console_for_people(_WIDTH)
    console.print(_step_table(validation))
    console.print(_device_table(validation))
    if validation.links:
        console.print(_link_table(validation))
    for line in _decision_lines(validation):
        console.print(f"  {line}", highlight=False, markup=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _step_table(validation: RunValidation) -> Table:
    table = _table(
        f"{validation.folder}: {validation.model}, {validation.schedule}", "", "predicted", "measured", "error"
    )
    table.add_row(
        f"step (median of {validation.steps_measured}, {validation.measured_by})",
        format_seconds(validation.step_s_predicted),
        format_seconds(validation.step_s_measured),
        f"{validation.step_error_ratio:+.1%}",
    )
    return table


def _device_table(validation: RunValidation) -> Table:
    columns = ["device", "busy, predicted", "measured", "error", "samples held, predicted", "measured"]
    counted = any(device.peak_bytes_measured is not None for device in validation.devices.values())
    table = _table("A step, by device", *columns, *(("bytes held, predicted", "measured") if counted else ()))
    for name, device in validation.devices.items():
        held = device.peak_held_samples_measured
        table.add_row(
            name,
            format_seconds(device.busy_s_predicted),
            format_seconds(device.busy_s_measured),
            _error(device.busy_s_predicted, device.busy_s_measured),
            str(device.peak_held_samples_predicted),
            "-" if held is None else str(held),
            *(_bytes(device.peak_bytes_predicted, device.peak_bytes_measured) if counted else ()),
        )
    return table


def _link_table(validation: RunValidation) -> Table:
    table = _table("A step, by link (bytes of tensors)", "link", "predicted", "measured", "error")
    for name, link in validation.links.items():
        table.add_row(
            name,
            format_bytes(link.bytes_predicted),
            format_bytes(link.bytes_measured),
            _error(link.bytes_predicted, link.bytes_measured),
        )
    return table


def _bytes(*sizes: int | None) -> tuple[str, ...]:
    return tuple("-" if size is None else format_bytes(size) for size in sizes)


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1.0:+.1%}" if measured else "-"


def _decision_lines(validation: RunValidation) -> list[str]:
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
