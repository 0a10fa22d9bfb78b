"""Steps that overlap beside steps that do not, measured: `benchmarks/staleness_throughput.py [--steps 12]`.

gpt2-tiny under the planner's own plan for the `laptop` preset, four times as slow: devices at a quarter of their speed,
links at a quarter of their bandwidth with four times their latency, so that ratios stay and this machine's own work
weighs less. The same plan under `critical-path` and `1f1b`, each with `--staleness 0` and `1`, one after another.

Emulated: the devices' time, the links. Real: computation, messages, sums, updates. Writes its table and JSON to
`benchmarks/results/`.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from results import save
from spantrain.app.planning.plan_files import under_schedule
from spantrain.app.profiling.profile import ProfileOptions, measure_profile
from spantrain.app.reporter import SilentReporter
from spantrain.app.session import Session, SessionOptions, open_session
from spantrain.app.training.outcome import TrainOutcome
from spantrain.app.training.requests import TrainRequest
from spantrain.app.training.stop import StopRequest
from spantrain.app.training.train import train
from spantrain.config.cluster_file import load_preset
from spantrain.core.cluster import Cluster
from spantrain.core.job import TrainJob
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.request import JobSpec

MODEL, GLOBAL_BATCH, SLOWER = "gpt2-tiny", 48, 4
SCHEDULES = ("critical-path", "1f1b")


def slow_laptop() -> Cluster:
    """Return the preset, with everything so many times as slow."""
    cluster = load_preset("laptop")
    sites = tuple(
        replace(site, bandwidth_bytes_per_s=site.bandwidth_bytes_per_s / SLOWER, latency_s=site.latency_s * SLOWER)
        for site in cluster.sites
    )
    links = tuple(
        replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / SLOWER, latency_s=link.latency_s * SLOWER)
        for link in cluster.links
    )
    return replace(
        cluster, name="slow-laptop", sites=sites, links=links, emulated_speed=cluster.emulated_speed / SLOWER
    )


def run(session: Session, plan: Plan, profile: Profile, job: TrainJob, schedule: str, out: Path) -> TrainOutcome:
    """Train the plan under a schedule."""
    plan = under_schedule(plan, schedule)
    request = TrainRequest(plan=plan, profile=profile, profile_path="", job=job, out=out, checkpoints=False)
    return train(session, request, StopRequest(), SilentReporter())


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    cluster, rows = slow_laptop(), []
    names = tuple(device.name for device in cluster.devices)
    table = [
        f"{MODEL}, batch {GLOBAL_BATCH}, preset laptop {SLOWER} times as slow, {options.steps} steps",
        "",
        f"{'schedule':14} {'staleness':>9} {'step, s':>8} {'predicted':>9} {'samples/s':>9}",
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        open_session(cluster, names, SessionOptions(), Path(folder) / "logs", SilentReporter()) as session,
    ):
        profile = measure_profile(session, resolve_model(MODEL), ProfileOptions(), SilentReporter())
        plan = make_plan(profile, JobSpec(global_batch=GLOBAL_BATCH)).plan
        for schedule in SCHEDULES:
            for staleness in (0, 1):
                job = TrainJob(steps=options.steps, staleness=staleness, adapter="off")
                found = run(session, plan, profile, job, schedule, Path(folder) / f"{schedule}-{staleness}")
                figures = found.step_s_measured, found.step_s_predicted, found.samples_per_s
                table.append("{:14} {:9} {:8.3f} {:9.3f} {:9.2f}".format(schedule, staleness, *figures))
                print(table[-1], flush=True)
                rows.append({"schedule": schedule, "staleness": staleness, "step_s": figures[0]})
                rows[-1] |= {"predicted_s": figures[1], "samples_per_s": figures[2], "losses": found.losses}
    print("\n".join(table))
    save("staleness_throughput", table, {"emulated": "devices' time, links", "rows": rows})


if __name__ == "__main__":
    main()
