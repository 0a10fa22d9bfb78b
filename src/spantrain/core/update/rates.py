"""Learning-rate schedules: the part of the full rate that a step has.

Names, options and values are those of the transformers library (`transformers.get_scheduler`), to the last digit; each
is a function of the step alone, so that a run goes on anywhere with the rate it would have had.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from spantrain.core.names import unknown_name
from spantrain.core.records import Record

Options = Mapping[str, Any]


class Course(Record):
    """What a schedule is reckoned from."""

    warmup_steps: int
    end: int
    """The step at which what falls has fallen."""
    learning_rate: float

    def warm_up(self, step: int) -> float | None:
        """Return the part during the warm-up, 0 in its first step; None behind it."""
        return step / max(1, self.warmup_steps) if step < self.warmup_steps else None

    def progress(self, step: int) -> float:
        """Return how much of the way from the warm-up to the end is done; over 1 behind the end."""
        return (step - self.warmup_steps) / max(1, self.end - self.warmup_steps)


def _constant(_step: int, _course: Course) -> float:
    return 1.0


def _linear(step: int, course: Course) -> float:
    return max(0.0, (course.end - step) / max(1, course.end - course.warmup_steps))


def _cosine(step: int, course: Course, *, num_cycles: float = 0.5) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * course.progress(step))))


def _cosine_with_restarts(step: int, course: Course, *, num_cycles: int = 1) -> float:
    progress = course.progress(step)
    if progress >= 1.0:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(num_cycles) * progress) % 1.0))))


def _polynomial(step: int, course: Course, *, lr_end: float = 1e-7, power: float = 1.0) -> float:
    decay: float = (course.learning_rate - lr_end) * (1 - course.progress(step)) ** power + lr_end
    return decay / course.learning_rate


def _inverse_sqrt(step: int, course: Course, *, timescale: int | None = None) -> float:
    scale = course.warmup_steps or 10_000 if timescale is None else timescale
    return 1.0 / math.sqrt((step + (scale - course.warmup_steps)) / scale)


def _cosine_with_min_lr(
    step: int, course: Course, *, num_cycles: float = 0.5, min_lr: float | None = None, min_lr_rate: float | None = None
) -> float:
    return _above(_cosine(step, course, num_cycles=num_cycles), course, min_lr, min_lr_rate)


def _cosine_warmup_with_min_lr(
    step: int,
    course: Course,
    *,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> float:
    if step < course.warmup_steps:
        if warmup_lr_rate is None:
            return (step + 1.0) / course.warmup_steps
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, course.warmup_steps - 1)
    progress = (step - course.warmup_steps + 1.0) / max(1.0, course.end - course.warmup_steps)
    factor = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
    return _above(factor, course, min_lr, min_lr_rate)


def _above(factor: float, course: Course, min_lr: float | None, min_lr_rate: float | None) -> float:
    least = min_lr / course.learning_rate if min_lr is not None else min_lr_rate or 0.0
    return max(0.0, factor * (1 - least) + least)


def _warmup_stable_decay(
    step: int,
    course: Course,
    *,
    num_decay_steps: int | None = None,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    decay_steps = num_decay_steps or 0
    stable_steps = num_stable_steps
    if stable_steps is None:
        stable_steps = course.end - course.warmup_steps - decay_steps
    if step < course.warmup_steps:
        progress = step / max(1, course.warmup_steps)
        rising = {
            "linear": progress,
            "cosine": 0.5 * (1.0 - math.cos(math.pi * progress)),
            "1-sqrt": 1.0 - math.sqrt(1.0 - progress),
        }
        return max(0.0, rising[warmup_type] * (1.0 - min_lr_ratio) + min_lr_ratio)
    if step < course.warmup_steps + stable_steps:
        return 1.0
    if step < course.warmup_steps + stable_steps + decay_steps:
        progress = (step - course.warmup_steps - stable_steps) / max(1, decay_steps)
        falling = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * float(num_cycles) * 2.0 * progress)),
            "1-sqrt": 1.0 - math.sqrt(progress),
        }
        return max(0.0, falling[decay_type] * (1.0 - min_lr_ratio) + min_lr_ratio)
    return min_lr_ratio


_SCHEDULES: Mapping[str, Callable[..., float]] = MappingProxyType(
    {
        "constant": _constant,
        "constant_with_warmup": _constant,
        "linear": _linear,
        "cosine": _cosine,
        "cosine_with_restarts": _cosine_with_restarts,
        "cosine_with_min_lr": _cosine_with_min_lr,
        "cosine_warmup_with_min_lr": _cosine_warmup_with_min_lr,
        "polynomial": _polynomial,
        "inverse_sqrt": _inverse_sqrt,
        "warmup_stable_decay": _warmup_stable_decay,
    }
)
LR_SCHEDULES = tuple(_SCHEDULES)
_MEASURED = "follows measured losses, so that the rate of a step is known to none who goes on from a checkpoint alone"
_REFUSED: Mapping[str, str] = MappingProxyType({"reduce_lr_on_plateau": _MEASURED, "greedy": _MEASURED})
_OWN_WARM_UP = ("cosine_warmup_with_min_lr", "warmup_stable_decay")
_ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt")
_SHAPES = ("linear", "cosine", "1-sqrt")
_COUNTS = ("num_decay_steps", "num_stable_steps", "timescale")


def needs_end(name: str) -> bool:
    """Whether a schedule's rates depend on the step at which it ends."""
    return name not in _ENDLESS


def rate_factor(name: str, step: int, course: Course, options: Options) -> float:
    """Return the part of the full learning rate that a step has, from 0; behind the end it stays.

    >>> course = Course(warmup_steps=2, end=6, learning_rate=1.0)
    >>> [rate_factor("linear", step, course, {}) for step in range(7)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if name != "constant" and name not in _OWN_WARM_UP:
        warming = course.warm_up(step)
        if warming is not None:
            return warming
    if needs_end(name):
        step = min(step, course.end)
    return _SCHEDULES[name](step, course, **options)


def schedule_problems(name: str, course: Course, options: Options) -> Iterator[str]:
    """Say what is wrong with a schedule's name or options."""
    if name in _REFUSED:
        yield f"lr_schedule {name} {_REFUSED[name]}; give one of {', '.join(LR_SCHEDULES)}"
        return
    if name not in _SCHEDULES:
        yield unknown_name("lr_schedule", name, LR_SCHEDULES)
        return
    known = {key: p for key, p in inspect.signature(_SCHEDULES[name]).parameters.items() if p.kind is p.KEYWORD_ONLY}
    wrong = [text for key, value in options.items() for text in _option_problems(name, key, value, known)]
    yield from wrong or _contradictions(name, course, options)


def _option_problems(name: str, key: str, value: object, known: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    if key not in known:
        yield unknown_name(f"option of lr_schedule {name}", key, tuple(known))
    elif key.endswith("_type"):
        if value not in _SHAPES:
            yield f"option {key} of lr_schedule {name} must be one of {', '.join(_SHAPES)}, got {value!r}"
    elif value is None and known[key].default is None:
        return
    elif key in _COUNTS:
        if type(value) is not int or value < (1 if key == "timescale" else 0):
            yield f"option {key} of lr_schedule {name} must be a whole number, not negative, got {value!r}"
    elif type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        yield f"option {key} of lr_schedule {name} must be a finite number, not negative, got {value!r}"


def _contradictions(name: str, course: Course, options: Options) -> Iterator[str]:
    end = options.get("lr_end", 1e-7)
    if name == "polynomial" and end >= course.learning_rate:
        yield f"option lr_end of lr_schedule polynomial must be below learning_rate {course.learning_rate}, got {end}"
    if name.endswith("min_lr") and (options.get("min_lr") is None) == (options.get("min_lr_rate") is None):
        yield f"lr_schedule {name} needs one of the options min_lr and min_lr_rate"
    timescale = options.get("timescale")
    if timescale is not None and timescale < course.warmup_steps:
        yield f"option timescale of lr_schedule {name} must be at least warmup_steps, {course.warmup_steps}"
    if name == "warmup_stable_decay" and options.get("num_decay_steps") is None:
        yield "lr_schedule warmup_stable_decay needs the option num_decay_steps"
