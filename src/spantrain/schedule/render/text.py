"""A whole order as text that parses back: a line per replica, its actions in order."""

import re
from collections.abc import Sequence

from spantrain.core.action import Action
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

    Only the form is checked here; `schedule.check.check_orders` says whether the order does all work and can run.

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
