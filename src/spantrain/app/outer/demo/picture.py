"""The picture of the outer optimizer's demonstration: held-out loss of each cluster by time, and by all tokens."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from xml.sax.saxutils import escape

from spantrain.app.outer.demo.record import LossPoint

_WIDTH, _HEIGHT, _PANEL, _LEFT, _TOP, _BOTTOM = 960, 340, 400, 60, 52, 48
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf")


def draw_losses(points: Sequence[LossPoint], title: str) -> str:
    """Return the picture as SVG: two panels with the same losses, a line for each cluster."""
    names = list(dict.fromkeys(point.cluster for point in points))
    panels: tuple[tuple[str, Callable[[LossPoint], float]], ...] = (
        ("seconds", lambda point: point.time_s),
        ("tokens of all clusters, thousands", lambda point: point.tokens / 1e3),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect x="0" y="0" width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="16" y="20">{escape(title)}</text>',
    ]
    for number, (across, where) in enumerate(panels):
        parts += _panel(points, names, _LEFT + number * (_PANEL + 60), across, where)
    for number, name in enumerate(names):
        x = _LEFT + 90 * number
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<line x1="{x}" y1="36" x2="{x + 18}" y2="36" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 24}" y="40">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    points: Sequence[LossPoint], names: Sequence[str], left: float, across: str, where: Callable[[LossPoint], float]
) -> list[str]:
    low, high = min(point.loss for point in points), max(point.loss for point in points)
    most = max((where(point) for point in points), default=0.0) or 1.0
    bottom, height = _HEIGHT - _BOTTOM, _HEIGHT - _BOTTOM - _TOP

    def at(point: LossPoint) -> tuple[float, float]:
        part = (point.loss - low) / (high - low) if high > low else 0.5
        return left + _PANEL * where(point) / most, bottom - height * part

    parts = [_line((left, bottom), (left + _PANEL, bottom)), _line((left, _TOP), (left, bottom))]
    for tick in range(5):
        x, y = left + _PANEL * tick / 4, bottom - height * tick / 4
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{most * tick / 4:.4g}</text>')
        loss = low + (high - low) * tick / 4
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
    parts.append(f'<text x="{left + _PANEL / 2:.1f}" y="{bottom + 36}" text-anchor="middle">{escape(across)}</text>')
    for number, name in enumerate(names):
        line = [at(point) for point in points if point.cluster == name]
        colour = _COLOURS[number % len(_COLOURS)]
        parts += [_line(start, end, colour) for start, end in pairwise(line)]
    return parts


def _line(start: tuple[float, float], end: tuple[float, float], colour: str = "#000000") -> str:
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke="{colour}" '
        'stroke-width="1"/>'
    )
