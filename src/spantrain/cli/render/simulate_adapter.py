"""What `spantrain simulate --adapter` shows: steps over links that change, and what the adapter decided."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from spantrain.cli.options import chosen_trace, print_json
from spantrain.config.files.json_codec import to_json
from spantrain.core.job import ADAPTERS
from spantrain.core.quantities import format_seconds
from spantrain.errors import ConfigError
from spantrain.schedule.registry import check_schedule

if TYPE_CHECKING:
    from spantrain.app.simulation.adapter import AdapterOutcome


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
    from spantrain.app.planning.plan_files import open_plan
    from spantrain.app.simulation.adapter import AdapterRequest, simulate_adapter

    plan, profile = open_plan(plan_path)
    trace = chosen_trace(network_trace, emulated=True)
    assert trace is not None, "it was named"
    outcome = simulate_adapter(
        AdapterRequest(
            plan=plan,
            profile=profile,
            network_trace=trace,
            adapter=adapter,
            steps=steps,
            schedule=check_schedule(schedule or plan.schedule),
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
