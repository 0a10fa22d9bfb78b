"""The runtime's own time per action: `benchmarks/action_overhead.py [--runs 3] [--steps 10] [--no-network]`.

From the end of one action to the start of the next, less the waiting for messages: deciding, sending, receiving,
putting pieces together, noting figures. The bound is 1.5 ms in the median.

Emulated: the laptop preset's six devices (their time; the computation is real) and, where namespaces are allowed,
the network between its sites. Real: one process for each device, all messages, this machine's processors. The
processes share the processors, so the figures rise with the load of the machine; every run is shown.
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from spantrain.app.profiling.profile import ProfileOptions, measure_profile
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.cluster_file import load_preset
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.request import JobSpec
from spantrain.testbed.testbed import why_unavailable

BOUND_S = 1.5e-3


def run_once(session: Session, plan: Plan, profile: Profile, steps: int, folder: Path) -> TrainOutcome:
    """Train a few steps on workers that are there already."""
    request = TrainRequest(
        plan=plan, profile=profile, profile_path="", job=TrainJob(steps=steps), out=folder, checkpoints=False
    )
    return train(session, request, StopRequest(), SilentReporter())


def show(number: int, outcome: TrainOutcome) -> float:
    """Print one run; return its median over devices."""
    for name, figures in outcome.devices.items():
        print(
            f"run {number}  {name:12} stage {figures.stage}  median {figures.overhead_median_s * 1e3:6.3f} ms  "
            f"p90 {figures.overhead_p90_s * 1e3:6.3f} ms  real compute {figures.real_compute_ratio:4.0%}"
        )
    medians = [figures.overhead_median_s for figures in outcome.devices.values()]
    tails = [figures.overhead_p90_s for figures in outcome.devices.values()]
    print(
        f"run {number}  all devices: median {statistics.median(medians) * 1e3:.3f} ms, worst device "
        f"{max(medians) * 1e3:.3f} ms; p90 {statistics.median(tails) * 1e3:.3f} ms, worst {max(tails) * 1e3:.3f} ms"
    )
    return max(medians)


def measure(runs: int, steps: int, network: bool, folder: Path) -> bool:
    """Run, print, and say whether the bound holds on every device of every run."""
    cluster = load_preset("laptop")
    devices = tuple(device.name for device in cluster.devices)
    with open_session(cluster, devices, SessionOptions(network=network), folder / "logs", SilentReporter()) as session:
        profile = measure_profile(session, resolve_model("gpt2-tiny"), ProfileOptions(), SilentReporter())
        plan = make_plan(profile, JobSpec(global_batch=64, schedule="critical-path")).plan
        worst = []
        for number in range(1, runs + 1):
            outcome = run_once(session, replace(plan, generation=number), profile, steps, folder)
            worst.append(show(number, outcome))
    print(outcome.emulated)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
    holds = max(worst) < BOUND_S
    print(
        f"bound {BOUND_S * 1e3:.1f} ms on the median of every device: {'holds' if holds else 'DOES NOT HOLD'} "
        f"(worst of {runs} runs {max(worst) * 1e3:.3f} ms, best {min(worst) * 1e3:.3f} ms)"
    )
    return holds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-network", action="store_true", help="loopback, unshaped")
    options = parser.parse_args()
    network = not options.no_network
    if network and (reason := why_unavailable()) is not None:
        print(f"the network is not emulated: {reason}")
        network = False
    with tempfile.TemporaryDirectory() as folder:
        if not measure(options.runs, options.steps, network, Path(folder)):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
