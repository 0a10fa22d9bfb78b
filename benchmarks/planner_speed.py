"""How fast `auto` plans: `benchmarks/planner_speed.py [--only NAME] [--command] [--json FILE]`.

Seconds from files on disk (profile.json) to a plan on disk (plan.json), Python's own start excluded: reading, search,
writing; and how many plans were simulated. Profiles are made from data sheets and described networks (`cost.analytic`);
nothing is emulated. Each case runs in a process of its own, so that its memory is its own. Processor seconds stand
beside wall seconds, since other programs on the machine stretch the latter. With `--command`, the search is all that
`spantrain plan` does: the comparisons with one device and one site, orders of work, reasons and writing, too.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spantrain.app.planning.plan_files import write_plans
from spantrain.app.profiling.describe import described_profile
from spantrain.config.artefacts import read_profile, write_plan, write_profile
from spantrain.config.cluster_file import load_preset
from spantrain.core.cluster import Cluster, Device, DeviceKind, Host, Link, Site
from spantrain.core.plan import Plan
from spantrain.core.profile import Profile
from spantrain.core.units import UnitGraph
from spantrain.cost.analytic import analytic_profile
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.engine import make_plan
from spantrain.planner.engine.evaluate import Evaluator
from spantrain.planner.engine.outcome import PlanOptions
from spantrain.planner.request import Evaluation, JobSpec, PlanRequest
from spantrain.planner.strategies.auto.strategy import auto
from worker_pool import follow_parent

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is planned, and in how many seconds it should be."""

    name: str
    cluster: Callable[[], Cluster]
    model: str
    global_batch: int
    bound_s: float
    layers: int | None = None
    """None: units as the model has them; else each is divided into even pieces until there are so many."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What it took."""

    name: str
    devices: int
    units: int
    read_s: float
    search_s: float
    write_s: float
    processor_s: float
    evaluations: int
    evaluation_s: float
    peak_bytes: int
    step_s: float
    stages: tuple[int, ...]
    bound_s: float

    @property
    def whole_s(self) -> float:
        """From files on disk to a plan on disk."""
        return self.read_s + self.search_s + self.write_s


def large_cluster(kinds: int, sites: int, per_kind: int) -> Cluster:
    """Return hosts of eight devices of several kinds, spread over sites."""
    names = [f"s{index}" for index in range(sites)]
    hosts: list[Host] = []
    devices: list[Device] = []
    for kind in range(kinds):
        for number in range(per_kind // 8):
            site, host = names[(kind * (per_kind // 8) + number) % sites], f"h{kind}-{number}"
            own = tuple(f"{host}-{index}" for index in range(8))
            hosts.append(Host(name=host, site=site, devices=own))
            devices += [
                Device(name=name, kind=f"k{kind}", host=host, site=site, backend="emulated", memory_bytes=16 * GIB)
                for name in own
            ]
    return Cluster(
        name=f"{len(devices)} devices",
        kinds=tuple(
            DeviceKind(
                name=f"k{kind}",
                peak_fp16_flop_per_s=5e13 * (kind + 1),
                peak_fp32_flop_per_s=1e13 * (kind + 1),
                memory_bytes=16 * GIB,
                memory_bandwidth_bytes_per_s=1e12,
                power_w=250,
                source="made up",
            )
            for kind in range(kinds)
        ),
        sites=tuple(
            Site(
                name=name,
                hosts=tuple(host.name for host in hosts if host.site == name),
                bandwidth_bytes_per_s=12.5e9,
                latency_s=5e-5,
            )
            for name in names
        ),
        hosts=tuple(hosts),
        devices=tuple(devices),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=1.25e9, latency_s=0.01)
            for a in names
            for b in names
            if a != b
        ),
    )


def in_layers(graph: UnitGraph, layers: int) -> UnitGraph:
    """Return a graph with units of the size of layers: the costliest units are divided most, into even pieces."""
    pieces = [1] * len(graph.units)
    while sum(pieces) < layers:
        pieces[max(range(len(pieces)), key=lambda i: graph.units[i].forward_flop_per_sample / pieces[i])] += 1
    return replace(
        graph,
        units=tuple(
            replace(
                unit,
                name=f"{unit.name}.{number}",
                unit_class=f"{unit.unit_class}/{count}",
                parameter_bytes=unit.parameter_bytes // count,
                forward_flop_per_sample=unit.forward_flop_per_sample / count,
                activation_bytes_per_sample=unit.activation_bytes_per_sample // count,
                deferred_bytes_per_sample=unit.deferred_bytes_per_sample // count,
            )
            for unit, count in zip(graph.units, pieces, strict=True)
            for number in range(count)
        ),
    )


def profile_of(case: Case) -> Profile:
    """Return the profile of a case, by data sheets."""
    profile = described_profile(case.cluster(), resolve_model(case.model))
    if case.layers is None:
        return profile
    return analytic_profile(profile.cluster, profile.model, in_layers(profile.graph, case.layers))


def cases() -> tuple[Case, ...]:
    """Return all cases, small ones first."""

    def preset(name: str, model: str, batch: int, bound_s: float, layers: int | None = None) -> Case:
        return Case(
            name=f"{name} {model}" + (f", {layers} layers" if layers else ""),
            cluster=lambda: load_preset(name),
            model=model,
            global_batch=batch,
            bound_s=bound_s,
            layers=layers,
        )

    def large(kinds: int, sites: int, per_kind: int, bound_s: float) -> Case:
        return Case(
            name=f"{kinds * per_kind} devices, {kinds} kinds, {sites} sites",
            cluster=lambda: large_cluster(kinds, sites, per_kind),
            model="gpt2-medium",
            global_batch=4 * kinds * per_kind,
            bound_s=bound_s,
        )

    return (
        preset("laptop", "gpt2-tiny", 64, 0.3),
        preset("spantrain-setting-1", "gpt2", 128, 1.0),
        preset("spantrain-setting-1", "resnet101", 128, 1.0),
        preset("spantrain-setting-2", "gpt2", 128, 1.0),
        preset("spantrain-setting-2", "resnet101", 128, 1.0),
        preset("asteroid-c-100", "efficientnet-b1", 2048, 1.0),
        preset("asteroid-c-100", "efficientnet-b1", 2048, 1.0, layers=213),
        large(1, 1, 128, 1.0),
        large(3, 3, 64, 5.0),
        large(2, 2, 256, 2.0),
        large(3, 3, 256, 5.0),
        large(4, 8, 1024, 30.0),
    )


def timed(name: str, command: bool) -> Timed:
    """Time one case; its profile is written first."""
    case = next(case for case in cases() if case.name == name)
    profile = profile_of(case)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "profile.json", Path(folder) / "plan.json"
        write_profile(profile, source)
        del profile
        return _commanded(case, source, target) if command else _planned(case, source, target)


def _commanded(case: Case, source: Path, target: Path) -> Timed:
    marks, processor_s = [time.perf_counter()], time.process_time()
    profile = read_profile(source)
    marks.append(time.perf_counter())
    outcome = write_plans(
        make_plan(profile, JobSpec(global_batch=case.global_batch), PlanOptions()), profile, source, target
    )
    marks.append(time.perf_counter())
    return Timed(
        name=case.name,
        devices=len(profile.cluster.devices),
        units=len(profile.graph.units),
        read_s=marks[1] - marks[0],
        search_s=marks[2] - marks[1],
        write_s=0.0,
        processor_s=time.process_time() - processor_s,
        evaluations=sum(figures.plans for figures in outcome.strategies.values()),
        evaluation_s=0.0,
        peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        step_s=outcome.step_s_predicted,
        stages=tuple(len(stage.devices) for stage in outcome.plan.stages),
        bound_s=case.bound_s,
    )


def _planned(case: Case, source: Path, target: Path) -> Timed:
    marks, processor_s = [time.perf_counter()], time.process_time()
    profile = read_profile(source)
    marks.append(time.perf_counter())
    job = JobSpec(global_batch=case.global_batch)
    evaluator, spent = Evaluator(profile, job), [0.0, 0.0]

    def evaluate(plan: Plan) -> Evaluation:
        started_s = time.perf_counter()
        found = evaluator(plan)
        spent[0] += 1
        spent[1] += time.perf_counter() - started_s
        return found

    best = auto(PlanRequest(profile=profile, job=job, evaluate=evaluate))[0]
    marks.append(time.perf_counter())
    write_plan(best.plan, target)
    marks.append(time.perf_counter())
    return Timed(
        name=case.name,
        devices=len(profile.cluster.devices),
        units=len(profile.graph.units),
        read_s=marks[1] - marks[0],
        search_s=marks[2] - marks[1],
        write_s=marks[3] - marks[2],
        processor_s=time.process_time() - processor_s,
        evaluations=int(spent[0]),
        evaluation_s=spent[1],
        peak_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        step_s=evaluator(best.plan).step_s,
        stages=tuple(len(stage.devices) for stage in best.plan.stages),
        bound_s=case.bound_s,
    )


def show(entry: Timed) -> None:
    """Print a line."""
    verdict = "holds" if entry.whole_s < entry.bound_s else "MISSED"
    if verdict == "MISSED" and entry.processor_s < entry.bound_s:
        verdict = "MISSED in wall seconds, holds in processor seconds"
    stages = "-".join(map(str, entry.stages[:10])) + ("..." if len(entry.stages) > 10 else "")
    print(
        f"{entry.name:36} {entry.devices:5} {entry.units:5} {entry.read_s:7.3f} {entry.search_s:8.3f} "
        f"{entry.write_s:7.3f} {entry.whole_s:8.3f} {entry.processor_s:9.3f} {entry.evaluations:5} "
        f"{entry.evaluation_s:8.3f} {entry.peak_bytes / 1e6:7.0f} {entry.step_s:9.4g} {stages:24} "
        f"bound {entry.bound_s:g} s: {verdict}",
        flush=True,
    )


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose name holds this")
    parser.add_argument("--command", action="store_true", help="time all that `spantrain plan` does")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    print(
        f"{'case':36} {'dev.':>5} {'units':>5} {'read s':>7} {'search s':>8} {'write s':>7} {'whole s':>8} "
        f"{'processor':>9} {'sim.':>5} {'of it s':>8} {'MB':>7} {'step s':>9} stages"
    )
    found = []
    for case in cases():
        if options.only in case.name:
            with multiprocessing.get_context("spawn").Pool(1, initializer=follow_parent) as pool:
                found.append(pool.apply(timed, (case.name, options.command)))
            show(found[-1])
    met = all(entry.whole_s < entry.bound_s for entry in found)
    print("targets met" if met else "targets MISSED")
    if options.json:
        page = {"cases": [{**asdict(entry), "whole_s": entry.whole_s} for entry in found], "met": met}
        options.json.write_text(json.dumps(page, indent=1) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
