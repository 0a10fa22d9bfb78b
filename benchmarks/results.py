"""What benchmarks leave behind under `benchmarks/results/`: a table, a plot and JSON.

With date, machine, commit, and a digest of the code (`benchmarks/made_from.py` tells which results are older than it).
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import psutil

from made_from import digest_of

FOLDER = Path(__file__).parent / "results"

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 360, 70, 40, 180, 50

Points = Sequence[tuple[float, float]]


def circumstances() -> dict[str, str]:
    """Return date, machine and commit."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False, cwd=FOLDER.parent
    )
    memory_gib = psutil.virtual_memory().total / 2**30
    script = Path(sys.argv[0])
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.machine()}",
        "commit": said.stdout.strip() or "unknown",
        "script": script.name,
        "code": digest_of(script),
    }


def save(name: str, table: Sequence[str], data: Mapping[str, Any], svg: str | None = None) -> None:
    """Write NAME.txt, NAME.json and, with a plot, NAME.svg; say where."""
    FOLDER.mkdir(exist_ok=True)
    about = circumstances()
    head = f"{about['date']}, {about['machine']}, commit {about['commit']}"
    (FOLDER / f"{name}.txt").write_text("\n".join([head, "", *table, ""]))
    (FOLDER / f"{name}.json").write_text(json.dumps({**about, **data}, indent=1) + "\n")
    if svg is not None:
        (FOLDER / f"{name}.svg").write_text(svg)
    print(f"written: {FOLDER / name}.txt, .json{', .svg' if svg is not None else ''}")


def line_plot(series: Mapping[str, Points], *, title: str, across: str, up: str) -> str:
    """Return an SVG picture of lines, each with its name beside it."""
    points = [point for line in series.values() for point in line]
    (left, right), (low, high) = (_range([point[axis] for point in points]) for axis in (0, 1))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x = _LEFT + (point[0] - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - (point[1] - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 22, title, size=15),
        _text(_LEFT, _HEIGHT - 12, across),
        _text(6, _TOP - 8, up),
        *_axes(at, (left, right), (low, high)),
    ]
    for number, (name, line) in enumerate(series.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        way = " ".join(f"{x},{y}" for x, y in map(at, line))
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(_text(_WIDTH - _RIGHT + 10, _TOP + 12 + 18 * number, name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _axes(at: Any, across: tuple[float, float], up: tuple[float, float]) -> list[str]:
    (x0, y0), (x1, y1) = at((across[0], up[0])), at((across[1], up[1]))
    parts = [f'<path d="M{x0},{y1} V{y0} H{x1}" fill="none" stroke="black"/>']
    for part in range(5):
        x, y = (ends[0] + (ends[1] - ends[0]) * part / 4 for ends in (across, up))
        parts.append(_text(at((x, up[0]))[0] - 8, y0 + 16, f"{x:.4g}"))
        parts.append(_text(x0 - 44, at((across[0], y))[1] + 4, f"{y:.4g}"))
    return parts


def _text(x: float, y: float, text: str, *, size: int = 12, colour: str = "black") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}">{escape(text)}</text>'


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)
