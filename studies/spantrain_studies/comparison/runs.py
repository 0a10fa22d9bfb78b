"""One run of one method on the workers that are there.

What a step sends over each link and out of each host, read from the testbed's own counters.
"""

import itertools
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

from spantrain.app.reporter import Reporter, SilentReporter
from spantrain.app.session import Session
from spantrain.app.training.metrics import StepMetrics
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.traced_run import RunNetwork
from spantrain.app.training.train import train
from spantrain.config.traces.network_traces import NetworkTrace
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.runtime.coordinator.barrier import StepOutcome
from spantrain.testbed.testbed import Testbed
from spantrain_studies.comparison.figures import MeasuredRun
from spantrain_studies.comparison.layouts import Layout
from spantrain_studies.comparison.worker.orders import FrameworkResult

_COUNTERS = "/proc/net/dev"


class StepTraffic:
    """Counts between the end of the warm-up and the end of a run, so that what comes before the steps is not in it."""

    def __init__(self, testbed: Testbed | None, cluster: Cluster, devices: tuple[str, ...], warm_up_steps: int) -> None:
        """Count on a testbed; on loopback there is nothing to read.

        Args:
            testbed: where the workers live.
            cluster: of the testbed.
            devices: that take part: hosts of others are not looked at.
            warm_up_steps: after so many steps counting begins.
        """
        self._testbed = testbed
        self._hosts = list(dict.fromkeys(cluster.device_by_name[name].host for name in devices))
        self._warm_up_steps = warm_up_steps
        self._before: tuple[dict[str, int], dict[str, int]] | None = None
        self._steps_before = 0
        self._steps = 0

    def note(self, steps_done: int) -> None:
        """Hear that so many steps are done."""
        self._steps = steps_done
        if self._before is None and steps_done >= self._warm_up_steps:
            self._before, self._steps_before = self._read(), steps_done

    def per_step(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the bytes of a step by link and by host, up to now."""
        steps = self._steps - self._steps_before
        if self._before is None or steps < 1:
            return {}, {}
        links, hosts = (_differences(now, was, steps) for now, was in zip(self._read(), self._before, strict=True))
        return links, hosts

    def _read(self) -> tuple[dict[str, int], dict[str, int]]:
        if self._testbed is None:
            return {}, {}
        links = {f"{link.source}->{link.target}": link.bytes_sent for link in self._testbed.status().links}
        return links, {host: self._sent_by(host) for host in self._hosts}

    def _sent_by(self, host: str) -> int:
        assert self._testbed is not None
        with self._testbed.popen(host, ["cat", _COUNTERS], stdout=PIPE) as process:
            assert process.stdout is not None
            text = process.stdout.read().decode()
        return sent_bytes(text, self._testbed.interface(host))


def sent_bytes(counters: str, interface: str) -> int:
    """Return what an interface has sent, from the text of /proc/net/dev.

    >>> sent_bytes("  eth0: 10 1 0 0 0 0 0 0 77 2 0 0 0 0 0 0", "eth0")
    77
    """
    found = re.search(rf"^\s*{re.escape(interface)}:(.*)$", counters, re.MULTILINE)
    return int(found[1].split()[8]) if found else 0


def _differences(now: Mapping[str, int], before: Mapping[str, int], steps: int) -> dict[str, float]:
    return {name: (size - before.get(name, 0)) / steps for name, size in now.items()}


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

    def framework(self, layout: Layout, job: TrainJob, warm_up_steps: int) -> MeasuredRun:
        """Run a framework.

        Raises:
            WorkerError, PeerLostError: a device failed or was lost.
        """
        order = layout.order(self.profile, job)
        traffic = self._traffic(order.devices, warm_up_steps)

        def heard(_device: str, done: int, total: int, text: str) -> None:
            traffic.note(done)
            self.reporter.progress(done, total, text)

        network = RunNetwork(self.network_trace, self.session.testbed, layout.plan, self.profile)
        network.prepare(job.steps, self._folder(str(layout.framework)))
        try:
            results = self.session.coordinator.perform(
                dict.fromkeys(order.devices, order), on_progress=heard, on_begin=network.begin
            )
        finally:
            network.end()
        return framework_run(results, order.global_batch, warm_up_steps, *traffic.per_step())

    def plan(self, plan: Plan, job: TrainJob, folder: str, warm_up_steps: int) -> MeasuredRun:
        """Train a plan with our runtime.

        Raises:
            WorkerError, PeerLostError: a device failed or was lost.
        """
        traffic = self._traffic(plan.devices, warm_up_steps)
        listener = _StepCollector(self.reporter, traffic)
        request = TrainRequest(
            plan=plan,
            profile=self.profile,
            profile_path="",
            job=job,
            out=self._folder(folder),
            checkpoints=False,
            options=RunOptions(network_trace=self.network_trace),
        )
        outcome = train(self.session, request, StopRequest(), listener)
        links, hosts = traffic.per_step()
        real = [figures.real_compute_ratio for figures in outcome.devices.values()]
        return MeasuredRun(
            step_s=tuple(step.duration_s for step in listener.steps[warm_up_steps:]),
            losses=tuple(loss for loss in outcome.losses if loss is not None),
            utilisation={name: figures.utilisation for name, figures in outcome.devices.items()},
            peak_bytes={name: figures.peak_bytes or 0 for name, figures in outcome.devices.items()},
            real_compute_ratio=max(real) if plan.cluster.emulated else None,
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
) -> MeasuredRun:
    """Put together what the devices saw; a step ends when the last of them has ended it."""
    rows = results.values()
    steps = range(len(next(iter(rows)).step_ends_s))
    ends_s = [max(row.start_s for row in rows), *(max(row.step_ends_s[step] for row in rows) for step in steps)]
    seconds = [end_s - start_s for start_s, end_s in itertools.pairwise(ends_s)]
    steady = steps[warm_up_steps:]
    total_s = sum(seconds[step] for step in steady)
    return MeasuredRun(
        step_s=tuple(seconds[step] for step in steady),
        losses=tuple(sum(row.loss_sums[step] for row in rows if row.loss_sums) / global_batch for step in steps),
        utilisation={name: sum(row.busy_s[step] for step in steady) / total_s for name, row in results.items()},
        peak_bytes={name: row.peak_bytes for name, row in results.items()},
        real_compute_ratio=max((row.real_s / sum(row.busy_s) for row in rows if row.real_s is not None), default=None),
        link_bytes=link_bytes,
        host_bytes=host_bytes,
    )


class _StepCollector(SilentReporter):
    """Hears of our runtime's steps."""

    def __init__(self, reporter: Reporter, traffic: StepTraffic) -> None:
        self.steps: list[StepOutcome] = []
        self._reporter, self._traffic = reporter, traffic

    def step(self, outcome: StepOutcome, metrics: StepMetrics, total_steps: int) -> None:
        """Count it."""
        del metrics
        self.steps.append(outcome)
        self._traffic.note(len(self.steps))
        self._reporter.progress(len(self.steps), total_steps, "steps")


def median_step_s(run: MeasuredRun) -> float:
    """Return what the middle step of a run took."""
    return statistics.median(run.step_s)
