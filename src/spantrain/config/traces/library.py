"""Networks whose links change, by name: `drop-50`, `square`, `outage-30` ... as speeds over the time of a run.

A trace says how fast links are over time, as a part of their normal speed. Its times follow the length of the run
unless they are given in seconds; before and after what it describes, links have their normal speed. The step down by
40 to 60 % and the one large transfer beside the training are what SpanTrain's paper tries its adapter on (section 4.5
of the English one: 56 % of the throughput lost); the others are the usual shapes of networks that change, made up here.
"""

import math
import random
import re
from collections.abc import Callable, Mapping
from itertools import groupby
from operator import itemgetter

from spantrain.config.files.problems import did_you_mean
from spantrain.core.quantities import parse_seconds
from spantrain.core.records import Record
from spantrain.core.speed import SpeedTrace
from spantrain.errors import ConfigError

Steps = list[tuple[float, float]]

_TICK_S = 1e-3
"""Times are whole milliseconds, so that files show them as people would write them."""
_DIURNAL_STEPS = 24
_MAX_STEPS = 1000


class Wanted(Record):
    """What a curve is made from."""

    seconds: Mapping[str, float]
    numbers: Mapping[str, float]
    run_s: float
    link: str


class TraceShape(Record):
    """One family of traces."""

    name: str
    """With `NN` where a number stands."""
    says: str
    times: Mapping[str, str]
    """Parameters that are times, with their values if not given: `10s`, or a part of the run, `25%`."""
    numbers: Mapping[str, float]
    """Parameters that are numbers."""
    curve: Callable[[Wanted], Steps]
    """Changes in order of time; those at one time are one."""
    number_is: str = ""
    """Which parameter the number in the name gives; a drop's and an outage's own."""


class NamedTrace(Record):
    """A trace of the library with its parameters, not yet tied to a run or a cluster."""

    shape: TraceShape
    text: str
    """As it was asked for."""
    times: Mapping[str, str]
    numbers: Mapping[str, float]
    """All parameters: those that were given, and the shape's own values of the others."""
    links: tuple[str, ...] = ()
    """The only ones that it is for; none: all."""

    def speed(self, run_s: float, link: str) -> SpeedTrace:
        """Return how fast a link is over a run that should take so many seconds.

        Raises:
            ConfigError: its times do not follow each other.
        """
        seconds = {name: _seconds(text, run_s) for name, text in self.times.items()}
        if seconds.get("from", -1.0) >= seconds.get("until", math.inf):
            raise ConfigError(
                f"network trace {self.text}: from is {seconds['from']:g} s, until {seconds['until']:g} s in a run of "
                f"{run_s:.3g} s; give times that follow each other, e.g. from=10s,until=40s"
            )
        wanted = Wanted(seconds=seconds, numbers=self.numbers, run_s=run_s, link=link)
        return SpeedTrace(changes=_tidy(self.shape.curve(wanted)))


def named_trace(text: str) -> NamedTrace:
    """Return a trace of the library from `NAME` or `NAME:parameter=value,...`.

    >>> named_trace("drop-60:from=10s,until=40s").speed(60.0, "lab->office").changes
    ((10.0, 0.4), (40.0, 1.0))
    >>> named_trace("drop-50:links=lab->office+office->lab").links
    ('lab->office', 'office->lab')

    Raises:
        ConfigError: there is no such name or parameter, or a value that it cannot have.
    """
    name, _, rest = text.partition(":")
    shape, number = _shape_of(name, text)
    numbers = {**shape.numbers, **({shape.number_is: float(number)} if number is not None else {})}
    times, links = dict(shape.times), tuple[str, ...]()
    for part in (part for part in rest.split(",") if part):
        parameter, _, value = part.partition("=")
        if parameter == "links":
            links += tuple(link.strip() for link in value.split("+") if link.strip())
            if not links:
                raise ConfigError(f"network trace {text}: links needs names joined by +, e.g. links=lab->office+lab up")
            continue
        known = (*shape.times, *(name for name in shape.numbers if name != shape.number_is))
        if parameter not in known or not value:
            example = shape.times.get(known[0]) or f"{shape.numbers[known[0]]:g}"
            raise ConfigError(
                f"network trace {text}: {part!r} is no parameter=value of {shape.name}; "
                f"{did_you_mean(parameter, known)}, e.g. {shape.name}:{known[0]}={example}"
            )
        if parameter in shape.times:
            try:
                _seconds(value, 1.0)
            except ValueError as error:
                raise ConfigError(
                    f"network trace {text}: {parameter}: {error}; or a part of the run, e.g. 25%"
                ) from None
            times[parameter] = value
        else:
            numbers[parameter] = _number(value, parameter, text)
    found = NamedTrace(shape=shape, text=text, times=times, numbers=numbers, links=links)
    _check_numbers(found)
    return found


def _shape_of(name: str, text: str) -> tuple[TraceShape, str | None]:
    for shape in SHAPES:
        pattern = re.escape(shape.name).replace("NN", r"(\d+(?:\.\d+)?)")
        match = re.fullmatch(pattern, name)
        if match:
            return shape, match[1] if shape.number_is else None
    raise ConfigError(
        f"network trace {text}: there is none called {name!r}; {did_you_mean(name, EXAMPLES)}; "
        f"`spantrain testbed traces` shows all; a file ends with .yaml"
    )


def _number(value: str, parameter: str, text: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ConfigError(f"network trace {text}: {parameter} must be a number, got {value!r}")
    return found


def _check_numbers(trace: NamedTrace) -> None:
    numbers = trace.numbers
    for name in ("low", "takes", "stride"):
        if not 0 < numbers.get(name, 0.5) < 1:
            raise ConfigError(
                f"network trace {trace.text}: {name} must be more than 0 and less than 1, got {numbers[name]:g}; it is "
                "a part of the normal speed"
            )
    if not 0 < numbers.get("percent", 50.0) < 100:
        raise ConfigError(
            f"network trace {trace.text}: a drop by {numbers['percent']:g} % leaves nothing to drop to; give more than "
            "0 and less than 100, or outage-30"
        )
    if numbers.get("outage", 1.0) <= 0:
        raise ConfigError(f"network trace {trace.text}: an outage takes more than 0 s, e.g. outage-30")


def _seconds(text: str, run_s: float) -> float:
    """Return the seconds of `10s` or of `25%` of the run."""
    if not text.endswith("%"):
        return parse_seconds(text)
    try:
        part = float(text[:-1])
    except ValueError:
        part = math.nan
    if not 0 <= part < math.inf:
        raise ValueError(f"{text!r} is no part of the run; give e.g. 25%")
    return run_s * part / 100


def _tidy(steps: Steps) -> tuple[tuple[float, float], ...]:
    """Return the changes at whole milliseconds; of several at one time the last, and none to the same speed."""
    by_time = {round(at_s / _TICK_S): round(speed, 6) for at_s, speed in steps}
    alike = groupby(sorted(by_time.items()), key=itemgetter(1))
    return tuple((next(group)[0] / 1000, speed) for speed, group in alike)


def _drop(wanted: Wanted) -> Steps:
    speed = 1 - wanted.numbers["percent"] / 100
    return [(wanted.seconds["from"], speed), (wanted.seconds["until"], 1.0)]


def _square(wanted: Wanted) -> Steps:
    period_s, steps = _period_s(wanted), []
    for number in range(_periods(wanted.run_s, period_s)):
        start_s = number * period_s
        steps += [(start_s, 1.0), (start_s + period_s / 2, wanted.numbers["low"])]
    return _ends_with_the_run(steps, wanted.run_s)


def _random_walk(wanted: Wanted) -> Steps:
    every_s = max(wanted.seconds["every"], _TICK_S)
    low, stride = wanted.numbers["low"], wanted.numbers["stride"]
    # Each link walks by itself; the same seed and name walk the same way on every machine.
    draw = random.Random(f"{wanted.numbers['seed']:g} {wanted.link}")
    speed, steps = 1.0, []
    for number in range(_periods(wanted.run_s, every_s)):
        steps.append((number * every_s, speed))
        speed = min(1.0, max(low, speed + draw.uniform(-stride, stride)))
    return _ends_with_the_run(steps, wanted.run_s)


def _diurnal(wanted: Wanted) -> Steps:
    step_s, low = max(_period_s(wanted) / _DIURNAL_STEPS, _TICK_S), wanted.numbers["low"]
    steps = []
    for number in range(_periods(wanted.run_s, step_s)):
        angle = 2 * math.pi * (number + 0.5) / _DIURNAL_STEPS
        steps.append((number * step_s, low + (1 - low) * (1 + math.cos(angle)) / 2))
    return _ends_with_the_run(steps, wanted.run_s)


def _burst(wanted: Wanted) -> Steps:
    start_s = wanted.seconds["from"]
    return [(start_s, 1 - wanted.numbers["takes"]), (start_s + max(wanted.seconds["for"], _TICK_S), 1.0)]


def _outage(wanted: Wanted) -> Steps:
    start_s = wanted.seconds["from"]
    return [(start_s, 0.0), (start_s + wanted.numbers["outage"], 1.0)]


def _period_s(wanted: Wanted) -> float:
    return max(wanted.seconds["period"], 2 * _TICK_S)


def _periods(run_s: float, period_s: float) -> int:
    found = max(1, math.ceil(run_s / period_s))
    if found > _MAX_STEPS:
        raise ConfigError(
            f"network trace: {found} changes in a run of {run_s:.3g} s, at most {_MAX_STEPS} are followed; give a "
            "longer time between them, e.g. a part of the run: 4%"
        )
    return found


def _ends_with_the_run(steps: Steps, run_s: float) -> Steps:
    return [*(step for step in steps if step[0] < run_s), (max(run_s, _TICK_S), 1.0)]


SHAPES = (
    TraceShape(
        name="drop-NN",
        says="NN % less for the middle half of the run",
        times={"from": "25%", "until": "75%"},
        numbers={"percent": 50.0},
        curve=_drop,
        number_is="percent",
    ),
    TraceShape(
        name="square",
        says="a square wave between the normal speed and `low`",
        times={"period": "20%"},
        numbers={"low": 0.5},
        curve=_square,
    ),
    TraceShape(
        name="random-walk",
        says="each link by itself, up or down by at most `stride`, between `low` and 1",
        times={"every": "4%"},
        numbers={"seed": 0.0, "low": 0.3, "stride": 0.2},
        curve=_random_walk,
    ),
    TraceShape(
        name="diurnal",
        says="a day's slow wave down to `low` and back, in 24 steps",
        times={"period": "100%"},
        numbers={"low": 0.4},
        curve=_diurnal,
    ),
    TraceShape(
        name="burst",
        says="a competing transfer that takes a part of every link for a while",
        times={"from": "40%", "for": "20%"},
        numbers={"takes": 0.56},
        curve=_burst,
    ),
    TraceShape(
        name="outage-NN",
        says="nothing passes for NN seconds; what waits goes on after them",
        times={"from": "50%"},
        numbers={"outage": 30.0},
        curve=_outage,
        number_is="outage",
    ),
)

EXAMPLES = ("drop-40", "drop-50", "drop-60", "square", "random-walk", "diurnal", "burst", "outage-30")
"""Names that are worth a line in a list; a drop and an outage can have any number."""
