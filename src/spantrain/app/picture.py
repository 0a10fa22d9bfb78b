"""Pictures: a comparison as SVG, and the few forms that our SVG pictures are made of drawn with Pillow, as PNG."""

import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from spantrain.errors import ConfigError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

from collections.abc import Mapping
from xml.sax.saxutils import escape

from spantrain.app.comparison.figures import CompareOutcome, MethodFigures

_SCALE = 2
"""Dots for each point of the SVG picture."""


def check_png() -> None:
    """Refuse if pictures cannot be drawn, before any work is done for them.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        import PIL.ImageDraw  # noqa: F401
    except ImportError as error:
        raise ConfigError("--png needs Pillow; run: pip install 'spantrain[plot]', or write --svg") from error


def write_png(svg: str, path: Path) -> None:
    """Draw an SVG picture of `schedule.render.svg` (rectangles, lines, text) and write it as PNG.

    Raises:
        ConfigError: Pillow is not installed, or the file cannot be written.
    """
    check_png()
    from PIL import Image, ImageDraw

    root = ElementTree.fromstring(svg)  # our own text
    _, _, width, height = (float(value) for value in root.attrib["viewBox"].split())
    image = Image.new("RGB", (round(width * _SCALE), round(height * _SCALE)), "white")
    page = _Page(ImageDraw.Draw(image, "RGBA"), float(root.attrib.get("font-size", "12")))
    for element in root:
        page.draw(element)
    hidden = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            image.save(hidden, format="PNG")
            hidden.replace(path)
        finally:
            hidden.unlink(missing_ok=True)
    except OSError as reason:
        raise ConfigError(f"{path}: cannot be written: {reason.strerror}; choose another place") from None


class _Page:
    """Draws one element after the other."""

    def __init__(self, pen: "ImageDraw", font_size: float) -> None:
        from PIL.ImageFont import load_default

        self._pen = pen
        self._font = load_default(font_size * _SCALE)

    def draw(self, element: ElementTree.Element) -> None:
        """Draw an element; those of other kinds have no picture."""
        match element.tag.rpartition("}")[2]:
            case "rect":
                left, top = self._at(element, "x"), self._at(element, "y")
                right, bottom = left + self._at(element, "width"), top + self._at(element, "height")
                # The last dot belongs to a rectangle; one narrower than a dot still shows.
                corners = (left, top, max(left, right - 1), max(top, bottom - 1))
                self._pen.rectangle(corners, fill=element.get("fill", "black"))
            case "line":
                ends = tuple(self._at(element, name) for name in ("x1", "y1", "x2", "y2"))
                width = max(1, round(self._at(element, "stroke-width")))
                self._pen.line(ends, fill=_faded(element), width=width)
            case "text":
                anchor = {"end": "rs", "middle": "ms"}.get(element.get("text-anchor", ""), "ls")
                place = (self._at(element, "x"), self._at(element, "y"))
                self._pen.text(place, element.text or "", fill="black", font=self._font, anchor=anchor)

    def _at(self, element: ElementTree.Element, name: str) -> float:
        return float(element.get(name, "0")) * _SCALE


def _faded(element: ElementTree.Element) -> tuple[int, int, int, int]:
    """Return the colour of a line, with its opacity."""
    from PIL import ImageColor

    red, green, blue = ImageColor.getrgb(element.get("stroke", "black"))[:3]
    return red, green, blue, round(255 * float(element.get("opacity", "1")))


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
    most = max([*bounds.values(), *(row.samples_per_s for row in outcome.methods.values())])
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
