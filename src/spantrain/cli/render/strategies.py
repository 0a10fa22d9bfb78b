"""The strategies of a plan in one table, in as many columns as the terminal has room for, and why some are out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from spantrain.cli.render.text import few, format_speed
from spantrain.core.quantities import format_seconds

if TYPE_CHECKING:
    from spantrain.core.outer.groups import OuterGroup, OuterPlan
    from spantrain.planner.engine.outcome import PlanOutcome, StrategyFigures

_REASON_LENGTH = 160
_NAME = "strategy"
_GAP = 3
"""Characters between two columns: a space, a line, a space."""
_LEFT_OUT_FIRST = ("search s", "own estimate", "J/sample", "USD/step", "bubble", "memory")
"""Columns that give way, in this order, where the terminal is too narrow for all."""
_HEADS = {"own estimate": "own\nestimate"}


def strategy_table(outcome: "PlanOutcome", width: int) -> Table:
    """Return the table for a terminal of so many characters; no cell is cut."""
    rows, columns = _rows(outcome), _columns(outcome, width)
    plan = outcome.plan
    table = Table(
        title=f"{plan.model.name}, global batch {plan.global_batch}, on {plan.cluster.name}: simulated", box=box.SQUARE
    )
    for name in columns:
        table.add_column(_HEADS.get(name, name), justify="left" if name == _NAME else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table


def left_out_line(outcome: "PlanOutcome", width: int) -> str:
    """Return which columns there is no room for; empty if none."""
    shown = _columns(outcome, width)
    out = [name for name in _rows(outcome)[0] if name not in shown]
    return f"Not shown in {width} characters: {', '.join(out)} (--json has all)" if out else ""


def _columns(outcome: "PlanOutcome", width: int) -> list[str]:
    """Return the columns that there is room for."""
    rows = _rows(outcome)
    wide = {
        name: max(len(part) for text in (_HEADS.get(name, name), *(row[name] for row in rows)) for part in _lines(text))
        for name in rows[0]
    }
    for name in _LEFT_OUT_FIRST:
        if sum(wide.values()) + _GAP * len(wide) + 1 <= width:
            break
        del wide[name]
    return list(wide)


def _lines(text: str) -> Sequence[str]:
    return text.split("\n")


def _rows(outcome: "PlanOutcome") -> list[Mapping[str, str]]:
    """Return the cells of each strategy by column, the fastest first; the outer optimizer last."""
    ranked = sorted(outcome.strategies.items(), key=lambda entry: entry[1].step_s or float("inf"))
    rows: list[Mapping[str, str]] = [{_NAME: _ticked(name, outcome), **_cells(figures)} for name, figures in ranked]
    if outcome.outer is not None:
        rows.append({_NAME: _ticked("outer", outcome), **_outer_cells(outcome.outer)})
    return rows


def _ticked(name: str, outcome: "PlanOutcome") -> str:
    return f"{'✓' if name == outcome.chosen else ' '} {name}"


def _cells(figures: "StrategyFigures") -> Mapping[str, str]:
    own, money, known = figures.own_estimate_s, figures.money_per_step, figures.step_s is not None
    cells = {
        "samples/s": format_speed(figures.samples_per_s or 0.0),
        "s/step": f"{figures.step_s or 0.0:.4g}",
        "own estimate": "-" if own is None else f"{own:.4g}",
        "bubble": f"{figures.bubble_ratio or 0.0:.0%}",
        "memory": f"{figures.peak_memory_share or 0.0:.0%}",
        "USD/step": "no price" if money is None else f"{money:.3g}",
        "J/sample": _joules(figures.joules_per_sample or 0.0),
        "devices": str(figures.devices_used),
    }
    fits = "no" if not known else "but" if figures.reason else "compare" if figures.only_to_compare else "yes"
    shown = cells if known else dict.fromkeys(cells, "-")
    return {**shown, "search s": f"{figures.search_s:.2f}", "fits": fits}


def _joules(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _outer_cells(outer: "OuterPlan") -> Mapping[str, str]:
    """Return what is known of it: seconds are those in which it does a global batch."""
    none = dict.fromkeys(("own estimate", "bubble", "memory", "USD/step", "J/sample"), "-")
    return {
        "samples/s": format_speed(outer.samples_per_s),
        "s/step": f"{outer.global_batch / outer.samples_per_s:.4g}",
        **none,
        "devices": str(sum(len(group.devices) for group in outer.groups)),
        "search s": "-",
        "fits": "yes" if not outer.reason else "but" if outer.allowed else "ask",
    }


def reason_lines(outcome: "PlanOutcome") -> list[str]:
    """Say of each strategy that may not be chosen why not."""
    lines = []
    for name, figures in outcome.strategies.items():
        if figures.reason:
            verb = "breaks a constraint" if figures.fits else "has no plan"
            lines.append(f"{name} {verb}: {_short(figures.reason)}")
        elif figures.only_to_compare:
            lines.append(f"{name} is to compare: {figures.only_to_compare}")
    return lines


def _short(reason: str) -> str:
    return reason if len(reason) <= _REASON_LENGTH else f"{reason[:_REASON_LENGTH]}…"


def outer_lines(outer: "OuterPlan") -> list[str]:
    """Say what a round of the outer optimizer is."""
    groups = "; ".join(
        f"{_group_name(group)}: {group.global_batch} samples in {format_seconds(group.step_s)}"
        for group in outer.groups
    )
    lines = [
        f"outer: {outer.inner_steps} inner steps ({groups}), then {format_seconds(outer.exchange_s)} of exchange "
        f"through {outer.server}: {format_speed(outer.samples_per_s)} samples/s. How much each sample teaches so is "
        "not reckoned."
    ]
    if outer.reason:
        lines.append(f"outer may not be chosen: {outer.reason}")
    return lines


def _group_name(group: "OuterGroup") -> str:
    """Return a group's name, with its devices where it is a part of a site (`lab#2`)."""
    return f"{group.name} ({few(group.devices)})" if "#" in group.name else group.name
