"""A plan for people: strategies in one table, what runs where as a picture in text, and why."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from spantrain.core.plan import Plan, Stage
from spantrain.core.quantities import format_bandwidth, format_bytes, format_seconds
from spantrain.cost.analytic import ANALYTIC_METHOD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spantrain.app.plan import PlanOutcome, StrategyFigures
    from spantrain.core.profile import Profile

__all__ = ["picture_lines", "print_plan", "show_plan"]

_PLAIN_WIDTH = 150
_REASON_LENGTH = 160
_ENDS_SHOWN = 3
"""Of many replicas, so many from each end are named."""


def show_plan(outcome: "PlanOutcome", profile: "Profile") -> None:
    """Print on standard output, with a word on where the figures come from."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    print_plan(outcome, console)
    if profile.provenance.method == ANALYTIC_METHOD:
        console.print(f"  By data sheets: {ANALYTIC_METHOD}.", style="dim", highlight=False, markup=False)


def print_plan(outcome: "PlanOutcome", console: Console) -> None:
    """Print the strategies, the chosen plan, and why."""
    console.print(_strategy_table(outcome))
    for name, figures in outcome.strategies.items():
        if figures.reason:
            verb = "breaks a constraint" if figures.fits else "has no plan"
            console.print(f"  {name} {verb}: {_short(figures.reason)}", highlight=False, markup=False)
    for line in picture_lines(outcome):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for reason in outcome.reasons:
        console.print(f"  · {reason}", highlight=False, markup=False)


def _short(reason: str) -> str:
    return reason if len(reason) <= _REASON_LENGTH else f"{reason[:_REASON_LENGTH]}…"


def _strategy_table(outcome: "PlanOutcome") -> Table:
    plan = outcome.plan
    table = Table(title=f"{plan.model.name}, global batch {plan.global_batch}, on {plan.cluster.name}: simulated")
    table.add_column("strategy", no_wrap=True)
    for column in (
        "samples/s", "s/step", "own estimate", "bubble", "memory", "USD/step", "J/sample", "devices", "search", "fits",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for name, figures in sorted(outcome.strategies.items(), key=lambda entry: entry[1].step_s or float("inf")):
        table.add_row(("✓ " if name == outcome.chosen else "  ") + name, *_cells(figures))
    return table


def _cells(figures: "StrategyFigures") -> tuple[str, ...]:
    search = f"{figures.search_s:.2f} s"
    if figures.step_s is None or figures.samples_per_s is None:
        return (*("-",) * 8, search, "no")
    own, money = figures.own_estimate_s, figures.money_per_step
    return (
        f"{figures.samples_per_s:.4g}",
        f"{figures.step_s:.4g}",
        "-" if own is None else f"{own:.4g}",
        f"{figures.bubble_ratio or 0.0:.0%}",
        f"{figures.peak_memory_share or 0.0:.0%}",
        "no price" if money is None else f"{money:.3g}",
        f"{figures.joules_per_sample or 0.0:.3g}",
        str(figures.devices_used),
        search,
        "but" if figures.reason else "yes",
    )


def picture_lines(outcome: "PlanOutcome") -> list[str]:
    """Return the plan as text: stages from first to last, and between them the links with their load.

    Links inside a stage (its gradient sum) stand under it. Both directions stand together where they carry the same.
    """
    plan = outcome.plan
    lines = [f"Plan of {outcome.chosen}, {plan.schedule} order"]
    shown: set[str] = set()
    for index, stage in enumerate(plan.stages):
        sizes = sorted({span.size for span in stage.micro_batches})
        units = f"units {stage.first_unit}-{stage.end_unit - 1}"
        batch = f"micro-batches of {'/'.join(map(str, sizes))}"
        lines.append(f"  ┌ stage {index}: {units}, {batch}")
        lines += [f"  │   {text}" for text in _replica_texts(stage, outcome)]
        lines += [f"  │   gradient sum over {text}" for text in _links(outcome, stage, stage, shown)]
        if index + 1 < len(plan.stages):
            both = (*_links(outcome, stage, plan.stages[index + 1], shown),)
            lines += [f"  ↕ {text}" for text in both]
    rest = [name for name in outcome.links if name not in shown]
    lines += [f"  also {text}" for text in _link_texts(rest, outcome)]
    return lines


def _replica_texts(stage: Stage, outcome: "PlanOutcome") -> list[str]:
    total = sum(replica.sample_share for replica in stage.replicas)
    own = outcome.plan.cluster.device_by_name
    texts = []
    for replica in stage.replicas:
        first = own[replica.devices[0]]
        memory = max(outcome.peak_bytes[name] / own[name].memory_bytes for name in replica.devices)
        share = _percent(replica.sample_share / total)
        texts.append(
            f"{'+'.join(replica.devices)} ({first.kind}, {first.site}): {share} of the samples, "
            f"{replica.in_flight_limit} in flight, memory {memory:.0%}"
        )
    if len(texts) > 2 * _ENDS_SHOWN + 1:
        hidden = len(texts) - 2 * _ENDS_SHOWN
        texts = [*texts[:_ENDS_SHOWN], f"… {hidden} more …", *texts[-_ENDS_SHOWN:]]
    return texts


def _percent(part: float) -> str:
    return f"{part:.0%}" if part >= 0.1 else f"{100 * part:.2g}%"


def _links(outcome: "PlanOutcome", a: Stage, b: Stage, shown: set[str]) -> list[str]:
    """Return the links that join two stages (or one with itself) and that are not shown yet; mark them."""
    here, there = _places(outcome.plan, a), _places(outcome.plan, b)
    found = []
    for name in outcome.links:
        source, target = name.split("->")
        joins = (source in here and target in there) or (source in there and target in here)
        if joins and name not in shown:
            found.append(name)
    shown.update(found)
    if len(found) > 2 * _ENDS_SHOWN:
        busiest = max(found, key=lambda name: outcome.links[name].busy_ratio)
        return [f"{len(found)} links, the busiest {_link_text(busiest, outcome)}"]
    return _link_texts(found, outcome)


def _places(plan: Plan, stage: Stage) -> frozenset[str]:
    """Return the ends of links at which a stage's devices are (as `cost.network` names them): sites, hosts, devices."""
    devices = [plan.cluster.device_by_name[name] for name in stage.devices]
    ends = [(device.site, f"{device.site}/{device.host}") for device in devices]
    return frozenset(
        place
        for device, (site, host) in zip(devices, ends, strict=True)
        for place in (site, host, f"{host}/{device.name}")
    )


def _link_texts(names: "Sequence[str]", outcome: "PlanOutcome") -> list[str]:
    """Return a line for each link; two directions with the same load share one."""
    texts: list[str] = []
    done: set[str] = set()
    for name in names:
        back = "->".join(reversed(name.split("->")))
        if name in done:
            continue
        if back != name and back in names and outcome.links[back] == outcome.links[name]:
            done.add(back)
            texts.append(_link_text(name, outcome).replace("->", "<->", 1).replace(" a step,", " a step each way,"))
        else:
            texts.append(_link_text(name, outcome))
    return texts


def _link_text(name: str, outcome: "PlanOutcome") -> str:
    load = outcome.links[name]
    return (
        f"{name}: {format_bytes(load.size_bytes)} a step, {load.busy_ratio:.0%} of "
        f"{format_bandwidth(load.bandwidth_bytes_per_s)} ({format_seconds(load.busy_ratio * outcome.step_s_predicted)})"
    )
