"""What decision machines and their drivers exchange (DESIGN idea 2), its log, and the address of a message on the wire.

The log says what a replica's policy was told and what it answered, in a form that people read and that parses back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from spantrain.core.action import Action, Direction
from spantrain.core.records import Record
from spantrain.core.span import Span


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A new step begins; nothing of it has arrived or run."""

    step: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Samples have come from the stage before (forward) or after (backward), in some piece."""

    direction: Direction
    span: Span
    stage: int | None = None
    """Whom they are for, on a device with several stages; None: it has one."""


@dataclass(frozen=True, slots=True)
class Finished:
    """An action that was commanded has ended."""

    action: Action


@dataclass(frozen=True, slots=True)
class Recut:
    """Micro-batches of this device that have not begun are to be cut otherwise, up to the end of the step."""

    spans: tuple[Span, ...]
    """In the place of those that they share samples with; the same samples, by rising sample."""
    reason: str

    def __post_init__(self) -> None:
        if not self.spans or list(self.spans) != sorted(self.spans):
            raise ValueError(f"a re-cut needs spans by rising sample, got {self.spans}")
        if not self.reason or " because " in self.reason:
            raise ValueError(f"a re-cut needs a reason, without ' because ' in it; got {self.reason!r}")


@dataclass(frozen=True, slots=True)
class Run:
    """Do this action now."""

    action: Action
    reason: str


Event = StepStarted | Arrived | Finished | Recut
Command = Run


@dataclass(frozen=True, slots=True, order=True)
class MessageKey:
    """The address of samples between stages: what they are, not who waits for them.

    `lane` is `forward` or `backward`, or `evaluate` for those held out. `cut` is the unit index behind which the model
    is cut.
    """

    generation: int
    step: int
    lane: str
    cut: int
    span: Span

    def __str__(self) -> str:
        return f"g{self.generation}/s{self.step}/{self.lane}/cut{self.cut}{self.span}"


def event_text(event: Event) -> str:
    """Return an event as text that `event_of` reads back.

    >>> event_text(StepStarted(7)), event_text(Finished(Action.parse("2F[0:4]")))
    ('step 7', 'finished 2F[0:4]')
    """
    match event:
        case StepStarted(step):
            return f"step {step}"
        case Arrived(direction, span, stage):
            return f"arrived {direction.value} {span}" + ("" if stage is None else f" at {stage}")
        case Finished(action):
            return f"finished {action}"
        case Recut(spans, reason):
            return f"recut {' '.join(map(str, spans))} because {reason}"


def event_of(text: str) -> Event:
    """Read the text form of an event.

    Raises:
        ValueError: it is none.

    >>> event_of("arrived backward [4:8]")
    Arrived(direction=<Direction.BACKWARD: 'backward'>, span=Span(lo=4, hi=8), stage=None)
    >>> event_of("recut [0:2] [2:4] because the link is slow").reason
    'the link is slow'
    """
    what, _, reason = text.partition(" because ")
    match what.split(" "):
        case ["recut", _, *_] if reason:
            return Recut(tuple(map(Span.parse, what.split(" ")[1:])), reason)
        case _ if reason:
            pass
        case ["step", number] if _is_number(number):
            return StepStarted(int(number))
        case ["arrived", ("forward" | "backward") as direction, span]:
            return Arrived(Direction(direction), Span.parse(span))
        case ["arrived", ("forward" | "backward") as direction, span, "at", stage] if _is_number(stage):
            return Arrived(Direction(direction), Span.parse(span), int(stage))
        case ["finished", action]:
            return Finished(Action.parse(action))
    raise ValueError(
        f"not an event: {text!r}; write step N, arrived forward|backward [lo:hi] (at STAGE), finished ACTION, or "
        "recut [lo:hi] ... because REASON, e.g. finished 2F[0:16]"
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


class Decision(Record):
    """One event that a policy heard, and its answer."""

    step: int
    now_s: float
    """The time that it was told: its own device's monotonic clock."""
    event: str
    """Text form."""
    run: tuple[Action, ...] = ()
    """What it wants done now; nothing, or one action."""
    reason: str = ""

    def __post_init__(self) -> None:
        if self.step < 0 or not math.isfinite(self.now_s):
            raise ValueError(f"step must not be negative and now_s must be finite, got {self.step}, {self.now_s}")
        event_of(self.event)

    @classmethod
    def of(cls, step: int, now_s: float, event: Event, commands: Sequence[Command]) -> "Decision":
        """Note an event and the commands that answered it."""
        return cls(
            step=step,
            now_s=now_s,
            event=event_text(event),
            run=tuple(command.action for command in commands),
            reason="; ".join(command.reason for command in commands),
        )

    @property
    def heard(self) -> Event:
        """What the policy was told."""
        return event_of(self.event)

    def __str__(self) -> str:
        answer = f"run {', '.join(map(str, self.run))} ({self.reason})" if self.run else "nothing to run"
        return f"step {self.step}, {self.event} -> {answer}"


class DeviceDecisions(Record):
    """The decisions of one device's policy, in order, whole steps only."""

    device: str
    trace_shift_s: float
    """What is added to its `now_s` to get the time of the run's trace."""
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True, order=True)
class ControlKey:
    """The address of a message between devices that carries no samples: a shared sum, part of an exchange, a probe."""

    generation: int
    step: int
    lane: str
    """What it is; each lane is used once in a step."""
    kind: int = 0
    """Kind of a probe (`profiler.network_probes`)."""

    def __str__(self) -> str:
        return f"g{self.generation}/s{self.step}/{self.lane}"


AnyKey = MessageKey | ControlKey

BACKGROUND = "~"
"""What the lanes of messages begin with that wait until the link has no others to carry."""
AT_ANY_STEP = 2**62
"""The step of messages that belong to none: whoever forgets those of steps that are done keeps them."""
