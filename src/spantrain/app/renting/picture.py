"""Time against money as a picture: every choice a square, the frontier joined, the choice and one good node marked."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

from spantrain.app.picture import check_png, write_png
from spantrain.app.renting.choice import RentOutcome, RentRow
from spantrain.config.files.text_files import check_can_write, write_atomically
from spantrain.core.records import Record
from spantrain.errors import ConfigError

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 900, 520, 70, 40, 250, 50
_GREY, _BLUE, _RED, _GREEN = "#555555", "#4c9be8", "#d9534f", "#3f9d4e"
_OPTION = "--out-plot"


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn or written, before any work is done for it.

    Raises:
        ConfigError: it is neither .svg nor .png, Pillow is missing for the latter, or it cannot be written.
    """
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"{_OPTION} {path}: name a file that ends in .svg or .png")
    if path.suffix == ".png":
        check_png(_OPTION)
    check_can_write(path, _OPTION)


def write_plot(outcome: RentOutcome, path: Path) -> None:
    """Write the picture as SVG or PNG, as its name ends."""
    svg = draw_frontier(outcome)
    if path.suffix == ".png":
        write_png(svg, path)
    else:
        write_atomically(path, svg.encode())


def draw_frontier(outcome: RentOutcome) -> str:
    """Return the frontier as an SVG picture of rectangles, lines and text; both axes are logarithmic."""
    goal = outcome.goal
    marked = [row for row in (outcome.chosen, outcome.one_node) if row is not None]
    rows = [*outcome.frontier, *marked]
    axes = _Axes(hours=_span([row.hours for row in rows]), usd=_span([row.usd for row in rows]))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20">{escape(outcome.chosen.plan.model.name)}: hours and USD for '
        f"{goal.shown_amount:.3g} {goal.unit}</text>",
        *axes.grid(),
        *axes.limits(outcome),
        *axes.joined(outcome.frontier),
        *(part for row in outcome.frontier for part in axes.mark(row, _BLUE, 6)),
    ]
    if outcome.one_node is not None:
        parts += axes.mark(outcome.one_node, _GREEN, 9, f"one good node: {outcome.one_node.candidate.what}")
    parts += axes.mark(outcome.chosen, _RED, 9, f"the choice: {outcome.chosen.candidate.what}", below=True)
    return "\n".join([*parts, "</svg>", ""])


class _Axes(Record):
    """Where hours and dollars are on the axes."""

    hours: tuple[float, float]
    usd: tuple[float, float]

    def x(self, hours: float) -> float:
        return _LEFT + _part(hours, self.hours) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, usd: float) -> float:
        return _HEIGHT - _BOTTOM - _part(usd, self.usd) * (_HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> Iterator[str]:
        bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
        for value in _ticks(self.hours):
            x = self.x(value)
            yield _line(x, _TOP, x, bottom, _GREY, 0.2)
            yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{value:g}</text>'
        for value in _ticks(self.usd):
            y = self.y(value)
            yield _line(_LEFT, y, right, y, _GREY, 0.2)
            yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        yield f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">hours</text>'
        yield f'<text x="{_LEFT - 6}" y="{_TOP - 6}" text-anchor="end">USD</text>'

    def limits(self, outcome: RentOutcome) -> Iterator[str]:
        budget, deadline = outcome.goal.budget_usd, outcome.goal.deadline_h
        if budget is not None and self.usd[0] < budget < self.usd[1]:
            y = self.y(budget)
            yield _line(_LEFT, y, _WIDTH - _RIGHT, y, _RED, 0.8)
            yield f'<text x="{_WIDTH - _RIGHT + 4}" y="{y + 4:.1f}">budget</text>'
        if deadline is not None and self.hours[0] < deadline < self.hours[1]:
            x = self.x(deadline)
            yield _line(x, _TOP, x, _HEIGHT - _BOTTOM, _RED, 0.8)
            yield f'<text x="{x:.1f}" y="{_TOP - 6}" text-anchor="middle">deadline</text>'

    def joined(self, rows: Sequence[RentRow]) -> Iterator[str]:
        for one, other in pairwise(rows):
            yield _line(self.x(one.hours), self.y(one.usd), self.x(other.hours), self.y(other.usd), _BLUE, 0.8)

    def mark(self, row: RentRow, colour: str, size: float, text: str = "", *, below: bool = False) -> list[str]:
        x, y = self.x(row.hours), self.y(row.usd)
        title = escape(f"{row.candidate.what}: {row.hours:.3g} h, {row.usd:.4g} USD")
        square = (
            f'<rect x="{x - size / 2:.1f}" y="{y - size / 2:.1f}" width="{size}" height="{size}" fill="{colour}">'
            f"<title>{title}</title></rect>"
        )
        label = f'<text x="{x + 9:.1f}" y="{y + (16 if below else -8):.1f}">{escape(text)}</text>'
        return [square, label] if text else [square]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis; what costs nothing, which no logarithm has, lies at its beginning."""
    some = [value for value in values if value > 0] or [1.0]
    return min(some) / 1.3, max(some) * 1.3


def _part(value: float, span: tuple[float, float]) -> float:
    """Return where a value lies in a span, both by their logarithm."""
    return math.log(max(value, span[0]) / span[0]) / math.log(span[1] / span[0])


def _ticks(span: tuple[float, float]) -> Iterator[float]:
    """Yield round numbers inside a span.

    >>> list(_ticks((3, 60)))
    [5.0, 10.0, 20.0, 50.0]
    """
    for power in range(math.floor(math.log10(span[0])), math.ceil(math.log10(span[1])) + 1):
        for digit in (1, 2, 5):
            value = float(f"{digit}e{power}")
            if span[0] <= value <= span[1]:
                yield value


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, opacity: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="1" '
        f'opacity="{opacity}"/>'
    )
