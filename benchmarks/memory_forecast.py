"""Print the bytes that runs held, beside the memory model's forecast.

    python benchmarks/memory_forecast.py [MODEL ...]

Each model is trained for a few steps in three stages on the laptop preset: real worker processes, real computation and
gradients; the speed of devices and links is emulated. Both are slowed alike until a step takes three seconds, for a
device that computes longer than it is allowed to does its work in another order than planned: what waits for W then
depends on this machine. Columns, by device:

- `measured`: the most bytes of tensors held at once (parameters, gradients, optimizer state, what autograd and
  messages hold; `runtime.worker.plan_part`);
- `forecast`: the memory model over the simulated steps, without the framework's constant, which is a GPU process's;
- `by its order`: the same model over the actions and messages that the run really had: where it differs from the
  forecast, the simulator expected another order of work, not other bytes;
- `at most`: what the plan's in-flight limits allow in any order, two messages of a kind at a time: the plan's
  `peak_bytes`, which must fit;
- `real`: the largest part of a device's emulated time that computing really took. Over 30 % the run is made again, at
  most twice.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from spantrain.app.profiling.describe import described_profile
from spantrain.app.profiling.slowing import MAX_REAL_COMPUTE
from spantrain.config.artefacts import reference_to_profile, write_plan, write_profile
from spantrain.config.cluster_file import load_preset
from spantrain.config.traces.trace_file import read_trace
from spantrain.core.action import Action
from spantrain.core.cluster import Cluster
from spantrain.core.plan import Plan, Replica, Stage
from spantrain.core.profile import Profile
from spantrain.core.span import equal_spans
from spantrain.core.trace import Trace
from spantrain.cost.memory import MemoryCost
from spantrain.models.catalog.catalog import resolve_model
from spantrain.planner.engine.predict import predict
from spantrain.sim.record import MemoryLog

MODELS = ("gpt2-tiny", "bert-small-tiny", "resnet-tiny", "efficientnet-tiny")
SCHEDULES = ("1f1b", "critical-path")
DEVICES = ("lab-0", "lab-1", "office-nx")
STEPS = 4
SAMPLES, SPAN = 24, 4
BOUND = 0.05
_STEP_S = 3.0
_MOST_TRIES = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    model: str
    schedule: str
    recompute: bool

    @property
    def label(self) -> str:
        """How it is called in the table."""
        return f"{self.model}, {self.schedule}{', every second unit again' if self.recompute else ''}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of one run."""

    measured: Mapping[str, int]
    """By device: the bytes that it held at most."""
    trace: Trace
    """Of all steps."""
    real_compute_ratio: float


def slowed(cluster: Cluster, factor: float) -> Cluster:
    """Return a cluster whose devices and links are so many times slower."""
    sites = (
        replace(site, bandwidth_bytes_per_s=site.bandwidth_bytes_per_s / factor, latency_s=site.latency_s * factor)
        for site in cluster.sites
    )
    links = (
        replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor, latency_s=link.latency_s * factor)
        for link in cluster.links
    )
    speed = cluster.emulated_speed / factor
    return replace(cluster, sites=tuple(sites), links=tuple(links), emulated_speed=speed)


def profile_of(model: str) -> Profile:
    """Return the laptop as described, slow enough for a step of `_STEP_S`."""
    cluster = load_preset("laptop")
    described = described_profile(cluster, resolve_model(model))
    case = Case(model=model, schedule="1f1b", recompute=False)
    factor = max(1.0, _STEP_S / predict(plan_of(case, described), described).step_s)
    return described_profile(slowed(cluster, factor), described.model)


def plan_of(case: Case, profile: Profile) -> Plan:
    """Return three stages of as many units each, with memory for fewer samples than there are."""
    count = len(profile.graph.units)
    bounds = [round(count * number / len(DEVICES)) for number in range(len(DEVICES) + 1)]
    stages = []
    for index, device in enumerate(DEVICES):
        units = range(bounds[index], bounds[index + 1])
        limit = SPAN * (len(DEVICES) - index) if case.schedule == "1f1b" else 3 * SPAN
        stages.append(
            Stage(
                first_unit=units.start,
                end_unit=units.stop,
                replicas=(Replica(devices=(device,), sample_share=1.0, in_flight_limit=limit),),
                micro_batches=equal_spans(SAMPLES, SPAN),
                recompute=tuple(units[::2]) if case.recompute else (),
            )
        )
    return Plan(
        cluster=profile.cluster,
        model=profile.model,
        global_batch=SAMPLES,
        dtype="float32",
        stages=tuple(stages),
        schedule=case.schedule,
    )


def train(plan: Plan, profile: Profile) -> Run:
    """Train the plan, again where this machine was too slow for it."""
    for _ in range(_MOST_TRIES):
        with tempfile.TemporaryDirectory() as folder:
            run = _train_once(plan, profile, Path(folder))
        if run.real_compute_ratio <= MAX_REAL_COMPUTE:
            break
    return run


def _train_once(plan: Plan, profile: Profile, folder: Path) -> Run:
    profile_path, plan_path, out = folder / "profile.json", folder / "plan.json", folder / "run"
    write_profile(profile, profile_path)
    write_plan(replace(plan, profile=reference_to_profile(profile_path, plan_path)), plan_path)
    command = [sys.executable, "-m", "spantrain", "train", str(plan_path), "--steps", str(STEPS), "--out", str(out)]
    # The forecast is of this plan: none is to take its place.
    command += ["--trace-steps", str(STEPS), "--optimizer", "adamw", "--adapter", "off", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    figures = json.loads(done.stdout)["devices"]
    return Run(
        measured={name: figures[name]["peak_bytes"] for name in plan.devices},
        trace=read_trace(out / "trace.json"),
        real_compute_ratio=max(figures[name]["real_compute_ratio"] for name in plan.devices),
    )


def at_most(plan: Plan, profile: Profile) -> dict[str, int]:
    """Return the bytes of tensors that the plan's limits allow."""
    cost = MemoryCost(profile, "adamw", plan.dtype)
    sizes = cost.plan_held_sizes(plan)
    return {name: size - sizes[name].always.framework_bytes for name, size in cost.plan_peak_bytes(plan).items()}


def by_its_order(plan: Plan, profile: Profile, trace: Trace) -> dict[str, int]:
    """Return what the memory model says of the actions and messages in a trace."""
    sizes = MemoryCost(profile, "adamw", plan.dtype).plan_held_sizes(plan)
    log = MemoryLog(sizes)
    for name in plan.devices:
        for interval in (interval for interval in trace.intervals if interval.device == name):
            lane, what = interval.lane, interval.name.partition(" ")[0]
            size_bytes = int(interval.detail.get("bytes", 0))
            if lane == "compute" and interval.name[0].isdigit():
                log.computed(name, Action.parse(interval.name), interval.start_s, interval.end_s)
            elif lane == "receive" and what in ("forward", "backward"):
                log.received(name, size_bytes, interval.end_s)
            elif lane == "send" and what == "backward":
                log.sent(name, size_bytes, interval.start_s, interval.end_s)
            elif lane == "send" and what == "forward":
                log.sent(name, size_bytes, interval.start_s, interval.end_s, forward=True)
    return {name: log.of(name, name).held_bytes for name in plan.devices}


def main() -> None:
    """Run all cases and print the table."""
    columns = ("forecast", "by its order", "at most")
    print(f"{'KiB':10} {'measured':>10} {''.join(f'{name:>21}' for name in columns)}   real")
    errors: dict[str, list[float]] = {name: [] for name in columns}
    for model in sys.argv[1:] or MODELS:
        profile = profile_of(model)
        for case in (Case(model=model, schedule=s, recompute=r) for s in SCHEDULES for r in (False, True)):
            plan = plan_of(case, profile)
            run = train(plan, profile)
            forecast = predict(plan, profile, optimizer="adamw").memory
            replayed, limits = by_its_order(plan, profile, run.trace), at_most(plan, profile)
            print(case.label)
            for name in plan.devices:
                row = (forecast[name].held_bytes, replayed[name], limits[name])
                off = [size / run.measured[name] - 1 for size in row]
                for found, error in zip(errors.values(), off, strict=True):
                    found.append(error)
                cells = "".join(f"{size / 1024:12.0f} {error:+8.1%}" for size, error in zip(row, off, strict=True))
                print(
                    f"{name:10} {run.measured[name] / 1024:10.0f} {cells}   {run.real_compute_ratio:4.0%}", flush=True
                )
    for what in columns[:2]:
        within = sum(abs(error) <= BOUND for error in errors[what])
        largest = max(map(abs, errors[what]))
        print(f"{what}: {within} of {len(errors[what])} within {BOUND:.0%}; largest {largest:.1%}")
    limit = errors["at most"]
    print(
        f"at most: held by {sum(error >= -BOUND for error in limit)} of {len(limit)}, with {BOUND:.0%}; "
        f"{min(limit):+.1%} to {max(limit):+.1%}"
    )


if __name__ == "__main__":
    main()
