"""The command that says what a plan would do, under one schedule or all of them."""

from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spantrain.cli import options as shared
from spantrain.cli.render.text import console_for_people, figures_table
from spantrain.config.files.json_codec import to_json
from spantrain.config.files.text_files import check_can_write
from spantrain.config.traces.network_traces import Changes, NetworkTrace, read_changes
from spantrain.core.job import ADAPTERS
from spantrain.core.quantities import format_bytes, format_seconds, parse_bytes
from spantrain.core.records import Record
from spantrain.cost.held_sizes import HeldBytes
from spantrain.errors import ConfigError
from spantrain.schedule.registry import check_schedule, schedule_names

if TYPE_CHECKING:
    from rich.table import Table

    from spantrain.app.simulation.simulate import ScheduleOutcome
    from spantrain.core.plan import Plan
    from spantrain.core.profile import Profile

_STEPS = 3
_WIDTH = 150
"""Where there is no terminal."""


class SimulateArguments(Record):
    """The options of `spantrain simulate`."""

    plan_path: Annotated[Path, typer.Argument(help="What `spantrain plan` wrote.")]
    schedule: Annotated[str | None, "An order of work, or `all`; default: the plan's own."] = None
    memory_limit: Annotated[
        str | None, "Bytes that every device may hold, e.g. 4GiB; in-flight limits follow from it."
    ] = None
    steps: Annotated[int, typer.Option(help="Steps to simulate; the last one is shown.", min=1, max=1000)] = _STEPS
    changes: Annotated[Path | None, "YAML: how speeds of devices and links change over time (docs/simulator.md)."] = (
        None
    )
    network_trace: shared.NetworkTraceName = None
    adapter: Annotated[
        str | None, f"With --network-trace: each step with what follows the network: {', '.join(ADAPTERS)}."
    ] = None
    availability: Annotated[
        str | None, "Devices that leave and come: a CSV or JSON file, or mtbf:HOURS,repair:HOURS,seed:N."
    ] = None
    hours: Annotated[
        float | None, typer.Option(help="With --availability: how long the run is; default: 24.", min=0.001, max=10_000)
    ] = None
    checkpoint_every: Annotated[
        int | None, typer.Option(help="With --availability: steps between checkpoints; default: none.", min=1)
    ] = None
    protect: Annotated[str | None, "With --availability: as with `spantrain train`; default: auto."] = None
    optimizer: shared.Optimizer = "adamw"
    staleness: Annotated[int, typer.Option(help="1: steps that overlap (docs/staleness.md).", min=0, max=1)] = 0
    trace: Annotated[Path | None, "Write the simulated run, for Perfetto."] = None
    prices: shared.PricesFile = None
    json_: shared.Json = False

    def check(self) -> None:
        """Refuse options that contradict each other, before anything is read.

        Raises:
            ConfigError: some do.
        """
        if self.schedule == "all" and self.trace is not None:
            raise ConfigError("--trace: name one schedule with --schedule, a trace shows one")
        if self.trace is not None:
            check_can_write(self.trace, "--trace")
        if self.changes is not None and self.network_trace is not None:
            raise ConfigError(
                "--changes and --network-trace: give one of them; a file of changes can name links as well"
            )
        own = (self.hours, self.checkpoint_every, self.protect)
        if self.availability is None and any(value is not None for value in own):
            raise ConfigError("--hours, --checkpoint-every and --protect: only with --availability")
        others = (self.schedule, self.memory_limit, self.changes, self.network_trace, self.adapter, self.trace)
        given = any(value is not None for value in others) or self.staleness > 0 or self.steps != _STEPS
        if self.availability is not None and given:
            raise ConfigError(
                "--availability: not with --schedule, --memory-limit, --changes, --network-trace, --adapter, --trace, "
                "--steps or --staleness; leave them out"
            )
        if self.adapter is None:
            return
        if self.adapter not in ADAPTERS:
            raise ConfigError(f"--adapter {self.adapter}: give one of {', '.join(ADAPTERS)}")
        if self.network_trace is None:
            raise ConfigError(
                "--adapter: an adapter has something to do only where links change; name how with --network-trace, "
                "e.g. --network-trace drop-50"
            )
        beside = {
            "--schedule all": self.schedule == "all", "--memory-limit": self.memory_limit, "--trace": self.trace,
            "--staleness": self.staleness,
        }  # fmt: skip
        if wrong := [name for name, value in beside.items() if value]:
            raise ConfigError(f"--adapter: does not go with {', '.join(wrong)}; leave that out")


@shared.with_options(SimulateArguments)
def simulate(asked: SimulateArguments, _: typer.Context) -> None:
    """Predict a plan under one schedule or all: time, waiting, memory, money and energy of a step."""
    from spantrain.app.planning.plan_files import open_plan

    asked.check()
    limit_bytes = shared.positive("--memory-limit", asked.memory_limit, parse_bytes)
    state = shared.planned_state(asked.optimizer)
    plan, profile = open_plan(asked.plan_path)
    profile = shared.priced(profile, asked.prices)
    traced = shared.chosen_trace(asked.network_trace, emulated=True)
    if asked.adapter is not None and traced is not None:
        _run_adapter(asked, plan, profile, traced, state)
    elif asked.availability is not None:
        _run_availability(asked, plan, profile, asked.availability, state)
    else:
        _run_schedules(asked, plan, profile, traced, limit_bytes, state)


def _run_schedules(
    asked: SimulateArguments, plan: "Plan", profile: "Profile", traced: NetworkTrace | None, limit_bytes: int | None,
    optimizer: str,
) -> None:  # fmt: skip
    """Simulate; write the trace that was asked for, and print what came of it."""
    from spantrain.app.simulation.simulate import SimulateRequest, run_simulation, write_simulated_trace

    one = plan.schedule if asked.schedule is None else asked.schedule
    request = SimulateRequest(
        plan=plan,
        profile=profile,
        schedules=schedule_names() if one == "all" else (check_schedule(one),),
        memory_limit_bytes=limit_bytes,
        steps=asked.steps,
        optimizer=optimizer,
        staleness=asked.staleness,
        changes=Changes() if asked.changes is None else read_changes(asked.changes),
        network_trace=traced,
    )
    report = run_simulation(request)
    if asked.trace is not None:
        write_simulated_trace(report.results[request.schedules[0]], asked.trace)
    if asked.json_:
        head = {"plan": str(asked.plan_path), "memory_limit_bytes": limit_bytes, "steps": asked.steps}
        shared.print_json(head | {"schedules": {name: to_json(outcome) for name, outcome in report.schedules.items()}})
        return
    console = console_for_people(_WIDTH)
    ran = [outcome for outcome in report.schedules.values() if not outcome.reason]
    console.print(_step_table(ran))
    console.print(_memory_table(ran))
    for outcome in report.schedules.values():
        if outcome.reason:
            console.print(f"  {outcome.schedule}: cannot run: {outcome.reason}", highlight=False, markup=False)
    for line in _remarks(ran):
        console.print(f"  {line}", style="dim", highlight=False, markup=False)
    if asked.network_trace is not None:  # under which steps differ: the tables are of the last one
        for outcome in report.schedules.values():
            if ends_s := outcome.step_ends_s:
                slowest_s = max(end_s - start_s for start_s, end_s in pairwise((0.0, *ends_s)))
                typer.echo(
                    f"  {outcome.schedule}: {len(ends_s)} steps under {asked.network_trace} take "
                    f"{format_seconds(ends_s[-1])}, the slowest {format_seconds(slowest_s)}"
                )
    if asked.trace is not None:
        typer.echo(f"Wrote {asked.trace}; open it at ui.perfetto.dev")


def _run_adapter(
    asked: SimulateArguments, plan: "Plan", profile: "Profile", traced: NetworkTrace, optimizer: str
) -> None:
    """Say what each step takes with what follows the network."""
    from spantrain.app.planning.plan_files import under_schedule
    from spantrain.app.simulation.adapter import simulate_adapter

    assert asked.adapter is not None, "it is asked for"
    own = under_schedule(plan, asked.schedule)
    outcome = simulate_adapter(own, profile, traced, adapter=asked.adapter, steps=asked.steps, optimizer=optimizer)
    if asked.json_:
        shared.print_json({"plan": str(asked.plan_path), **to_json(outcome)})
        return
    typer.echo(
        f"  {len(outcome.steps)} steps under {outcome.network_trace}, --adapter {outcome.adapter}: "
        f"{format_seconds(outcome.total_s)}; a calm step takes {format_seconds(outcome.calm_step_s)}"
    )
    typer.echo(f"  {'step':>4}  {'begins':>9}  {'takes':>9}  {'plan':>4}  cut in mid-step")
    for step in outcome.steps:
        if step.reason:
            typer.echo(f"        plan {step.plan}: {step.reason}")
        times = f"{format_seconds(step.begun_s):>9}  {format_seconds(step.step_s):>9}"
        typer.echo(f"  {step.step:>4}  {times}  {step.plan:>4}  {step.recuts or ''}")


def _run_availability(asked: SimulateArguments, plan: "Plan", profile: "Profile", text: str, optimizer: str) -> None:
    """Say what comes of a run whose devices leave and come."""
    from spantrain.app.planning.protection import losses_of
    from spantrain.app.simulation.availability import events_of, run_availability

    losses, until_s = losses_of(asked.protect or "auto"), (asked.hours or 24.0) * 3600
    events = events_of(text, profile.cluster, until_s)
    found = run_availability(plan, profile, events, until_s, optimizer, asked.checkpoint_every, losses)
    if asked.json_:
        shared.print_json(to_json(found))
        return
    for line in found.lines:
        typer.echo(line)
    parts = ", ".join(f"{part} {format_seconds(seconds)}" for part, seconds in found.pause_s.items())
    typer.echo(
        f"  {found.samples_per_s:.4g} samples/s committed, {found.share:.2%} of what the devices present could do"
    )
    typer.echo(
        f"  {found.steps} steps, {found.steps_lost} lost, {format_bytes(found.moved_bytes)} moved; pauses: {parts}; "
        + ("no price" if found.rent_usd is None else f"rent ${found.rent_usd:.4g}")
    )


def _step_table(outcomes: "list[ScheduleOutcome]") -> "Table":
    waits = (f"waits, stage {stage}" for stage in range(len(outcomes[0].bubble_ratio)))
    table = figures_table("schedule", "step", "over the bound", *waits, "money", "energy", title="A step, simulated")
    for outcome in sorted(outcomes, key=lambda entry: entry.step_s or 0.0):
        ratio, money = outcome.ratio_to_bound, outcome.money_per_step
        table.add_row(
            outcome.schedule,
            format_seconds(outcome.step_s or 0.0),
            "-" if ratio is None else f"{ratio:.3f}",
            *(f"{waits:.1%}" for waits in outcome.bubble_ratio),
            "no price" if money is None else f"${money:.3g}",
            f"{outcome.joules_per_step:.4g} J",
        )
    return table


def _memory_table(outcomes: "list[ScheduleOutcome]") -> "Table":
    names = (outcome.schedule for outcome in outcomes)
    table = figures_table("device", "limit", *names, title="Most memory held at once (! is over the limit)")
    for device, limit_bytes in outcomes[0].limit_bytes.items():
        cells = [
            format_bytes(outcome.peak_bytes[device]) + (" !" if device in outcome.over_limit else "")
            for outcome in outcomes
        ]
        table.add_row(device, format_bytes(limit_bytes), *cells)
    return table


def _remarks(outcomes: "list[ScheduleOutcome]") -> list[str]:
    """Return what one must know to read the figures."""
    lines = [
        "Money is by the sites' prices, else by list prices (docs/prices.md); energy by the kinds' power figures "
        "(docs/simulator.md)."
    ]
    for device in sorted({device for outcome in outcomes for device in outcome.over_limit}):
        over = (outcome for outcome in outcomes if device in outcome.over_limit)
        worst = max(over, key=lambda entry: entry.peak_bytes[device])
        lines.append(f"{device} is over its limit, most under {worst.schedule}: {_what(worst.peak_held[device])}")
    unpriced = sorted({name for outcome in outcomes if outcome.money for name in outcome.money.without_price})
    if unpriced:
        lines.append(f"No price is known for the kind of {', '.join(unpriced)}.")
    return lines


def _what(held: HeldBytes) -> str:
    """Say what a device holds, the most first."""
    sizes = {field.name.removesuffix("_bytes"): getattr(held, field.name) for field in fields(held)}
    return ", ".join(f"{name} {format_bytes(sizes[name])}" for name in sorted(sizes, key=lambda name: -sizes[name]))
