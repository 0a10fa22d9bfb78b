"""Trains one device's part of a plan: the worker's side of a training run."""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import Store

from spantrain.core.decisions import DeviceDecisions
from spantrain.core.messages import MessageKey
from spantrain.core.plan import Plan
from spantrain.core.spans import Span
from spantrain.core.units import UnitGraph
from spantrain.errors import ConfigError, WorkerError
from spantrain.models.build import UnitModule, build_units, parameter_names, shared_parameters
from spantrain.models.data import open_dataset
from spantrain.models.device import Device, EmulatedDevice, real_compute_ratio
from spantrain.models.graph import build_graph
from spantrain.models.stage import StageExecutor
from spantrain.policy.dispatch import make_policy
from spantrain.policy.tasks import replica_tasks
from spantrain.runtime.checkpoint import read_stage, restore_stage, save_stage
from spantrain.runtime.driver import DeviceClock, StepDriver
from spantrain.runtime.emulation import emulated_seconds
from spantrain.runtime.feed import SampledFeed
from spantrain.runtime.gradients import GradientSum, gradient_square
from spantrain.runtime.memory import forget_peak, peak_bytes
from spantrain.runtime.optimizer import build_optimizer, clip_factor, learning_rate
from spantrain.runtime.orders import PeerEntry, StepReport, TrainOrder, TrainResult, Verdict
from spantrain.runtime.recorder import Recorder
from spantrain.transport.interface import PeerCounters
from spantrain.transport.mailbox import Mailbox

__all__ = ["Colleagues", "TrainSession"]

_COLLECTIVE_TIMEOUT_S = 60.0
_TIED = "tied:"
_OVERHEADS_KEPT = 10_000


@dataclass(frozen=True, kw_only=True)
class Colleagues:
    """How a worker reaches the others: data, barrier, meeting point, and the news that the run is off."""

    mailbox: Mailbox
    admit: Callable[[int, tuple[PeerEntry, ...]], None]
    """(generation, peers): returns when all of them have admitted each other."""
    commit_step: Callable[[StepReport], Verdict]
    meet: Callable[[int, int, bool], Store]
    """(generation, stage, leads) -> the store where the replicas of a stage meet."""
    checkpoint_saved: Callable[[int, str, str], None]
    """(step, file name, SHA-256)"""
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
        self._stage_index, self._replica_index = self._plan.place(name)
        self._stage = self._plan.stages[self._stage_index]
        self._leads = self._replica_index == 0
        self._device = device
        self._recorder = Recorder(name, clock_offset_s=colleagues.clock_offset_s, steps=order.job.trace_steps)
        self._overhead_s: deque[float] = deque(maxlen=_OVERHEADS_KEPT)
        colleagues.admit(self._plan.generation, order.peers)
        self._traffic = _Traffic(colleagues.mailbox)
        forget_peak(device)
        self._build()

    def _build(self) -> None:
        """Build this stage's units with the weights that one process would have given them."""
        plan, stage = self._plan, self._stage
        graph = build_graph(plan.model)
        units = build_units(plan.model, stage.units, seed=self._job.seed)
        self._executor = StageExecutor(
            units,
            is_first=self._stage_index == 0,
            is_last=self._stage_index == len(plan.stages) - 1,
            global_batch=plan.global_batch,
            autocast_dtype=torch.bfloat16 if plan.dtype == "bfloat16" else None,
            torch_device=self._device.torch_device,
        )
        self._parameters = self._executor.named_parameters()
        self._optimizer = build_optimizer(self._job, self._parameters.values())
        self._tied = _tied_across_stages(plan, self._stage_index, graph, units)
        self._training = self._feed(held_out=False)
        seconds = emulated_seconds(plan.cluster, self._name, plan.dtype, [graph.units[i] for i in stage.units])
        self._driver = StepDriver(
            plan=plan,
            name=self._name,
            executor=self._executor,
            clock=DeviceClock(device=self._device, seconds=seconds),
            mailbox=self._colleagues.mailbox,
            feed=self._training,
            recorder=self._recorder,
            check_abort=self._colleagues.check_abort,
        )
        tasks = replica_tasks(plan, schedule=self._order.schedule)
        self._policy = make_policy(self._order.schedule, tasks[self._stage_index][self._replica_index])
        self._held_out = self._feed(held_out=True) if self._job.evaluate_every else None

    def _feed(self, *, held_out: bool) -> SampledFeed:
        return SampledFeed(
            open_dataset(self._plan.model, held_out=held_out),
            global_batch=self._plan.global_batch,
            seed=self._job.seed,
            same_every_step=held_out,
        )

    def run(self) -> TrainResult:
        """Train until the coordinator says stop; return what this device saw."""
        store = None
        if len(self._stage.replicas) > 1:
            store = self._colleagues.meet(self._plan.generation, self._stage_index, self._leads)
        group = GradientSum(
            store=store,
            rank=self._replica_index,
            num_replicas=len(self._stage.replicas),
            torch_device=self._device.torch_device,
            timeout_s=_COLLECTIVE_TIMEOUT_S,
        )
        try:
            self._resume(group)
            self._train(group)
        finally:
            group.close()
            self._executor.discard()
        return self._result()

    def _resume(self, group: GradientSum) -> None:
        if not self._order.resume_from:
            return
        content = read_stage(Path(self._order.resume_from), self._name) if self._leads else b""
        restore_stage(group.broadcast_bytes(content, self._device.torch_device), self._parameters, self._optimizer)

    def _train(self, group: GradientSum) -> None:
        step = self._order.first_step
        evaluate = True
        while True:
            evaluation = self._evaluate(step) if evaluate else None
            self._recorder.begin_step()
            loss_sum = self._driver.run_step(step, self._policy)
            self._sum_gradients(group, step)
            verdict = self._commit(step, loss_sum, evaluation)
            self._update(step, verdict)
            step += 1
            if verdict.checkpoint and self._leads:
                self._save(step)
            evaluate = verdict.evaluate
            if verdict.stop:
                break
        if self._held_out:
            self._recorder.end_steps()
            self._commit(step, None, self._evaluate(step))

    def _evaluate(self, step: int) -> float | None:
        return self._driver.evaluate(step, self._held_out) if self._held_out else None

    def _sum_gradients(self, group: GradientSum, step: int) -> None:
        """Sum over the replicas of this stage, then over the stages that share a parameter."""
        start_s = time.monotonic()
        group.all_reduce(list(self._parameters.values()))
        if len(self._stage.replicas) > 1:
            self._recorder.communicated("gradient sum", step, start_s, time.monotonic())
        for tied in self._tied:
            self._sum_tied(tied, group, step)

    def _sum_tied(self, tied: "_Tied", group: GradientSum, step: int) -> None:
        """Sum one shared parameter's gradients in the order of stages, so that all copies stay equal."""
        start_s = time.monotonic()
        own = self._parameters[tied.parameter]
        assert own.grad is not None
        if self._leads:
            for stage in tied.other_stages:
                key = MessageKey(self._plan.generation, step, f"{_TIED}{tied.group}:{self._stage_index}", 0, Span(0, 1))
                self._driver.send_message(self._leader(stage), key, (own.grad.unsqueeze(0).clone(),))
            total = torch.zeros_like(own.grad)
            for stage in sorted((self._stage_index, *tied.other_stages)):
                total += (
                    own.grad
                    if stage == self._stage_index
                    else self._driver.wait_for_message(step, f"{_TIED}{tied.group}:{stage}")[0][0]
                )
            own.grad.copy_(total)
        group.broadcast([own.grad])
        self._recorder.communicated(f"tied gradient sum {tied.group}", step, start_s, time.monotonic())

    def _leader(self, stage: int) -> str:
        return self._plan.stages[stage].replicas[0].devices[0]

    def _commit(self, step: int, loss_sum: float | None, evaluation: float | None) -> Verdict:
        figures = self._recorder.figures
        self._overhead_s.extend(figures.overhead_s)
        counted_elsewhere = frozenset(
            tied.parameter for tied in self._tied if min(tied.other_stages) < self._stage_index
        )
        square = gradient_square(self._parameters, leave_out=counted_elsewhere) if self._leads else None
        reads_data = step == self._order.first_step and self._stage_index in (0, len(self._plan.stages) - 1)
        _check_finite(step, {"loss": loss_sum, "squared gradient norm": square, "held-out loss": evaluation})
        verdict = self._colleagues.commit_step(
            StepReport(
                generation=self._plan.generation,
                step=step,
                loss_sum=loss_sum,
                grad_square=square,
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
        factor = clip_factor(verdict.grad_norm, self._job.max_grad_norm)
        if factor < 1.0:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._job, step)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _save(self, steps_done: int) -> None:
        folder = Path(self._order.output_dir) / "checkpoint" / f"step-{steps_done}"
        name, digest = save_stage(folder, self._name, self._parameters, self._optimizer)
        self._colleagues.checkpoint_saved(steps_done, name, digest)

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
            peak_bytes=peak_bytes(self._device),
            overhead_s=tuple(self._overhead_s),
        )


def _check_finite(step: int, values: Mapping[str, float | None]) -> None:
    for what, value in values.items():
        if value is not None and not math.isfinite(value):
            raise WorkerError(
                f"step {step}: the {what} is {value}; training has diverged: lower --learning-rate, or clip with "
                "--max-grad-norm; the last checkpoint is from before"
            )


class _Traffic:
    """Bytes on the wire since this session began; a mailbox counts on through all its sessions."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._before = mailbox.counters().peers

    def sent(self) -> dict[str, int]:
        """Return what went to each peer."""
        return self._since(lambda counters: counters.wire_bytes_sent)

    def received(self) -> dict[str, int]:
        """Return what came from each peer."""
        return self._since(lambda counters: counters.wire_bytes_received)

    def _since(self, value: Callable[[PeerCounters], int]) -> dict[str, int]:
        none = PeerCounters()
        now = self._mailbox.counters().peers
        return {name: value(counters) - value(self._before.get(name, none)) for name, counters in now.items()}


@dataclass(frozen=True, kw_only=True)
class _Tied:
    """A parameter of this stage of which other stages hold copies."""

    group: str
    parameter: str
    other_stages: tuple[int, ...]


def _tied_across_stages(
    plan: Plan, stage_index: int, graph: UnitGraph, units: Sequence[UnitModule]
) -> tuple[_Tied, ...]:
    """Find the parameters that other stages hold copies of."""
    holders: dict[str, set[int]] = {}
    for index, stage in enumerate(plan.stages):
        for unit in stage.units:
            for group in graph.units[unit].shared:
                holders.setdefault(group, set()).add(index)
    found = []
    for group, members in sorted(shared_parameters(units).items()):
        others = tuple(sorted(holders.get(group, set()) - {stage_index}))
        if others:
            position, local = members[0]
            found.append(_Tied(group=group, parameter=parameter_names(units[position])[local], other_stages=others))
    return tuple(found)
