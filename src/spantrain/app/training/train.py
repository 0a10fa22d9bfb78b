"""Train a plan: plan and job in, losses and measurements out."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from spantrain.app.adaptation.adapt import adviser_of
from spantrain.app.faults import FaultInjector
from spantrain.app.live_requests import requests_heard
from spantrain.app.outer.join import check_outer
from spantrain.app.planning.plan_files import with_room_for_two
from spantrain.app.profiling.slowing import MAX_REAL_COMPUTE, too_fast, what_is_emulated
from spantrain.app.reporter import Reporter
from spantrain.app.session import Session
from spantrain.app.training.checkpoints import RunCheckpoints
from spantrain.app.training.metrics import RunLog
from spantrain.app.training.outcome import (
    HeldOutLoss,
    PlanChanges,
    TrainOutcome,
    device_figures,
    link_figures,
    measured_step_s,
    refused_messages,
    steady,
    with_reasons,
)
from spantrain.app.training.recovery import carry_on
from spantrain.app.training.recovery.joining import Membership
from spantrain.app.training.recovery.journal import BegunLeg, Journal, first_leg, with_what_is_held
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.run_folder import RunContent, measured, write_run
from spantrain.app.training.run_record import TRACE_FILE, RunRecord
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.traced_run import RunNetwork
from spantrain.app.watching.run_watch import RunWatch
from spantrain.core.checkpoint import SampleLedger
from spantrain.core.planned.report import PlanReport
from spantrain.core.quantities import if_finite
from spantrain.core.trace import Trace
from spantrain.errors import ConfigError, UsageError, WorkerError
from spantrain.planner.engine.predict import predict
from spantrain.recovery.policy import OnLoss
from spantrain.runtime.checkpoint.manifest import Manifest
from spantrain.runtime.checkpoint.saver import CHECKPOINTS
from spantrain.runtime.checkpoint.tensor_file import Disk, remove_partials
from spantrain.runtime.control.orders import TrainResult
from spantrain.runtime.control.requests import SwitchReport
from spantrain.runtime.coordinator.advice import Advice, Adviser, Advising
from spantrain.runtime.coordinator.barrier import StepBarrier, StepOutcome
from spantrain.runtime.coordinator.batches import EXTERNAL
from spantrain.runtime.coordinator.records import StepRecords
from spantrain.runtime.coordinator.roster import DeviceLostError, DeviceMemoryError

_LAST_WORDS_S = 2.0
"""How long a run that fails waits for what its devices had done in the step under way."""


def train(session: Session, request: TrainRequest, stop: StopRequest, reporter: Reporter) -> TrainOutcome:
    """Run the plan's devices until the steps are done or a stop is asked for.

    Raises:
        ConfigError: the plan is of a run whose batches came from a user's own loop; or the run cannot be a cluster of
            an outer optimizer.
        WorkerError, PeerLostError: a device failed or was lost; the run has been ended everywhere.
    """
    if request.batches is None and request.plan.model.dataset == EXTERNAL:
        raise ConfigError(
            "this run's batches came from a loop of its own: go on with it from there (spantrain.session with "
            "resume_from_checkpoint), or from Python with data (spantrain.Trainer)"
        )
    request = with_what_is_held(session, request, reporter)
    plan = request.plan
    if request.options.outer:
        check_outer(session)
    if request.job.staleness:
        plan = with_room_for_two(plan, request.profile, request.job.optimizer_state)
    plan = replace(
        request.protected(plan),
        generation=session.generations.following(request.plan.generation, goes_on=request.resume is not None),
    )
    request = replace(request, plan=plan)
    return _RunOnSession(session, request.with_first_weights(), stop, reporter).run()


class _RunOnSession:
    def __init__(self, session: Session, request: TrainRequest, stop: StopRequest, reporter: Reporter) -> None:
        self._session = session
        self._request = request
        self._stop = stop
        self._outcomes: list[StepOutcome] = []
        self._losses = list(request.resume.losses) if request.resume else []
        self._reporter = self._watch = RunWatch(reporter, request.out, request.profile, request.job, self._losses)
        self._first_step = request.resume.content.step if request.resume else 0
        before = request.resume.ledger if request.resume else SampleLedger()
        self._ledger = before.extended(self._first_step, request.plan.global_batch)
        self._leg = first_leg(request)
        self._before = self._leg.plan
        """What ran before this leg."""
        self._goes_on = request.options.on_loss is OnLoss.GO_ON and not request.options.outer
        """Whether devices may go and come."""
        self._hears_members = self._goes_on and not request.job.staleness
        self._profile = request.profile
        """As it was given, whatever devices turn out to have less memory."""
        self._prepared = carry_on.PreparedChanges(request.light_change)
        self._stood_still_s = 0.0
        """Between this leg's first step and the end of the one before."""
        self._journal = Journal(session, request, self._watch)
        self._log = RunLog(request, self._ledger, self._watch)
        self._watch.evaluated_before(self._log.before)
        self._checkpoints = RunCheckpoints(session, request, self._saved, self._manifest, self._watch)
        self._faults = FaultInjector(request.options.faults, session, request.out)
        self._network = RunNetwork(request.options.network_trace, session.testbed, request.plan, request.profile)
        self._plans = PlanChanges(request.plan, first_step=self._first_step, folder=request.out, tell=self._watch.note)

    def run(self) -> TrainOutcome:
        request = self._request
        plan = request.plan
        self._reporter.phase(f"Training {plan.model.name} on {len(plan.devices)} devices, {plan.schedule}")
        outer = request.options.outer
        if outer:
            self._reporter.note(
                f"This run is cluster {outer.cluster} of the outer optimizer at {outer.master}, with rounds of "
                f"{outer.inner_steps} steps"
            )
        for line in request.notes:
            self._reporter.note(line)
        self._reporter.run_begins(plan)
        self._network.prepare(request.job.steps - self._first_step, request.out)
        if request.checkpoints:
            remove_partials(Disk(), request.out / CHECKPOINTS)
        with ExitStack() as stack:
            stack.enter_context(self._watch)
            stack.callback(self._network.end)
            stack.enter_context(self._log)
            stack.enter_context(self._prepared)
            names = tuple(plan.cluster.device_by_name) if self._hears_members else ()
            stack.enter_context(requests_heard(request.out, names))
            stack.enter_context(self._faults.hearing())
            stack.enter_context(self._journal)
            self._journal.begin(self._manifest(self._first_step))
            results = None
            while results is None:
                results = self._run_leg()
            self._checkpoints.await_room(self._stop)
        self._checkpoints.end(self._stop)
        return self._outcome(results)

    def _run_leg(self) -> dict[str, TrainResult] | None:
        """Train with the same devices until the run ends; None: it goes on with others."""
        coordinator, leg = self._session.coordinator, self._leg
        self._journal.write(BegunLeg(plan=leg.plan, step=leg.first_step, kept=leg.kept is not None))
        self._membership = Membership(leg, self._session, self._request, self._reporter, self._stop)
        with ExitStack() as stack:
            self._running = barrier = self._barrier(self._advising(stack))
            try:
                results = coordinator.train(
                    carry_on.orders_of(leg, self._session, self._request, self._ledger.samples_before(leg.first_step)),
                    barrier,
                    self._checkpoints.begin(leg.plan, leg.resume),
                    self._looks_up,
                    self._request.batches,
                    self._on_begin,
                    self._reporter.note,
                )
                if not barrier.paused:
                    return results
                self._go_on(self._membership.leg(barrier.committed))
            except (DeviceLostError, WorkerError) as error:
                if not self._goes_on or not isinstance(error, (DeviceLostError, DeviceMemoryError)):
                    coordinator.settle(leg.plan.devices, _LAST_WORDS_S)
                    self._watch.stopped_in(coordinator.failures())
                    raise
                self._go_on(self._leg_after(error, barrier))
        return None

    def _saved(self, step: int, folder: Path) -> None:
        self._log.saved(step, str(folder))
        self._journal.saved(step, folder)

    def _leg_after(self, error: DeviceLostError | DeviceMemoryError, barrier: StepBarrier) -> carry_on.Leg:
        """Return how the run goes on without a device that was lost, or with less on one that ran out of memory."""
        leg = replace(self._leg, plan=barrier.plan)
        setback = carry_on.setback_of(error, leg, barrier, self._session, self._stop, self._watch.note)
        self._watch.stopped_in(self._session.coordinator.failures())
        if setback.short:
            self._request = carry_on.with_less_memory(self._request, leg.plan, setback.short)
            self._prepared.plan_by(self._request.light_change)
        self._checkpoints.gone({*leg.plan.devices} - {*setback.holders, *setback.short})
        return carry_on.leg_after(leg, setback, self._session, self._request, self._prepared, self._checkpoints.newest)

    def _looks_up(self) -> bool:
        """Make faults that are asked for, look after full disks; return whether to end at once."""
        self._faults.look()
        self._checkpoints.look(self._stop)
        return self._stop.at_once

    def _go_on(self, leg: carry_on.Leg) -> None:
        """Begin another leg."""
        self._before, self._leg = self._running.plan, leg
        self._checkpoints.gone(leg.leaving)
        self._reporter.note(leg.reason)
        step = leg.first_step
        del self._losses[step:]
        self._log.go_back(step)
        self._outcomes = [outcome for outcome in self._outcomes if outcome.step < step]
        if not leg.is_over:
            self._plans.decided(step - 1, Advice(plan=leg.plan, reason=leg.reason))
        self._reporter.run_begins(leg.plan, leg.reason)

    def _barrier(self, advising: Advising | None) -> StepBarrier:
        request, later = self._request, self._session.coordinator.later
        return StepBarrier(
            plan=self._leg.plan,
            job=request.job,
            first_step=self._leg.first_step,
            is_over=self._leg.is_over,
            stop_requested=lambda: self._stop.wanted,
            on_step=lambda outcome: later(lambda: self._on_step(outcome)),
            on_commit=self._journal.committed,
            pause_requested=lambda: self._membership.ready,
            save_requested=lambda: self._stop.take_save() or self._checkpoints.is_due(self._running.plan),
            can_checkpoint=request.checkpoints,
            advising=advising,
            records=StepRecords(lambda step: later(lambda: self._watch.recorded(step))),
        )

    def _advising(self, stack: ExitStack) -> Advising | None:
        request, later = self._request, self._session.coordinator.later
        adviser: Adviser | None = request.adviser
        if adviser is None:
            calm = None if self._leg.reason else request.calm_plan
            own = adviser_of(self._leg.plan.unprotected, request.profile, request.job, calm)
            if own is None:
                return None
            stack.callback(own.close)
            adviser = own
        advising = Advising(
            adviser,
            self._leg.plan,
            on_trouble=lambda text: later(lambda: self._reporter.note(text)),
            finish=request.finished,
        )
        return stack.enter_context(advising)

    def _on_begin(self, begun_s: float) -> None:
        if self._leg.reason:
            self._stood_still_s = begun_s - self._leg.begun_s
            self._reporter.note(carry_on.about_pause(self._leg, self._before, self._request, self._stood_still_s))
            self._session.coordinator.dismiss(self._leg.leaving)
            return
        self._stop.begun = True
        self._network.begin(begun_s)
        self._reporter.note("All devices are ready: the first step begins")

    def _on_step(self, outcome: StepOutcome) -> None:
        self._outcomes.append(outcome)
        if outcome.loss is not None:
            self._losses.append(if_finite(outcome.loss))
        self._log.step(outcome, self._network.rates_at(outcome.closed_s))
        if self._hears_members:
            self._membership.look(self._running)
        if self._goes_on:
            self._prepared.prepare(self._running.plan, frozenset(self._session.coordinator.here()))
        self._faults.after(outcome.step + 1)
        if self._leg.reason and outcome.step == self._leg.first_step and not self._leg.is_over:
            moved_bytes = outcome.switch.received_bytes if outcome.switch else 0
            self._plans.done(SwitchReport(duration_s=self._stood_still_s, received_bytes=moved_bytes))
        elif outcome.switch is not None and outcome.step != self._leg.first_step:
            self._plans.done(outcome.switch)
        if outcome.advice is not None:
            self._session.generations.taken(outcome.advice.plan.generation)
            self._plans.decided(outcome.step, outcome.advice)
            self._reporter.run_begins(outcome.advice.plan, outcome.advice.reason)

    def _manifest(self, step: int) -> Manifest:
        request = self._request
        plan, first = self._plans.after(step), request.calm_plan or request.plan
        if self._leg.is_over:
            plan = self._leg.plan  # of devices that are there
        return Manifest(
            step=step,
            model=plan.model,
            plan=plan,
            report=request.report if plan is request.plan else PlanReport(),
            job=request.job,
            profile=request.profile_path,
            losses=tuple(self._losses[:step]),
            ledger=self._ledger,
            calm_plan=None if (first.stages, first.hints) == (plan.stages, plan.hints) else first,
        )

    def _outcome(self, results: Mapping[str, TrainResult]) -> TrainOutcome:
        self._plans.ended(len(self._losses))
        request, plan, outcomes = self._request, self._plans.plan, self._last_steps()
        job = request.job
        predicted = predict(plan, request.profile, optimizer=job.optimizer_state, staleness=job.staleness)
        measured_s = measured_step_s(outcomes, overlap=job.staleness > 0, otherwise_s=predicted.step_s)
        ratio = max(result.real_compute_ratio for result in results.values())
        if request.plan.cluster.emulated and ratio > MAX_REAL_COMPUTE:
            self._reporter.note(too_fast(request.plan.cluster, ratio))
        for notice in dict.fromkeys(text for result in results.values() for text in result.notices):
            self._reporter.note(notice)
        try:
            self._write(results)
        except UsageError as error:
            self._reporter.note(f"{error}; what was trained is whole")
        before = self._ledger.samples_before
        return TrainOutcome(
            losses=tuple(self._losses),
            step_s_measured=measured_s,
            step_s_predicted=predicted.step_s,
            prediction_error_ratio=measured_s / predicted.step_s - 1.0,
            samples_per_s=plan.global_batch / measured_s,
            steps=len(self._losses),
            devices={
                name: device_figures(plan, name, results[name], predicted, outcomes, request.profile.graph)
                for name in plan.devices
                if name in results and steady(outcomes)
            },
            links=link_figures(results, sum(outcome.duration_s for outcome in self._outcomes)),
            generation=plan.generation,
            schedule=plan.schedule,
            trace=str(request.out / TRACE_FILE) if steady(outcomes) else "",
            checkpoint=self._checkpoints.path,
            heldout_losses=tuple(
                HeldOutLoss(steps_done=entry.step, loss=entry.eval_loss) for entry in self._log.evaluations
            ),
            refused_messages=refused_messages(results.values()),
            first_step=self._first_step,
            train_s=sum(outcome.duration_s for outcome in self._outcomes),
            samples=before(len(self._losses)) - before(self._first_step),
            epoch=self._log.epoch,
            interrupted=self._stop.wanted,
            emulated=what_is_emulated(plan, self._session.network),
            network_trace=self._network.figures(self._outcomes, request.out),
            plan_changes=tuple(self._plans.changes),
            weights=request.weights.text,
            left_out=request.left_out,
        )

    def _last_steps(self) -> list[StepOutcome]:
        """Return the steps under the last plan."""
        return [outcome for outcome in self._outcomes if outcome.step >= self._plans.first_step]

    def _write(self, results: Mapping[str, TrainResult]) -> None:
        """Leave in the run's folder what `spantrain validate` compares, if any step was trained."""
        request, steps = self._request, steady(self._last_steps())
        if not steps:
            self._reporter.note(
                "All steps had been done before: figures of a step are predicted, and there is no trace"
            )
            return
        record = RunRecord(
            plan="",
            profile="",
            optimizer=request.job.optimizer_state,
            **measured(steps, overlap=request.job.staleness > 0),
            peak_bytes={name: r.peak_bytes for name, r in results.items() if r.peak_bytes is not None},
            first_step=self._plans.first_step,
            staleness=request.job.staleness,
            weights=request.weights.text,
            left_out=request.left_out,
            losses=tuple(self._losses),
        )
        trace = Trace.joined([result.trace for result in results.values()], "wall")
        content = RunContent(
            plan=request.plan,
            report=request.report,
            profile=self._profile,
            record=record,
            trace=with_reasons(trace, self._plans.changes),
            decisions=tuple(result.decisions for result in results.values()),
            later_plans=self._plans.files,
        )
        write_run(request.out, content)
