"""One run of one method on the workers that are there."""

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spantrain.app.comparison.figures import Run
from spantrain.app.comparison.layouts import Layout
from spantrain.app.comparison.traffic import StepTraffic
from spantrain.app.reporter import Reporter, SilentReporter
from spantrain.app.training.session import Session
from spantrain.app.training.traced_run import open_trace
from spantrain.app.training.train import StopRequest, TrainRequest, train
from spantrain.config.files.json_codec import from_json
from spantrain.config.traces.network_traces import NetworkTrace
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.runtime.comparison.order import FrameworkResult
from spantrain.runtime.coordinator.barrier import StepOutcome


@dataclass(kw_only=True)
class Runner:
    """Runs methods one after the other on the same workers."""

    session: Session
    profile: Profile
    reporter: Reporter
    out: Path
    """Folder for what our own runs write."""
    network_trace: NetworkTrace | None = None
    """How the emulated links change in every run, from its first step on."""

    def framework(self, layout: Layout, job: TrainJob, warm_up_steps: int) -> Run:
        """Run a framework.

        Raises:
            WorkerError, PeerLostError: a device failed or was lost.
        """
        order = layout.order(self.profile, job)
        traffic = self._traffic(order.devices, warm_up_steps)

        def heard(_device: str, done: int, total: int, text: str) -> None:
            traffic.note(done)
            self.reporter.progress(done, total, text)

        network = open_trace(self.network_trace, self.session.testbed, layout.plan, self.profile)
        network.prepare(job.steps, self._folder(str(layout.framework)))
        try:
            answers = self.session.coordinator.perform(
                dict.fromkeys(order.devices, order), on_progress=heard, on_begin=network.begin
            )
        finally:
            network.end()
        results = {
            name: from_json(FrameworkResult, answers[name]["result"], f"result of {name}") for name in order.devices
        }
        return framework_run(results, order.global_batch, warm_up_steps, *traffic.per_step())

    def plan(self, plan: Plan, job: TrainJob, folder: str, warm_up_steps: int) -> Run:
        """Train a plan with our runtime.

        Raises:
            WorkerError, PeerLostError: a device failed or was lost.
        """
        traffic = self._traffic(plan.devices, warm_up_steps)
        listener = _Listener(self.reporter, traffic)
        request = TrainRequest(
            plan=plan,
            profile=self.profile,
            profile_path="",
            job=job,
            out=self._folder(folder),
            checkpoints=False,
            network_trace=self.network_trace,
        )
        outcome = train(self.session, request, StopRequest(), listener)
        links, hosts = traffic.per_step()
        return Run(
            step_s=tuple(step.duration_s for step in listener.steps[warm_up_steps:]),
            losses=outcome.losses,
            utilisation={name: figures.utilisation for name, figures in outcome.devices.items()},
            peak_bytes={name: figures.peak_bytes or 0 for name, figures in outcome.devices.items()},
            real_compute_ratio=max(figures.real_compute_ratio for figures in outcome.devices.values()),
            link_bytes=links,
            host_bytes=hosts,
        )

    def _folder(self, name: str) -> Path:
        folder = self.out / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _traffic(self, devices: tuple[str, ...], warm_up_steps: int) -> StepTraffic:
        return StepTraffic(self.session.testbed, self.session.cluster, devices, warm_up_steps)


def framework_run(
    results: Mapping[str, FrameworkResult],
    global_batch: int,
    warm_up_steps: int,
    link_bytes: Mapping[str, float],
    host_bytes: Mapping[str, float],
) -> Run:
    """Put together what the devices saw; a step ends when the last of them has ended it."""
    rows = results.values()
    steps = range(len(next(iter(rows)).step_ends_s))
    ends_s = [max(row.start_s for row in rows), *(max(row.step_ends_s[step] for row in rows) for step in steps)]
    seconds = [end_s - start_s for start_s, end_s in itertools.pairwise(ends_s)]
    steady = steps[warm_up_steps:]
    total_s = sum(seconds[step] for step in steady)
    return Run(
        step_s=tuple(seconds[step] for step in steady),
        losses=tuple(sum(row.loss_sums[step] for row in rows if row.loss_sums) / global_batch for step in steps),
        utilisation={name: sum(row.busy_s[step] for step in steady) / total_s for name, row in results.items()},
        peak_bytes={name: row.peak_bytes for name, row in results.items()},
        real_compute_ratio=max(row.real_s / sum(row.busy_s) for row in rows),
        link_bytes=link_bytes,
        host_bytes=host_bytes,
    )


class _Listener(SilentReporter):
    """Hears of our runtime's steps."""

    def __init__(self, reporter: Reporter, traffic: StepTraffic) -> None:
        self.steps: list[StepOutcome] = []
        self._reporter, self._traffic = reporter, traffic

    def step(self, outcome: StepOutcome, total_steps: int) -> None:
        """Count it."""
        self.steps.append(outcome)
        self._traffic.note(len(self.steps))
        self._reporter.progress(len(self.steps), total_steps, "steps")


def median_step_s(run: Run) -> float:
    """Return what the middle step of a run took."""
    return statistics.median(run.step_s)
