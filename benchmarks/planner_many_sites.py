"""Planning for many sites: `benchmarks/planner_many_sites.py [--only TEXT] [--save]`.

Three parts. A curve: gpt2-medium with 64 A100 a site, 5 Gbit/s and 20 ms between all sites, from 1 to 200 sites; more
sites are never worse. Sites of unlike kinds and sizes, over links that differ. And size: up to 102,400 devices. Of
each, the seconds of a step, the least that any plan could take (compute, memory, links), the
devices and sites in use, and what planning took: processor seconds from files on disk (profile.json) to a plan on disk,
comparisons and reasons included, and memory, each case in a process of its own.

Profiles are made from data sheets and described networks (`cost.analytic`); nothing is emulated, and nothing measured.
A case holds if planning takes no longer than its bound, and no curve's step is longer than with fewer sites, but for
half of a per cent.
"""

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from planner_pools import Pool, alike, cluster_of, mixed
from results import line_plot, save
from spantrain.app.planning.plan_files import write_plans
from spantrain.app.profiling.describe import described_profile
from spantrain.config.artefacts import read_profile, write_profile
from spantrain.config.cluster_file import load_preset
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import JobSpec
from worker_pool import follow_parent

SAME = 1.005
"""By how much a step may be longer with more."""
CURVE = (1, 2, 4, 8, 12, 14, 16, 24, 32, 64, 128, 200)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is planned, and in how many processor seconds and bytes it should be."""

    name: str
    pool: Pool | None
    """None: the laptop preset."""
    model: str = "gpt2-medium"
    global_batch: int = 512
    bound_s: float | None = None
    bound_bytes: float | None = None
    curve: str = ""
    """Cases of a name follow each other: each has what the one before has, and more."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came out."""

    name: str
    curve: str
    devices: int
    sites: int
    step_s: float
    least_s: float
    compute_s: float
    devices_used: int
    sites_used: int
    chosen: str
    bubble_ratio: float
    processor_s: float
    peak_bytes: int
    holds: bool


def cases() -> tuple[Case, ...]:
    """Return all cases."""

    def large(sites: int, per_site: int, bound_s: float | None, bound_bytes: float | None = None) -> Case:
        count = sites * per_site
        return Case(
            name=f"{count} in {sites}",
            pool=alike(sites, per_site),
            global_batch=4 * count,
            bound_s=bound_s,
            bound_bytes=bound_bytes,
        )

    def prefix(seed: int, sites: int) -> Pool:
        whole = mixed(seed, 24)
        return Pool(**{**vars(whole), "places": whole.places[:sites]})

    return (
        *(Case(name=f"64 A100 x {n}", pool=alike(n, 64), curve="64 A100 a site") for n in CURVE),
        *(
            Case(name=f"mixed {seed} x {n}", pool=prefix(seed, n), curve=f"mixed {seed}")
            for seed in (1, 2, 3)
            for n in (1, 2, 4, 8, 16, 24)
        ),
        Case(name="laptop", pool=None, model="gpt2-tiny", global_batch=64, bound_s=0.3),
        large(64, 64, 8.0),
        large(200, 32, 30.0),
        large(200, 128, 30.0),
        large(8, 4096, None),
        large(8, 12_800, 180.0, 3e9),
        Case(
            name="102400 in 1000",
            pool=Pool(places=(*(alike(1, 103).places * 400), *(alike(1, 102).places * 600))),
            global_batch=409_600,
            bound_s=180.0,
            bound_bytes=3e9,
        ),
    )


def planned(case: Case) -> Outcome:
    """Plan one case, and say what it took."""
    cluster = load_preset("laptop") if case.pool is None else cluster_of(case.pool)
    profile = described_profile(cluster, resolve_model(case.model))
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "profile.json", Path(folder) / "plan.json"
        write_profile(profile, source)
        del profile
        began_s = time.process_time()
        profile = read_profile(source)
        outcome = make_plan(profile, JobSpec(global_batch=case.global_batch), PlanOptions())
        write_plans(outcome, profile, source, target)
        processor_s = time.process_time() - began_s
    used = [profile.cluster.device_by_name[name] for name in outcome.plan.devices]
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    within = case.bound_s is None or processor_s <= case.bound_s
    return Outcome(
        name=case.name,
        curve=case.curve,
        devices=len(profile.cluster.devices),
        sites=len(profile.cluster.sites),
        step_s=outcome.step_s_predicted,
        least_s=outcome.bound.step_s,
        compute_s=outcome.bound.compute_s,
        devices_used=len(used),
        sites_used=len({device.site for device in used}),
        chosen=outcome.chosen,
        bubble_ratio=outcome.strategies[outcome.chosen].bubble_ratio or 0.0,
        processor_s=processor_s,
        peak_bytes=peak_bytes,
        holds=within and (case.bound_bytes is None or peak_bytes <= case.bound_bytes),
    )


def row_of(one: Outcome, case: Case, *, worse: bool) -> str:
    """Return a line of the table."""
    bound = "" if case.bound_s is None else f" (bound {case.bound_s:g})"
    verdict = "WORSE than with less" if worse else "" if one.holds else "MISSED"
    return (
        f"{one.name:16} {one.devices:7} {one.sites:5} {one.step_s:9.4f} {one.least_s:9.4f} "
        f"{one.step_s / one.least_s:6.3f} {100 * one.bubble_ratio:6.1f} {one.devices_used:7} {one.sites_used:5} "
        f"{one.chosen:13} {one.processor_s:8.2f}{bound} {one.peak_bytes / 1e6:6.0f} {verdict}"
    )


HEAD = (
    f"{'case':16} {'devices':>7} {'sites':>5} {'step s':>9} {'least s':>9} {'ratio':>6} {'wait %':>6} {'in use':>7} "
    f"{'sites':>5} {'strategy':13} {'all s':>8} {'MB':>6}"
)


def plot_of(found: Sequence[Outcome]) -> str:
    """Return the picture of the curves: samples per second need no more of it than steps."""
    series = {}
    for name in dict.fromkeys(one.curve for one in found if one.curve):
        rows = [one for one in found if one.curve == name]
        series[name] = [(one.sites, one.step_s) for one in rows]
        series[f"{name}, least"] = [(one.sites, one.least_s) for one in rows]
    return line_plot(series, title="A step with more and more sites", across="sites", up="seconds")


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/planner_many_sites.*")
    options = parser.parse_args()
    print(HEAD)
    found: list[Outcome] = []
    lines = [HEAD]
    sound = True
    least: dict[str, float] = {}
    for case in cases():
        if options.only not in case.name:
            continue
        with multiprocessing.get_context("spawn").Pool(1, initializer=follow_parent) as pool:
            one = pool.apply(planned, (case,))
        worse = bool(case.curve) and one.step_s > SAME * least.get(case.curve, float("inf"))
        least[case.curve] = min(one.step_s, least.get(case.curve, float("inf")))
        sound = sound and one.holds and not worse
        found.append(one)
        lines.append(row_of(one, case, worse=worse))
        print(lines[-1], flush=True)
    verdict = "all hold" if sound else "MISSED"
    print(verdict)
    if options.save:
        save("planner_many_sites", [*lines, verdict], {"cases": [asdict(one) for one in found]}, plot_of(found))
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
