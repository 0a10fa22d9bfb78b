"""What was simulated, for people and programs: a live run beside its prediction, and steps that an adapter follows."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from spantrain.app.validate_run import RunValidation
from spantrain.cli.options import chosen_trace, print_json
from spantrain.cli.render.text import console_for_people
from spantrain.config.files.json_codec import to_json
from spantrain.core.job import ADAPTERS
from spantrain.core.quantities import format_bytes, format_seconds
from spantrain.errors import ConfigError

if TYPE_CHECKING:
    from spantrain.app.simulation.adapter import AdapterOutcome

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


def check_adapter(adapter: str, network_trace: str | None, others: Mapping[str, object]) -> None:
    """Refuse what does not go with --adapter.

    Raises:
        ConfigError: there is no such adapter, no trace, or an option that is for single steps only.
    """
    if adapter not in ADAPTERS:
        raise ConfigError(f"--adapter {adapter}: give one of {', '.join(ADAPTERS)}")
    if network_trace is None:
        raise ConfigError(
            "--adapter: an adapter has something to do only where links change; name how with --network-trace, "
            "e.g. --network-trace drop-50"
        )
    given = [name for name, value in others.items() if value]
    if given:
        raise ConfigError(f"--adapter: does not go with {', '.join(given)}; leave that out")


def show_adapter(
    plan_path: Path,
    network_trace: str,
    *,
    adapter: str,
    steps: int,
    schedule: str | None,
    optimizer: str,
    as_json: bool,
) -> None:
    """Simulate and print; `optimizer` is named as `cost.memory` does."""
    from spantrain.app.planning.plan_files import open_plan, under_schedule
    from spantrain.app.simulation.adapter import AdapterRequest, simulate_adapter

    plan, profile = open_plan(plan_path)
    trace = chosen_trace(network_trace, emulated=True)
    assert trace is not None, "it was named"
    outcome = simulate_adapter(
        AdapterRequest(
            plan=under_schedule(plan, schedule),
            profile=profile,
            network_trace=trace,
            adapter=adapter,
            steps=steps,
            optimizer=optimizer,
        )
    )
    if as_json:
        print_json({"plan": str(plan_path), **_document(outcome)})
        return
    for line in _lines(outcome):
        typer.echo(line)


def _document(outcome: "AdapterOutcome") -> dict[str, object]:
    return {name: value for name, value in to_json(outcome).items() if name != "plans"}


def _lines(outcome: "AdapterOutcome") -> list[str]:
    lines = [
        f"  {len(outcome.steps)} steps under {outcome.network_trace}, --adapter {outcome.adapter}: "
        f"{format_seconds(outcome.total_s)}; a calm step takes {format_seconds(outcome.calm_step_s)}",
        f"  {'step':>4}  {'begins':>9}  {'takes':>9}  {'plan':>4}  cut in mid-step",
    ]
    for step in outcome.steps:
        if step.reason:
            lines.append(f"        plan {step.plan}: {step.reason}")
        lines.append(
            f"  {step.step:>4}  {format_seconds(step.begun_s):>9}  {format_seconds(step.step_s):>9}  {step.plan:>4}  "
            f"{step.recuts or ''}"
        )
    return lines
