"""Keeps what there is to see of a run up to date in its folder, and says which device or link makes steps late."""

import json
import re
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from spantrain.app.reporter import Reporter
from spantrain.app.watching import view
from spantrain.app.watching.chain import StageLayout, StepForecast, StepReason, StepTrace, reason_of
from spantrain.app.watching.reason_text import late_line
from spantrain.config.artefacts import VIEW_FORMAT
from spantrain.config.files.json_codec import to_json
from spantrain.config.files.text_files import write_atomically
from spantrain.core.job import TrainJob
from spantrain.core.names import few
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.quantities import if_finite
from spantrain.core.trace import Trace
from spantrain.errors import UsageError
from spantrain.planner.engine.predict import predict
from spantrain.runtime.control.requests import OrderFailure
from spantrain.runtime.coordinator.records import RecordedStep
from spantrain.sim.engine import SimulationResult

if TYPE_CHECKING:
    from spantrain.app.training.metrics import EvaluationMetrics, StepMetrics
    from spantrain.runtime.coordinator.barrier import StepOutcome

_WRITE_EVERY_S, _WRITE_PART = 1.0, 0.02
"""No more often, and at most so much of the time."""
_LATE_STEP = 2.0
"""A step that took so many times its forecast is told of."""
_TELL_EVERY_S = 30.0
_WARM_UP_STEPS = 2
_HISTORY = 200
"""So many of the last steps say what is usual."""
_POINTS = 500
"""Of the losses; a longer run has fewer of its first ones."""
_EVENTS, _LONGEST_TEXT = 200, 2000


class Points:
    """A curve of as many steps as come, in few points: each second one goes where there are too many."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, float | None]] = []
        self._stride = 1
        self._last: tuple[int, float | None] | None = None

    def add(self, step: int, value: float | None) -> None:
        """Take the next one."""
        self._last = (step, value)
        while self.kept and self.kept[-1][0] >= step:  # steps that were not committed are done again
            self.kept.pop()
        if step % self._stride == 0:
            self.kept.append(self._last)
        if len(self.kept) > _POINTS:
            self._stride *= 2
            self.kept = [one for one in self.kept if one[0] % self._stride == 0]

    @property
    def all(self) -> tuple[tuple[int, float | None], ...]:
        """Those that are kept, and the last."""
        return (*self.kept, *([self._last] if self._last and self._last not in self.kept[-1:] else []))


class RunWatch(Reporter, AbstractContextManager["RunWatch"]):
    """Hears what a reporter hears, and passes it on; a context, over the whole run."""

    def __init__(
        self, shown: Reporter, folder: Path, profile: Profile, job: TrainJob, losses: Sequence[float | None] = ()
    ) -> None:
        """Pass on to `shown`; write into `folder` what there is to see of a run, which has these losses behind it."""
        self._shown, self._folder, self._profile, self._job = shown, folder, profile, job
        for name in ("phase", "progress", "logged"):  # of which there is nothing to see
            setattr(self, name, getattr(shown, name))
        self._plan: Plan | None = None
        self._first_step = 0
        """Steps done before the present plan."""
        self._done = len(losses)
        self._predicted: SimulationResult | None = None
        self._forecast: StepForecast | None = None
        self._losses, self._evaluations = Points(), Points()
        for index, loss in enumerate(losses):
            self._losses.add(index + 1, loss)
        self._durations: deque[float] = deque(maxlen=_HISTORY)
        self._history: defaultdict[str, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=_HISTORY))
        self._events: deque[view.SeenEvent] = deque(maxlen=_EVENTS)
        self._outcome: StepOutcome | None = None
        self._metrics: StepMetrics | None = None
        self._rates: defaultdict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=_HISTORY))
        self._peaks: dict[str, int] = {}
        self._timeline: view.Timeline | None = None
        self._unfinished: view.Timeline | None = None
        self._reason: StepReason | None = None
        self._next_write_s = self._told_s = float("-inf")
        self._state, self._ending = view.RUNNING, ""
        self._writes = True

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        self._state = view.ENDED if error is None else view.FAILED
        self._ending = "" if error is None else _public(str(error)) or "it was interrupted"
        if self._plan is not None:
            self._write(at_once=True)

    # What a reporter hears.

    def run_begins(self, plan: Plan, reason: str = "") -> None:
        """Take the plan that the steps to come belong to; until one is recorded, the last recorded one is told of."""
        self._shown.run_begins(plan, reason)
        self._plan, self._first_step = plan, self._done
        self._predicted = self._forecast = self._timeline = self._outcome = None
        self._durations.clear()
        self._history.clear()
        self._write(at_once=True)

    def step(self, outcome: "StepOutcome", metrics: "StepMetrics", total_steps: int) -> None:
        """Take a step's figures."""
        self._shown.step(outcome, metrics, total_steps)
        self._outcome, self._metrics, self._done = outcome, metrics, metrics.step
        self._losses.add(metrics.step, if_finite(metrics.loss))
        self._durations.append(outcome.duration_s)
        for device, busy_s in outcome.busy_s.items():
            self._history[device].append((outcome.step, busy_s))
        for source, reports in outcome.links.items():
            for report in reports:
                if report.bytes_per_s is not None:
                    self._rates[source, report.peer].append(report.bytes_per_s)
        self._write()

    def evaluated(self, metrics: "EvaluationMetrics") -> None:
        """Take a held-out loss."""
        self._shown.evaluated(metrics)
        self.evaluated_before([metrics])

    def evaluated_before(self, found: "Iterable[EvaluationMetrics]") -> None:
        """Take held-out losses that people have been told of, as of the run that goes on."""
        for metrics in found:
            self._evaluations.add(metrics.step, if_finite(metrics.eval_loss))

    def saved(self, folder: str) -> None:
        """Take a checkpoint as an event."""
        self._shown.saved(folder)
        self._note(f"Checkpoint {folder}")

    def note(self, text: str) -> None:
        """Take what is told as an event."""
        self._shown.note(text)
        self._note(text)

    def _note(self, text: str) -> None:
        self._events.append(view.SeenEvent(at_unix_s=time.time(), steps_done=self._done, text=_public(text)))
        if self._plan is not None:
            self._write()

    # What devices did in single steps.

    def recorded(self, step: RecordedStep) -> None:
        """Take what all devices did in a step; tell who was late, if it took over twice its forecast."""
        plan, outcome = self._plan, step.outcome
        if plan is None or set(plan.devices) != set(outcome.busy_s):
            return
        forecast, stages = self._forecast_of(plan), StageLayout.of(plan)
        trace = StepTrace(step.trace, outcome.step, stages)
        took_s: defaultdict[str, float] = defaultdict(float)
        until_s: defaultdict[str, float] = defaultdict(lambda: float("-inf"))
        for message, left_s in sorted(trace.messages(), key=lambda one: one[1]):
            link = f"{message.source} -> {message.target}"  # on which several go at once
            took_s[link] += max(0.0, message.there_s - max(left_s, until_s[link]))
            until_s[link] = max(until_s[link], message.there_s)
        for link, seconds in took_s.items():
            self._history[link].append((outcome.step, seconds))
        self._peaks, self._unfinished = dict(step.peak_bytes), None
        self._reason = reason_of(outcome.step, outcome.duration_s, step.trace, forecast, stages, self._history)
        self._timeline = self._seen(trace, outcome.step, outcome.duration_s, plan)
        warm = outcome.step >= self._first_step + _WARM_UP_STEPS and outcome.evaluation_loss is None
        due = outcome.closed_s - self._told_s > _TELL_EVERY_S
        if warm and due and outcome.duration_s > _LATE_STEP * forecast.step_s:
            self._told_s = outcome.closed_s
            self.note(late_line(self._reason))
        self._write()

    def stopped_in(self, failures: Mapping[str, OrderFailure]) -> None:
        """Take what the devices that are left had done in a step that was never ended."""
        told = {name: one.unfinished for name, one in failures.items() if one.unfinished is not None}
        step = max((one.step for one in told.values()), default=0)
        trace = Trace.joined([one.trace(device) for device, one in sorted(told.items()) if one.step == step], "wall")
        if self._plan is not None and trace.intervals:
            found = StepTrace(trace, step, StageLayout.of(self._plan))
            end_s = max(one.end_s for one in trace.intervals)
            self._unfinished = self._seen(found, step, max(0.0, end_s - found.start_s), self._plan)

    def _forecast_of(self, plan: Plan) -> StepForecast:
        if self._forecast is None:
            self._predicted = predict(
                plan, self._profile, optimizer=self._job.optimizer_state, staleness=self._job.staleness
            )
            self._forecast = StepForecast(self._predicted.trace, self._predicted.step_s, StageLayout.of(plan))
        return self._forecast

    def _seen(self, found: StepTrace, step: int, duration_s: float, plan: Plan) -> view.Timeline:
        start_s = found.start_s
        return view.Timeline(
            step=step,
            duration_s=duration_s,
            work=_by_device(found),
            work_forecast=_by_device(self._forecast_of(plan).step),
            messages=tuple(
                (one.source, one.target, one.what, left_s - start_s, one.there_s - start_s)
                for one, left_s in found.messages()
            ),
        )

    # What is written.

    def _write(self, *, at_once: bool = False) -> None:
        now_s = time.monotonic()
        if not self._writes or not (at_once or now_s >= self._next_write_s):
            return
        head: dict[str, Any] = {"format": VIEW_FORMAT, "version": 1}
        text = json.dumps({**head, **to_json(self._view())}, ensure_ascii=False, separators=(",", ":"))
        try:
            write_atomically(self._folder / view.VIEW_FILE, text + "\n")
        except UsageError as error:  # hours of training are not a picture's to end
            self._writes = False
            self._shown.note(f"{error}; the run goes on, and its page shows nothing new")
        ended_s = time.monotonic()
        self._next_write_s = ended_s + max(_WRITE_EVERY_S, (ended_s - now_s) / _WRITE_PART)

    def _view(self) -> view.RunView:
        plan, outcome, metrics, predicted = self._plan, self._outcome, self._metrics, self._predicted
        assert plan is not None, "a run begins with a plan"
        return view.RunView(
            run=self._folder.resolve().name,
            model=plan.model.name,
            schedule=plan.schedule,
            generation=plan.generation,
            global_batch=plan.global_batch,
            state=self._state,
            ending=self._ending,
            updated_unix_s=time.time(),
            steps=self._job.steps,
            steps_done=self._done,
            step_s=outcome.duration_s if outcome else None,
            typical_step_s=median(self._durations) if self._durations else None,
            step_s_forecast=predicted.step_s if predicted else None,
            tokens_per_s=metrics.tokens_per_s if metrics else None,
            losses=self._losses.all,
            evaluations=self._evaluations.all,
            sites=tuple(site.name for site in plan.cluster.sites),
            links=tuple(self._links(plan)),
            stages=tuple(
                view.SeenStage(first_unit=one.first_unit, end_unit=one.end_unit, devices=one.devices)
                for one in plan.stages
            ),
            devices=tuple(self._devices(plan)),
            events=tuple(self._events),
            timeline=self._timeline,
            reason=self._reason,
            unfinished=self._unfinished,
        )

    def _devices(self, plan: Plan) -> Iterable[view.SeenDevice]:
        outcome, predicted = self._outcome, self._predicted
        busy, stages = outcome.busy_s if outcome else {}, StageLayout.of(plan).stage_of
        for device in plan.cluster.devices:
            name = device.name
            memory = predicted.memory.get(name) if predicted else None
            yield view.SeenDevice(
                name=name,
                site=device.site,
                kind=device.kind,
                stage=stages.get(name),
                part=_part(plan, name) if name in stages else "no part in this plan",
                memory_bytes=device.memory_bytes,
                peak_bytes_forecast=memory.counted_bytes(device.backend) if memory else None,
                peak_bytes=self._peaks.get(name),
                held_samples=outcome.peak_held_samples.get(name) if outcome else None,
                held_samples_forecast=predicted.peak_in_flight.get(name) if predicted else None,
                busy_ratio=min(1.0, busy[name] / outcome.duration_s) if outcome and name in busy else None,
                busy_ratio_forecast=predicted.utilisation.get(name) if predicted else None,
                meters=outcome.meters.get(name) if outcome else None,
            )

    def _links(self, plan: Plan) -> Iterable[view.SeenLink]:
        # Of devices that have gone there may still be news.
        site_of = defaultdict(str, {device.name: device.site for device in plan.cluster.devices})
        lists: list[defaultdict[tuple[str, str], list[float]]] = [defaultdict(list) for _ in range(3)]
        rates, usual, planned = lists
        used: defaultdict[tuple[str, str], float] = defaultdict(float)
        for one in self._profile.links:
            planned[site_of[one.source], site_of[one.target]].append(one.bandwidth_bytes_per_s)
        for (source, target), known in self._rates.items():
            rates[site_of[source], site_of[target]].append(known[-1])
            usual[site_of[source], site_of[target]].append(median(known))
        for source, sent in (self._outcome.sent_bytes if self._outcome else {}).items():
            for target, size in sent.items():
                used[site_of[source], site_of[target]] += size
        duration_s = self._outcome.duration_s if self._outcome else 1.0
        for link in plan.cluster.links:
            pair = link.source, link.target
            yield view.SeenLink(
                source=link.source,
                target=link.target,
                latency_s=link.latency_s,
                planned_bytes_per_s=median(planned[pair] or [link.bandwidth_bytes_per_s]),
                bytes_per_s=median(rates[pair]) if rates[pair] else None,
                usual_bytes_per_s=median(usual[pair]) if usual[pair] else None,
                used_bytes_per_s=used[pair] / duration_s,
            )


def _public(text: str) -> str:
    """Return what is told as others may read it: without what lets workers join, and not without end."""
    return re.sub(r"SPANTRAIN_TOKEN=\S+", "SPANTRAIN_TOKEN=...", text)[:_LONGEST_TEXT]


def _part(plan: Plan, device: str) -> str:
    """Return what part of its stage's samples a device has, and with whom it divides tensors."""
    crew = plan.crew_of(device)
    replicas, number = crew.first.replicas, crew.replica_index(device)
    share = replicas[number].sample_share / sum(one.sample_share for one in replicas)
    others = [name for name in replicas[number].devices if name != device]
    further = "".join(f", and of stage {stage}'s" for stage in crew.numbers[1:])
    return f"{share:.0%} of its samples{further}" + (f", tensors with {few(others)}" if others else "")


def _by_device(step: StepTrace) -> dict[str, tuple[tuple[str, float, float], ...]]:
    found = defaultdict(list)
    for one in step.work():
        found[one.device].append((one.name, one.start_s - step.start_s, one.end_s - step.start_s))
    return {device: tuple(rows) for device, rows in found.items()}
