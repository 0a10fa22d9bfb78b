"""Print how exactly the testbed follows a trace, and how far a run under it is from its simulation.

python benchmarks/network_traces.py [--traces drop-50,square,outage-5] [--steps 8]

Real: processes, TCP, packets, gradients. Emulated: links and the devices' time. Two of the laptop preset's devices
train in two sites, with a link so slow that it decides the step, once for each trace. Figures: when the last step
ended, measured and simulated; the same for the worst step. A machine that is busy with other things computes for longer
than it emulates, which shows as steps that end late: the load is printed beside.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from spantrain.app.profiling.describe import described_profile
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import SessionOptions, open_session
from spantrain.app.training.requests import RunOptions, TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.traced_run import NetworkTraceFigures
from spantrain.app.training.train import train
from spantrain.config.cluster_file import load_preset
from spantrain.config.traces.network_traces import network_trace
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.span import equal_spans
from spantrain.models.catalog.catalog import resolve_model
from spantrain.testbed.testbed import why_unavailable

BATCH = 8
LINK_BYTES_PER_S = 2e6 / 8
EMULATED_SPEED = 0.004


def two_sites() -> tuple[Plan, Profile]:
    """Return half of the model in the lab and half in the office, and the profile by data sheets."""
    laptop = load_preset("laptop")
    links = tuple(replace(link, bandwidth_bytes_per_s=LINK_BYTES_PER_S) for link in laptop.links)
    cluster = replace(laptop, links=links, emulated_speed=EMULATED_SPEED)
    profile = described_profile(cluster, resolve_model("gpt2-tiny"), dtype="float32")
    units = len(profile.graph.units)
    bounds = ((0, units // 2, "lab-0"), (units // 2, units, "office-nx"))
    stages = tuple(
        Stage(
            first_unit=first,
            end_unit=end,
            replicas=(Replica(devices=(device,), sample_share=1.0, in_flight_limit=BATCH),),
            micro_batches=equal_spans(BATCH, 2),
        )
        for first, end, device in bounds
    )
    plan = Plan(
        cluster=cluster,
        model=profile.model,
        global_batch=BATCH,
        dtype="float32",
        stages=stages,
        schedule="critical-path",
    )
    return plan, profile


def run(plan: Plan, profile: Profile, trace: str, steps: int, folder: Path) -> NetworkTraceFigures:
    """Train under a trace; return what the network and the steps did."""
    request = TrainRequest(
        plan=plan,
        profile=profile,
        profile_path="",
        job=TrainJob(steps=steps),
        out=folder,
        checkpoints=False,
        options=RunOptions(network_trace=network_trace(trace)),
    )
    reporter = SilentReporter()
    with open_session(plan.cluster, plan.devices, SessionOptions(), folder / "logs", reporter) as session:
        figures = train(session, request, StopRequest(), reporter).network_trace
    assert figures is not None
    return figures


def main() -> int:
    """Print a line for each trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default="drop-50,square,outage-5")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    if (reason := why_unavailable()) is not None:
        sys.exit(reason)
    plan, profile = two_sites()
    print(f"{'trace':16} {'measured':>10} {'simulated':>10} {'off':>8} {'worst step':>11} {'load':>6}")
    for trace in options.traces.split(","):
        with tempfile.TemporaryDirectory() as folder:
            found = run(plan, profile, trace, options.steps, Path(folder))
        ends = list(zip(found.step_ends_s, found.predicted_step_ends_s, strict=True))
        worst = max((abs(measured / predicted - 1) for measured, predicted in ends), default=0.0)
        measured, predicted = ends[-1]
        print(
            f"{trace:16} {measured:8.2f} s {predicted:8.2f} s {measured / predicted - 1:+8.1%} {worst:11.1%} "
            f"{os.getloadavg()[0]:6.1f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
