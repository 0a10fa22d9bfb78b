"""One step of a trace as an SVG picture: a row for each device, its actions, and the messages between rows."""

from collections.abc import Sequence
from functools import cached_property
from xml.sax.saxutils import escape

from spantrain.core.records import Record
from spantrain.core.trace import Interval, Trace
from spantrain.errors import UsageError

_WIDTH, _ROW, _BAR, _LEFT, _TOP, _RIGHT = 1100, 44, 28, 96, 34, 16
_COLOURS = {"F": "#4c9be8", "B": "#e8894c", "I": "#e8b34c", "W": "#6abf69"}
_OTHER = "#b6a6d8"
_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights", "": "gradient sums"}
_KIND = {"wall": "measured", "virtual": "simulated"}


def draw_trace(trace: Trace, *, title: str | None = None) -> str:
    """Return the picture of the last step of a trace.

    Raises:
        UsageError: nothing was computed.
    """
    computed = [interval for interval in trace.intervals if interval.lane == "compute"]
    chosen = max((interval.step for interval in computed), default=0)
    work = tuple(interval for interval in computed if interval.step == chosen)
    if not work:
        raise UsageError(f"the trace has no work of step {chosen} to draw; record at least one step")
    picture = _Picture(work=work, trace=trace, step=chosen)
    heading = title or (
        f"One {_KIND.get(trace.clock, trace.clock)} step, {picture.end_s - picture.start_s:.2f} s: "
        "what each device did, and the messages"
    )
    return "\n".join([*picture.frame(heading), *picture.bars(), *picture.messages(), *picture.legend(), "</svg>", ""])


class _Picture(Record):
    """Where on the page things are."""

    work: Sequence[Interval]
    trace: Trace
    step: int

    @cached_property
    def start_s(self) -> float:
        return min(interval.start_s for interval in self.work)

    @cached_property
    def end_s(self) -> float:
        return max(interval.end_s for interval in self.work)

    @cached_property
    def scale(self) -> float:
        """Points per second."""
        return (_WIDTH - _LEFT - _RIGHT) / (self.end_s - self.start_s or 1.0)

    @cached_property
    def rows(self) -> dict[str, int]:
        """Row by device: by stage, then by first work."""
        places: dict[str, tuple[int, float]] = {}
        for interval in self.work:
            action = interval.action
            stage, first_s = places.get(interval.device, (len(self.work), interval.start_s))
            here = len(self.work) if action is None else action.stage
            places[interval.device] = (min(stage, here), min(first_s, interval.start_s))
        return {device: row for row, device in enumerate(sorted(places, key=lambda device: places[device]))}

    @property
    def height(self) -> int:
        return _TOP + _ROW * len(self.rows) + 40

    def x(self, seconds: float) -> float:
        return _LEFT + (seconds - self.start_s) * self.scale

    def y(self, device: str) -> int:
        return _TOP + _ROW * self.rows[device]

    def frame(self, heading: str) -> list[str]:
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {self.height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{self.height}" fill="white"/>',
            f'<text x="{_LEFT}" y="20">{escape(heading)}</text>',
        ]
        for device in self.rows:
            top = self.y(device)
            parts.append(f'<text x="{_LEFT - 8}" y="{top + 18}" text-anchor="end">{escape(device)}</text>')
            parts.append(
                f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_BAR}" fill="#f2f2f2"/>'
            )
        return parts

    def bars(self) -> list[str]:
        return [
            f'<rect x="{self.x(interval.start_s):.1f}" y="{self.y(interval.device)}" height="{_BAR}" '
            f'width="{max(interval.duration_s * self.scale - 0.6, 0.4):.1f}" '
            f'fill="{_COLOURS.get(interval.action.op.value if interval.action else "", _OTHER)}">'
            f"<title>{escape(interval.name)}</title></rect>"
            for interval in self.work
        ]

    def messages(self) -> list[str]:
        parts = []
        for flow in self.trace.flows:
            if flow.step != self.step or not {flow.source, flow.target} <= set(self.rows) or flow.sent_s < self.start_s:
                continue
            down = self.rows[flow.target] > self.rows[flow.source]
            y1 = self.y(flow.source) + (_BAR if down else 0)
            y2 = self.y(flow.target) + (0 if down else _BAR)
            parts.append(
                f'<line x1="{self.x(flow.sent_s):.1f}" y1="{y1}" x2="{self.x(flow.received_s):.1f}" y2="{y2}" '
                'stroke="#555" stroke-width="0.6" opacity="0.55"/>'
            )
        return parts

    def legend(self) -> list[str]:
        parts = []
        for index, (key, name) in enumerate(_NAMES.items()):
            left, top = _LEFT + 175 * index, self.height - 24
            parts.append(f'<rect x="{left}" y="{top}" width="14" height="14" fill="{_COLOURS.get(key, _OTHER)}"/>')
            parts.append(f'<text x="{left + 20}" y="{top + 12}">{name}</text>')
        return parts
