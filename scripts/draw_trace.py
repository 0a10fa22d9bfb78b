"""Draw one step of a trace as an SVG: a row for each device, its actions, and the messages between rows.

python scripts/draw_trace.py runs/demo/trace.json docs/demo-step.svg
"""

import sys
from pathlib import Path
from xml.sax.saxutils import escape

from spantrain.core.trace import Interval, Trace
from spantrain.schedule.perfetto import read_trace

WIDTH, ROW, LEFT, TOP = 1100, 44, 96, 34
COLOURS = {"F": "#4c9be8", "B": "#e8894c", "I": "#e8b34c", "W": "#6abf69"}
NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights", "": "gradient sums"}


def letter(interval: Interval) -> str:
    """Return the operation of an action's text, or nothing for other work."""
    return next((char for char in interval.name[:4] if char in COLOURS), "") if interval.name[0].isdigit() else ""


def draw(trace: Trace) -> str:
    """Return the picture of the trace's last step."""
    step = max(interval.step for interval in trace.intervals)
    work = [i for i in trace.intervals if i.step == step and i.lane == "compute"]
    start_s, end_s = min(i.start_s for i in work), max(i.end_s for i in work)
    scale = (WIDTH - LEFT - 16) / (end_s - start_s)
    first = {d: min(i.start_s for i in work if i.device == d) for d in {i.device for i in work}}
    rows = {device: index for index, device in enumerate(sorted(first, key=lambda d: (stage(work, d), first[d])))}
    height = TOP + ROW * len(rows) + 40

    def x(seconds: float) -> float:
        return LEFT + (seconds - start_s) * scale

    def y(device: str) -> int:
        return TOP + ROW * rows[device]

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20">One measured step, {end_s - start_s:.2f} s: '
        "what each device did, and the messages</text>",
    ]
    for device in rows:
        parts.append(f'<text x="{LEFT - 8}" y="{y(device) + 18}" text-anchor="end">{escape(device)}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y(device)}" width="{WIDTH - LEFT - 16}" height="28" fill="#f2f2f2"/>')
    for interval in work:
        colour = COLOURS.get(letter(interval), "#b6a6d8")
        parts.append(
            f'<rect x="{x(interval.start_s):.1f}" y="{y(interval.device)}" height="28" '
            f'width="{max(interval.duration_s * scale - 0.6, 0.4):.1f}" fill="{colour}">'
            f"<title>{escape(interval.name)}</title></rect>"
        )
    for flow in trace.flows:
        if flow.step == step and {flow.source, flow.target} <= set(rows) and flow.sent_s >= start_s:
            down = rows[flow.target] > rows[flow.source]
            y1, y2 = y(flow.source) + (28 if down else 0), y(flow.target) + (0 if down else 28)
            parts.append(
                f'<line x1="{x(flow.sent_s):.1f}" y1="{y1}" x2="{x(flow.received_s):.1f}" y2="{y2}" '
                f'stroke="#555" stroke-width="0.6" opacity="0.55"/>'
            )
    for index, (key, name) in enumerate(NAMES.items()):
        left = LEFT + 175 * index
        parts.append(
            f'<rect x="{left}" y="{height - 24}" width="14" height="14" fill="{COLOURS.get(key, "#b6a6d8")}"/>'
        )
        parts.append(f'<text x="{left + 20}" y="{height - 12}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def stage(work: list[Interval], device: str) -> int:
    """Return the stage that a device serves, from its actions' texts."""
    return min(int(i.name.split(letter(i))[0]) for i in work if i.device == device and letter(i))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: draw_trace.py TRACE.json PICTURE.svg")
    Path(sys.argv[2]).write_text(draw(read_trace(Path(sys.argv[1]))))
