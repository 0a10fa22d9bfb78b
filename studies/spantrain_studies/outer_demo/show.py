"""What a person sees of the outer optimizer's demonstration: how far all clusters are, and what came out."""

import time

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spantrain.cli.render.text import console_for_people, say
from spantrain.core.quantities import format_bandwidth
from spantrain_studies.outer_demo.record import DemoRecord, OuterDemoSummary

_PLAIN_WIDTH = 120
_PLAIN_EVERY_S = 10.0
"""Where there is no terminal, a line so often."""
_REDRAWS_PER_S = 4


class DemoScreen:
    """Draws the demonstration in place on a terminal's standard error, prints plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = console_for_people(_PLAIN_WIDTH, stderr=True)
        self._live: Live | None = None
        self._said_s = float("-inf")
        self._since_s = time.monotonic()

    def __enter__(self) -> "DemoScreen":
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=_REDRAWS_PER_S, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Say that a new part begins."""
        self._console.print(f"[{time.monotonic() - self._since_s:4.0f} s] {text}", highlight=False, markup=False)

    def note(self, text: str) -> None:
        """Say something that should stay to be read."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def show(self, record: DemoRecord, elapsed_s: float, total_s: float) -> None:
        """Show how far all clusters are."""
        head = (
            f"{elapsed_s:.0f} of {total_s:.0f} s, version {record.versions}, {record.tokens:,} tokens, "
            f"{record.rejected} updates left out"
        )
        if self._live is not None:
            self._live.update(Group(Text(head), _rows_table(record)))
        elif time.monotonic() >= self._said_s + _PLAIN_EVERY_S:
            self._said_s = time.monotonic()
            losses = ", ".join(
                f"{row.name} {row.heldout_loss:.3f} (v{row.version})"
                for row in record.rows.values()
                if row.heldout_loss is not None
            )
            self.note(f"  {head}; held-out loss: {losses}")


def _rows_table(record: DemoRecord) -> Table:
    table = Table("cluster", "speed", "state", "version", "staleness", "rounds", "steps", "tokens", "loss", "held-out",
                  "up", "down")  # fmt: skip
    for row in record.rows.values():
        table.add_row(
            row.name,
            f"{row.speed:.2g} ×",
            row.state,
            str(row.version),
            f"{row.mean_staleness:.1f}",
            str(row.outer_rounds),
            str(row.inner_steps),
            f"{row.tokens:,}",
            _loss(row.loss),
            _loss(row.heldout_loss),
            _rate(row.up_bytes_per_s),
            _rate(row.down_bytes_per_s),
        )
    return table


def show_demo(summary: OuterDemoSummary, *, stderr: bool) -> None:
    """Print what came out."""
    console = console_for_people(_PLAIN_WIDTH, stderr=stderr)
    table = Table("cluster", "speed", "steps", "tokens", "rounds", "staleness", "transfers", "waited", "of ideal",
                  title="Each trained a whole copy, and waited for nobody")  # fmt: skip
    for name, row in summary.clusters.items():
        table.add_row(
            name,
            f"{row.speed:.2g} ×",
            str(row.inner_steps),
            f"{row.tokens:,}",
            str(row.outer_rounds),
            f"{row.mean_staleness:.1f}",
            f"{row.comm_s:.1f} s",
            f"{row.blocked_s:.2f} s",
            f"{row.throughput_vs_ideal:.1%}",
        )
    console.print(table)
    say(console, f"held-out loss {summary.loss_first:.3f} → {summary.loss_last:.3f}, {summary.versions} versions, "
                 f"{summary.rejected_updates} updates left out")  # fmt: skip
    say(console, f"{summary.throughput_vs_ideal:.1%} of what the clusters would do each alone")
    slow = max(row.real_compute_ratio for row in summary.clusters.values())
    say(console, f"emulated: {summary.emulated}")
    say(console, f"real computation took up to {slow:.0%} of the emulated devices' time")
    say(console, f"picture: {summary.picture}")


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _rate(bytes_per_s: float | None) -> str:
    return "" if bytes_per_s is None else format_bandwidth(bytes_per_s)
