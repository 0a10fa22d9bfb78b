"""Trains one device's part of a plan with weights one step old: steps overlap, and their ends run beside them.

The rule is that of `schedule.dispatch.policies`. Behind some steps everything gets quiet on all devices: the last one,
those with a checkpoint or an evaluation behind them, and the one in which a stop is asked for or the one after. There
all updates are done, both sets of weights become the newest, and training goes on as it begins. So a run that goes on
from a checkpoint does what the run did that wrote it.

Two sets of a stage's weights that are trained, for even and for odd steps, and one optimizer that works on both in
turn; weights that are not trained are in both.

Step t works on the weights V_t of its set, and leaves its gradients there. When they are summed, nothing else needs V_t
any more: V_{t+1} is copied over it, and the optimizer makes V_{t+2} of it in place (`schedule.dispatch.policies` has
the rule). Where everything is quiet, both sets are made the newest: training goes on there as it begins.
"""

import threading
import time
from collections import deque
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.models.statistics import named_statistics
from spantrain.models.units import left_behind
from spantrain.runtime.checkpoint.holding import holding_of
from spantrain.runtime.control.orders import TrainOrder, TrainResult
from spantrain.runtime.control.requests import DeviceReport, StepVerdict
from spantrain.runtime.gradients.optimizer import build_optimizer
from spantrain.runtime.gradients.step_sums import Background, Parameters
from spantrain.runtime.step.context import WorkerContext, WorkerLinks
from spantrain.runtime.step.stage_member import StageMember, stage_executor
from spantrain.runtime.worker.carry_on import LeftState
from spantrain.runtime.worker.plan_part import PlanPart, check_finite, make_plan_part, trained_of
from spantrain.runtime.worker.trainer import TrainSession


class TwoSets:
    """The sets of one device by the parity of steps, and what the optimizer and checkpoints know: the newest weights.

    `newest` are parameters of their own, which share their memory with the set that was updated last; so what the
    optimizer keeps of them is one, whichever set it works on.
    """

    def __init__(self, even: Parameters, odd: Parameters) -> None:
        """Take two sets of the same names, with the same weights."""
        assert even.keys() == odd.keys(), "two sets of one stage have the same parameters"
        self._sets = (even, odd)
        # By `.data`: what is counted as a change of one set must not be one of the other, whose step is at work.
        self.newest = {name: nn.Parameter(parameter.data) for name, parameter in even.items()}

    def of(self, step: int) -> Parameters:
        """Return the parameters that a step works on."""
        return self._sets[step % 2]

    @torch.no_grad()
    def prepare_update(self, step: int) -> None:
        """Make `newest` the weights behind a step's own, in the step's memory, with the step's gradients."""
        own, other = self.of(step), self.of(step + 1)
        _copy(own, other)
        for name, newest in self.newest.items():
            newest.data = own[name].data
            newest.grad, own[name].grad = own[name].grad, None

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give both sets the newest weights."""
        for one in self._sets:
            behind = {name: own for name, own in one.items() if own.data_ptr() != self.newest[name].data_ptr()}
            _copy(behind, self.newest)


def _copy(into: Parameters, source: Parameters) -> None:
    if into:
        tensors: list[Tensor] = [source[name].detach() for name in into]
        torch._foreach_copy_([own.detach() for own in into.values()], tensors)


def with_second_set(here: WorkerContext, plan: Plan, member: StageMember) -> tuple[StageMember, TwoSets]:
    """Return the member with a second set of its units' weights; running statistics and what is not trained are one."""
    frozen = [own for own in member.named_parameters.values() if not own.requires_grad]
    shared = {id(own): own for own in (*frozen, *named_statistics(member.units).values())}
    units = deepcopy(list(member.units), shared | left_behind(nn.ModuleList(member.units)))
    second = stage_executor(here, plan, member.stage_index, units, member.groups)
    sets = TwoSets(trained_of(member.named_parameters), trained_of(second.named_parameters()))
    return replace(member, second=second), sets


def quiet_behind(job: TrainJob, step: int) -> bool:
    """Whether a job lets everything get quiet behind a step, whatever happens.

    >>> [step for step in range(10) if quiet_behind(TrainJob(steps=9, checkpoint_every=4, adapter="off"), step)]
    [3, 7, 8, 9]
    """
    done = step + 1
    regular = any(every and done % every == 0 for every in (job.checkpoint_every, job.evaluate_every))
    return done >= job.steps or regular


class StaleSession(TrainSession):
    """One train order on one device, with two steps at once."""

    def _part_of(self, member: StageMember) -> PlanPart:
        order, here = self._order, self._here
        member, self._sets = with_second_set(here, order.plan, member)
        self._ends = Background("ends of steps")
        self._verdicts: dict[int, StepVerdict] = {}
        """Of steps whose ends are over."""
        optimizer = build_optimizer(order.job, self._sets.newest.values(), self._sets.newest)
        held = {**member.named_parameters, **self._sets.newest}
        holding = holding_of(order.plan, here.name, here.graph, held, member.parts.own, member.units)
        return make_plan_part(here, order.plan, member, optimizer, holding)

    def run(self) -> TrainResult:
        """Train until the coordinator says stop; return what this device saw."""
        try:
            return super().run()
        finally:
            self._ends.close()

    def _resume(self) -> None:
        super()._resume()
        self._sets.synchronize()

    def _run_steps(self, step: int) -> int:
        self._sets.synchronize()
        evaluate = True
        while True:
            evaluation = self._evaluate(step) if evaluate else None
            step, verdict = self._run_until_quiet(step, evaluation)
            if verdict.stop:
                self._outer.finish(step)
            self._sets.synchronize()
            if verdict.checkpoint:
                self._save(step)
            evaluate = verdict.evaluate
            if verdict.stop:
                return step

    def _run_until_quiet(self, first: int, evaluation: float | None) -> tuple[int, StepVerdict]:
        """Run steps until one behind which everything gets quiet; return the step to come, and that one's verdict."""
        driver = self._part.actions.driver
        assert driver is not None, "steps overlap on leaders only"
        ends: deque[tuple[int, threading.Event]] = deque()
        """Steps that end, in their own thread, and what is set when they have."""
        last: int | None = None
        begun, ready = first, first + 1
        """The next step to begin, and the newest one that has its weights."""
        self._next_figures()
        while True:
            while begun <= ready and last is None:
                driver.begin_step(begun)
                last = begun if quiet_behind(self._job, begun) else None
                begun += 1
            done = driver.advance()
            if done is not None:
                over = self._begin_end(*done, evaluation if done[0] == first else None)
                ends.append((done[0], over))
                if done[0] != last:
                    self._next_figures()
            while ends and ends[0][1].is_set():
                step, over = ends.popleft()
                self._ends.wait(over, self._links.check_abort)  # raises what stopped it, if anything did
                driver.forget(step)
                verdict = self._verdicts.pop(step)
                ready = step + 2
                if step == last:
                    return step + 1, verdict
                if verdict.stop and last is None:
                    last = step + 1

    def _next_figures(self) -> None:
        """Count what comes for the next report."""
        self._recorder.begin_step()
        self._begun_s = time.monotonic()

    def _begin_end(self, step: int, loss_sum: float | None, evaluation: float | None) -> threading.Event:
        """Have a step's gradients summed and its update made, behind the ends of the steps before."""
        check_finite(step, {"loss": loss_sum, "held-out loss": evaluation})
        report = self._figures(step, loss_sum, evaluation)

        def work() -> None:
            self._verdicts[step] = self._settle(step, report)
            self._links.mailbox.wake()

        return self._ends.begin(work)

    def _settle(self, step: int, report: DeviceReport) -> StepVerdict:
        """Sum, agree, update; in the thread of the ends."""
        part, parameters = self._part, self._sets.of(step)
        sums = part.stage_sum.begin(parameters)
        sums.finish(self._links.check_abort)
        self._recorder.summed(step, sums.intervals)
        part.commit_statistics(part.member.executors[step % 2 :][:1])
        part.tied_sums.run(step, parameters)
        verdict = self._agreed(self._with_norm(report, parameters))
        self._sets.prepare_update(step)
        self._update(step, verdict)
        self._outer.follow(step, verdict)
        return verdict


def session_of(order: TrainOrder, links: WorkerLinks, left: LeftState | None = None) -> TrainSession:
    """Return what carries out an order as its job says: step by step, or two steps at once."""
    session = StaleSession if order.job.staleness else TrainSession
    return session(order, links, left)
