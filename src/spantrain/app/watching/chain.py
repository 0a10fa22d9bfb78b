"""Who waited for whom: the chain of work and messages that a step's duration is made of, beside its forecast.

From the last work of a step back to its first: what a piece of work waited for last is the link before it, whether
that was the same device's work before it, a message, or another device that came late to a sum. The method is that of
critical-path analysis of message-passing programs (Yang and Miller, ICDCS 1988).
"""

import contextlib
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from spantrain.core.action import Op
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.core.span import Span
from spantrain.core.trace import Interval, Trace

_SWITCH, _SUM = "change to plan", "gradient sum"
_SPAN = re.compile(r"\[\d{1,9}:\d{1,9}\]$")
_CUT = re.compile(r"/cut(\d{1,9})\[")
_LANES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward"}
"""The lane of messages that an action may wait for, and of those that it makes."""
_LATE = 1.25
"""So many times as long as usual is late."""
BETWEEN = "between"


class StageLayout(Record):
    """Which stages devices have, and which are joined at a cut."""

    stage_of: Mapping[str, int]
    """By device, of several the first."""
    before: Mapping[int, int]
    """By cut, the stage that ends there; the next one begins there."""

    @classmethod
    def of(cls, plan: Plan) -> "StageLayout":
        """Return that of a plan."""
        return cls(
            stage_of={device: crew.numbers[0] for crew in plan.crews for device in crew.devices},
            before={stage.end_unit - 1: number for number, stage in enumerate(plan.stages[:-1])},
        )

    def ends(self, key: str) -> tuple[str, int, int] | None:
        """Return the lane of a message between stages, who makes it and who takes it; None: its key is of no such.

        >>> StageLayout(stage_of={}, before={5: 0}).ends("g1/s3/backward/cut5[0:4]")
        ('backward', 1, 0)
        """
        lane, cut = lane_of(key), _CUT.search(key)
        stage = self.before.get(int(cut[1])) if cut else None
        if stage is None or lane not in _LANES.values():
            return None
        return (lane, stage, stage + 1) if lane == _LANES[Op.FORWARD] else (lane, stage + 1, stage)


class ChainPart(Record):
    """One link of the chain: a device's work, what it did between two pieces of it, or a message on its way."""

    place: str
    """A device, or `source -> target`."""
    what: str
    """An action's text, a message's lane and samples, a sum's name, or `between`."""
    start_s: float
    """From the step's first work on."""
    end_s: float
    forecast_s: float | None
    """How long it should have taken; None where nothing says so."""

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s

    @property
    def excess_s(self) -> float:
        """How much longer than forecast; time between two pieces of work is forecast as none."""
        if self.forecast_s is None and self.what != BETWEEN:
            return 0.0
        return self.duration_s - (self.forecast_s or 0.0)


@dataclass(frozen=True, slots=True)
class StepMessage:
    """Samples between stages."""

    source: str
    target: str
    lane: str
    made_by: int
    taken_by: int
    """Stages."""
    span: Span
    sent_s: float
    there_s: float

    @property
    def what(self) -> str:
        """Lane and samples as text."""
        return f"{self.lane} {self.span}"


class StepTrace:
    """One step of a trace, with what each piece of work waited for."""

    def __init__(self, trace: Trace, step: int, stages: StageLayout) -> None:
        """Take a step of a trace of devices, whose stages are given."""
        self._stage_of = stages.stage_of
        self._work: dict[str, list[Interval]] = defaultdict(list)
        self._makers: dict[tuple[str, int, str], list[tuple[int, Interval]]] = defaultdict(list)
        """By device, stage and lane: the actions that make what it sends there, by their first samples."""
        self._arrivals: dict[tuple[str, int, str], list[StepMessage]] = defaultdict(list)
        """By device, stage and lane, as they came."""
        self._sums_end_s: dict[str, float] = {}
        """By device: when a simulated step's gradient sum ends."""
        for one in sorted(trace.intervals, key=lambda one: one.start_s):
            if one.step != step:
                continue
            if one.lane == "compute" and not one.name.startswith(_SWITCH):
                self._work[one.device].append(one)
                if (action := one.action) is not None and action.op in _LANES:
                    self._makers[one.device, action.stage, _LANES[action.op]].append((action.span.lo, one))
            elif one.lane == "sum" and one.name == _SUM:
                self._sums_end_s[one.device] = one.end_s
        for flow in sorted(trace.flows, key=lambda one: one.received_s):
            ends, span = stages.ends(flow.name), _span_in(flow.name)
            if flow.step == step and flow.source in self._stage_of and ends is not None and span is not None:
                message = StepMessage(flow.source, flow.target, *ends, span, flow.sent_s, flow.received_s)
                self._arrivals[flow.target, message.taken_by, message.lane].append(message)
        for makers in self._makers.values():
            makers.sort(key=lambda one: one[0])

    @property
    def start_s(self) -> float:
        """When its first work began."""
        return min((one.start_s for one in self.work()), default=0.0)

    def work(self) -> Iterable[Interval]:
        """All pieces of work."""
        return (one for work in self._work.values() for one in work)

    def messages(self) -> Iterable[tuple[StepMessage, float]]:
        """All messages between stages, each with when it could have left: its samples were made."""
        for message in (one for arrivals in self._arrivals.values() for one in arrivals):
            maker = self._maker(message)
            yield message, message.sent_s if maker is None else min(maker.end_s, message.there_s)

    def sum_s(self, device: str) -> float | None:
        """How long a device's gradient sum goes on behind its last action, as a simulated step has it."""
        actions = [one.end_s for one in self._work[device] if one.action is not None]
        end_s = self._sums_end_s.get(device)
        return None if end_s is None or not actions else max(0.0, end_s - max(actions))

    def chain(self) -> tuple[tuple[str, str, float, float], ...]:
        """Return the chain in time: place, what, start and end of each part."""
        found: list[tuple[str, str, float, float]] = []
        node = max(self.work(), key=lambda one: one.end_s, default=None)
        end_s = node.end_s if node else 0.0
        while node is not None:
            joined = self._last_to_join(node)
            start_s = min(joined.start_s, end_s)
            found.append((joined.device, joined.name, start_s, end_s))
            node, message = self._before(joined)
            cause_s = min(start_s, message.there_s if message else node.end_s if node else start_s)
            if start_s > cause_s:
                found.append((joined.device, BETWEEN, cause_s, start_s))
            end_s = cause_s
            if message is not None:
                left_s = min(node.end_s if node else message.sent_s, end_s)
                found.append((f"{message.source} -> {message.target}", message.what, left_s, end_s))
                end_s = left_s
        return tuple(reversed(found))

    def _last_to_join(self, node: Interval) -> Interval:
        """Return who came last to what several devices do together: the same interval, if it is alone or the last."""
        if node.action is not None:
            return node
        stage = self._stage_of.get(node.device)
        together = [
            one
            for one in self.work()
            if one.name == node.name and ("tied" in one.name or self._stage_of.get(one.device) == stage)
        ]
        return max((one for one in together if one.start_s < node.end_s), key=lambda one: one.start_s, default=node)

    def _before(self, node: Interval) -> tuple[Interval | None, StepMessage | None]:
        """Return the work that a piece of work waited for last, and the message that brought it, if one did."""
        mine = self._work[node.device]
        index = bisect_left(mine, node.start_s, key=lambda one: one.start_s)
        previous = mine[index - 1] if index else None
        message = None
        if (action := node.action) is not None and action.op in _LANES:
            arrived = reversed(self._arrivals[node.device, action.stage, _LANES[action.op]])
            message = next((one for one in arrived if one.span.intersect(action.span)), None)
        if message is not None and (previous is None or message.there_s > previous.end_s):
            maker = self._maker(message)
            # Clocks of two machines may differ: a chain only ever goes back.
            return (maker if maker is None or maker.start_s < node.start_s else None), message
        return previous, None

    def _maker(self, message: StepMessage) -> Interval | None:
        """Return the action that made a message's samples, or the last of them."""
        makers = self._makers[message.source, message.made_by, message.lane]
        index = bisect_left(makers, message.span.hi, key=lambda one: one[0])
        found = makers[index - 1][1] if index else None
        if found is None or (action := found.action) is None or found.start_s >= message.there_s:
            return None
        return found if action.span.intersect(message.span) else None


def _span_in(text: str) -> Span | None:
    """Return the samples that a text ends with; None if it ends with none that a batch can have."""
    found = _SPAN.search(text)
    with contextlib.suppress(ValueError):  # another machine may have told it
        return Span.parse(found[0]) if found else None
    return None


def lane_of(key: str) -> str:
    """Return the lane in the text of a message's key, e.g. `forward` of g1/s3/forward/cut2[0:4]."""
    parts = key.split("/")
    return parts[2] if len(parts) > 2 else ""


class StepForecast:
    """How long each piece of work and each message should take, from a simulated step."""

    def __init__(self, trace: Trace, step_s: float, stages: StageLayout) -> None:
        """Take the trace of a simulated step, and how long a step takes in all."""
        self.step_s = step_s
        self._seconds: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
        """By place and kind: (samples, seconds)."""
        self.step = step = StepTrace(trace, max((one.step for one in trace.intervals), default=0), stages)
        for work in step.work():
            if (action := work.action) is not None:
                self._seconds[work.device, _kind(work.name)[0]].append((action.span.size, work.duration_s))
        for one, left_s in step.messages():
            self._seconds[f"{one.source} -> {one.target}", one.lane].append((one.span.size, one.there_s - left_s))
        for device in stages.stage_of:
            sum_s = step.sum_s(device)
            if sum_s is not None:
                self._seconds[device, _SUM].append((1, sum_s))

    def seconds(self, place: str, what: str) -> float | None:
        """Return how long a part of a chain should take; None where the forecast has nothing like it.

        Work on other numbers of samples than the forecast's takes in proportion.
        """
        kind, samples = _kind(what)
        known = self._seconds.get((place, kind))
        if not known:
            return None
        same = [seconds for size, seconds in known if size == samples]
        if same:
            return median(same)
        return samples * sum(seconds for _, seconds in known) / sum(size for size, _ in known)


def _kind(what: str) -> tuple[str, int]:
    """Return the kind of a part of a chain, and of how many samples it is.

    >>> _kind("2F[0:16]"), _kind("forward [0:4]"), _kind("gradient sum")
    (('2F', 16), ('forward', 4), ('gradient sum', 1))
    """
    span = _span_in(what)
    if span is None:
        return what, 1
    return what.rpartition("[")[0].strip(), span.size


class Lateness(Record):
    """The device or link that made a step longer than its forecast, and since when."""

    place: str
    excess_s: float
    """How much longer its parts of the chain took than forecast."""
    usual_s: float | None = None
    """What it takes in a step as a rule (a device: busy; a link: with messages on their way); None: nothing was
    measured before.
    """
    now_s: float | None = None
    """The same of the last step."""
    since_step: int | None = None
    """The first of the steps, up to the last, that took longer than usual; None: none did, it has always been so."""


class StepReason(Record):
    """Why a step took as long as it did."""

    step: int
    """Counted from 0, as in traces."""
    duration_s: float
    """From the end of the step before to its own."""
    forecast_s: float
    chain: tuple[ChainPart, ...]
    rest_s: float
    """Of the duration what is no part of the chain: the barrier, the update, an evaluation, a checkpoint."""
    late: Lateness | None
    """None: nothing took longer than forecast."""


History = Mapping[str, Sequence[tuple[int, float]]]
"""By place: (step, seconds) of the steps before and of the last, in order."""


def reason_of(step: int, duration_s: float, trace: Trace, forecast: StepForecast, stages: StageLayout,
              history: History) -> StepReason:  # fmt: skip
    """Return why a step of a trace took so long."""
    found = StepTrace(trace, step, stages)
    begin_s = found.start_s
    chain = tuple(
        ChainPart(
            place=place,
            what=what,
            start_s=start_s - begin_s,
            end_s=end_s - begin_s,
            forecast_s=None if what == BETWEEN else forecast.seconds(place, what),
        )
        for place, what, start_s, end_s in found.chain()
    )
    excess: dict[str, float] = defaultdict(float)
    for part in chain:
        excess[part.place] += part.excess_s
    place = max(excess, key=lambda name: excess[name], default=None)
    late = None if place is None or excess[place] <= 0 else _lateness(place, excess[place], history.get(place, ()))
    spent_s = sum(part.duration_s for part in chain)
    return StepReason(
        step=step,
        duration_s=duration_s,
        forecast_s=forecast.step_s,
        chain=chain,
        rest_s=max(0.0, duration_s - spent_s),
        late=late,
    )


def _lateness(place: str, excess_s: float, series: Sequence[tuple[int, float]]) -> Lateness:
    """Compare with what was usual before: the lower quartile, so that most of the steps may be late.

    >>> _lateness("lab-0", 0.4, [(0, 1.0), (1, 1.1), (2, 1.0), (3, 1.4), (4, 1.5)]).since_step
    3
    """
    if len(series) < 2:
        return Lateness(place=place, excess_s=excess_s)
    usual_s = sorted(seconds for _, seconds in series)[(len(series) - 1) // 4]
    since = None
    for step, seconds in reversed(series):
        if seconds <= _LATE * usual_s:
            break
        since = step
    return Lateness(place=place, excess_s=excess_s, usual_s=usual_s, now_s=series[-1][1], since_step=since)
