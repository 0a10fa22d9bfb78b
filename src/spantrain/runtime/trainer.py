"""Trains one device's part of a plan: the worker's side of a training run."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from spantrain.core.decisions import DeviceDecisions
from spantrain.errors import ConfigError, WorkerError
from spantrain.models.data import open_dataset
from spantrain.models.device import Device, EmulatedDevice, real_compute_ratio
from spantrain.runtime.checkpoint.device import DeviceCheckpoints
from spantrain.runtime.checkpoint.holding import holding_of
from spantrain.runtime.checkpoint.restore import group_of
from spantrain.runtime.checkpoint.saver import SavedFile
from spantrain.runtime.feed import SampledFeed
from spantrain.runtime.given import GIVEN, GivenFeed
from spantrain.runtime.gradients import StageSum
from spantrain.runtime.memory import forget_peak, peak_bytes
from spantrain.runtime.optimizer import build_optimizer, clip_factor, learning_rate
from spantrain.runtime.orders import PeerEntry, StepReport, TrainOrder, TrainResult, Verdict
from spantrain.runtime.posts import DriverPost, MailboxPost
from spantrain.runtime.recorder import Recorder
from spantrain.runtime.scaling import GradientScaling
from spantrain.runtime.stage_actions import StageActions
from spantrain.runtime.stage_member import join_stage
from spantrain.runtime.tied import TiedSums, tied_across_stages
from spantrain.runtime.traffic import Traffic
from spantrain.transport.mailbox import Mailbox

__all__ = ["Colleagues", "TrainSession"]

_OVERHEADS_KEPT = 10_000


@dataclass(frozen=True, kw_only=True)
class Colleagues:
    """How a worker reaches the others: data, barrier, meeting point, and the news that the run is off."""

    mailbox: Mailbox
    admit: Callable[[int, tuple[PeerEntry, ...]], None]
    """(generation, peers): returns when all of them have admitted each other."""
    commit_step: Callable[[StepReport], Verdict]
    meet: Callable[[int, int, bool], Store]
    """(generation, stage, leads) -> the store where the devices of a stage meet."""
    checkpoint_saved: Callable[[SavedFile], tuple[int, ...]]
    """Returns the steps whose checkpoints are not kept any longer."""
    ask_given: Callable[[dict[str, Any]], dict[str, Any]]
    """What to do next, and rows of batches, where a user's own loop gives them (`runtime.given`)."""
    check_abort: Callable[[], None]
    clock_offset_s: float


class TrainSession:
    """One train order on one device."""

    def __init__(self, order: TrainOrder, name: str, device: Device, colleagues: Colleagues) -> None:
        self._order = order
        self._plan = order.plan
        self._job = order.job
        self._name = name
        self._colleagues = colleagues
        self._device = device
        self._recorder = Recorder(name, clock_offset_s=colleagues.clock_offset_s, steps=order.job.trace_steps)
        self._overhead_s: deque[float] = deque(maxlen=_OVERHEADS_KEPT)
        colleagues.admit(self._plan.generation, order.peers)
        self._traffic = Traffic(colleagues.mailbox)
        forget_peak(device)
        self._build()

    def _build(self) -> None:
        self._member = join_stage(
            self._plan,
            self._name,
            self._device,
            graph=self._order.graph,
            seed=self._job.seed,
            meet=self._colleagues.meet,
        )
        with ExitStack() as undo:
            undo.callback(self._member.groups.close)
            self._prepare()
            undo.pop_all()

    def _prepare(self) -> None:
        """Make all that a step needs besides the stage's units."""
        plan = self._plan
        self._stage_index = self._member.stage_index
        self._parameters = self._member.executor.named_parameters()
        self._optimizer = build_optimizer(self._job, self._parameters.values())
        self._training = self._feed(held_out=False)
        self._held_out = self._feed(held_out=True) if self._job.evaluate_every else None
        self._checkpoints = DeviceCheckpoints(
            self._order.output_dir,
            self._name,
            holding_of(plan, self._name, self._member.graph, self._parameters, self._member.parts.own),
            self._optimizer,
            self._colleagues.checkpoint_saved,
        )
        self._scaling = GradientScaling(
            self._job, plan.dtype, self._order.checkpoint.scalars if self._order.checkpoint else {}
        )
        self._actions = StageActions(
            plan=plan,
            schedule=self._order.schedule,
            name=self._name,
            member=self._member,
            device=self._device,
            mailbox=self._colleagues.mailbox,
            feed=self._training,
            recorder=self._recorder,
            check_abort=self._colleagues.check_abort,
        )
        self._stage_sum = StageSum(
            self._member.groups, self._member.parts, levels=self._member.unlike, partial=self._member.partial
        )
        self._tied_sums = TiedSums(
            tied_across_stages(plan, self._stage_index, self._member.graph, self._member.units),
            plan=plan,
            stage_index=self._stage_index,
            driver=self._actions.driver,
            stage_sum=self._stage_sum,
            recorder=self._recorder,
        )

    def _feed(self, *, held_out: bool) -> SampledFeed | GivenFeed:
        if self._plan.model.dataset == GIVEN:
            return GivenFeed(self._colleagues.ask_given, self._colleagues.check_abort)
        return SampledFeed(
            open_dataset(self._plan.model, held_out=held_out),
            global_batch=self._plan.global_batch,
            seed=self._job.seed,
            same_every_step=held_out,
            first_step=self._order.first_step,
            samples_before=self._order.samples_before,
        )

    def run(self) -> TrainResult:
        """Train until the coordinator says stop; return what this device saw."""
        try:
            self._resume()
            with self._checkpoints:
                self._train()
        finally:
            self._member.groups.close()
            self._member.executor.discard()
        return self._result()

    def _resume(self) -> None:
        """Begin with what a checkpoint holds, if there is one; all devices of the run do so together."""
        order, plan = self._order, self._plan
        address = {"generation": plan.generation, "step": order.first_step}
        post = (
            DriverPost(self._actions.driver, **address)
            if self._actions.driver
            else MailboxPost(self._colleagues.mailbox, **address, check_abort=self._colleagues.check_abort)
        )
        group = group_of(plan.cluster, self._name, plan.devices)
        self._checkpoints.resume(order.resume_from, order.checkpoint, group, post)

    def _train(self) -> None:
        step = self._order.first_step
        evaluate = True
        while True:
            if isinstance(self._training, GivenFeed) and not self._training.next_step(step, self._save):
                break
            evaluation = self._evaluate(step) if evaluate else None
            self._recorder.begin_step()
            self._scaling.begin(self._member.executor)
            loss_sum = self._actions.run_step(step)
            self._sum_gradients(step)
            overflow = self._scaling.unscale(self._parameters.values())
            verdict = self._commit(step, loss_sum, evaluation, overflow=overflow)
            self._update(step, verdict)
            step += 1
            if verdict.checkpoint:
                self._save(step)
            evaluate = verdict.evaluate
            if verdict.stop:
                break
        if self._held_out:
            self._recorder.end_steps()
            self._commit(step, None, self._evaluate(step))

    def _save(self, steps_done: int) -> None:
        self._checkpoints.save(steps_done, self._scaling.scalars)

    def _evaluate(self, step: int) -> float | None:
        return self._actions.evaluate(step, self._held_out) if self._held_out else None

    def _sum_gradients(self, step: int) -> None:
        """Sum over the replicas of this stage, then over the stages that share a parameter."""
        start_s = time.monotonic()
        self._stage_sum.run(self._parameters)
        if self._stage_sum.sums:
            self._recorder.communicated("gradient sum", step, start_s, time.monotonic())
        self._tied_sums.run(step, self._parameters)

    def _commit(
        self, step: int, loss_sum: float | None, evaluation: float | None, *, overflow: bool = False
    ) -> Verdict:
        figures = self._recorder.figures
        self._overhead_s.extend(figures.overhead_s)
        square = self._stage_sum.square(self._parameters, leave_out=self._tied_sums.counted_elsewhere)
        if overflow and square is not None:
            square = 0.0
        reads_data = step == self._order.first_step and self._stage_index in (0, len(self._plan.stages) - 1)
        _check_finite(step, {"loss": loss_sum, "squared gradient norm": square, "held-out loss": evaluation})
        verdict = self._colleagues.commit_step(
            StepReport(
                generation=self._plan.generation,
                step=step,
                loss_sum=loss_sum,
                grad_square=square,
                overflow=overflow,
                busy_s=figures.busy_s,
                peak_held_samples=figures.peak_held_samples,
                evaluation_loss_sum=evaluation,
                sent_bytes=self._traffic.sent(),
                data_digest=self._training.digest if reads_data else None,
            )
        )
        if verdict.data_differs:
            raise ConfigError(
                f"data {self._plan.model.dataset}: not the same on all machines: {verdict.data_differs}; inputs and "
                "labels would not match. Give all of them the same files with --data PATH (stdlib-text needs the same "
                "Python version everywhere)"
            )
        return verdict

    def _update(self, step: int, verdict: Verdict) -> None:
        self._scaling.settle(skipped=verdict.skip_update)
        if verdict.skip_update:
            self._optimizer.zero_grad(set_to_none=True)
            return
        factor = clip_factor(verdict.grad_norm, self._job.max_grad_norm)
        if factor < 1.0:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._job, step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _result(self) -> TrainResult:
        return TrainResult(
            trace=self._recorder.trace(),
            decisions=DeviceDecisions(
                device=self._name,
                schedule=self._order.schedule,
                trace_shift_s=self._colleagues.clock_offset_s,
                decisions=self._recorder.decisions(),
            ),
            sent_bytes=self._traffic.sent(),
            received_bytes=self._traffic.received(),
            refused=dict(self._colleagues.mailbox.counters().refused),
            real_compute_ratio=real_compute_ratio(self._device),
            overrun_actions=self._device.overruns if isinstance(self._device, EmulatedDevice) else 0,
            peak_bytes=peak_bytes(self._device, self._member.executor, self._optimizer),
            overhead_s=tuple(self._overhead_s),
            notices=self._member.notices,
        )


def _check_finite(step: int, values: Mapping[str, float | None]) -> None:
    for what, value in values.items():
        if value is not None and not math.isfinite(value):
            raise WorkerError(
                f"step {step}: the {what} is {value}; training has diverged: lower --learning-rate, or clip with "
                "--max-grad-norm; the last checkpoint is from before"
            )
