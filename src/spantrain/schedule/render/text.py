"""Text: a whole order, which parses back, and timelines of what each device did when."""

import re
from collections.abc import Iterable, Sequence

from spantrain.core.action import Action
from spantrain.core.trace import Interval, Trace
from spantrain.errors import UsageError
from spantrain.schedule.orders import Orders

_LINE = re.compile(r"stage (\d{1,6}) replica (\d{1,6}):(.*)", re.ASCII)
_FORM = "'stage S replica R: ACTION ...', e.g. 'stage 0 replica 0: 0F[0:2] 0B[0:2]'"


def format_orders(orders: Sequence[Sequence[Sequence[Action]]]) -> str:
    """Return one line per replica, by stage and replica, with its actions in order.

    >>> print(format_orders([[[Action.parse("0F[0:2]"), Action.parse("0B[0:2]")]]]))
    stage 0 replica 0: 0F[0:2] 0B[0:2]
    """
    return "\n".join(
        " ".join([f"stage {stage} replica {replica}:", *map(str, order)])
        for stage, row in enumerate(orders)
        for replica, order in enumerate(row)
    )


def parse_orders(text: str) -> Orders:
    """Read what `format_orders` wrote; empty lines, and lines that start with `#`, say nothing.

    Only the form is checked here; `schedule.orders.check_orders` says whether the order does all work and can run.

    Raises:
        UsageError: a line has another form, or stages or replicas do not follow each other; the line is named.

    >>> parse_orders("# one device" + chr(10) + "stage 0 replica 0: 0F[0:2] 0B[0:2]")[0][0][1].op.value
    'B'
    """
    rows: list[list[tuple[Action, ...]]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise UsageError(f"order, line {number}: got {line.strip()[:60]!r}, wanted {_FORM}")
        place = int(match[1]), int(match[2])
        expected = {(len(rows), 0)} | ({(len(rows) - 1, len(rows[-1]))} if rows else set())
        if place not in expected:
            wanted = " or ".join(f"stage {stage} replica {replica}" for stage, replica in sorted(expected))
            raise UsageError(f"order, line {number}: got stage {place[0]} replica {place[1]}, wanted {wanted}")
        if place[0] == len(rows):
            rows.append([])
        rows[-1].append(_actions(match[3], number))
    if not rows:
        raise UsageError(f"order: no line in it; write {_FORM}")
    return tuple(map(tuple, rows))


def _actions(text: str, number: int) -> tuple[Action, ...]:
    try:
        return tuple(Action.parse(word) for word in text.split())
    except ValueError as error:
        raise UsageError(f"order, line {number}: {error}") from error


_IDLE = "."


def render_trace(trace: Trace, *, width: int) -> str:
    """Return one row per device over a line of equal times: F, B, I, W, `*` for other work, `.` for waiting.

    That is of the last step; a cell shows what runs for most of it.

    >>> from spantrain.core.span import Span
    >>> def ran(device, text, start_s):
    ...     return Interval(device=device, lane="compute", name=text, step=0, start_s=start_s, end_s=start_s + 1)
    >>> trace = Trace(intervals=(
    ...     ran("edge", "0F[0:2]", 0), ran("edge", "0F[2:4]", 1), ran("edge", "0B[0:2]", 4),
    ...     ran("edge", "0B[2:4]", 6), ran("cloud", "1F[0:2]", 1), ran("cloud", "1I[0:2]", 2),
    ...     ran("cloud", "1F[2:4]", 3), ran("cloud", "1I[2:4]", 4), ran("cloud", "1W[0:2]", 5),
    ...     ran("cloud", "1W[2:4]", 6)), flows=(), clock="virtual")
    >>> print(render_trace(trace, width=7))
    edge   FF..B.B
    cloud  .FIFIWW
           0 s to 7 s, 1 s a cell
    """
    from_all = [interval for interval in trace.intervals if interval.lane == "compute"]
    if not from_all:
        return "nothing was computed"
    last = max(interval.step for interval in from_all)
    intervals = [interval for interval in from_all if interval.step == last]
    start_s = min(interval.start_s for interval in intervals)
    end_s = max(interval.end_s for interval in intervals)
    cell_s = (end_s - start_s) / width or 1.0
    devices = list(dict.fromkeys(interval.device for interval in intervals))
    margin = max(len(device) for device in devices) + 2
    rows = [
        device.ljust(margin) + _row((i for i in intervals if i.device == device), start_s, cell_s, width)
        for device in devices
    ]
    return "\n".join([*rows, " " * margin + f"{start_s:g} s to {end_s:g} s, {cell_s:.4g} s a cell"])


def _row(intervals: Iterable[Interval], start_s: float, cell_s: float, width: int) -> str:
    filled: list[dict[str, float]] = [{} for _ in range(width)]
    for interval in intervals:
        lo, hi = (interval.start_s - start_s) / cell_s, (interval.end_s - start_s) / cell_s
        letter = "*" if interval.action is None else interval.action.op.value
        for cell in range(int(lo), min(int(hi) + 1, width)):
            part = min(hi, cell + 1) - max(lo, cell)
            filled[cell][letter] = filled[cell].get(letter, 0.0) + part
    shares = [{_IDLE: 1.0 - sum(cell.values()), **cell} for cell in filled]
    return "".join(max(cell, key=cell.__getitem__) for cell in shares)
