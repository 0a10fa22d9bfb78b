"""One worker's part of a run of another framework."""

import datetime
import time
from typing import Protocol

import torch.distributed as dist

from spantrain.errors import PeerLostError
from spantrain.models.data.dataset import open_dataset
from spantrain.runtime.control.requests import Begin, Progress
from spantrain.runtime.step.context import WorkerLinks
from spantrain.runtime.step.work import SampledFeed
from spantrain.runtime.worker.perform import Meet, RegisteredOrder
from spantrain_studies.comparison.worker.device import framework_device
from spantrain_studies.comparison.worker.orders import FrameworkOrder, FrameworkResult

_GENERATION = 0
_PATIENCE_S = 900.0
"""For one message of others: a step of a slow network takes minutes."""


class FrameworkRunner(Protocol):
    """What runs the steps."""

    def step(self, step: int) -> float | None:
        """Run one step, update included; return the sum of the losses that this device has."""

    def peak_bytes(self) -> int:
        """Return the most bytes that it held."""


class FrameworkSession:
    """One order on one device."""

    def __init__(self, order: FrameworkOrder, links: WorkerLinks, meet: Meet) -> None:
        """Take an order, the same for all devices; `meet`: where all devices do."""
        self._order, self._links, self._device = order, links, framework_device(links.device, links.name)
        self._rank = order.devices.index(links.name)
        self._meet = meet

    def run(self) -> FrameworkResult:
        """Run all steps; torch's default process group is there meanwhile."""
        store = self._meet(_GENERATION, 0, self._rank == 0)
        try:
            dist.init_process_group(
                "gloo",
                store=store,
                rank=self._rank,
                world_size=len(self._order.devices),
                timeout=datetime.timedelta(seconds=_PATIENCE_S),
            )
            return self._steps()
        except dist.DistError as error:
            raise PeerLostError(f"another device went away: {error}") from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    def _steps(self) -> FrameworkResult:
        order = self._order
        runner = self._runner()
        ends_s: list[float] = []
        losses: list[float] = []
        busy_s: list[float] = []
        self._links.control.ask(Begin())
        start_s = time.monotonic()
        for step in range(order.job.steps):
            self._links.check_abort()
            before_s = self._device.busy_s
            loss_sum = runner.step(step)
            ends_s.append(time.monotonic())
            busy_s.append(self._device.busy_s - before_s)
            if loss_sum is not None:
                losses.append(loss_sum)
            if self._rank == 0:
                progress = Progress(done=step + 1, total=order.job.steps, text=str(order.framework))
                self._links.control.ask(progress)
        dist.barrier()
        return FrameworkResult(
            start_s=start_s,
            step_ends_s=tuple(ends_s),
            loss_sums=tuple(losses),
            busy_s=tuple(busy_s),
            real_s=self._device.real_s,
            overruns=self._device.overruns,
            peak_bytes=runner.peak_bytes(),
        )

    def _runner(self) -> FrameworkRunner:
        order = self._order
        feed = SampledFeed(open_dataset(order.model), global_batch=order.global_batch, seed=order.job.seed)
        # Imported here: each costs a worker that never needs it half a second.
        if order.framework.in_stages:
            from spantrain_studies.comparison.worker.stages import StagedModelRunner

            return StagedModelRunner(order, self._rank, self._device, feed)
        from spantrain_studies.comparison.worker.whole import WholeModelRunner

        return WholeModelRunner(order, self._rank, self._device, feed)


def _perform(order: FrameworkOrder, links: WorkerLinks, meet: Meet) -> FrameworkResult:
    return FrameworkSession(order, links, meet).run()


FRAMEWORK = RegisteredOrder(name="framework", kind=FrameworkOrder, perform=_perform)
