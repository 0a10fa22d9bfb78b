"""The picture of a comparison: a bar for each method, and lines where bounds lie."""

from collections.abc import Mapping
from xml.sax.saxutils import escape

from spantrain_studies.comparison.figures import CompareOutcome, MethodFigures

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR = 900, 140, 150, 72, 26, 18
_FRAMEWORK, _OWN, _DOUBTFUL = "#b6a6d8", "#4c9be8", "#d9d9d9"
_BOUNDS = {
    "compute": "all devices at work",
    "compute_best_site": "best site's devices at work",
    "chosen_plan": "auto's plan, any order",
}
"""Those that a bar can come near; others are in the table."""


def draw_comparison(outcome: CompareOutcome, own: frozenset[str]) -> str:
    """Return the picture as SVG; `own` are the methods that our runtime runs."""
    bounds = {name: value for name in _BOUNDS if (value := getattr(outcome.bounds, name)) is not None}
    most = max([*bounds.values(), *(row.samples_per_s for row in outcome.methods.values())], default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = _TOP + _ROW * len(outcome.methods) + 20 * len(bounds) + 24
    setting = outcome.setting
    heading = f"{setting.model} on {setting.cluster}, {setting.global_batch} samples a step: samples per second"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect x="0" y="0" width="{_WIDTH}" height="{height}" fill="white"/>',
            f'<text x="16" y="20">{escape(heading)}</text>',
            f'<text x="16" y="37">{escape(setting.scale.changes)}</text>',
            f'<text x="16" y="54">{escape(setting.scale.ratio)}</text>',
            *_bars(outcome.methods, own, scale),
            *_lines(bounds, scale, _TOP + _ROW * len(outcome.methods)),
            "</svg>",
            "",
        ]
    )


def _bars(methods: Mapping[str, MethodFigures], own: frozenset[str], scale: float) -> list[str]:
    parts = []
    for number, (name, row) in enumerate(methods.items()):
        top, width = _TOP + _ROW * number, row.samples_per_s * scale
        colour = _DOUBTFUL if not row.sound else _OWN if name in own else _FRAMEWORK
        text = f"{row.samples_per_s:.4g} ({row.ratio_to_first:.2f}x)" + ("" if row.sound else " real compute!")
        parts += [
            f'<text x="{_LEFT - 8}" y="{top + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>',
            f'<text x="{_LEFT + width + 6:.1f}" y="{top + 14}">{escape(text)}</text>',
        ]
    return parts


def _lines(bounds: Mapping[str, float], scale: float, bottom: int) -> list[str]:
    parts = []
    for number, (name, value) in enumerate(bounds.items()):
        x, y = _LEFT + value * scale, bottom + 20 * (number + 1)
        parts += [
            f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{y - 8}" stroke="#555" stroke-width="1" '
            'opacity="0.6"/>',
            f'<text x="{x - 6:.1f}" y="{y}" text-anchor="end">{escape(f"{_BOUNDS[name]}: {value:.4g}")}</text>',
        ]
    return parts
