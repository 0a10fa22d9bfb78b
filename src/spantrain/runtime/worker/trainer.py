"""Trains one device's part of a plan: the worker's side of a training run."""

import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from spantrain.adaptation.registry import LocalAdapters
from spantrain.core.messages import DeviceDecisions
from spantrain.core.plan import Plan
from spantrain.devices.meters import MeterThread
from spantrain.devices.registry import class_of
from spantrain.errors import ConfigError
from spantrain.models.build import build_units
from spantrain.runtime.checkpoint.device_files import FileSender, FilesToBeginWith
from spantrain.runtime.checkpoint.saver import DeviceCheckpoints, restore
from spantrain.runtime.control.orders import KeptState, TrainOrder, TrainResult
from spantrain.runtime.control.requests import AheadChange, Begin, DeviceReport, HeldState, StepVerdict, SwitchReport
from spantrain.runtime.coordinator.batches import QueuedFeed, feed_of
from spantrain.runtime.gradients.optimizer import GradientScaling
from spantrain.runtime.gradients.step_sums import Parameters, StepSums
from spantrain.runtime.recorder import PeerTraffic, StepRecorder, StepTeller
from spantrain.runtime.redistribution.exchange import group_of
from spantrain.runtime.step.context import WorkerContext, WorkerLinks, admit, clock_offset_s, seen_here
from spantrain.runtime.step.stage_member import StageMember, build_member
from spantrain.runtime.worker.carry_on import LeftState, carry_on
from spantrain.runtime.worker.keeping.ahead import StateAhead
from spantrain.runtime.worker.keeping.stages import Keeping
from spantrain.runtime.worker.outer_member import OuterMember
from spantrain.runtime.worker.plan_part import PlanPart, check_finite, make_plan_part, new_optimizer, peak_bytes
from spantrain.runtime.worker.switch import kept_units, take_over
from spantrain.transport.connection.peers import PeerAddress

_OVERHEADS_KEPT = 10_000


class TrainSession:
    """One train order on one device."""

    is_whole = True
    """Whether what it holds is of one step: not while an update is made, nor where one has failed."""
    _begins = True
    """Whether what it goes on with, if anything, has not all come yet: parameters may hold anything until then."""
    _lacks_rows = False
    """Whether the rows of parameters that other replicas update are those of before the last update."""

    def __init__(self, order: TrainOrder, links: WorkerLinks, left: LeftState | None = None) -> None:
        """Prepare to carry out an order; `left`: what this device still holds, where the order begins with that."""
        self._prepared_s = time.monotonic()
        self._order = order
        self._earlier = left
        """What to give out as held as long as no step of this order, or of its present plan, is committed."""
        self._steps_done = order.first_step
        """Updates that the parameters have had."""
        self.paused = False
        """Whether another order goes on with what is held."""
        self._summed = False
        """Whether the next step's gradients are summed, and all but the verdict on it is there."""
        self._statistics: dict[str, torch.Tensor] = {}
        """Running statistics as they were before that step."""
        self._job = order.job
        self._links, self._control = links, links.control
        self._clock_offset_s = clock_offset_s(self._control)
        self._meters = MeterThread(links.device.meters())
        self._recorder = StepRecorder(links.name, clock_offset_s=self._clock_offset_s, steps=order.job.trace_steps)
        self._overhead_s: deque[float] = deque(maxlen=_OVERHEADS_KEPT)
        self.teller = StepTeller(links.control, self._recorder)
        admit(self._control, links.mailbox, order.plan.generation, order.peers)
        self._traffic = PeerTraffic(links.mailbox)
        links.device.forget_peak()
        self._peak_bytes = 0
        """Under the plans that have run before the present one."""
        self._training = feed_of(order, links, held_out=False)
        self._held_out = feed_of(order, links, held_out=True) if self._job.evaluate_every else None
        self._here = self._context()
        self._part = self._first_part()
        self._keeping = Keeping(self._here, self._part, begins=order.kept is None and order.checkpoint is None)
        self._ahead = StateAhead(self._here, self._part)
        self._since_step = order.first_step
        """The first step of the present plan."""
        self._begun_s = time.monotonic()
        """When the present step began."""
        self._switch_report: SwitchReport | None = None
        """To be told with the next report."""
        self._checkpoints = DeviceCheckpoints(
            order.output_dir,
            links.name,
            self._part.holding,
            self._part.optimizer,
            lambda saved: self._control.ask(saved).steps,
            sender=FileSender(self._control),
            complain=self._control.ask,
        )
        scalars = order.checkpoint.scalars if order.checkpoint else {}
        self._scaling = GradientScaling(order.job, order.plan.dtype, scalars)
        self._outer = OuterMember(order.outer, self._here)

    def _context(self) -> WorkerContext:
        order, links = self._order, self._links
        return WorkerContext(
            **vars(links),
            graph=order.graph,
            job=order.job,
            feed=self._training,
            recorder=self._recorder,
            adapters=LocalAdapters(order.job.adapter, links.name),
        )

    def _first_part(self) -> PlanPart:
        plan, here, job = self._order.plan, self._here, self._job
        crew = plan.crew_of(here.name)
        groups = here.open_groups(plan, crew.numbers[0], job.joins_statistics)
        with ExitStack() as undo:
            undo.callback(groups.close)
            if self._order.kept is None:
                units = build_units(plan.model, crew.units, seed=job.seed)
            else:
                before = self._earlier.part if self._earlier else None
                units = kept_units(plan, here.name, before, seed=job.seed)
            member = build_member(here, plan, units, groups)
            part = self._part_of(member)
            undo.pop_all()
        return part

    def _part_of(self, member: StageMember) -> PlanPart:
        plan = self._order.plan
        return make_plan_part(self._here, plan, member, *new_optimizer(self._here, plan, member))

    def run(self) -> TrainResult:
        """Train until the coordinator says stop; return what this device saw."""
        try:
            self._resume()
            with self._checkpoints, self._meters:
                self._train()
        finally:
            self._outer.leave()
            self._part.close()
            self._part.discard()
        return self._result()

    def _resume(self) -> None:
        """Begin with what devices or a checkpoint hold, if there is either; all devices of the run do so together."""
        order = self._order
        if order.kept is not None:
            received_bytes, scalars = carry_on(self._here, self._earlier, self._part, order)
            self._scaling = GradientScaling(self._job, order.plan.dtype, scalars)
            self._keeping.begin(order.first_step, self._earlier.held if self._earlier else ())
            self._begins = False
            duration_s = time.monotonic() - self._prepared_s
            self._switch_report = SwitchReport(duration_s=duration_s, received_bytes=received_bytes)
            return
        if order.checkpoint is not None:
            group = group_of(order.plan.cluster, self._here.name, order.plan.devices)
            post = self._part.post(self._here, order.first_step)
            files = FilesToBeginWith(
                Path(order.resume_from), order.checkpoint.files, order.at_coordinator, self._control
            )
            restore(files, self._part.holding, self._part.optimizer, group, post)
        self._keeping.begin(order.first_step)
        self._begins = False

    def _train(self) -> None:
        order, step = self._order, self._order.first_step
        self._outer.join(self._part, step)
        self._control.ask(Begin())
        if not order.is_over:
            step = self._run_steps(step)
        elif order.kept is not None and order.output_dir:
            self._save(step)
        if self.paused:
            return
        self._outer.leave()
        if self._held_out:
            self._recorder.end_steps()
            self._commit(step, None, self._evaluate(step))

    def _run_steps(self, step: int) -> int:
        """Train from a step on until the run ends or pauses; return how many steps are done then."""
        last = self._order.kept.verdict if self._order.kept else None
        evaluate = last is None or last.evaluate
        while True:
            if isinstance(self._training, QueuedFeed) and not self._training.next_step(step, self._save):
                self._outer.finish(step)
                break
            evaluation = self._evaluate(step) if evaluate else None
            self._recorder.begin_step()
            self._begun_s = time.monotonic()
            self._scaling.begin(self._part.member.chunks)
            sums = self._part.stage_sum.begin(self._part.parameters)
            loss_sum = self._part.actions.run_step(step, sums.final)
            self._sum_gradients(step, sums)
            overflow = self._scaling.unscale(self._part.updated.values())
            self._keeping.follow(step)
            self._summed = True
            verdict = self._commit(step, loss_sum, evaluation, overflow=overflow)
            self._update(step, verdict)
            self._take_rows(step)
            self._outer.follow(step, verdict)
            step += 1
            if verdict.stop:
                self._outer.finish(step)
            if verdict.checkpoint:
                self._save(step)
            evaluate = verdict.evaluate
            if verdict.stop:
                break
            if verdict.pause:
                self._ahead.finish(step)
                self.paused = True
                break
            if verdict.plan is not None:
                self._switch(verdict.plan, step)
            if verdict.ahead is not None:
                self._begin_ahead(verdict.ahead, step)
        return step

    @property
    def held(self) -> HeldState:
        """What this device holds now."""
        return HeldState(steps=self._steps_done, summed=self._summed)

    def leave(self, kept: KeptState, first_step: int) -> LeftState | None:
        """Return what this device holds after so many steps, once this order has ended; None if it does not hold it.

        What is summed of a step that was committed without this device's hearing of it is applied; of a step that was
        not, it is dropped.
        """
        part, verdict = self._part, kept.verdict
        if self._summed and verdict is not None and self._steps_done == first_step - 1:
            self._update(self._steps_done, verdict)
        if self._steps_done != first_step or not self.is_whole:
            return None
        with torch.no_grad():  # they have the values of before a step that never happened
            for name, value in self._statistics.items():
                part.holding.statistics[name].copy_(value)
        self._keeping.drop()
        part.forget_gradients()
        self._summed, self._statistics = False, {}
        if self._begins and (self._order.kept is not None or self._order.checkpoint is not None):
            return self._earlier
        return self._earlier or self._left()

    def _left(self) -> LeftState:
        kept = (*self._keeping.whole, *self._ahead.taken(self._steps_done))
        part = self._part
        if self._lacks_rows:
            part = replace(part, holding=part.holding.without_others_rows)
        return LeftState(part=part, scalars=self._scaling.scalars, kept=kept)

    def _switch(self, plan: Plan, step: int) -> None:
        """Go over to another plan before a step, together with all other devices."""
        start_s = time.monotonic()
        part = self._part
        self._outer.leave_before(part.plan, plan, step)
        # Users' functions for the model were checked against those that this worker may call.
        plan = replace(plan, model=part.plan.model)
        self._set_peers(plan, self._order.peers)
        self._peak_bytes = self._peak()
        self._earlier = self._left()
        self._part, received_bytes = take_over(self._here, part, plan, step=step)
        part.stage_sum.close()
        self._keeping = Keeping(self._here, self._part, begins=False, before=self._keeping)
        self._keeping.begin(step, self._earlier.held)
        self._ahead = StateAhead(self._here, self._part)
        self._checkpoints.hold(self._part.holding, self._part.optimizer)
        self._since_step = step
        self._outer.hold(self._part, step)
        self._recorder.switched(f"change to plan {plan.generation}", step, start_s, time.monotonic())
        self._switch_report = SwitchReport(duration_s=time.monotonic() - start_s, received_bytes=received_bytes)

    def _begin_ahead(self, change: AheadChange, step: int) -> None:
        """Give and take ahead of another plan from a step on."""
        self._set_peers(self._part.plan, (*self._order.peers, *change.newcomers))
        self._ahead.begin(change, self._left().held, step)

    def _set_peers(self, plan: Plan, peers: Sequence[PeerAddress]) -> None:
        mailbox = self._links.mailbox
        mailbox.set_peers(plan.generation, seen_here(mailbox, peers))

    def _save(self, steps_done: int) -> None:
        self._checkpoints.save(steps_done, self._scaling.scalars)

    def _evaluate(self, step: int) -> float | None:
        return self._part.actions.evaluate(step, self._held_out) if self._held_out else None

    def _sum_gradients(self, step: int, sums: StepSums) -> None:
        """End the sums over the replicas of this stage; then sum over the stages that share a parameter."""
        part, start_s = self._part, time.monotonic()
        sums.finish(self._links.check_abort)
        self._statistics = {name: value.clone() for name, value in part.holding.statistics.items()}
        part.commit_statistics(part.member.chunks)
        if part.stage_sum.exchanges:
            self._recorder.communicated("gradient sum", step, start_s, time.monotonic())
            self._recorder.summed(step, sums.intervals)
        part.tied_sums.run(step, part.parameters)
        part.take_gradients()

    def _commit(
        self, step: int, loss_sum: float | None, evaluation: float | None, *, overflow: bool = False
    ) -> StepVerdict:
        check_finite(step, {"loss": None if overflow else loss_sum, "held-out loss": evaluation})
        report = self._figures(step, loss_sum, evaluation)
        self._switch_report = None
        return self._agreed(self._with_norm(report, self._part.updated, overflow=overflow))

    def _agreed(self, report: DeviceReport) -> StepVerdict:
        """Bring a report to the barrier; return what all do."""
        verdict = self._control.ask(replace(report, outer=self._outer.report()))
        if verdict.data_differs:
            raise ConfigError(
                f"data {self._part.plan.model.dataset}: not the same on all machines: {verdict.data_differs}; inputs "
                "and labels would not match. Give all of them the same files with --data PATH (stdlib-text needs the "
                "same Python version everywhere)"
            )
        if verdict.record:
            self.teller.tell(report.step, self._peak())
        return verdict

    def _with_norm(self, report: DeviceReport, updated: Parameters, *, overflow: bool = False) -> DeviceReport:
        """Add what is known when gradients are summed."""
        part = self._part
        square = part.stage_sum.square(updated, leave_out=part.tied_sums.counted_elsewhere)
        if overflow and square is not None:
            square = 0.0
        check_finite(report.step, {"squared gradient norm": square})
        return replace(report, grad_square=square, overflow=overflow)

    def _figures(self, step: int, loss_sum: float | None, evaluation: float | None) -> DeviceReport:
        """Return what is known when a step's actions are done here."""
        loss_overflows = loss_sum is not None and not math.isfinite(loss_sum)
        part, figures = self._part, self._recorder.figures
        self._overhead_s.extend(figures.overhead_s)
        return DeviceReport(
            generation=part.plan.generation, step=step, loss_sum=0.0 if loss_overflows else loss_sum,
            loss_overflows=loss_overflows, grad_square=None, busy_s=figures.busy_s,
            peak_held_samples=figures.peak_held_samples, duration_s=time.monotonic() - self._begun_s,
            evaluation_loss_sum=evaluation, sent_bytes=self._traffic.newly_sent(),
            data_digest=self._training.digest if step == self._since_step and part.reads_data else None,
            dataset_size=self._training.dataset_size if part.reads_data else None, switch=self._switch_report,
            links=part.actions.driver.local.reports() if part.actions.driver else (),
            kept=tuple(kept.ward for kept in self._keeping.whole), ahead=self._ahead.state, meters=self._meters.latest,
        )  # fmt: skip

    def _update(self, step: int, verdict: StepVerdict) -> None:
        self._steps_done, self._summed, self.is_whole = step + 1, False, False
        self._statistics, self._earlier = {}, None
        self._scaling.settle(skipped=verdict.skip_update)
        grad_norm = None if verdict.skip_update else verdict.grad_norm
        self._keeping.before_update()
        self._ahead.before_update(step, grad_norm)
        self._part.update(self._job, step, grad_norm)
        self._lacks_rows = self._part.lacks_rows and grad_norm is not None
        self._keeping.commit(step, grad_norm)
        self.is_whole = True

    def _take_rows(self, step: int) -> None:
        """Take the rows that other replicas have updated, where replicas divide the optimizer's state."""
        if self._lacks_rows:
            start_s = time.monotonic()
            self._part.take_rows()
            class_of(self._here.device.torch_device).settle(self._here.device.torch_device)
            self._links.check_abort()  # of a gather that was given up, anything may have come
            self._lacks_rows = False
            self._recorder.communicated("gather of parameters", step, start_s, time.monotonic())

    def _peak(self) -> int:
        member = self._part.member
        now_bytes = peak_bytes(self._here.device, member.executors, self._part.optimizer, member.shards)
        return max(self._peak_bytes, now_bytes)

    def _result(self) -> TrainResult:
        device = self._here.device
        return TrainResult(
            trace=self._recorder.trace(),
            decisions=DeviceDecisions(
                device=self._here.name, trace_shift_s=self._clock_offset_s, decisions=self._recorder.decisions()
            ),
            sent_bytes=self._traffic.sent(),
            received_bytes=self._traffic.received(),
            refused=dict(self._links.mailbox.counters().refused),
            real_compute_ratio=device.real_compute_ratio,
            overrun_actions=device.overruns,
            peak_bytes=self._peak(),
            overhead_s=tuple(self._overhead_s),
            notices=(*self._part.member.notices, *self._outer.notices),
        )
