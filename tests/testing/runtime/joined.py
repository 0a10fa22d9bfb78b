"""A coordinator, workers that join it, and a network between them that may go away."""

import contextlib
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, wait_for
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.recovery.policy import OnLoss
from spantrain.runtime.coordinator.barrier import StepOutcome
from spantrain.runtime.coordinator.coordinator import Coordinator
from spantrain.runtime.launch.launcher import LocalWorkers, WorkerPlacement
from spantrain.runtime.worker.settings import WorkerSettings
from testing.patience import PATIENCE_S
from testing.relay import FAR, NEAR, Relay

FOREVER = 1_000_000


def two_free_ports() -> int:
    """Return a port that is free here and there, with the next one."""
    while True:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            port = stack.enter_context(socket.create_server((NEAR, 0))).getsockname()[1]
            for host, number in ((FAR, port), (NEAR, port + 1), (FAR, port + 1)):
                stack.enter_context(socket.create_server((host, number)))
            return port


class Steps(SilentReporter):
    """Says when what was waited for has come."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.notes: list[str] = []
        self.joined = 0

    def progress(self, done: int, _total: int, _text: str) -> None:
        self.joined = done

    def step(self, outcome: StepOutcome, _metrics: object, total_steps: int) -> None:
        self.steps.append(outcome.step)

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class Machines:
    """A coordinator in this process, workers in others, a network between them."""

    workers: LocalWorkers
    coordinator: Coordinator
    relay: Relay
    profile_of: Callable[..., object]
    out: Path
    pool: ThreadPoolExecutor
    told: Steps = field(default_factory=Steps)
    stop: StopRequest = field(default_factory=StopRequest)

    def join(self, plan: Plan, *devices: str) -> None:
        """Start workers for some devices."""
        for name in devices:
            self.workers.log_of(name).unlink(missing_ok=True)
        self.workers.start([self._placement(name, plan) for name in devices])

    def start(self, plan: Plan) -> "Future[TrainOutcome]":
        """Have workers join for all devices of a plan, and begin to train it."""
        self.join(plan, *plan.devices)
        wait_for(self.coordinator, plan.devices, PATIENCE_S, self.told)
        return self.train(plan)

    def train(self, plan: Plan) -> "Future[TrainOutcome]":
        """Begin to train a plan, for whose devices workers have joined."""
        session = Session(
            cluster=plan.cluster,
            devices=plan.devices,
            coordinator=self.coordinator,
            network="real",
            testbed=None,
            workers=None,
        )
        request = TrainRequest(
            plan=plan,
            profile=self.profile_of(plan.cluster, plan.model),
            profile_path="",
            job=TrainJob(steps=FOREVER, adapter="off"),
            out=self.out,
            options=RunOptions(on_loss=OnLoss.END),
        )

        def run() -> TrainOutcome:
            try:
                return train(session, request, self.stop, self.told)
            finally:
                self.coordinator.stop()

        return self.pool.submit(run)

    def _placement(self, name: str, plan: Plan) -> WorkerPlacement:
        settings = WorkerSettings(
            join=self.coordinator.join_address.replace(NEAR, FAR),
            token=self.coordinator.token,
            name=name,
            backend=plan.cluster.device_by_name[name].backend,
        )
        return WorkerPlacement(settings=settings, environment={"GLOO_SOCKET_IFNAME": "lo"})

    def process(self, device: str) -> psutil.Process:
        """Return a device's worker."""
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/fd/1") == str(self.workers.log_of(device)):
                    return process
        raise AssertionError(f"{device} has no worker")

    def has_said(self, device: str) -> str:
        """Return the last line of a worker that has ended."""
        return self.workers.log_of(device).read_text().strip().splitlines()[-1]
