"""What to rent, for people: the frontier as a table, the choice, and its plan."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box

from spantrain.cli.render.plan import picture_lines
from spantrain.cli.render.text import console_for_people, figures_table, say

if TYPE_CHECKING:
    from rich.table import Table

    from spantrain.app.renting.choice import RentOutcome, RentRow
    from spantrain.planner.engine.outcome import PlanOutcome

_PLAIN_WIDTH = 150


def show_rent(outcome: "RentOutcome", planned: "PlanOutcome", global_batch: int) -> None:
    """Print on standard output."""
    console = console_for_people(_PLAIN_WIDTH)
    console.print(_table(outcome, global_batch))
    for line in outcome.reasons():
        say(console, line)
    for line in picture_lines(planned):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _table(outcome: "RentOutcome", global_batch: int) -> "Table":
    """Return the frontier, the cheapest first; the choice is ticked, and the best single machine stands below."""
    goal = outcome.goal
    title = (
        f"{outcome.chosen.plan.model.name}, global batch {global_batch}, {goal.shown_amount:.4g} {goal.unit}: what "
        "money buys in time"
    )
    heads = ("hours", "USD", "of it egress", f"USD/M {goal.unit}", "lost", "plan")
    table = figures_table("what to rent", *heads, title=title, box=box.SQUARE)
    for row in outcome.frontier:
        table.add_row(*_cells(row, "✓" if row.candidate == outcome.chosen.candidate else " "))
    one = outcome.one_node
    more = [row for row in (outcome.chosen, one) if row is not None and not _among(row, outcome.frontier)]
    if more:
        table.add_section()
    for row in more:
        table.add_row(*_cells(row, "✓" if row.candidate == outcome.chosen.candidate else " "))
    return table


def _among(row: "RentRow", rows: "Iterable[RentRow]") -> bool:
    return any(row.candidate == other.candidate for other in rows)


def _cells(row: "RentRow", mark: str) -> tuple[str, ...]:
    return (
        f"{mark} {row.candidate.what}", f"{row.hours:.3g}", f"{row.usd:,.4g}" if row.usd < 1000 else f"{row.usd:,.0f}",
        f"{row.egress_usd:.3g}" if row.egress_usd else "-", f"{row.usd_per_million:.3g}",
        f"{row.lost_ratio:.1%}" if row.lost_ratio else "-", row.how,
    )  # fmt: skip
