"""What a use case tells the person who waits, and how it draws steps: a bar on a terminal, else a line now and then."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spantrain.core.plan import Plan
from spantrain.core.planned.report import PlanReport
from spantrain.core.profile import Profile

if TYPE_CHECKING:
    from spantrain.app.training.metrics import EvaluationMetrics, StepMetrics
    from spantrain.app.training.outcome import TrainOutcome
    from spantrain.planner.engine.outcome import PlanOutcome
    from spantrain.planner.groups import DeviceGroup
    from spantrain.runtime.coordinator.barrier import StepOutcome

_RECENT_STEPS = 20
_WIDEST_BAR, _NARROWEST_BAR = 36, 8
_SILENCE_S = 60.0
"""Where there is no terminal, the most seconds of training without a line."""


class Reporter:
    """Hears of progress and shows what parts of the work found; never decides anything. This one says nothing."""

    def phase(self, text: str) -> None:
        """Say that a new part of the work begins."""

    def progress(self, done: int, total: int, text: str) -> None:
        """Say how far the present part is."""

    def run_begins(self, plan: Plan, reason: str = "") -> None:
        """Say which plan the steps to come belong to, and why it has taken over from another one, if it has."""

    def step(self, outcome: "StepOutcome", metrics: "StepMetrics", total_steps: int) -> None:
        """Say that a training step has ended."""

    def evaluated(self, metrics: "EvaluationMetrics") -> None:
        """Say what an evaluation on held-out data gave."""

    def logged(self, scalars: Mapping[str, float], step: int) -> None:
        """Say what is logged of the steps since the last time (`loss`: their mean), or of an evaluation."""

    def saved(self, folder: str) -> None:
        """Say that a checkpoint is complete."""

    def note(self, text: str) -> None:
        """Say something that should stay to be read."""

    def show_groups(self, groups: "Sequence[DeviceGroup]", profile: Profile) -> None:
        """Show the two levels of groups."""

    def show_plan(self, outcome: "PlanOutcome") -> None:
        """Show the plan and what it is better than."""

    def show_training(self, outcome: "TrainOutcome", plan: Plan, report: PlanReport) -> None:
        """Show the figures of a run."""


class SilentReporter(Reporter):
    """Says nothing, whatever others are made to say."""


class DrawingReporter(Reporter):
    """Draws how far a run is; a context, which leaves the terminal as it was, however it ends."""

    def __init__(self, console: Console, *, every: int) -> None:
        """Print a line every so many steps where `console` is no terminal; 0: draw and print nothing."""
        self._console = console
        self._every = every
        self._live: Live | None = None
        self._draws = every > 0 and console.is_terminal and not console.is_dumb_terminal
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._since_line_s = _SILENCE_S  # the first step gets a line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar away, and show the cursor again."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, text: str) -> None:
        """Print it, and forget the pace of the steps before."""
        self._recent_s.clear()
        self.note(text)

    def progress(self, done: int, total: int, text: str) -> None:
        """Draw how far another part of the work is; off a terminal, say nothing."""
        self._draw(done, total, f"{done}/{total} {text}")

    def step(self, outcome: "StepOutcome", metrics: "StepMetrics", total_steps: int) -> None:
        """Draw a step's figures, and on a terminal more lines under it; elsewhere print them now and then."""
        more, total = self.more_lines(outcome), total_steps
        self._recent_s.append(metrics.step_s)
        self._since_line_s += metrics.step_s
        if self._draws:
            # The bar needs room, too.
            width = self._console.width - _NARROWEST_BAR - 4
            self._draw(metrics.step, total, _fitted(self._figures(metrics, total), width), more)
            return
        due = self._every and metrics.step % self._every == 0
        if self._every and (due or metrics.step == total or self._since_line_s >= _SILENCE_S):
            self._since_line_s = 0.0
            lines = (f"  step {_fitted(self._figures(metrics, total), self._console.width - 7)}", *more)
            self._console.print("\n".join(lines), soft_wrap=True, highlight=False)

    def more_lines(self, outcome: "StepOutcome") -> Sequence[str]:  # noqa: ARG002 - for heirs
        """Return what stands under a step's figures."""
        return ()

    def evaluated(self, metrics: "EvaluationMetrics") -> None:
        """Print what an evaluation gave; it stays."""
        self.note(f"  held-out loss {metrics.eval_loss:.4f} after {metrics.step} steps")

    def note(self, text: str) -> None:
        """Print something that stays, unless nothing is printed."""
        if self._every:
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    def _figures(self, metrics: "StepMetrics", total: int) -> list[tuple[int, str]]:
        """Return the figures of a step in their order, each with how soon it goes where there is little room."""
        # The first step, and that behind an evaluation, may take longer than others.
        pace_s = fmean(islice(self._recent_s, 1, None)) if len(self._recent_s) > 1 else metrics.step_s
        speed = metrics.step_s / pace_s if pace_s else 1.0
        left_s = pace_s * (total - metrics.step)
        found = [
            (0, f"{metrics.step}/{total}"),
            (0, f"loss {metrics.loss:.4f}"),
            (0, "not updated: gradients overflowed") if metrics.skipped else (4, f"|grad| {metrics.grad_norm:.2f}"),
            (2, f"{metrics.samples_per_s * speed:.1f} samples/s"),
        ]
        if metrics.tokens_per_s is not None:
            found.append((3, f"{metrics.tokens_per_s * speed:,.0f} tokens/s"))
        return [*found, (1, f"{_clock(left_s)} left")] if left_s else found

    def _draw(self, done: int, total: int, text: str, more: Sequence[str] = ()) -> None:
        if not self._draws:
            return
        line = Table.grid(padding=(0, 1))
        bar = min(_WIDEST_BAR, self._console.width - len(text) - 4)
        cells: list[RenderableType] = [Text(""), Text(text, no_wrap=True, overflow="crop")]
        if bar >= _NARROWEST_BAR:
            cells.insert(1, ProgressBar(total=max(total, 1), completed=done, width=bar))
        line.add_row(*cells)
        below = (Text(entry, no_wrap=True, overflow="ellipsis", style="dim") for entry in more)
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=8, transient=True)
            self._live.start()
        self._live.update(Group(line, *below))


def _fitted(figures: Sequence[tuple[int, str]], width: int) -> str:
    """Return figures beside each other, without those that go first where they are wider than this.

    >>> _fitted([(0, "5/9"), (2, "31.0 samples/s"), (1, "0:04 left")], 16)
    '5/9  0:04 left'
    """
    kept = list(figures)
    while len("  ".join(text for _, text in kept)) > width and any(rank for rank, _ in kept):
        kept.remove(max(kept))
    return "  ".join(text for _, text in kept)


def _clock(seconds: float) -> str:
    """Return a duration as clocks show it.

    >>> _clock(4.4), _clock(754), _clock(90000), _clock(864000)
    ('0:04', '12:34', '1 d 1:00 h', '10 d 0:00 h')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
    return f"{hours // 24} d {hours % 24}:{minute:02} h"
