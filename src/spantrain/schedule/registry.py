"""Names of the schedules, and a line on each."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from spantrain.errors import UsageError

DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "1f1b": "static: P - p forwards warm up stage p, then one full backward and one forward in turn",
        "1f1b-asteroid": "static: 1f1b with 2 (P - p) - 1 forwards to warm up (Asteroid)",
        "compact": "at run time: forwards first, then backwards of inputs, weights into the holes (SpanTrain 3.3.1)",
        "critical-path": "at run time: backwards of inputs first, then forwards, weights into the holes; or as planned",
        "gpipe": "static: all forwards, then all full backwards",
        "zb": "static: warms up as 1f1b-asteroid; weights apart, at fixed places (the original zero-bubble order, H2)",
        "zb-h1": "static: warms up as 1f1b; weights apart, at fixed places, no stage holds more than 1f1b's first one",
    }
)
SCHEDULE_NAMES = tuple(sorted(DESCRIPTIONS))
STATIC_SCHEDULES = ("1f1b", "1f1b-asteroid", "gpipe", "zb", "zb-h1")


def check_schedule(name: str) -> str:
    """Return the name if there is such a schedule.

    Raises:
        UsageError: there is none; the message has the names and a near match.

    >>> check_schedule("compact")
    'compact'
    """
    if name in SCHEDULE_NAMES:
        return name
    near = difflib.get_close_matches(name, SCHEDULE_NAMES, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"unknown schedule {name!r}; {hint}choose one of {', '.join(SCHEDULE_NAMES)}")
