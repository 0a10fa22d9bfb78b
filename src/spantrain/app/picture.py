"""A picture as a PNG file: the few forms that our SVG pictures are made of, drawn with Pillow."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from spantrain.config.files.text_files import write_atomically
from spantrain.errors import ConfigError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

_SCALE = 2
"""Dots for each point of the SVG picture."""


def check_png(option: str = "--png") -> None:
    """Refuse if pictures cannot be drawn, before any work is done for them; `option` asked for one.

    Raises:
        ConfigError: Pillow is not installed.
    """
    try:
        import PIL.ImageDraw  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{option} needs Pillow; run: pip install 'spantrain[plot]', or write an SVG") from error


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
    content = BytesIO()
    image.save(content, format="PNG")
    write_atomically(path, content.getvalue())


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
